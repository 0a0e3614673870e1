"""Curves over the map size, as SVG or PNG. Needs matplotlib."""

import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sgl_frspec.maps.token_map import TokenMapError

SMALLEST_DRAWN = 256


class Curve(NamedTuple):
    """One line of a picture: y over the map size; a dashed one is a baseline."""

    name: str
    sizes: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    dashed: bool = False


def draw_curves(
    curves: Sequence[Curve],
    *,
    title: str,
    ylabel: str,
    image_format: str,
    marks: Sequence[int] = (),
    best: int | None = None,
) -> bytes:
    """A picture of ``curves`` over a logarithmic axis of map sizes.

    Args:
        curves: at least one.
        title: above the picture.
        ylabel: name and unit of the values.
        image_format: ``svg`` or ``png``.
        marks: sizes to name on the axis.
        best: size to mark with a vertical line.

    Returns:
        The file's bytes; the same curves give the same bytes.

    Raises:
        TokenMapError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TokenMapError(
            "drawing a picture needs the package matplotlib: pip install 'sgl-frspec[maps]'"
        ) from error
    with matplotlib.rc_context({"svg.hashsalt": "frspec", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.add_subplot()
        for curve in curves:
            style = "--" if curve.dashed else "-"
            axes.plot(curve.sizes, curve.values, style, label=curve.name, linewidth=1.6)
        if best is not None:
            axes.axvline(best, color="black", linewidth=0.8, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(marks), [f"{size:,}" for size in marks], rotation=45)
        axes.set_xlabel("ids in the map")
        axes.set_ylabel(ylabel)
        axes.set_title(title)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, loc="best")
        buffer = io.BytesIO()
        metadata = {"Date": None} if image_format == "svg" else {"Software": None}
        figure.savefig(buffer, format=image_format, dpi=150, metadata=metadata)
    return buffer.getvalue()


def inline_svg(svg: bytes) -> str:
    """An SVG file's drawing without the XML prolog, to stand inside HTML."""
    text = svg.decode()
    return text[text.index("<svg") :]


def thinned(
    curve: npt.NDArray[np.float64], points: int = 400
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Sizes, evenly spread on a logarithmic axis, and a curve's values at them.

    Smaller maps than :data:`SMALLEST_DRAWN` are left out: nobody drafts over so few ids.
    """
    first = min(SMALLEST_DRAWN, len(curve))
    sizes = np.unique(np.geomspace(first, len(curve), points).round().astype(np.int64))
    return sizes, curve[sizes - 1]
