"""Times of the draft head by vocabulary, out of the harness's results (``python -m bench kernels
--out DIR`` writes ``DIR/kernels.json``)."""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_frspec.maps.token_map import TokenMapError

OPERATION = "reduced_topk"
_VOCAB = re.compile(r"V(\d+)")


def head_times_ms(path: Path, *, provider: str, words: Sequence[str]) -> dict[int, float]:
    """Vocabulary size -> time in ms of one call of the draft head.

    Args:
        path: the harness's ``kernels.json``.
        provider: whose times, such as ``ours``.
        words: parts of a case's id that it must have, such as ``rows4`` and ``bf16``; they must
            leave cases that differ in their vocabulary alone.

    Raises:
        TokenMapError: the file is not such a result, or the words leave no such cases.
    """
    series: dict[tuple[str, ...], dict[int, float]] = defaultdict(dict)
    for row in _rows(path):
        parts = str(row.get("case", "")).split("-")
        sizes = [int(m[1]) for part in parts if (m := _VOCAB.fullmatch(part))]
        timed = row.get("provider") == provider and row.get("us_p50")
        if timed and row.get("op") == OPERATION and sizes and set(words) <= set(parts):
            rest = tuple(part for part in parts if not _VOCAB.fullmatch(part))
            series[rest][sizes[0]] = float(row["us_p50"]) / 1000
    series = {rest: times for rest, times in series.items() if len(times) > 1}
    if len(series) != 1:
        found = "; ".join("-".join(rest) for rest in series) or "none"
        raise TokenMapError(
            f"{path}: {' '.join(words) or 'no words'} should leave one series of {provider!r} over"
            f" several vocabularies; series there: {found}"
        )
    return series.popitem()[1]


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        rows = json.loads(path.read_bytes())["rows"]
    except FileNotFoundError as error:
        raise TokenMapError(f"{path}: no such file") from error
    except (ValueError, KeyError, TypeError) as error:
        raise TokenMapError(
            f"{path}: not a result of `python -m bench kernels --out DIR` ({error!r})"
        ) from error
    return [row for row in rows if isinstance(row, dict)]
