"""Rows of a serving comparison: one for each server and workload, and the files that keep them."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bench.serving.measure import Sample, middle
from bench.serving.trace import RoundProfile
from bench.serving.variants import EAGLE, EAGLE_MAP
from sgl_frspec.maps.files import atomic_file

FILE = "serve.json"


@dataclass
class Row:
    """What one server did under one workload.

    Attributes:
        run: which run measured it; only rows of one run are compared.
        ms_round, ms_min, ms_max: median and extremes over the alternations.
        tokens_per_second: of all requests together, without prefill; the median.
        accept_length, expected_accept: tokens a round, the target's own included.
        answer_tokens: of the long answers; None in results from before it was recorded.
        wrong: wrong answers of ``requests``; None where right ones are not known.
        idle_share: 1 - busy_ms / ms_round: time in which nothing runs on the GPU.
        gap_share: gaps_ms / ms_round: the part of it that lies inside CUDA graphs.
        kv_tokens: capacity; ``kv_capped`` says that it was given, not what memory allows.
        ms_samples: of each alternation.
    """

    run: str
    shape: str
    tree: str
    variant: str
    base: str
    backend: str
    flags: str
    batch: int
    context: int
    alternations: int
    ms_round: float
    ms_min: float
    ms_max: float
    tokens_per_second: float
    accept_length: float
    expected_accept: float | None
    wrong: int | None
    requests: int
    start_s: float
    kv_tokens: int
    kv_capped: bool
    ms_samples: list[float]
    answer_tokens: int | None = None
    kernels: float | None = None
    graphs: float | None = None
    launches: float | None = None
    copies: float | None = None
    waits: float | None = None
    busy_ms: float | None = None
    idle_share: float | None = None
    gap_share: float | None = None
    by_kernel: dict[str, tuple[float, float]] | None = None

    @property
    def case(self) -> tuple[Any, ...]:
        """What rows that can be compared have in common."""
        return self.run, self.shape, self.tree, self.batch, self.context

    def add_profile(self, profile: RoundProfile) -> None:
        """Take over a trace's averages; idle time is judged by the untraced round."""
        self.kernels, self.graphs, self.launches = profile.kernels, profile.graphs, profile.launches
        self.copies, self.waits, self.busy_ms = profile.copies, profile.waits, profile.busy_ms
        self.idle_share = 1 - profile.busy_ms / self.ms_round
        self.gap_share = profile.gaps_ms / self.ms_round
        self.by_kernel = profile.by_kernel


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """The fields of a row that follow from its samples."""
    times = [sample.ms_per_round for sample in samples]
    known = [sample.wrong for sample in samples if sample.wrong is not None]
    return {
        "alternations": len(samples),
        "ms_round": middle(times),
        "ms_min": min(times),
        "ms_max": max(times),
        "tokens_per_second": middle([sample.tokens_per_second for sample in samples]),
        "accept_length": middle([sample.accept_length for sample in samples]),
        "wrong": sum(known) if known else None,
        "ms_samples": [round(time, 5) for time in times],
    }


@dataclass(frozen=True)
class Gains:
    """How many times longer a round of other servers takes, in the same run and workload.

    Attributes:
        full: stock EAGLE over the full vocabulary; the better one of several backends.
        mapped: stock EAGLE with the map, on the row's own backend if there is one, else the first.
        best: the fastest stock server with the map.
    """

    full: float | None
    mapped: float | None
    best: float | None


def gains(row: Row, rows: Sequence[Row]) -> Gains:
    """Of ``row`` over the stock servers beside it."""
    beside = [other for other in rows if other.case == row.case]
    full = [other.ms_round for other in beside if other.base == EAGLE]
    mapped = [other for other in beside if other.base == EAGLE_MAP]
    own = [other for other in mapped if other.backend == row.backend] or mapped
    return Gains(
        min(full) / row.ms_round if full else None,
        own[0].ms_round / row.ms_round if own else None,
        min(other.ms_round for other in mapped) / row.ms_round if mapped else None,
    )


def write(rows: Sequence[Row], machine: Mapping[str, str], out: Path) -> None:
    """``serve.json`` with everything, ``serve.csv`` without the lists."""
    out.mkdir(parents=True, exist_ok=True)
    document = {"machine": dict(machine), "rows": [asdict(row) for row in rows]}
    with atomic_file(out / FILE) as file:
        file.write(f"{json.dumps(document, indent=1)}\n".encode())
    names = [f.name for f in fields(Row) if f.name not in ("ms_samples", "by_kernel")]
    with (out / "serve.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def read(folders: Sequence[Path]) -> tuple[list[Row], dict[str, str]]:
    """Rows of several runs, and the machines of all.

    Raises:
        ValueError: a folder holds no results, or those of another version.
    """
    rows: list[Row] = []
    machines: dict[str, list[str]] = {}
    for folder in folders:
        try:
            document = json.loads((folder / FILE).read_text())
            rows += [Row(**record) for record in document["rows"]]
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no results of `bench serve` in {folder}: {error}") from None
        for key, value in document["machine"].items():
            if value not in machines.setdefault(key, []):
                machines[key].append(value)
    return rows, {key: " / ".join(values) for key, values in machines.items()}
