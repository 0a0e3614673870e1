"""The comparison as lines on the screen and as Markdown."""

from collections.abc import Sequence

from bench.columns import aligned
from bench.serving.rows import Row, gains

HEADINGS = (
    "variant",
    "ms/round",
    "min–max",
    "× full",
    "× map",
    "× best",
    "tok/s",
    "accept",
    "expected",
    "kernels",
    "graphs",
    "launches",
    "copies",
    "busy ms",
    "idle",
    "in graphs",
    "right",
)


def cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """One line of the table, beside the other rows of its case."""
    gain = gains(row, rows)
    return [
        row.variant,
        f"{row.ms_round:.3f}",
        f"{row.ms_min:.3f}–{row.ms_max:.3f}",
        *(_number(value, ".2f") for value in (gain.full, gain.mapped, gain.best)),
        f"{row.tokens_per_second:.0f}",
        f"{row.accept_length:.2f}",
        _number(row.expected_accept, ".2f"),
        *(_number(value, ".0f") for value in (row.kernels, row.graphs, row.launches, row.copies)),
        _number(row.busy_ms, ".3f"),
        _number(row.idle_share, ".1%"),
        _number(row.gap_share, ".1%"),
        "?" if row.wrong is None else f"{row.requests - row.wrong}/{row.requests}",
    ]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def title(row: Row) -> str:
    """What the rows of a case have in common."""
    return f"{row.shape}, tree {row.tree}, batch {row.batch}, context {row.context:,}"


def text(case: Sequence[Row]) -> str:
    """The rows of one case as aligned columns under their title."""
    lines = [list(HEADINGS), *(cells(row, case) for row in case)]
    heading = f"{title(case[0])} ({case[0].alternations} alternations)"
    return "\n".join([heading, *aligned(lines)])


def cases(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows by case, in the order in which the cases came."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.case, []).append(row)
    return list(groups.values())


def servers(rows: Sequence[Row]) -> str:
    """Start-up time and KV capacity of each server."""
    lines = []
    for row in {(row.run, row.shape, row.tree, row.variant): row for row in rows}.values():
        capped = " (given, not what the memory allows)" if row.kv_capped else ""
        name = f"{row.shape} {row.tree} {row.variant}"
        lines.append(f"{name}: start {row.start_s:.0f} s, KV {row.kv_tokens:,} tokens{capped}")
    return "\n".join(lines)


def markdown(rows: Sequence[Row]) -> str:
    """One Markdown table of all cases, with the servers below."""
    lines = ["| case | " + " | ".join(HEADINGS) + " |"]
    lines.append("|---|---|" + "--:|" * (len(HEADINGS) - 1))
    for case in cases(rows):
        for row in case:
            lines.append(f"| {title(row)} | " + " | ".join(cells(row, case)) + " |")
    return "\n".join(lines) + "\n\n```\n" + servers(rows) + "\n```\n"
