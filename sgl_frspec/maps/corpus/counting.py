"""Count the tokens of whole sources in parallel, in bounded memory, resumable.

Documents are read in one process and counted in several. Counts are sums over documents, so neither
the number of processes nor where a run was interrupted changes them.
"""

import collections
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

from sgl_frspec.maps.corpus.checkpoint import Checkpoint, Tally
from sgl_frspec.maps.corpus.counter import DocumentCounter
from sgl_frspec.maps.corpus.documents import Document
from sgl_frspec.maps.corpus.reader import SourceReader
from sgl_frspec.maps.token_map import Ids, TokenMapError

# About 2 MB with its counts: large enough to hide the hand-over, small enough to bound memory.
BATCH_CHARS = 1 << 19
BATCH_DOCUMENTS = 1 << 12
CHECKPOINT_SECONDS = 20.0

Progress = Callable[[int], None]


class Batch(NamedTuple):
    """Documents of one source, with how far reading had come in all sources, in bytes."""

    source: int
    documents: list[Document]
    position: int


def count_sources(
    readers: list[SourceReader],
    counter: DocumentCounter,
    vocab_size: int,
    *,
    workers: int = 1,
    checkpoint: Checkpoint | None = None,
    progress: Progress = lambda position: None,
) -> Tally:
    """The token counts of each source.

    Args:
        readers: the sources, each at its beginning.
        counter: turns documents into counts; handed to every worker.
        vocab_size: ids counted are below it.
        workers: processes that tokenize.
        checkpoint: where to keep the state of an interrupted run, and to look for one.
        progress: told how many bytes have been read and counted.

    Raises:
        TokenMapError: a source cannot be read, or a worker died.
    """
    tally = Tally.zero(len(readers), vocab_size)
    if checkpoint is not None:
        tally = checkpoint.load() or tally
    saved = time.monotonic()
    skip = tally.batches
    batches = (b for i, b in enumerate(read_batches(readers)) if i >= skip or progress(b.position))
    for batch, (ids, counts) in _count_in_order(counter, batches, workers):
        tally.add(batch.source, ids, counts, len(batch.documents))
        progress(batch.position)
        if checkpoint is not None and time.monotonic() - saved > checkpoint.seconds:
            checkpoint.save(tally)
            saved = time.monotonic()
    return tally


def read_batches(readers: list[SourceReader]) -> Iterator[Batch]:
    """The sources' documents in batches; the same input always gives the same batches."""
    for i, reader in enumerate(readers):
        documents: list[Document] = []
        size = 0
        for document in reader.documents():
            documents.append(document)
            size += _weight(document)
            if size >= BATCH_CHARS or len(documents) >= BATCH_DOCUMENTS:
                yield Batch(i, documents, sum(r.position for r in readers))
                documents, size = [], 0
        if documents:
            yield Batch(i, documents, sum(r.position for r in readers))


def _weight(document: Document) -> int:
    if isinstance(document, str):
        return len(document)
    return sum(4 if isinstance(item, int) else len(str(item)) for item in document)


def _count_in_order(
    counter: DocumentCounter, batches: Iterator[Batch], workers: int
) -> Iterator[tuple[Batch, tuple[Ids, Ids]]]:
    if workers == 1:
        for batch in batches:
            yield batch, counter.count(batch.documents)
        return
    pending: collections.deque = collections.deque()
    with _pool(counter, workers) as pool:
        try:
            for batch in batches:
                pending.append((batch, pool.submit(_count, batch.documents)))
                if len(pending) > 2 * workers:
                    done, future = pending.popleft()
                    yield done, future.result()
            while pending:
                done, future = pending.popleft()
                yield done, future.result()
        except BrokenProcessPool as error:
            raise TokenMapError(
                "a worker process died, perhaps for want of memory; run again (it resumes) with"
                " fewer --workers"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _pool(counter: DocumentCounter, workers: int) -> ProcessPoolExecutor:
    # Forked workers share the tokenizer's memory, which for a vocabulary of 262k is 0.4 GB.
    context = multiprocessing.get_context("fork")
    return ProcessPoolExecutor(workers, context, _start_worker, (counter, os.getpid()))


_counter: DocumentCounter


def _start_worker(counter: DocumentCounter, parent: int) -> None:
    global _counter
    _counter = counter
    # One thread of the tokenizer's own pool is an eighth faster than its path without a pool. Where
    # the parent's pool has run, threads that the fork lost, tokenizers takes that path by itself.
    os.environ["RAYON_NUM_THREADS"] = "1"
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    # A killed parent cannot tell its workers; they would wait for ever.
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _count(documents: list[Document]) -> tuple[Ids, Ids]:
    return _counter.count(documents)


def worker_count() -> int:
    """Processes that may run at once on this machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
