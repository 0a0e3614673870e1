"""From the replies of several ways of drafting to a table of accept lengths."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from examples.smollm2_135m.prompts import Prompt
from examples.smollm2_135m.serving import (
    Drafting,
    Reply,
    accept_length,
    first_difference,
    hot_ids,
    outside_share,
)


@dataclass(frozen=True)
class Answers:
    """Replies of every way of drafting, in the order of ``prompts``.

    Attributes:
        prompts: what was asked.
        replies: by the title of the way of drafting.
        plain: the title of the one without speculation.
    """

    prompts: list[Prompt]
    replies: dict[str, list[Reply]]
    plain: str

    def of(self, title: str, domain: str | None = None) -> list[Reply]:
        """The replies to one domain's prompts, or to all."""
        pairs = zip(self.prompts, self.replies[title], strict=True)
        return [reply for prompt, reply in pairs if domain in (None, prompt.domain)]

    def differences(self) -> list[dict[str, Any]]:
        """Where a reply departs from the one without speculation."""
        found = []
        for title, replies in self.replies.items():
            plain = self.replies[self.plain]
            for number, (reply, other) in enumerate(zip(replies, plain, strict=True)):
                at = first_difference(reply.ids, other.ids)
                if at is not None:
                    found.append({"drafting": title, "prompt": number, "token": at})
        return found


def summarise(
    answers: Answers, draftings: Sequence[Drafting], full_vocabulary: Drafting
) -> dict[str, Any]:
    """The figures, by way of drafting and domain; ``all`` pools every cycle."""
    domains = [*dict.fromkeys(prompt.domain for prompt in answers.prompts), None]
    full = {d: accept_length(answers.of(full_vocabulary.title, d)) for d in domains}
    rows = []
    for drafting in draftings:
        hot = hot_ids(drafting.map_size) if drafting.map_size else None
        for domain in domains:
            replies = answers.of(drafting.title, domain)
            length, whole = accept_length(replies), full[domain]
            rows.append(
                {
                    "drafting": drafting.title,
                    "domain": domain or "all",
                    "prompts": len(replies),
                    "tokens": sum(len(reply.ids) for reply in replies),
                    "accept_length": length,
                    "of_full_vocabulary": length / whole if length and whole else None,
                    "outside_map": outside_share(replies, hot) if hot else None,
                }
            )
    return {
        "rows": rows,
        "compared_replies": len(answers.prompts) * len(draftings),
        "differences": answers.differences(),
    }


def markdown(summary: dict[str, Any]) -> str:
    """The summary as a table: a row a domain, and a line on equality."""
    rows = summary["rows"]
    titles = list(dict.fromkeys(row["drafting"] for row in rows))
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    cells = {(row["drafting"], row["domain"]): row for row in rows}
    lines = [
        "| domain | prompts | " + " | ".join(titles) + " |",
        "|---|--:|" + "--:|" * len(titles),
    ]
    for domain in domains:
        count = cells[titles[0], domain]["prompts"]
        line = [_cell(cells[title, domain]) for title in titles]
        lines.append(f"| {domain} | {count} | {' | '.join(line)} |")
    differences = summary["differences"]
    lines += [
        "",
        "Mean accept length (accepted drafts + 1), share of the full vocabulary's, share of tokens "
        f"outside the map. Greedy replies equal to those without speculation: "
        f"{summary['compared_replies'] - len(differences)} of {summary['compared_replies']}.",
        *(
            f"- differs: {d['drafting']}, prompt {d['prompt']}, token {d['token']}"
            for d in differences
        ),
    ]
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any]) -> str:
    if row["outside_map"] is None:
        return f"{row['accept_length']:.3f}"
    return f"{row['accept_length']:.3f} ({row['of_full_vocabulary']:.1%}; {row['outside_map']:.1%})"
