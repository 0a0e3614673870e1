"""Fit a ranked map to a model: cut it, force the required ids in, refuse what does not belong."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from sgl_frspec.maps.token_map import Ids, TokenMap, TokenMapError, check_ids


class FittedMap(NamedTuple):
    """The hot ids of one server.

    Attributes:
        ids: int64 ``[K]``, ascending, so that a smaller draft id is a smaller token id.
        added: the required ids that the ranked list did not hold within its first ``K`` entries.
    """

    ids: Ids
    added: tuple[int, ...]


def fit_token_map(
    token_map: TokenMap,
    *,
    vocab_size: int,
    size: int | None = None,
    required_ids: Iterable[int] = (),
    min_size: int = 1,
    tokenizer_fingerprint: str | None = None,
) -> FittedMap:
    """The first ``size`` ids of ``token_map``, with ``required_ids`` among them, ascending.

    A required id that is missing takes the place of the lowest ranked id that is not required, so
    the result has exactly ``size`` ids (the whole map's length if ``size`` is None).

    Args:
        token_map: the ranked map.
        vocab_size: rows of the target's LM head.
        size: how many ids to draft over.
        required_ids: ids that must be proposable, such as every end-of-turn token.
        min_size: the fewest ids the draft can work with (its top-k).
        tokenizer_fingerprint: the target's; compared when the map carries one too.

    Raises:
        TokenMapError: the map is for another tokenizer or vocabulary, shorter than ``size``, or too
            small for
            ``min_size`` or the required ids.
    """
    metadata = token_map.metadata
    _check_tokenizer(metadata.tokenizer_fingerprint, tokenizer_fingerprint, metadata.tokenizer)
    required = sorted({*required_ids, *metadata.required_ids})
    if required and not 0 <= required[0] <= required[-1] < vocab_size:
        bad = required[0] if required[0] < 0 else required[-1]
        raise TokenMapError(
            f"required id {bad} is outside the vocabulary of {vocab_size}; check the tokenizer's"
            " special tokens"
        )
    size = len(token_map) if size is None else size
    _check_size(size, len(token_map), min_size, len(required))
    ranked = token_map.ids[:size]
    # Ids beyond the head are harmless past the cut: input-only tokens rank last there.
    check_ids(ranked, vocab_size=vocab_size)
    added = np.setdiff1d(np.asarray(required, dtype=np.int64), ranked)
    replaceable = np.flatnonzero(~np.isin(ranked, required))
    dropped = replaceable[len(replaceable) - len(added) :]
    ids = np.sort(np.concatenate([np.delete(ranked, dropped), added]))
    return FittedMap(ids, tuple(added.tolist()))


def _check_tokenizer(of_map: str | None, of_model: str | None, name: str | None) -> None:
    if of_map is None or of_model is None or of_map == of_model:
        return
    raise TokenMapError(
        f"the map was made with another tokenizer ({name or 'unnamed'}, fingerprint {of_map[:12]});"
        f" this model's is {of_model[:12]}: rank a map with this model's tokenizer"
    )


def _check_size(size: int, available: int, min_size: int, required: int) -> None:
    if size < 1 or size > available:
        raise TokenMapError(
            f"size {size} asked of a map with {available} ids; choose 1 to {available}, or rank a"
            " larger map"
        )
    if size < min_size:
        raise TokenMapError(
            f"the map has {size} ids, fewer than top-k {min_size}; use a larger map or a smaller"
            " top-k"
        )
    if size < required:
        raise TokenMapError(
            f"size {size} cannot hold the {required} required ids (end of turn, special tokens);"
            f" choose at least {required}"
        )
