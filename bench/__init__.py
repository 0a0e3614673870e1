"""The benchmark harness: ``python -m bench --help``."""
