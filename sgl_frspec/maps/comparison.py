"""Two maps of one tokenizer beside each other."""

from collections.abc import Sequence

import numpy as np

from sgl_frspec.maps.coverage import coverage_at, own_counts
from sgl_frspec.maps.inspection import readable
from sgl_frspec.maps.report import Section, percent
from sgl_frspec.maps.token_map import Ids, TokenMap, TokenMapError
from sgl_frspec.maps.vocabulary import Vocabulary


def compare(
    one: TokenMap,
    other: TokenMap,
    *,
    sizes: Sequence[int],
    limit: int,
    vocabulary: Vocabulary | None = None,
) -> list[Section]:
    """How far two maps agree at each size, and the best ranked ids that only one of them has.

    Args:
        one: the first map, called A.
        other: the second, called B.
        sizes: cuts to compare; beyond a map's length it counts whole.
        limit: how many ids of each to list, at the largest size.
        vocabulary: names the listed ids.

    Raises:
        TokenMapError: the maps are of different tokenizers.
    """
    fingerprints = one.metadata.tokenizer_fingerprint, other.metadata.tokenizer_fingerprint
    if None not in fingerprints and fingerprints[0] != fingerprints[1]:
        raise TokenMapError(
            f"the maps are of different tokenizers ({one.metadata.tokenizer or 'unnamed'} and"
            f" {other.metadata.tokenizer or 'unnamed'}); the same id is another token in each"
        )
    return [
        _metadata(one, other),
        _agreement(one, other, sizes),
        *(
            section
            for section in (
                _only(one, other, "A", sizes[-1], limit, vocabulary),
                _only(other, one, "B", sizes[-1], limit, vocabulary),
            )
            if section.rows
        ),
    ]


def _metadata(one: TokenMap, other: TokenMap) -> Section:
    def facts(token_map: TokenMap) -> dict[str, str]:
        metadata = token_map.metadata
        return {
            "ids": f"{len(token_map):,}",
            "vocabulary size": str(metadata.vocab_size or "unknown"),
            "tokenizer": metadata.tokenizer or "unnamed",
            "required ids": str(len(metadata.required_ids)),
            "count unit": metadata.count_unit if token_map.counts is not None else "no counts",
            "sources": ", ".join(source.name for source in metadata.sources) or "unknown",
        }

    of_other = facts(other)
    rows = [(name, value, of_other[name]) for name, value in facts(one).items()]
    return Section("Maps", ("", "A", "B"), rows)


def _agreement(one: TokenMap, other: TokenMap, sizes: Sequence[int]) -> Section:
    counts = own_counts(one), own_counts(other)
    rows = []
    for size in sizes:
        shared = len(np.intersect1d(one.ids[:size], other.ids[:size]))
        of = min(size, len(one), len(other))
        crossed = [
            "" if c is None else percent(coverage_at(m, c, [size])[0])
            for m, c in ((other, counts[0]), (one, counts[1]))
        ]
        rows.append((f"{size:,}", f"{shared:,}", percent(shared / of), *crossed))
    headings = ("size", "shared ids", "share", "A's corpus covered by B", "B's corpus covered by A")
    return Section("Agreement", headings, rows)


def _only(
    this: TokenMap,
    that: TokenMap,
    name: str,
    size: int,
    limit: int,
    vocabulary: Vocabulary | None,
) -> Section:
    mine, theirs = this.ids[:size], that.ids[:size]
    ranks = np.flatnonzero(~np.isin(mine, theirs))[:limit]
    rows = [
        (
            readable(index, vocabulary) if vocabulary else f"id {index}",
            str(index),
            f"{rank:,}",
            _rank_in(that, index),
        )
        for rank, index in zip(ranks.tolist(), mine[ranks].tolist(), strict=True)
    ]
    title = f"Best ranked ids that only {name} has among its first {size:,}"
    return Section(title, ("token", "id", "rank", "rank in the other"), rows)


def _rank_in(token_map: TokenMap, index: int) -> str:
    found: Ids = np.flatnonzero(token_map.ids == index)
    return f"{int(found[0]):,}" if found.size else "absent"
