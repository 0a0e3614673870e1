"""The tokenizer inside a GGUF file as ``tokenizer.json``."""

from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from examples.gguf.tensors import metadata

_CONTROL_TOKEN = 3  # llama.cpp's token type of special tokens


def build_tokenizer(reader: GGUFReader) -> Tokenizer:
    """Rebuild the byte-level BPE tokenizer.

    GGUF names the pre-tokenizer (``smollm``) instead of describing it: single digits are split off
    first, then GPT-2's pattern applies. Without the digit step, white space before a number would
    be grouped differently than in the model's training.

    Raises:
        ValueError: the file's tokenizer is of another kind.
    """
    kind = metadata(reader, "tokenizer.ggml.model"), metadata(reader, "tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"the GGUF tokenizer is {kind}, expected ('gpt2', 'smollm')")
    tokens = metadata(reader, "tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ")) for m in metadata(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata(reader, "tokenizer.ggml.token_type")
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer
