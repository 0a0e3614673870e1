"""The state of a long count, kept beside its output until that is complete."""

import dataclasses
import io
import zipfile
from pathlib import Path
from typing import Self

import numpy as np

from sgl_frspec.maps.files import atomic_file
from sgl_frspec.maps.token_map import Ids, TokenMapError


@dataclasses.dataclass
class Tally:
    """Counts so far.

    Attributes:
        counts: int64 ``[V]`` for each source.
        documents: how many documents of each source.
        batches: how many batches, counted over all sources in their order.
    """

    counts: list[Ids]
    documents: list[int]
    batches: int = 0

    @classmethod
    def zero(cls, sources: int, vocab_size: int) -> Self:
        """Nothing counted yet."""
        return cls([np.zeros(vocab_size, dtype=np.int64) for _ in range(sources)], [0] * sources)

    def add(self, source: int, ids: Ids, counts: Ids, documents: int) -> None:
        """One more batch; ``ids`` are distinct."""
        self.counts[source][ids] += counts
        self.documents[source] += documents
        self.batches += 1


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Where a tally is kept.

    Attributes:
        path: the file.
        job: everything that the counts depend on; a file of another job is not continued.
        seconds: how often to write it.
    """

    path: Path
    job: str
    seconds: float

    def load(self) -> Tally | None:
        """The tally of an interrupted run of this job, or None.

        Raises:
            TokenMapError: the file belongs to another job or is damaged.
        """
        if not self.path.exists():
            return None
        try:
            with np.load(self.path, allow_pickle=False) as state:
                job = str(state["job"])
                tally = Tally(
                    list(state["counts"]), state["documents"].tolist(), int(state["batches"])
                )
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise TokenMapError(
                f"{self.path}: damaged state of an interrupted run ({error}); pass --restart"
            ) from error
        if job != self.job:
            raise TokenMapError(
                f"{self.path}: an interrupted run with other sources or settings left its state;"
                " pass --restart to begin anew, or choose another --output"
            )
        return tally

    def save(self, tally: Tally) -> None:
        """Keep ``tally``; the file before it stays until the new one is complete."""
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            job=np.asarray(self.job),
            counts=np.stack(tally.counts),
            documents=np.asarray(tally.documents),
            batches=np.asarray(tally.batches),
        )
        with atomic_file(self.path) as file:
            file.write(buffer.getvalue())
