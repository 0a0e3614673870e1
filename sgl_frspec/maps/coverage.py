"""How much of a text a map covers: the share of its tokens that a draft could propose.

Coverage bounds what a map can do: a target token outside the map is never proposed, so a draft that
would be accepted with probability a is accepted with probability a · coverage at most.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sgl_frspec.maps.token_map import Ids, MapMetadata, TokenMap, TokenMapError
from sgl_frspec.maps.vocabulary import Vocabulary

# Where published maps were cut, and where tables and pictures are.
SIZES = (4096, 8192, 16384, 32768, 65536)


def coverage_curve(token_map: TokenMap, counts: Ids) -> npt.NDArray[np.float64]:
    """The share of ``counts`` within the first 1, 2, … ids of ``token_map``.

    Args:
        token_map: N ranked ids.
        counts: int64 ``[V]``, how often each id occurs in a text; may be shorter than the map's
            largest id, which then counts as never seen.

    Returns:
        float64 ``[N]``, ascending, at most 1.

    Raises:
        TokenMapError: the text holds no tokens.
    """
    total = int(counts.sum())
    if total == 0:
        raise TokenMapError("the text holds no tokens; check its field and the roles counted")
    hits = np.zeros(len(token_map), dtype=np.int64)
    inside = token_map.ids < len(counts)
    hits[inside] = counts[token_map.ids[inside]]
    return np.cumsum(hits) / total


def coverage_at(token_map: TokenMap, counts: Ids, sizes: Sequence[int]) -> list[float]:
    """The share of ``counts`` within the first ``size`` ids, for each size up to the map's.

    Sizes beyond the map get the whole map's coverage.

    Raises:
        TokenMapError: the text holds no tokens, or a size is below 1.
    """
    if min(sizes) < 1:
        raise TokenMapError(f"size {min(sizes)} is not positive")
    curve = coverage_curve(token_map, counts)
    return [float(curve[min(size, len(curve)) - 1]) for size in sizes]


def own_counts(token_map: TokenMap) -> Ids | None:
    """The counts that ``token_map`` was ranked by, int64 ``[V]``; None where it has none."""
    if token_map.counts is None or not token_map.counts.any():
        return None
    counts = np.zeros(int(token_map.ids.max()) + 1, dtype=np.int64)
    counts[token_map.ids] = token_map.counts
    return counts


def own_coverage(token_map: TokenMap, sizes: Sequence[int]) -> list[float] | None:
    """The share of the ranked corpus within the first ``size`` ids; None without counts.

    Measured on the text that made the ranking, so an upper bound for any other.
    """
    counts = own_counts(token_map)
    if counts is None:
        return None
    # A cut removed ids but not their share of the corpus.
    kept = int(counts.sum()) / (token_map.metadata.total_count or int(counts.sum()))
    return [share * kept for share in coverage_at(token_map, counts, sizes)]


def missing_ids(token_map: TokenMap, counts: Ids, size: int | None = None) -> Ids:
    """Ids that occur in ``counts`` but not within the first ``size`` ids, most frequent first."""
    seen = np.flatnonzero(counts)
    outside = seen[~np.isin(seen, token_map.ids[:size])]
    return outside[np.lexsort((outside, -counts[outside]))].astype(np.int64)


def id_order_map(vocabulary: Vocabulary) -> TokenMap:
    """The ranking that needs no text: required ids first, then every token by its id.

    For byte-level BPE that is the order of the merges, and a strong baseline; for vocabularies
    sorted in another way it is not.
    """
    required = np.asarray(vocabulary.required_ids, dtype=np.int64)
    ids = np.unique(np.fromiter(vocabulary.tokens.values(), dtype=np.int64))
    metadata = MapMetadata(
        vocab_size=vocabulary.size,
        tokenizer_fingerprint=vocabulary.fingerprint,
        tokenizer=vocabulary.name,
        required_ids=vocabulary.required_ids,
        corpus="token-id order",
    )
    return TokenMap(np.concatenate([required, np.setdiff1d(ids, required)]), None, metadata)
