"""Outcomes of ``bench serve --verify-text``: in lines, in JSON, and as a table of every case."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

REPORT, TABLE = "verify_text.json", "verify_text.md"


@dataclass(frozen=True)
class Difference:
    """Where a text leaves the target's.

    Attributes:
        prompt: index of the prompt.
        position: of the first token that differs.
        plain, drafted: the two tokens.
        gap: between the log probabilities, so between the logits, of the target's two best tokens.
        behind: by how much the drafted token is behind the target's best; None if it is not among
            the few best, or if one text ends before the other.
    """

    prompt: int
    position: int
    plain: int
    drafted: int
    gap: float
    behind: float | None


@dataclass(frozen=True)
class Verdict:
    """One server against the target.

    Attributes:
        behind_after: of each token after a first difference, how far it is behind the best.
    """

    variant: str
    prompts: int
    tokens: int
    same: int
    accept_length: float
    differences: list[Difference]
    behind_after: list[float] = field(default_factory=list)

    def unexplained(self, bound: float) -> list[Difference]:
        """Differences that rounding does not explain."""
        return [d for d in self.differences if d.behind is None or d.behind > bound]

    def wrong_after(self, bound: float) -> int:
        """Tokens after a first difference that are no choice of the target's, given their text."""
        return sum(behind > bound for behind in self.behind_after)


def describe(verdict: Verdict, bound: float) -> str:
    """The outcome, with a line for each difference."""
    unexplained = verdict.unexplained(bound)
    each = verdict.tokens // max(1, verdict.prompts)
    lines = [
        f"{verdict.variant}: {verdict.same} of {verdict.prompts} texts of {each} tokens are the"
        f" target's; accept length {verdict.accept_length:.2f}; {len(unexplained)} differences"
        " beyond rounding"
    ]
    if verdict.behind_after:
        behind, exact = verdict.behind_after, verdict.behind_after.count(0.0)
        lines.append(
            f"  {len(behind):,} tokens after a first difference: {exact:,} the target's best given"
            f" their text, the others up to {max(behind):.4f} behind;"
            f" {verdict.wrong_after(bound)} beyond rounding"
        )
    for d in verdict.differences:
        mark = "WRONG" if d in unexplained else "tie"
        behind = "far" if d.behind is None else f"{d.behind:.4f}"
        lines.append(
            f"  {mark} prompt {d.prompt} position {d.position}: {d.plain} → {d.drafted},"
            f" top-two gap {d.gap:.4f}, drafted token behind by {behind}"
        )
    return "\n".join(lines)


def markdown(verdicts: Sequence[Verdict], bound: float) -> str:
    """A table of the servers, and one of every first difference with its gap."""
    lines = [
        f"Bound: {bound:.3g}, in log probabilities.",
        "",
        "| server | texts | equal to the target's | accept length | beyond the bound | tokens after"
        " a first difference | of them the target's best | farthest behind | beyond the bound |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for v in verdicts:
        after = v.behind_after
        lines.append(
            f"| {v.variant} | {v.prompts} | {v.same} | {v.accept_length:.2f}"
            f" | {len(v.unexplained(bound))} | {len(after):,} | {after.count(0.0):,}"
            f" | {max(after, default=0.0):.4f} | {v.wrong_after(bound)} |"
        )
    lines += [
        "",
        "| server | prompt | position | target's token | other token | top-two gap | behind by |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {v.variant} | {d.prompt} | {d.position} | {d.plain} | {d.drafted} | {d.gap:.4f}"
        f" | {'far' if d.behind is None else f'{d.behind:.4f}'} |"
        for v in verdicts
        for d in v.differences
    ]
    return "\n".join(lines) + "\n"


def document(verdicts: Sequence[Verdict], bound: float) -> dict[str, object]:
    """For a results file; of the tokens after first differences their number and the farthest."""
    records = [asdict(verdict) for verdict in verdicts]
    for record in records:
        behind = record.pop("behind_after")
        record["after"] = {"tokens": len(behind), "farthest_behind": max(behind, default=0.0)}
    return {"bound": bound, "verdicts": records}


def write(verdicts: Sequence[Verdict], bound: float, out: Path) -> None:
    """``verify_text.json`` and ``verify_text.md``."""
    out.mkdir(parents=True, exist_ok=True)
    (out / REPORT).write_text(json.dumps(document(verdicts, bound), indent=1) + "\n")
    (out / TABLE).write_text(markdown(verdicts, bound))
