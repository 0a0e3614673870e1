"""Counts -> ranked ids: the required ones, then by count, then what was never seen."""

from collections.abc import Sequence

import numpy as np

from sgl_frspec.maps.byte_alphabet import token_bytes
from sgl_frspec.maps.token_map import Ids, TokenMapError
from sgl_frspec.maps.vocabulary import Vocabulary

# Shares of weighted sources are stored as whole parts of this.
SHARE_SCALE = 10**12


def rank_ids(counts: Ids, vocabulary: Vocabulary, *, required_ids: tuple[int, ...]) -> Ids:
    """Every id that the tokenizer can produce, ranked.

    Order: ``required_ids`` as given; ids with a count, most frequent first, ties to the smaller id;
        unseen single-byte tokens; other unseen tokens in tokenizer order, which for BPE is the
        order of its merges; reserved and padding slots last.

    Args:
        counts: int64 ``[V]``, by id.
        vocabulary: the tokenizer; ids without a token (padding of the LM head) are never ranked.
        required_ids: ids that stand first whatever their count.

    Returns:
        int64 ``[N]``.
    """
    known = np.zeros(len(counts), dtype=bool)
    known[[i for i in vocabulary.tokens.values() if i < len(counts)]] = True
    known[list(required_ids)] = True
    tier = _unseen_tiers(len(counts), vocabulary)
    tier[counts > 0] = 0
    ids = np.arange(len(counts), dtype=np.int64)
    order = np.lexsort((ids, -counts, tier))
    first = np.asarray(required_ids, dtype=np.int64)
    rest = order[known[order] & ~np.isin(order, first)]
    return np.concatenate([first, rest]).astype(np.int64)


def blend_counts(
    counts: Sequence[Ids],
    weights: Sequence[float | None],
    *,
    totals: Sequence[int] | None = None,
) -> tuple[Ids, str]:
    """Several sources' counts as one.

    Without weights they are added up. With weights each source contributes its share of the total
    whatever its size, in whole parts of :data:`SHARE_SCALE`.

    Args:
        counts: int64 ``[V]`` for each source.
        weights: one for each source, or all None.
        totals: what each source's shares are of; None for the sums of its counts.

    Returns:
        int64 ``[V]`` and its unit, ``occurrences`` or ``share``.

    Raises:
        TokenMapError: only some sources have a weight, a weight is not positive, or a weighted
            source is empty.
    """
    if all(weight is None for weight in weights):
        return np.stack(counts).sum(axis=0), "occurrences"
    blended = np.zeros(len(counts[0]), dtype=np.float64)
    given = [w for w in weights if w is not None]
    if len(given) < len(weights) or min(given) <= 0:
        raise TokenMapError(
            f"weights are {list(weights)}; give every source a positive weight, or none of them"
        )
    totals = [int(source.sum()) for source in counts] if totals is None else totals
    for i, (source, weight, total) in enumerate(zip(counts, given, totals, strict=True)):
        if total == 0:
            raise TokenMapError(
                f"source {i + 1} has weight {weight} but holds no tokens; remove it"
            )
        blended += source * (weight / sum(given) * SHARE_SCALE / total)
    # A token that was seen keeps a place before those that were not.
    shares = np.where(blended > 0, np.maximum(np.rint(blended), 1), 0)
    return shares.astype(np.int64), "share"


def _unseen_tiers(size: int, vocabulary: Vocabulary) -> Ids:
    tier = np.full(size, 2, dtype=np.int64)
    byte_level = vocabulary.byte_level
    single_bytes = [
        i
        for t, i in vocabulary.tokens.items()
        if len(t) <= 6 and len(token_bytes(t, byte_level=byte_level)) == 1
    ]
    tier[[i for i in single_bytes if i < size]] = 1
    tier[[i for i in vocabulary.placeholder_ids if i < size]] = 3
    return tier
