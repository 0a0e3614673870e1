"""Several maps of one tokenizer as one."""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from sgl_frspec import __version__
from sgl_frspec.maps.ranking import SHARE_SCALE, blend_counts
from sgl_frspec.maps.token_map import Ids, MapMetadata, SourceRecord, TokenMap, TokenMapError

T = TypeVar("T", int, str)
Weights = Sequence[float | None]


def merge_maps(maps: Sequence[TokenMap], weights: Weights | None = None) -> TokenMap:
    """Blend maps by their counts; one map alone is returned as it is.

    Without weights the counts are added up, as if all sources had been ranked together. With
    weights each map contributes its share whatever its size. Required ids of any map stand first,
    then ids by their blended count, ties to the smaller id, then ids that no map has counted, by
    the best rank that any map gives them. An id that a cut removed from a map counts as unseen
    there, so full rankings should be merged and the result cut.

    Args:
        maps: at least one, of one tokenizer.
        weights: one for each map, or None for all.

    Raises:
        TokenMapError: the maps are of different tokenizers or vocabularies, one has no counts,
            weighted ones are to be merged without weights, or a weight is wrong.
    """
    if not maps:
        raise TokenMapError("nothing to merge; give at least one map")
    if len(maps) == 1:
        return maps[0]
    weights = [None] * len(maps) if weights is None else list(weights)
    vocab_size = _shared("vocabulary size", [m.metadata.vocab_size for m in maps])
    fingerprint = _shared("tokenizer", [m.metadata.tokenizer_fingerprint for m in maps])
    size = max(int(m.ids.max()) for m in maps) + 1
    counts = [_dense_counts(m, i, size) for i, m in enumerate(maps)]
    totals = [m.metadata.total_count or int(c.sum()) for m, c in zip(maps, counts, strict=True)]
    if all(w is None for w in weights) and any(m.metadata.count_unit == "share" for m in maps):
        raise TokenMapError(
            "a map whose sources were weighted has no counts to add up; give every map a weight"
        )
    blended, unit = blend_counts(counts, weights, totals=totals)
    required = tuple(dict.fromkeys(i for m in maps for i in m.metadata.required_ids))
    ids = _order(maps, blended, required)
    metadata = MapMetadata(
        vocab_size=vocab_size,
        tokenizer_fingerprint=fingerprint,
        tokenizer=next((m.metadata.tokenizer for m in maps if m.metadata.tokenizer), None),
        required_ids=required,
        total_count=sum(totals) if unit == "occurrences" else SHARE_SCALE,
        count_unit=unit,
        sources=_sources(maps, weights),
        tool=f"sgl-frspec {__version__}",
    )
    return TokenMap(ids, blended[ids], metadata)


def _shared(what: str, values: Sequence[T | None]) -> T | None:
    known = {value for value in values if value is not None}
    if len(known) > 1:
        shown = ", ".join(sorted(str(value)[:12] for value in known))
        raise TokenMapError(
            f"the maps differ in their {what} ({shown}); merge maps of one tokenizer only"
        )
    return known.pop() if known else None


def _dense_counts(token_map: TokenMap, position: int, size: int) -> Ids:
    if token_map.counts is None:
        raise TokenMapError(
            f"map {position + 1} has no counts, so it cannot be weighed against others; rank its"
            " text again with `frspec rank`"
        )
    counts = np.zeros(size, dtype=np.int64)
    counts[token_map.ids] = token_map.counts
    return counts


def _order(maps: Sequence[TokenMap], counts: Ids, required: tuple[int, ...]) -> Ids:
    worst = max(len(m) for m in maps)
    best_rank = np.full(len(counts), worst, dtype=np.int64)
    for token_map in maps:
        ranks = np.arange(len(token_map), dtype=np.int64)
        best_rank[token_map.ids] = np.minimum(best_rank[token_map.ids], ranks)
    ids = np.flatnonzero(best_rank < worst).astype(np.int64)
    rank_among_unseen = np.where(counts[ids] > 0, 0, best_rank[ids])
    order = ids[np.lexsort((ids, rank_among_unseen, -counts[ids]))]
    first = np.asarray(required, dtype=np.int64)
    return np.concatenate([first, order[~np.isin(order, first)]])


def _sources(maps: Sequence[TokenMap], weights: Weights) -> tuple[SourceRecord, ...]:
    """All sources; where maps are weighted, each with its share of the whole."""
    records = []
    given = sum(weight or 0.0 for weight in weights)
    for token_map, weight in zip(maps, weights, strict=True):
        sources = token_map.metadata.sources
        if weight is None:
            records += sources
            continue
        parts = [s.weight if s.weight is not None else float(s.tokens) for s in sources]
        for source, part in zip(sources, parts, strict=True):
            share = weight / given * part / sum(parts)
            records.append(dataclasses.replace(source, weight=round(share, 6)))
    return tuple(records)
