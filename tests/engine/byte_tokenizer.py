"""A tokenizer for the tiny models: every byte, then pairs of letters, so any text is tokens."""

from itertools import product
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LETTERS = "etaoinshrdlcumwfgypbvk"
BEGIN, END = "<s>", "</s>"


def write_tokenizer(folder: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """Write one whose ids are ``0 … vocab_size - 1`` into a model's folder; 0 begins, 1 ends."""
    tokens = [BEGIN, END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = list(product(LETTERS, LETTERS))[: vocab_size - len(tokens)]
    tokens += [a + b for a, b in pairs]
    assert len(tokens) == vocab_size
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END)
    fast.save_pretrained(folder)
    return fast
