"""Ways to serve one model: without speculation, stock EAGLE, FRSPEC, each with further flags."""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PLAIN, EAGLE, EAGLE_MAP, FRSPEC = "nospec", "eagle", "eagle-map", "frspec"
BASES = (PLAIN, EAGLE, EAGLE_MAP, FRSPEC)


def flag_words(text: str, given_to: str) -> list[str]:
    """The words of a server's flags, split as a shell would.

    Raises:
        ValueError: a quotation has no end; the message names the option ``given_to``.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{given_to} {text!r}: {error}") from None


@dataclass(frozen=True)
class Tree:
    """The drafted tree: levels, children kept a level, verified nodes."""

    steps: int
    top_k: int
    nodes: int

    @classmethod
    def parse(cls, text: str) -> "Tree":
        """From ``3x4x16``.

        Raises:
            ValueError: the text is something else.
        """
        parts = text.split("x")
        if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
            raise ValueError(f"{text!r} is no tree: write steps x top-k x draft tokens, as 3x4x16")
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return f"{self.steps}x{self.top_k}x{self.nodes}"

    @property
    def flags(self) -> list[str]:
        """SGLang's flags for it."""
        return [
            *("--speculative-num-steps", str(self.steps)),
            *("--speculative-eagle-topk", str(self.top_k)),
            *("--speculative-num-draft-tokens", str(self.nodes)),
        ]


@dataclass(frozen=True)
class Variant:
    """One server of a comparison.

    Attributes:
        name: what tables call it.
        base: one of ``BASES``.
        backend: attention backend; empty for the run's default.
        flags: added to the server's command line.
    """

    name: str
    base: str
    backend: str = ""
    flags: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Variant":
        """From ``BASE[@BACKEND]`` or ``NAME=BASE[@BACKEND] FLAG…``.

        Raises:
            ValueError: no known base, or a name that cannot name a file.
        """
        name, equals, rest = text.partition("=")
        words = flag_words(rest if equals else text, "--variant")
        if not words:
            raise ValueError(f"{text!r} names no variant: write NAME=BASE[@BACKEND] FLAGS")
        base, _, backend = words[0].partition("@")
        name = name if equals else words[0]
        if base not in BASES:
            raise ValueError(f"{text!r}: {base!r} is none of {', '.join(BASES)}")
        if not name or set(name) & set("/\\ \t"):
            raise ValueError(f"{name!r} cannot name a variant's log file: no blanks, no slashes")
        return cls(name, base, backend, tuple(words[1:]))

    def flag(self, name: str) -> str | None:
        """The value of one of its flags, written ``--name value`` or ``--name=value``.

        Raises:
            ValueError: the flag stands there without one.
        """
        words = iter(self.flags)
        for word in words:
            given, equals, value = word.partition("=")
            if given != name:
                continue
            value = value if equals else next(words, "")
            if not value or value.startswith("--"):
                raise ValueError(f"{self.name}: {name} has no value")
            return value
        return None

    @property
    def speculates(self) -> bool:
        """Whether there is a draft."""
        return self.base != PLAIN

    @property
    def mapped(self) -> bool:
        """Whether the draft proposes tokens of the map only."""
        return self.base in (EAGLE_MAP, FRSPEC)

    def speculative_flags(self, draft: Path, token_map: Path, tree: Tree) -> list[str]:
        """SGLang's flags for its drafting."""
        if not self.speculates:
            return []
        algorithm = "FRSPEC" if self.base == FRSPEC else "EAGLE"
        flags = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft)]
        if self.mapped:
            flags += ["--speculative-token-map", str(token_map)]
        return flags + tree.flags


def parse_variants(texts: Sequence[str]) -> list[Variant]:
    """All of them, in the order given.

    Raises:
        ValueError: one cannot be parsed, or two have one name.
    """
    variants = [Variant.parse(text) for text in texts]
    if twice := names_given_twice(variants):
        raise ValueError(f"variants of the same name: {', '.join(twice)}; write NAME=…")
    return variants


def names_given_twice(variants: Sequence[Variant]) -> list[str]:
    """Names of more than one of them."""
    counts = Counter(variant.name for variant in variants)
    return sorted(name for name, count in counts.items() if count > 1)
