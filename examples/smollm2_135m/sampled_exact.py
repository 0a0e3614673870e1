"""Whether sampled replies have the target's own probabilities, from the files of ``sampled_arm``.

    python -m examples.smollm2_135m.sampled_exact FOLDER

Compares every arm, the one without speculation too, with the distribution of the first and the
second token that the target has in float32: Pearson's chi-square, with few and with many pools, and
Holm's correction over all tests. The second token's distribution is a sum over the likeliest first
tokens; replies that begin with another one are left out there. Settings with top-p are left out: a
token at its edge is in or out by the model's last bits. A server rounds otherwise than float32, so
a large enough sample differs for that reason alone.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.homogeneity import LEAST_EXPECTED, chi_square_tail, holm
from examples.smollm2_135m.sampled_arm import PROMPTS, SETTINGS, short_prompts
from examples.smollm2_135m.sampled_compare import COARSE_SHARE, marginal, together
from examples.smollm2_135m.serving import MODEL

CONTEXTS = 1024
ROWS = 64  # contexts in a pass of the model


class Expected(NamedTuple):
    """Probabilities after one prompt.

    Attributes:
        first: ``[V]`` float64, of the first token.
        begins: the first tokens that ``second`` follows.
        second: ``[V]`` float64, of the second token, given that the first is one of ``begins``.
    """

    first: Tensor
    begins: set[int]
    second: Tensor


@torch.inference_mode()
def expected(
    model: Any, prompt: list[int], temperatures: list[float], contexts: int
) -> list[Expected]:
    """What the target replies to ``prompt`` at each temperature."""
    logits = model(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1].double()
    first = [(logits / heat).softmax(-1) for heat in temperatures]
    begins = logits.topk(min(contexts, len(logits))).indices
    second = [torch.zeros_like(logits) for _ in temperatures]
    for tokens in begins.split(ROWS):
        rows = torch.tensor([prompt]).expand(len(tokens), -1)
        context = torch.cat([rows, tokens[:, None]], 1)
        following = model(context, logits_to_keep=1).logits[:, -1].double()
        for p, total, heat in zip(first, second, temperatures, strict=True):
            total += p[tokens] @ (following / heat).softmax(-1)
    return [
        Expected(p, set(begins.tolist()), total / total.sum())
        for p, total in zip(first, second, strict=True)
    ]


def goodness(counts: Mapping[str, int], p: Tensor, least: float) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom.

    Args:
        counts: of tokens, by their number in decimal.
        p: ``[V]`` float64, their probabilities.
        least: expected replies in a pool; pools are filled from the likeliest token on.
    """
    seen = torch.zeros_like(p)
    for token, count in counts.items():
        seen[int(token)] += count
    wanted, order = (p * seen.sum()).sort(descending=True, stable=True)
    observed = seen[order].tolist()
    pools, a, b = [], 0.0, 0.0
    for one, other in zip(observed, wanted.tolist(), strict=True):
        a, b = a + one, b + other
        if b >= least:
            pools.append((a, b))
            a = b = 0.0
    if pools:
        pools[-1] = (pools[-1][0] + a, pools[-1][1] + b)
    return sum((x - y) ** 2 / y for x, y in pools), max(len(pools) - 1, 0)


def rows_of_arm(arm: dict[str, Any], setting: str, targets: list[Expected]) -> list[list[Any]]:
    """Rows of an arm at one setting: names, replies, statistic, degrees and p-value."""
    rows = []
    for what, place in (("token 1", 0), ("token 2", 1)):
        cut = []
        for counts, target in zip(arm["counts"][setting], targets, strict=True):
            kept = {
                reply: count
                for reply, count in counts.items()
                if place == 0 or int(reply.split(",")[0]) in target.begins
            }
            cut.append((marginal(kept, (place,)), target.second if place else target.first))
        for pools, share in (("few", COARSE_SHARE), ("many", 0.0)):
            found = [goodness(c, p, max(LEAST_EXPECTED, share * c.total())) for c, p in cut]
            statistic, degrees = (sum(column) for column in zip(*found, strict=True))
            name = arm["arm"] if arm["arm"] == "plain" else f"{arm['arm']} {arm['map_size']:,}"
            replies = sum(counts.total() for counts, _ in cut)
            p_value = chi_square_tail(statistic, int(degrees))
            rows.append([name, setting, what, pools, replies, statistic, degrees, p_value])
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, default=MODEL, help=f"default: {MODEL}")
    args = parser.parse_args()
    files = [json.loads(path.read_text()) for path in sorted(args.folder.glob("*.json"))]
    heats = {n: s["temperature"] for n, s in SETTINGS.items() if set(s) == {"temperature"}}
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    prompts = short_prompts(args.model)[:PROMPTS]
    targets = [expected(model, prompt, list(heats.values()), CONTEXTS) for prompt in prompts]
    by_setting = dict(zip(heats, map(list, zip(*targets, strict=True)), strict=True))
    rows = [
        row
        for arm in together(files)
        for setting in heats
        if setting in arm["counts"]
        for row in rows_of_arm(arm, setting, by_setting[setting])
    ]
    print("| arm | setting | what | pools | replies | statistic | degrees | p | adjusted |")
    print("|---|---|---|---|--:|--:|--:|--:|--:|")
    for row, adjusted in zip(rows, holm([row[-1] for row in rows]), strict=True):
        name, setting, what, pools, replies, statistic, degrees, p = row
        print(
            f"| {name} | {setting} | {what} | {pools} | {replies:,} | {statistic:.1f} |"
            f" {degrees} | {p:.3f} | {adjusted:.2f} |"
        )


if __name__ == "__main__":
    main()
