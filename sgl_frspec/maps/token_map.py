"""A token map: the vocabulary's ids from the most to the least frequent, with counts and metadata.

Plain numpy, so that a map can be read and checked before anything heavy loads.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

FORMAT_VERSION = 1


class TokenMapError(ValueError):
    """A map, a source or a tokenizer that cannot be used; the message says what to do instead."""


@dataclasses.dataclass(frozen=True)
class SourceRecord:
    """Where a share of the counts came from.

    ``sha256`` is over the bytes of the file (for a folder: over the names and hashes of its files),
    ``weight`` is None when sources were added up as they are.
    """

    name: str
    sha256: str | None = None
    weight: float | None = None
    documents: int = 0
    tokens: int = 0


@dataclasses.dataclass(frozen=True)
class MapMetadata:
    """What a map says about itself.

    Attributes:
        vocab_size: rows of the model's LM head; every id is below it. None when unknown.
        tokenizer_fingerprint: see :func:`sgl_frspec.maps.tokenizer_fingerprint`.
        tokenizer: a name for people, never compared.
        required_ids: the ids that stand first whatever their count (end of turn, special tokens).
        total_count: sum of the counts over the whole vocabulary, also of the ids that a cut
            removed.
        count_unit: ``occurrences``, or ``share`` (parts per 10^12) where sources were weighted.
    """

    vocab_size: int | None = None
    tokenizer_fingerprint: str | None = None
    tokenizer: str | None = None
    required_ids: tuple[int, ...] = ()
    total_count: int | None = None
    count_unit: str = "occurrences"
    corpus: str | None = None
    sources: tuple[SourceRecord, ...] = ()
    date: str | None = None
    tool: str | None = None
    format_version: int = FORMAT_VERSION


@dataclasses.dataclass(frozen=True, eq=False)
class TokenMap:
    """A ranked list of token ids.

    Attributes:
        ids: int64 ``[N]``, most frequent first, no duplicates, none negative.
        counts: int64 ``[N]``, beside ``ids``; None when the file carries none (thunlp's ``.pt``).
        metadata: see :class:`MapMetadata`.

    Raises:
        TokenMapError: an id is negative, repeated or not below ``metadata.vocab_size``; the list is
            empty; the
            arrays' shapes or types are wrong.
    """

    ids: Ids
    counts: Ids | None = None
    metadata: MapMetadata = dataclasses.field(default_factory=MapMetadata)

    def __post_init__(self) -> None:
        check_ids(self.ids, vocab_size=self.metadata.vocab_size)
        if self.counts is not None:
            _check_counts(self.counts, len(self.ids))

    def __len__(self) -> int:
        return len(self.ids)

    def first(self, size: int) -> "TokenMap":
        """The ``size`` best ranked entries, with the same metadata.

        Raises:
            TokenMapError: ``size`` is below 1, above ``len(self)``, or would drop a required id.
        """
        if not 1 <= size <= len(self):
            raise TokenMapError(
                f"cannot cut a map of {len(self)} ids to {size}; choose a size from 1 to"
                f" {len(self)} or rank a larger map"
            )
        dropped = set(self.metadata.required_ids) - set(self.ids[:size].tolist())
        if dropped:
            raise TokenMapError(
                f"size {size} would drop required id {min(dropped)}; the map needs at least"
                f" {len(self.metadata.required_ids)} entries for its end-of-turn and special tokens"
            )
        counts = None if self.counts is None else self.counts[:size].copy()
        return TokenMap(self.ids[:size].copy(), counts, self.metadata)


def check_ids(ids: Ids, *, vocab_size: int | None = None, where: str = "token map") -> None:
    """Refuse what is not a list of distinct token ids.

    Raises:
        TokenMapError: naming ``where`` and the first offending entry.
    """
    if ids.dtype != np.int64:
        raise TokenMapError(
            f"{where}: ids have type {ids.dtype}; store whole numbers (int64), for example with"
            " `frspec convert`"
        )
    if ids.ndim != 1:
        raise TokenMapError(
            f"{where}: ids have shape {list(ids.shape)}; a map is one flat list of ids"
        )
    if ids.size == 0:
        raise TokenMapError(f"{where}: holds no ids; make one with `frspec rank`")
    _refuse_first(ids < 0, ids, f"{where}: entry {{i}} is negative ({{v}}); rank the map again")
    if vocab_size is not None:
        _refuse_first(
            ids >= vocab_size,
            ids,
            f"{where}: entry {{i}} is id {{v}}, outside the vocabulary of {vocab_size}; the map was"
            " made for another model: rank one with this model's tokenizer",
        )
    _refuse_duplicates(ids, where)


def find_duplicate(ids: Sequence[int] | Ids) -> int | None:
    """The first value that occurs twice, or None."""
    values, counts = np.unique(np.asarray(ids, dtype=np.int64), return_counts=True)
    repeated = values[counts > 1]
    return int(repeated[0]) if repeated.size else None


def _refuse_first(bad: npt.NDArray[np.bool_], ids: Ids, message: str) -> None:
    where = np.flatnonzero(bad)
    if where.size:
        raise TokenMapError(message.format(i=int(where[0]), v=int(ids[where[0]])))


def _refuse_duplicates(ids: Ids, where: str) -> None:
    repeated = find_duplicate(ids)
    if repeated is not None:
        first, second = np.flatnonzero(ids == repeated)[:2].tolist()
        raise TokenMapError(
            f"{where}: id {repeated} is at entries {first} and {second}; each id may stand once:"
            " remove the repetition or rank the map again"
        )


def _check_counts(counts: Ids, n: int) -> None:
    if counts.dtype != np.int64 or counts.shape != (n,):
        raise TokenMapError(
            f"counts have type {counts.dtype} and shape {list(counts.shape)}; expected int64 [{n}]"
        )
    _refuse_first(counts < 0, counts, "count {i} is negative ({v}); rank the map again")
