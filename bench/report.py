"""Rows as a table on the screen, and as CSV and JSON with the machine that made them."""

import csv
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from math import isfinite
from pathlib import Path
from typing import Any

from bench.runner import Row

COLUMNS = {  # heading: (field, format)
    "p50 µs": ("us_p50", ".2f"),
    "p20 µs": ("us_p20", ".2f"),
    "p80 µs": ("us_p80", ".2f"),
    "GB/s": ("gb_s", ".0f"),
    "% peak": ("pct_peak", ".0f"),
    "speedup": ("speedup", ".2f"),
    "max err": ("max_error", ".1e"),
}


UNTIMED = {"max err": COLUMNS["max err"]}


class Table:
    """Prints rows as they come, aligned to the longest names of the run."""

    def __init__(self, names: Sequence[tuple[str, str, str]], timed: bool) -> None:
        headings = ("op", "case", "provider")
        self.widths = [max(map(len, column)) for column in zip(headings, *names, strict=True)]
        self.columns = COLUMNS if timed else UNTIMED
        self._line(headings, self.columns, "")

    def _line(self, names: Sequence[str], cells: Sequence[str] | Mapping, note: str) -> None:
        left = "  ".join(n.ljust(w) for n, w in zip(names, self.widths, strict=True))
        print(left, *(c.rjust(8) for c in cells), note, flush=True)

    def add(self, row: Row) -> None:
        """Print ``row``; a red one shows its status and reason, and no time."""
        values = [(getattr(row, field), spec) for field, spec in self.columns.values()]
        cells = ["" if v is None else format(v, spec) for v, spec in values]
        note = "" if row.status == "ok" else f" {row.status}: {row.note}".splitlines()[0]
        self._line((row.op, row.case, row.provider), cells, note)


def absences(rows: Sequence[Row]) -> list[str]:
    """``provider: reason (cases)`` of the providers that could not run."""
    counts = Counter((r.provider, r.note) for r in rows if r.status == "absent")
    return [f"{name}: {reason} ({count} cases)" for (name, reason), count in counts.items()]


def write(rows: Sequence[Row], machine: Mapping[str, str], out: Path, stem: str) -> None:
    """Write ``stem.csv`` and ``stem.json`` into the folder ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    records = [asdict(row) | dict(machine) for row in rows]
    names = [field.name for field in fields(Row)] + list(machine)
    with (out / f"{stem}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(records)
    document = {"machine": dict(machine), "rows": [_without_nan(asdict(row)) for row in rows]}
    text = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False)
    (out / f"{stem}.json").write_text(text + "\n")


def _without_nan(record: dict[str, Any]) -> dict[str, Any]:
    """NaN, the error of a result that could not be compared, is no JSON."""
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in record.items()}


def markdown(rows: Sequence[Row], machine: Mapping[str, str]) -> str:
    """A Markdown table of the timed rows: a line a case, a column a provider (p50 in µs).

    Then the floor, what percentage of the measured peak the operation's first provider (ours, by
    custom) reaches, and how many times faster it is than the baseline and than the fastest other.
    Context rows stand in the table, but not in the last column.
    """
    providers = list(dict.fromkeys(row.provider for row in rows if row.us_p50))
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((row.op, row.case), {})[row.provider] = row
    headings = [*providers, "floor", "% of peak", "× baseline", "× best other"]
    lines = [" · ".join(f"{k} {v}" for k, v in machine.items()), ""]
    lines.append("| op | case | " + " | ".join(headings) + " |")
    lines.append("|---|---|" + "--:|" * len(headings))
    for (op, case), by in cases.items():
        cells = [_us(by[p]) if p in by else "–" for p in providers]
        lines.append(f"| {op} | {case} | " + " | ".join((*cells, *_standing(by))) + " |")
    return "\n".join(lines) + "\n"


def _us(row: Row) -> str:
    if row.us_p50:
        return f"{row.us_p50:.2f}"
    return f"**{row.status}**" if row.red else "–"


def _standing(by: Mapping[str, Row]) -> list[str]:
    """Floor, % of peak, × baseline, × best other of a case's first provider."""
    first, *others = by.values()
    if not (first.us_p50 and first.floor_us and first.pct_peak):
        return ["–"] * 4
    rivals = [row.us_p50 for row in others if row.us_p50 and not row.context]
    speedup = f"{first.speedup:.2f}" if first.speedup else "–"
    best = f"{min(rivals) / first.us_p50:.2f}" if rivals else "–"
    return [f"{first.floor_us:.2f}", f"{first.pct_peak:.0f}", speedup, best]
