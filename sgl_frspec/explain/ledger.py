"""Bytes, operations and times of the parts of a cycle, added up."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sgl_frspec.explain.device import Device

BF16 = 2  # bytes
Phase = Literal["draft", "verify"]
Matrix = tuple[int, int]  # columns of results, inner dimension


@dataclass(frozen=True)
class Part:
    """One kind of work in a cycle, summed over its runs.

    Attributes:
        phase, name: where it belongs.
        nbytes, flops: moved and done.
        seconds: the floor.
        expected_s: what the device's kernels should take; see :class:`Device`.
        products: matrix products launched.
        memory_bound: whether bytes take the most of it, not operations or starts.
    """

    phase: Phase
    name: str
    nbytes: float
    flops: float
    seconds: float
    expected_s: float
    products: int
    memory_bound: bool


@dataclass(frozen=True)
class CycleCost:
    """The parts of a cycle in the order in which they run."""

    parts: tuple[Part, ...]

    def seconds(self, phase: str | None = None, *names: str) -> float:
        """Floor of a phase, or of the named parts in it; of everything by default."""
        return sum(part.seconds for part in self._of(phase, names))

    def expected_s(self, phase: str | None = None, *names: str) -> float:
        """Expected time of the same."""
        return sum(part.expected_s for part in self._of(phase, names))

    def _of(self, phase: str | None, names: Sequence[str]) -> Iterator[Part]:
        for part in self.parts:
            if phase in (None, part.phase) and (not names or part.name in names):
                yield part


@dataclass
class _Work:
    nbytes: float = 0.0
    flops: float = 0.0
    floor_s: float = 0.0
    expected_s: float = 0.0
    start_s: float = 0.0
    products: int = 0


class Ledger:
    """Adds up work by part, keeping the order of first appearance."""

    def __init__(self, device: Device) -> None:
        """Start an empty one for ``device``."""
        self._device = device
        self._parts: dict[tuple[Phase, str], _Work] = {}

    def add(
        self,
        phase: Phase,
        name: str,
        nbytes: float,
        flops: float = 0.0,
        runs: int = 1,
        *,
        kernels: int = 0,
        row_bytes: float = 0.0,
    ) -> None:
        """Add ``runs`` times this, which is no matrix product.

        Args:
            phase, name: of the part.
            nbytes, flops: of one run.
            runs: how many.
            kernels: launched in one.
            row_bytes: what one thread block streams for a row, while the others stream theirs.
        """
        floor = self._device.seconds(nbytes, flops)
        start = kernels * self._device.kernel_s
        start += max(0.0, row_bytes / self._device.block_bytes_per_s - floor)
        self._add(phase, name, runs, _Work(nbytes, flops, floor, floor + start, start))

    def add_products(
        self,
        phase: Phase,
        name: str,
        rows: int,
        matrices: Sequence[Matrix],
        runs: int = 1,
        *,
        more_bytes: float = 0.0,
    ) -> None:
        """Add ``runs`` times the products of ``rows`` vectors with each matrix.

        Args:
            phase, name: of the part.
            rows: of each product.
            matrices: (columns, inner) of the weights.
            runs: how many.
            more_bytes: moved in a run beside all weights, by products in proportion.
        """
        weights = [BF16 * columns * inner for columns, inner in matrices]
        for nbytes, (columns, inner) in zip(weights, matrices, strict=True):
            moved = nbytes * (1 + more_bytes / sum(weights))
            flops = 2.0 * rows * columns * inner
            floor = self._device.seconds(moved, flops)
            expected = self._device.product_seconds(moved, flops, columns)
            start = self._device.product_start_s
            self._add(phase, name, runs, _Work(moved, flops, floor, expected, start, 1))

    def _add(self, phase: Phase, name: str, runs: int, once: _Work) -> None:
        work = self._parts.setdefault((phase, name), _Work())
        for field, value in vars(once).items():
            setattr(work, field, getattr(work, field) + runs * value)

    def close(self) -> CycleCost:
        """Everything that was added."""
        return CycleCost(tuple(self._part(*key, work) for key, work in self._parts.items()))

    def _part(self, phase: Phase, name: str, work: _Work) -> Part:
        streaming = work.nbytes / self._device.bytes_per_s
        multiplying = work.flops / self._device.flops_per_s
        return Part(
            phase=phase,
            name=name,
            nbytes=work.nbytes,
            flops=work.flops,
            seconds=work.floor_s,
            expected_s=work.expected_s,
            products=work.products,
            memory_bound=streaming > max(multiplying, work.start_s),
        )
