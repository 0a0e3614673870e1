"""What a map is and how good, as the tables of a report."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from sgl_frspec.maps.byte_alphabet import token_bytes
from sgl_frspec.maps.categories import id_categories
from sgl_frspec.maps.coverage import coverage_at, missing_ids, own_coverage
from sgl_frspec.maps.rank import unseen_count
from sgl_frspec.maps.report import Section, percent
from sgl_frspec.maps.token_map import Ids, SourceRecord, TokenMap
from sgl_frspec.maps.vocabulary import Vocabulary

ALL = "all"
# More special tokens than this are counted, not listed.
LISTED_TOKENS = 12


def description(token_map: TokenMap, name: str, vocabulary: Vocabulary | None) -> Section:
    """What the file says about itself."""
    metadata = token_map.metadata
    size = f"{len(token_map):,}"
    if metadata.vocab_size:
        size += f" of {metadata.vocab_size:,} ({percent(len(token_map) / metadata.vocab_size)})"
    fingerprint = (metadata.tokenizer_fingerprint or "not recorded")[:16]
    rows = [
        ("ids", size),
        ("tokenizer", f"{metadata.tokenizer or 'unnamed'}, fingerprint {fingerprint}"),
        ("required, first", _token_list(metadata.required_ids, vocabulary)),
        (
            "filled in unseen",
            f"{unseen_count(token_map):,}" if _has_counts(token_map) else "unknown",
        ),
        ("counts", _counts_note(token_map)),
        ("corpus", metadata.corpus or "no note"),
        ("made", f"{metadata.tool or 'by another tool'}, {metadata.date or 'no date'}"),
    ]
    return Section(name, ("", "value"), rows)


def source_table(sources: Sequence[SourceRecord]) -> Section:
    """The sources that the counts came from."""
    rows = [
        (
            source.name,
            "" if source.weight is None else f"{source.weight:g}",
            f"{source.documents:,}",
            f"{source.tokens:,}",
            (source.sha256 or "unknown")[:16],
        )
        for source in sources
    ]
    return Section("Sources", ("source", "weight", "documents", "tokens", "sha256"), rows)


def ranking_coverage(token_map: TokenMap, sizes: Sequence[int]) -> Section | None:
    """Coverage of the corpus that made the ranking."""
    shares = own_coverage(token_map, sizes)
    if shares is None:
        return None
    return Section(
        "Share of the ranking's own corpus",
        tuple(f"{size:,}" for size in sizes),
        [tuple(percent(share) for share in shares)],
        "The text that made the ranking; other text is covered less.",
    )


def categories(token_map: TokenMap, vocabulary: Vocabulary, sizes: Sequence[int]) -> Section:
    """How much of each script and category of the vocabulary is within each size."""
    kind = id_categories(vocabulary)
    whole = Counter(kind.values())
    within = [
        Counter(kind[i] for i in token_map.ids[:size].tolist() if i in kind) for size in sizes
    ]
    rows = [
        (name, f"{number:,}", *(f"{count[name]:,}" for count in within))
        for name, number in sorted(whole.items(), key=lambda item: (-item[1], item[0]))
    ]
    headings = ("tokens of", "vocabulary", *(f"{size:,}" for size in sizes))
    return Section("Scripts and categories", headings, rows)


def held_out_coverage(
    maps: Mapping[str, TokenMap], domains: Mapping[str, Ids], sizes: Sequence[int]
) -> Section:
    """Coverage of text that did not make the ranking, by map and domain."""
    rows = [
        (
            name,
            domain,
            *map(percent, coverage_at(token_map, counts, sizes)),
            f"{int(counts.sum()):,}",
        )
        for name, token_map in maps.items()
        for domain, counts in domains.items()
    ]
    headings = ("map", "domain", *(f"{size:,}" for size in sizes), "tokens")
    return Section("Share of the given text", headings, rows)


def missing_tokens(
    token_map: TokenMap,
    domains: Mapping[str, Ids],
    vocabulary: Vocabulary,
    *,
    size: int | None,
    limit: int,
) -> Section:
    """The tokens of the text that a map of ``size`` ids lacks most often."""
    rows = []
    for domain, counts in domains.items():
        missing = missing_ids(token_map, counts, size)
        total = int(counts.sum())
        rows += [
            (
                readable(i, vocabulary),
                domain,
                str(i),
                f"{counts[i]:,}",
                percent(int(counts[i]) / total),
            )
            for i in missing[:limit].tolist()
        ]
    of = f"the first {size:,} ids" if size else "the map"
    title = f"Most frequent tokens outside {of}"
    return Section(title, ("token", "domain", "id", "occurrences", "share"), rows)


def with_total(domains: Mapping[str, Ids]) -> dict[str, Ids]:
    """The domains, and their sum where there are several."""
    if len(domains) < 2:
        return dict(domains)
    return {**domains, ALL: np.stack(list(domains.values())).sum(axis=0)}


def readable(index: int, vocabulary: Vocabulary) -> str:
    """A token as a person can read it, white space and broken characters escaped."""
    token = vocabulary.by_id.get(index)
    if token is None:
        return f"id {index}"
    if index in vocabulary.required_ids or index in vocabulary.placeholder_ids:
        return token
    data = token_bytes(token, byte_level=vocabulary.byte_level)
    return repr(data.decode("utf-8", "backslashreplace"))


def _has_counts(token_map: TokenMap) -> bool:
    return token_map.counts is not None


def _counts_note(token_map: TokenMap) -> str:
    if not _has_counts(token_map):
        return "none"
    total = token_map.metadata.total_count
    if token_map.metadata.count_unit == "share":
        return "shares of weighted sources"
    return f"{total:,} occurrences" if total is not None else "occurrences"


def _token_list(ids: Sequence[int], vocabulary: Vocabulary | None) -> str:
    if not ids:
        return "none"
    tokens = vocabulary.by_id if vocabulary else {}
    names = [tokens.get(i, str(i)) for i in ids[:LISTED_TOKENS]]
    more = f" and {len(ids) - LISTED_TOKENS} more" if len(ids) > LISTED_TOKENS else ""
    return f"{len(ids)}: {' '.join(names)}{more}"
