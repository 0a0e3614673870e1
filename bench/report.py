"""Rows as a table on the screen, and as CSV and JSON with the machine that made them."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path

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


class Table:
    """Prints rows as they come, aligned to the longest names of the run."""

    def __init__(self, names: Sequence[tuple[str, str, str]]) -> None:
        headings = ("op", "case", "provider")
        self.widths = [max(map(len, column)) for column in zip(headings, *names, strict=True)]
        self._line(headings, COLUMNS, "")

    def _line(self, names: Sequence[str], cells: Sequence[str] | Mapping, note: str) -> None:
        left = "  ".join(n.ljust(w) for n, w in zip(names, self.widths, strict=True))
        print(left, *(c.rjust(8) for c in cells), note, flush=True)

    def add(self, row: Row) -> None:
        """Print ``row``; a red or absent one shows its status and reason, and no time."""
        values = [(getattr(row, field), spec) for field, spec in COLUMNS.values()]
        cells = ["" if v is None else format(v, spec) for v, spec in values]
        note = "" if row.status == "ok" else f" {row.status}: {row.note}".splitlines()[0]
        self._line((row.op, row.case, row.provider), cells, note)


def write(rows: Sequence[Row], machine: Mapping[str, str], out: Path, stem: str) -> None:
    """Write ``stem.csv`` and ``stem.json`` into the folder ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    records = [asdict(row) | dict(machine) for row in rows]
    names = [field.name for field in fields(Row)] + list(machine)
    with (out / f"{stem}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(records)
    document = {"machine": dict(machine), "rows": [asdict(row) for row in rows]}
    (out / f"{stem}.json").write_text(json.dumps(document, indent=1) + "\n")


def markdown(rows: Sequence[Row]) -> str:
    """The timed rows as a Markdown table, one line a case, one column a provider (p50 in µs)."""
    providers = list(dict.fromkeys(row.provider for row in rows if row.us_p50))
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((row.op, row.case), {})[row.provider] = row
    lines = ["| op | case | " + " | ".join(providers) + " | floor |"]
    lines.append("|---|---|" + "--:|" * (len(providers) + 1))
    for (op, case), by in cases.items():
        cells = [f"{by[p].us_p50:.2f}" if p in by and by[p].us_p50 else "–" for p in providers]
        floor = next((row.floor_us for row in by.values() if row.floor_us), None)
        cells.append("–" if floor is None else f"{floor:.2f}")
        lines.append(f"| {op} | {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
