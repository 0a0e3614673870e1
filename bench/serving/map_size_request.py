"""What can be wrong in a request for ``bench map-sizes``, found before a server starts."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.serving.variants import Variant, names_given_twice

# Below one there would be nothing to send or to time.
_AT_LEAST_ONE = ("answer_batch", "per_domain", "groups", "alternations", "short_tokens")


def check_numbers(args: argparse.Namespace) -> None:
    """Refuse counts with which nothing could be measured.

    Raises:
        ValueError: names the flag and what it takes.
    """
    counts = {name: getattr(args, name) for name in _AT_LEAST_ONE} | {"batch": min(args.batch)}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"--{name.replace('_', '-')} {count}: give at least 1")
    if args.tokens <= args.short_tokens:
        raise ValueError(
            f"--tokens {args.tokens}: a round is timed by a long answer less a short one of"
            f" {args.short_tokens} tokens; give more, or a smaller --short-tokens"
        )


def check_names(variants: Sequence[Variant], profiled: Sequence[str]) -> None:
    """Refuse servers of one name, those made from sizes included, and profiles of none of them.

    Raises:
        ValueError: says the names.
    """
    if twice := names_given_twice(variants):
        raise ValueError(
            f"servers of the same name: {', '.join(twice)}; names of a base and a size are"
            " those of --sizes and --stock-size: call the --variant otherwise"
        )
    names = [variant.name for variant in variants]
    if unknown := [name for name in profiled if name not in names]:
        raise ValueError(
            f"--profile {' '.join(unknown)}: there is no such server, only {', '.join(names)}"
        )


def make_folder(out: Path) -> None:
    """Make ``out`` unless it is there.

    Raises:
        ValueError: it is a file.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder")
    out.mkdir(parents=True, exist_ok=True)
