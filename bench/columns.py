"""Lines of cells as aligned columns."""

from collections.abc import Sequence


def aligned(lines: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """A string for each line; the first ``left`` columns flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
