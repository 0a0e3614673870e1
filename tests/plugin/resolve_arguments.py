"""SGLang's own argument parsing and resolution, for many command lines in one process.

``python -m tests.plugin.resolve_arguments`` reads an argument list (JSON) from each line of its
input. It answers with a line of JSON: the error or None, what was logged, the arguments that FRSPEC
sets, and its own options.
"""

import json
import logging
import os
import socket
import sys
from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view  # noqa: TID251
from sglang.srt.plugins import load_plugins  # noqa: TID251
from sglang.srt.server_args import prepare_server_args  # noqa: TID251

MARK = "RESOLVED "
SHOWN = (
    "disable_overlap_schedule",
    "enable_mixed_chunk",
    "max_running_requests",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
    "speculative_use_rejection_sampling",
)


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("sgl_frspec"):
            self.lines.append(record.getMessage())


def _no_network(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError(f"network access: {args}")


def resolve(argv: list[str]) -> dict[str, Any]:
    """What a server started with ``argv`` would work with, or why it would not start."""
    os.environ.pop("FRSPEC_CONFIG", None)
    records = _Records()
    error = None
    shown = {}
    try:
        server_args = prepare_server_args(argv)
        logging.getLogger().addHandler(records)
        server_args.resolve_once()
        view = resolving_view(server_args)
        shown = {name: getattr(view, name) for name in SHOWN}
    except Exception as caught:
        error = {"type": type(caught).__name__, "message": str(caught)}
    finally:
        logging.getLogger().removeHandler(records)
    options = json.loads(os.environ.get("FRSPEC_CONFIG", "{}"))
    return {"error": error, "log": records.lines, "arguments": shown, "options": options}


def main() -> None:
    """Answer until the input ends."""
    socket.getaddrinfo = _no_network
    load_plugins()
    for line in sys.stdin:
        print(MARK + json.dumps(resolve(json.loads(line))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
