"""The parts of a cycle, and a measurement split into them.

A cycle is one draft and one verification. Each moment of it belongs to one part: to that of the
kernel which runs, or to ``idle`` when none does, because the host has not launched it yet.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

PHASES = ("draft", "verify", "between")
PARTS = (
    "embedding",
    "fc",
    "norms",
    "attention projections",
    "attention",
    "MLP",
    "LM head",
    "softmax",
    "top-k",
    "tree",
    "acceptance",
    "copies",
)
IDLE = "GPU idle (host-bound)"
UNKNOWN = "unattributed"
HEAD_PARTS = ("LM head", "softmax", "top-k")
TOLERANCE = 0.03  # of the cycle, for the sum of the parts
PRODUCTS_TOLERANCE = 0.1  # of products in a cycle, averaged over those traced

Key = tuple[str, str]  # phase, part


@dataclass(frozen=True)
class Work:
    """What the arithmetic model says of a part in a cycle; see ``sgl_frspec.explain``."""

    nbytes: float
    flops: float
    floor_us: float
    expected_us: float
    memory_bound: bool


@dataclass(frozen=True)
class Split:
    """One implementation at one draft vocabulary, averaged over cycles.

    Attributes:
        implementation: what tables call it.
        vocab: rows of the draft's head.
        steps: draft steps in a cycle.
        cycles: how many were averaged.
        cycle_us: length of a cycle while nothing is traced.
        gpu_us: time of kernels and copies by (phase, part).
        host_us: time that the host spends issuing each, by the same keys, while nothing is traced;
            waiting for the GPU is in it. Empty where only a trace is known.
        kernels: kernels and copies in a cycle.
        launches: what the host launched for them: kernels, or whole graphs.
        work: what the arithmetic model expects of a part, by (phase, part).
        traced_cycle_us: length of a cycle while it was traced.
        products: matrix products of a cycle by (phase, part), where parts follow from kernels'
            neighbours and so can be wrong.
        expected_products: how many the model has.
    """

    implementation: str
    vocab: int
    steps: int
    cycles: int
    cycle_us: float
    gpu_us: Mapping[Key, float]
    host_us: Mapping[Key, float] = field(default_factory=dict)
    kernels: float = 0.0
    launches: float = 0.0
    work: Mapping[Key, Work] = field(default_factory=dict)
    traced_cycle_us: float = 0.0
    products: Mapping[Key, float] = field(default_factory=dict)
    expected_products: Mapping[Key, float] = field(default_factory=dict)

    @property
    def busy_us(self) -> float:
        """Time in which the GPU does anything."""
        return sum(self.gpu_us.values())

    @property
    def idle_us(self) -> float:
        """Time in which it waits; a GPU busier than the cycle is long has none."""
        return max(0.0, self.cycle_us - self.busy_us)

    @property
    def unattributed_us(self) -> float:
        """GPU time of kernels that no part claims."""
        return sum(us for (_, part), us in self.gpu_us.items() if part == UNKNOWN)

    @property
    def missing(self) -> float:
        """The cycle minus named parts and idle time, as a share of the cycle.

        It is positive when kernels belong to no part, and negative when the traced GPU time is
        longer than the untraced cycle, so the one is not a picture of the other.
        """
        named = self.busy_us - self.unattributed_us + self.idle_us
        return (self.cycle_us - named) / self.cycle_us

    @property
    def adds_up(self) -> bool:
        """Whether named parts and idle time are the cycle, within 3%."""
        return abs(self.missing) <= TOLERANCE

    @property
    def mislabelled(self) -> list[str]:
        """Parts with more or fewer products than the model has: kernels were given a wrong part."""
        if not self.products:
            return []
        return [
            f"{' '.join(key)} has {self.products.get(key, 0.0):.1f} products a cycle, not {count:g}"
            for key, count in self.expected_products.items()
            if abs(self.products.get(key, 0.0) - count) > PRODUCTS_TOLERANCE
        ]

    def part_us(self, *parts: str, phase: str | None = None) -> float:
        """GPU time of the parts, in one phase or in all."""
        return sum(
            us
            for (where, part), us in self.gpu_us.items()
            if part in parts and phase in (None, where)
        )

    def phase_us(self, phase: str) -> float:
        """GPU time of a phase."""
        return sum(us for (where, _), us in self.gpu_us.items() if where == phase)

    def ratio(self, key: Key) -> float | None:
        """Measured over expected time of a part; None where either is missing."""
        work, us = self.work.get(key), self.gpu_us.get(key)
        return us / work.expected_us if work and work.expected_us and us else None

    def named_parts(self) -> Iterator[Key]:
        """The (phase, part) pairs with any time, in the order of tables."""
        for phase in PHASES:
            for part in (*PARTS, UNKNOWN):
                if self.gpu_us.get((phase, part)) or self.host_us.get((phase, part)):
                    yield phase, part

    def as_json(self) -> dict[str, Any]:
        """For a results file; :func:`from_json` reads it."""
        plain = {k: v for k, v in vars(self).items() if not isinstance(v, Mapping)}
        tables = {
            "gpu_us": [(*key, us) for key, us in self.gpu_us.items()],
            "host_us": [(*key, us) for key, us in self.host_us.items()],
            "products": [(*key, count) for key, count in self.products.items()],
            "work": [(*key, *vars(work).values()) for key, work in self.work.items()],
        }
        derived = {"busy_us": self.busy_us, "idle_us": self.idle_us, "missing": self.missing}
        return plain | tables | derived


def from_json(row: Mapping[str, Any]) -> Split:
    """A split that :meth:`Split.as_json` wrote."""
    fields = {k: v for k, v in row.items() if k in Split.__dataclass_fields__}
    for name in ("gpu_us", "host_us", "products"):
        fields[name] = {(phase, part): us for phase, part, us in row[name]}
    fields["work"] = {(phase, part): Work(*numbers) for phase, part, *numbers in row["work"]}
    return Split(**fields)
