"""What ``frspec choose`` found, as a table, sentences, JSON and a picture."""

import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from sgl_frspec.explain.line import VocabularyLine
from sgl_frspec.maps.choosing import AcceptModel, Prediction, fastest, nearly_fastest
from sgl_frspec.maps.picture import Curve, draw_curves, inline_svg
from sgl_frspec.maps.report import Section, as_html, percent


def table(maps: Sequence[Prediction], full: Prediction, token_ms: float | None) -> Section:
    """Every size's prediction; the full vocabulary stands last."""
    best = fastest([*maps, full])
    rows = [
        (
            ("full vocabulary" if p is full else f"{p.size:,}") + (" (best)" if p is best else ""),
            "" if p.coverage is None else percent(p.coverage),
            f"{p.accept:.3f}" + ("" if p.measured else " ≈"),
            f"{p.cycle_ms:.3f}",
            f"{p.tokens_per_s:.1f}",
            f"{p.tokens_per_s / full.tokens_per_s:.3f}",
            "" if token_ms is None else f"{p.tokens_per_s * token_ms / 1000:.3f}",
        )
        for p in (*maps, full)
    ]
    headings = (
        "ids", "coverage", "accept length", "ms per cycle", "tokens/s", "× full",
        "× no speculation",
    )  # fmt: skip
    note = "≈: outside the sizes whose accept length was measured."
    return Section("Predicted by size", headings, rows, note)


def time_note(time: VocabularyLine, timed_sizes: int) -> str:
    """The time of a cycle as a sentence; two sizes are on a line whatever they are."""
    fit = f" (R² {time.r_squared:.4f})" if timed_sizes > 2 else ""
    return (
        f"A cycle takes {1000 * time.fixed_s:.3f} ms and {1e6 * time.per_token_s:.4f} ms per 1,000"
        f" ids{fit}."
    )


def verdict_lines(
    maps: Sequence[Prediction], full: Prediction, token_ms: float | None, accept: AcceptModel
) -> list[str]:
    """The best size, what it gains, and whether a map or speculation as such loses."""
    best = fastest(maps)
    gain = best.tokens_per_s / full.tokens_per_s - 1
    near = [p.size for p in nearly_fastest(maps)]
    lines = [f"Best size: {best.size:,} ids; from {near[0]:,} to {near[-1]:,} it is within 1%."]
    if gain > 0:
        lines.append(f"Against drafting over the full vocabulary: {100 * gain:+.1f}%.")
    else:
        lines.append(
            f"A map loses: its best size is {100 * gain:+.1f}% against the full vocabulary. Draft"
            " without one, or rank it from text closer to this traffic."
        )
    if token_ms is not None and best.tokens_per_s * token_ms < 1000:
        lines.append(
            f"Speculation with a map loses: {best.tokens_per_s:.1f} tokens/s against"
            f" {1000 / token_ms:.1f} without speculation. Serve without it."
        )
    error = accept.left_out_error()
    if error is not None:
        lines.append(f"A measured accept length, left out, is predicted within {percent(error)}.")
    return lines


def as_json(
    maps: Sequence[Prediction], full: Prediction, time: VocabularyLine, verdict: Sequence[str]
) -> str:
    """Everything, for a program to read."""
    document = {
        "sizes": [dataclasses.asdict(p) | {"tokens_per_s": p.tokens_per_s} for p in maps],
        "full": dataclasses.asdict(full) | {"tokens_per_s": full.tokens_per_s},
        "best": fastest(maps).size,
        "line": dataclasses.asdict(time),
        "verdict": verdict,
    }
    return json.dumps(document, indent=2) + "\n"


def picture_bytes(
    suffix: str,
    maps: Sequence[Prediction],
    full: Prediction,
    token_ms: float | None,
    verdict: Sequence[str],
) -> bytes:
    """Tokens per second by size, as a ``.png``, an ``.svg`` or an ``.html`` page."""
    sizes = np.asarray([p.size for p in (*maps, full)], dtype=np.int64)
    speeds = np.asarray([p.tokens_per_s for p in (*maps, full)])
    curves = [Curve("with a map", sizes, speeds)]
    levels = {"full vocabulary": full.tokens_per_s}
    levels |= {"no speculation": 1000 / token_ms} if token_ms else {}
    curves += [Curve(name, sizes, np.full(len(sizes), v), True) for name, v in levels.items()]
    image = draw_curves(
        curves,
        title="Predicted tokens per second of one request",
        ylabel="tokens/s",
        image_format="png" if suffix == ".png" else "svg",
        marks=sizes[:: max(1, len(sizes) // 8)].tolist(),
        best=fastest(maps).size,
    )
    if suffix != ".html":
        return image
    sections = [table(maps, full, token_ms), Section("Verdict", ("",), [(v,) for v in verdict])]
    return as_html("Size of the token map", sections, inline_svg(image)).encode()
