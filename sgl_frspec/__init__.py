"""Frequency-ranked speculative decoding (FR-Spec, arXiv:2502.14856) for SGLang.

The only package here that imports sglang. Importing it loads nothing heavy: SGLang imports the
plugin in every process it starts, most of which never decode.
"""

__version__ = "0.1.0"
