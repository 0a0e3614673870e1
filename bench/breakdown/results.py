"""What a run has found so far: written after every step, so that a run cut short leaves it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.breakdown import page, text
from bench.breakdown.parts import Split, from_json
from bench.breakdown.predict import with_prediction
from bench.breakdown.sweep import sweeps
from sgl_frspec.explain import Device, ModelShape, Speculation

FILE = "breakdown.json"


@dataclass
class Results:
    """Splits of one model, and where they go.

    Attributes:
        title: the model.
        shape, spec: its sizes, and how it is served.
        device: whose rates predictions take.
        machine: what measured.
        folder: for JSON and HTML; None leaves them out.
        note: a warning to stand above the report.
        predicted: whether to set the arithmetic model beside the times: not beside a CPU's.
    """

    title: str
    shape: ModelShape
    spec: Speculation
    device: Device
    machine: Mapping[str, str]
    folder: Path | None
    note: str = ""
    predicted: bool = True
    splits: list[Split] = field(default_factory=list)

    @property
    def settings(self) -> str:
        """Tree, batch, context and model in words."""
        spec, shape = self.spec, self.shape
        return (
            f"{spec.steps} steps, top-k {spec.top_k}, {spec.nodes} nodes, batch {spec.batch}, "
            f"context {spec.context}; {shape.layers} layers, {shape.vocab:,} tokens; "
            f"{self.machine['gpu']}"
        )

    def add(self, found: Sequence[Split]) -> None:
        """Take more splits, and write everything again."""
        if self.predicted:
            found = [with_prediction(s, self.shape, self.device, self.spec) for s in found]
        self.splits += found
        if self.folder:
            self._write(self.folder)

    def show(self) -> None:
        """Print tables and answers."""
        print(f"{self.title}: {self.settings}", end="\n\n")
        for found in self.splits:
            print(text.table(found), end="\n\n")
        print(text.summary(self.splits, self.shape.vocab))

    def _write(self, folder: Path) -> None:
        fits = {
            name: sweep.as_json(self.shape.vocab) for name, sweep in sweeps(self.splits).items()
        }
        document = {"machine": dict(self.machine), "settings": self.settings}
        document |= {"splits": [found.as_json() for found in self.splits], "fits": fits}
        html = page.render(
            self.splits,
            self.machine,
            self.title,
            self.settings,
            self.device,
            self.shape.vocab,
            self.note,
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(json.dumps(document, indent=1))
        (folder / "breakdown.html").write_text(html, encoding="utf-8")


@dataclass(frozen=True)
class Earlier:
    """What an earlier run left: its machine, its settings in words, its splits."""

    machine: dict[str, str]
    settings: str
    splits: list[Split]


def earlier(folder: Path) -> Earlier:
    """What is in ``folder``.

    Raises:
        ValueError: nothing of a run.
    """
    path = folder / FILE
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        splits = [from_json(row) for row in document["splits"]]
        return Earlier(document["machine"], document["settings"], splits)
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"--merge {folder}: {path} cannot be read: {error}") from None
