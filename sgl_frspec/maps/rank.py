"""Rank a vocabulary by how often its tokens occur in given sources."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sgl_frspec import __version__
from sgl_frspec.maps.corpus.chat import ChatTemplate, load_chat_template
from sgl_frspec.maps.corpus.checkpoint import Checkpoint, Tally
from sgl_frspec.maps.corpus.counter import ROLES, DocumentCounter, load_tokenizer
from sgl_frspec.maps.corpus.counting import CHECKPOINT_SECONDS, Progress, count_sources
from sgl_frspec.maps.corpus.reader import SourceReader
from sgl_frspec.maps.corpus.sources import Source
from sgl_frspec.maps.ranking import blend_counts, rank_ids
from sgl_frspec.maps.token_map import MapMetadata, SourceRecord, TokenMap, TokenMapError
from sgl_frspec.maps.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class RankOptions:
    """How to count and rank.

    Attributes:
        vocab_size: rows of the LM head; None for ``config.json``'s, else the tokenizer's.
        required_ids: more ids to put first, before the tokenizer's own special tokens.
        roles: of chat messages, count what the ``assistant`` wrote or ``all``.
        chat_template: a Jinja file to use instead of the tokenizer's own template.
        workers: processes that tokenize; the result does not depend on it.
        checkpoint: file for the state of an interrupted run; None to keep none.
        checkpoint_seconds: how often to write it.
        corpus: a note for people about the sources.
        date: of the ranking. Not taken from the clock, so that the same input gives the same bytes.
    """

    vocab_size: int | None = None
    required_ids: tuple[int, ...] = ()
    roles: str = ROLES[0]
    chat_template: Path | None = None
    workers: int = 1
    checkpoint: Path | None = None
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    corpus: str | None = None
    date: str | None = None


def rank_sources(
    sources: Sequence[Source],
    vocabulary: Vocabulary,
    options: RankOptions = RankOptions(),
    *,
    progress: Progress = lambda position: None,
) -> TokenMap:
    """Count the tokens of ``sources`` and rank the whole vocabulary by them.

    See :func:`sgl_frspec.maps.ranking.rank_ids` for the order, and
    :func:`sgl_frspec.maps.ranking.blend_counts` for what weights do. The file
    ``options.checkpoint`` stays, for the caller to remove once the map is safe.

    Raises:
        TokenMapError: a source cannot be read, nothing was counted, a required id or every
            end-of-turn token lies beyond the LM head.
    """
    # Refused before hours of reading, not after.
    _required(options, vocabulary, ranked_vocab_size(vocabulary, options.vocab_size))
    readers = [SourceReader(source) for source in sources]
    tally = count_tokens(readers, vocabulary, options, progress=progress)
    return rank_tally(tally, sources, [r.sha256 for r in readers], vocabulary, options)


def count_tokens(
    readers: list[SourceReader],
    vocabulary: Vocabulary,
    options: RankOptions = RankOptions(),
    *,
    progress: Progress = lambda position: None,
) -> Tally:
    """How often each token id occurs in each source.

    Raises:
        TokenMapError: a source cannot be read.
    """
    vocab_size = ranked_vocab_size(vocabulary, options.vocab_size)
    template = load_chat_template(vocabulary.path.parent, options.chat_template)
    counter = DocumentCounter(load_tokenizer(vocabulary), template, options.roles, vocab_size)
    checkpoint = None
    if options.checkpoint is not None:
        job = _job(readers, vocabulary, vocab_size, options.roles, template)
        checkpoint = Checkpoint(options.checkpoint, job, options.checkpoint_seconds)
    return count_sources(
        readers,
        counter,
        vocab_size,
        workers=options.workers,
        checkpoint=checkpoint,
        progress=progress,
    )


def rank_tally(
    tally: Tally,
    sources: Sequence[Source],
    hashes: Sequence[str | None],
    vocabulary: Vocabulary,
    options: RankOptions,
) -> TokenMap:
    """The ranked map of counts that were made already.

    Raises:
        TokenMapError: nothing was counted, or weights are wrong.
    """
    if not any(counts.any() for counts in tally.counts):
        names = ", ".join(source.name for source in sources)
        raise TokenMapError(f"no tokens in {names}; check the field and the roles that are counted")
    counts, unit = blend_counts(tally.counts, [source.weight for source in sources])
    required = _required(options, vocabulary, len(counts))
    ids = rank_ids(counts, vocabulary, required_ids=required)
    records = tuple(
        SourceRecord(s.name, sha256, s.weight, documents, int(c.sum()))
        for s, sha256, documents, c in zip(
            sources, hashes, tally.documents, tally.counts, strict=True
        )
    )
    metadata = MapMetadata(
        vocab_size=len(counts),
        tokenizer_fingerprint=vocabulary.fingerprint,
        tokenizer=vocabulary.name,
        required_ids=required,
        total_count=int(counts.sum()),
        count_unit=unit,
        corpus=options.corpus,
        sources=records,
        date=options.date,
        tool=f"sgl-frspec {__version__}",
    )
    return TokenMap(ids, counts[ids], metadata)


def _required(options: RankOptions, vocabulary: Vocabulary, vocab_size: int) -> tuple[int, ...]:
    beyond = [i for i in options.required_ids if not 0 <= i < vocab_size]
    if beyond:
        raise TokenMapError(
            f"required id {beyond[0]} is outside the vocabulary of {vocab_size}; if the LM head"
            " has more rows than the tokenizer has tokens, pass --vocab-size"
        )
    ends = vocabulary.eos_ids
    if ends and min(ends) >= vocab_size and not options.required_ids:
        raise TokenMapError(
            f"vocabulary size {vocab_size} leaves out every end-of-turn token (the first is id"
            f" {min(ends)}), so no draft could end a reply; pass --vocab-size with the rows of the"
            " LM head, or name a token with --require"
        )
    # Tokens added past the LM head are inputs only, such as an image's place.
    of_head = (i for i in vocabulary.required_ids if i < vocab_size)
    return tuple(dict.fromkeys((*options.required_ids, *of_head)))


def unseen_count(token_map: TokenMap) -> int:
    """How many ids stand in the map for want of better ones: neither seen nor required."""
    if token_map.counts is None:
        return 0
    required = np.isin(token_map.ids, np.asarray(token_map.metadata.required_ids, dtype=np.int64))
    return int(((token_map.counts == 0) & ~required).sum())


def ranked_vocab_size(vocabulary: Vocabulary, given: int | None) -> int:
    """Rows of the LM head: as given, else as the model's configuration says, else the tokenizer's.

    Raises:
        TokenMapError: not one token of the tokenizer is below it.
    """
    size = given or vocabulary.model_vocab_size or vocabulary.size
    if size < 1 or min(vocabulary.tokens.values()) >= size:
        raise TokenMapError(f"vocabulary size {size} leaves none of the tokenizer's tokens")
    return size


def _job(
    readers: list[SourceReader],
    vocabulary: Vocabulary,
    vocab_size: int,
    roles: str,
    template: ChatTemplate | None,
) -> str:
    """What the counts depend on. Weights and required ids do not change them."""
    parts = [
        [r.source.location, r.source.field, r.source.format, r.total_bytes, r.newest_change]
        for r in readers
    ]
    job = [parts, vocabulary.fingerprint, vocab_size, roles, template.text if template else None]
    return json.dumps(job)
