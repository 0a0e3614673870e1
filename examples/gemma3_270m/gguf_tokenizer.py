"""Gemma 3's tokenizer inside a GGUF file as ``tokenizer.json``.

GGUF keeps SentencePiece's pieces and scores, not the merges. A merge is any split of a piece into
two pieces; merges are ordered by the score of the piece, then by the lengths of the two parts, the
longest first, then by their ids, the largest first.
"""

from collections.abc import Sequence

from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from examples.gguf.tensors import metadata

_SPACE = "▁"
_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types
# The control tokens that stand for themselves in text; the others are placeholders for training.
_SPECIAL = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
)


def merges_of(pieces: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return every split of every piece into two pieces, in the order in which BPE applies them.

    Args:
        pieces: by token id.
        scores: of the pieces; higher merges first.
    """
    ids = {piece: index for index, piece in enumerate(pieces)}
    splits: list[tuple[float, str, str]] = []
    for piece, score in zip(pieces, scores, strict=True):
        pairs = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        splits.extend((score, *pair) for pair in known)
    splits.sort(key=lambda s: (s[0], len(s[1]), len(s[2])), reverse=True)
    return [(left, right) for _, left, right in splits]


def build_tokenizer(reader: GGUFReader) -> Tokenizer:
    """Rebuild the BPE tokenizer with byte fallback.

    Raises:
        ValueError: the file's tokenizer is of another kind.
    """
    kind = metadata(reader, "tokenizer.ggml.model")
    if kind != "llama":
        raise ValueError(f"the GGUF tokenizer is {kind!r}, expected 'llama' (SentencePiece)")
    types = metadata(reader, "tokenizer.ggml.token_type")
    tokens = metadata(reader, "tokenizer.ggml.tokens")
    # llama.cpp writes the runs of spaces, all user-defined, as plain spaces.
    pieces = [
        t.replace(" ", _SPACE) if kind == _USER_DEFINED else t
        for t, kind in zip(tokens, types, strict=True)
    ]
    # It also replaces the scores of user-defined pieces, which merge before all others.
    scores = [
        0.0 if kind == _USER_DEFINED else score
        for score, kind in zip(metadata(reader, "tokenizer.ggml.scores"), types, strict=True)
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges_of(pieces, scores),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    bos = pieces[metadata(reader, "tokenizer.ggml.bos_token_id")]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, pieces.index(bos))]
    )
    added = [p for p, kind in zip(pieces, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(p, special=p in _SPECIAL, normalized=False) for p in added])
    return tokenizer
