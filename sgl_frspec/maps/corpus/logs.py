"""What an SGLang server answered: its request log (``--log-requests --log-requests-level 3``)."""

import ast
import json
import re
from typing import Any

from sgl_frspec.maps.token_map import TokenMapError

_IDS = re.compile(r"'output_ids': \[([0-9, ]+)\]")
_OUT = re.compile(r", out=\{.*?'text': ('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
_CUT = re.compile(r"'output_ids': \[[0-9, ]+\] \.\.\. \[")


def finished_output(line: str) -> list[int] | str | None:
    """The output of a finished request: its token ids, else its text; None for other log lines.

    Reads both ``--log-requests-format`` values, with any prefix that a logger put before them.

    Raises:
        TokenMapError: the log cut the output short, which level 2 does beyond 2,048 ids.
    """
    if '"request.finished"' in line:
        return _from_json(line)
    if "Finish: obj=" not in line or ", out={" not in line:
        return None
    out = line[line.rindex(", out={") :]
    if _CUT.search(out):
        raise _cut_short()
    if ids := _IDS.search(out):
        return [int(word) for word in ids[1].split(",")]
    text = _OUT.search(out)
    return str(ast.literal_eval(text[1])) if text else None


def _from_json(line: str) -> list[int] | str | None:
    try:
        record: dict[str, Any] = json.loads(line[line.index("{") :])
    except ValueError:
        return None
    out = record.get("out")
    if not isinstance(out, dict):
        return None
    ids = out.get("output_ids")
    if isinstance(ids, list) and "..." in ids:
        raise _cut_short()
    if isinstance(ids, list) and ids and all(type(i) is int for i in ids):
        return ids
    text = out.get("text")
    return text if isinstance(text, str) else None


def _cut_short() -> TokenMapError:
    return TokenMapError(
        "the request log left out the middle of an output; log with --log-requests-level 3"
    )
