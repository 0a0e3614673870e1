"""Gemma-3-270M, a real model of 262,144 tokens, with a draft and maps made for it."""
