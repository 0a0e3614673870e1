"""Triton kernels for frequency-ranked speculative decoding. Needs torch and triton only.

One module an operation; import the module you need. Nothing here knows of SGLang.
"""
