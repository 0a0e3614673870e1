"""What the configurations of tokenizers inside GGUF files have in common."""

from typing import Any

from gguf import GGUFReader

from examples.gguf.tensors import metadata


def tokenizer_config(reader: GGUFReader, architecture: str) -> dict[str, Any]:
    """Return the contents of ``tokenizer_config.json``.

    Args:
        reader: of the GGUF file.
        architecture: prefix of the model's own metadata in it, such as ``llama``.
    """
    tokens = metadata(reader, "tokenizer.ggml.tokens")

    def named(key: str) -> str:
        return tokens[metadata(reader, f"tokenizer.ggml.{key}_token_id")]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "unk_token": named("unknown"),
        "pad_token": named("padding"),
        "model_max_length": metadata(reader, f"{architecture}.context_length"),
        "clean_up_tokenization_spaces": False,
    }
