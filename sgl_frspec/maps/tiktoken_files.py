"""tiktoken rank files: ``base64(token) rank`` a line, most frequent merge first."""

import base64
import binascii
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_frspec.maps.byte_alphabet import spell_bytes
from sgl_frspec.maps.token_map import TokenMapError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# A rank file carries no splitting rule; these are the published ones of the encodings in use.
CL100K_SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = CL100K_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_ranks(path: Path) -> dict[bytes, int]:
    """token -> rank, which is also its id.

    Raises:
        TokenMapError: a line is not ``base64 rank``.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise TokenMapError(
                f"{path}: line {number} is not `base64 rank`; give a tiktoken rank file or a"
                " tokenizer.json"
            ) from error
    return ranks


def tiktoken_tokens(path: Path) -> dict[str, int]:
    """token -> id in the byte-level spelling that ``tokenizer.json`` files use."""
    return {spell_bytes(token): rank for token, rank in read_ranks(path).items()}


def split_rule(name: str) -> str:
    """The splitting rule that belongs to a rank file of this name."""
    if "o200k" in name:
        return O200K_SPLIT
    return QWEN_SPLIT if "qwen" in name else CL100K_SPLIT


def tiktoken_tokenizer(path: Path) -> "Tokenizer":
    """A ``tokenizers.Tokenizer`` that merges as tiktoken does.

    tiktoken merges the neighbours whose union has the lowest rank, so every split of a token into
    two known parts becomes a merge rule, in the order of the token's rank.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    ranks = read_ranks(path)
    merges = [
        (spell_bytes(token[:i]), spell_bytes(token[i:]))
        for token, _ in sorted(ranks.items(), key=lambda item: item[1])
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]
    vocab = {spell_bytes(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(split_rule(path.stem)), behavior="isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, spell])
    return tokenizer
