"""Measuring real servers."""
