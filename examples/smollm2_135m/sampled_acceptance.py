"""How often a sampled token is among the drafted ones: drawn proposals against fixed ones.

    python -m examples.smollm2_135m.sampled_acceptance --model .cache/smollm2-135m

The target answers the held-out prompts at temperature 1. At every position of its replies the draft
proposes K children of a node, from the whole vocabulary and from the map cut to several sizes. The
chance that one of them is accepted is computed, not counted: for K fixed children, the draft's best
(SGLang's target-only rule), and for K - 1 fixed ones and one drawn from the rest of the draft's
best ``--candidates`` (docs/sampling.md).
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.eagle_training.accept_by_size import shared_with
from examples.eagle_training.corpus import Document
from examples.eagle_training.features import target_features
from examples.eagle_training.model import EagleDraft, load_draft
from examples.eagle_training.tree import read_prefix
from examples.smollm2_135m.prompts import chat_ids, eval_prompts
from sgl_frspec.drawn_proposals import LIST_SIZE
from sgl_frspec.maps import load_token_map

FOLDER = Path(__file__).parent
MAP_SIZES = (49152, 32768, 16384, 8192, 4096)
CHILDREN = (1, 4)
TEMPERATURES = (1.0, 0.7)
REPLY_TOKENS = 64
LONGEST_CONTEXT = 120


class Chances(NamedTuple):
    """Of accepting any child, ``[positions]``."""

    fixed: Tensor
    drawn: Tensor


def chances(
    p: Tensor, q: Tensor, token_ids: Tensor, children: int, candidates: int = 64
) -> Chances:
    """Both proposals at some positions.

    Args:
        p: ``[n, V]`` the target's probabilities.
        q: ``[n, M]`` the draft's.
        token_ids: ``[M]`` token of each draft id.
        children: K.
        candidates: how many of the draft's best a child is drawn from, the fixed ones included.
    """
    best = q.topk(min(candidates, q.shape[1]), dim=-1)
    ids = token_ids[best.indices]
    p_listed = p.gather(1, ids)
    fixed = children - 1
    inside = p_listed[:, :fixed].sum(1, keepdim=True)
    drawn = best.values[:, fixed:] / best.values[:, fixed:].sum(1, keepdim=True)
    overlap = torch.minimum(p_listed[:, fixed:], (1 - inside) * drawn).sum(1)
    return Chances(p_listed[:, :children].sum(1), inside[:, 0] + overlap)


@torch.no_grad()
def sampled_replies(model: Any, tokenizer: Any, count: int, seed: int) -> list[Document]:
    """The target's own words at temperature 1 to the first ``count`` short held-out prompts."""
    torch.manual_seed(seed)
    contexts = [(p, chat_ids(tokenizer, p.text)) for p in eval_prompts()]
    contexts = [(p, ids) for p, ids in contexts if len(ids) <= LONGEST_CONTEXT][:count]
    longest = max(len(ids) for _, ids in contexts)
    end = model.config.eos_token_id
    rows = torch.tensor([[end] * (longest - len(ids)) + ids for _, ids in contexts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for _, ids in contexts])
    written = model.generate(
        rows.to(model.device), attention_mask=mask.to(model.device), pad_token_id=end,
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=REPLY_TOKENS,
    )[:, longest:].tolist()  # fmt: skip
    replies = [row[: row.index(end) + 1] if end in row else row for row in written]
    return [
        Document(ids + reply, len(ids), prompt.domain, True)
        for (prompt, ids), reply in zip(contexts, replies, strict=True)
        if len(reply) > 2
    ]


@torch.no_grad()
def both_logits(model: Any, draft: EagleDraft, document: Document) -> tuple[Tensor, Tensor]:
    """Logits ``[n, V]`` of target and draft for each token of the reply but the first."""
    shared = shared_with(model)
    tokens = torch.tensor([document.tokens], device=model.device)
    features = target_features(model, tokens)
    # The draft reads a token beside the hidden state before it.
    prefix = read_prefix(draft, shared.embedding, tokens[:, 1:], features[:, :-1])
    start = document.context_length
    target, drafted = features[0, start:-1], prefix.hidden[0, start - 1 : -1]
    return (target @ shared.head.T).float(), (drafted @ shared.head.T).float()


def table(
    model: Any, draft: EagleDraft, ranked: Tensor, documents: list[Document], candidates: int
) -> list[str]:
    """Markdown rows: mean chances in per cent by temperature, map size and number of children."""
    found: dict[tuple[float, int], list[Tensor]] = {}
    for document in documents:
        target, drafted = both_logits(model, draft, document)
        for temperature in TEMPERATURES:
            p = (target / temperature).softmax(-1)
            for size in MAP_SIZES:
                ids = ranked[:size].sort().values
                q = (drafted[:, ids] / temperature).softmax(-1)
                each = [torch.stack(chances(p, q, ids, k, candidates)) for k in CHILDREN]
                found.setdefault((temperature, size), []).append(torch.stack(each))
    columns = "".join(f" {k} fixed | {k - 1} fixed, 1 drawn |" for k in CHILDREN)
    lines = [f"| T | map |{columns}", "|--:|--:|" + "--:|" * 2 * len(CHILDREN)]
    for (temperature, size), parts in found.items():
        means = torch.cat(parts, -1).mean(-1).flatten().tolist()
        cells = "".join(f" {100 * mean:.1f} |" for mean in means)
        lines.append(f"| {temperature} | {size:,} |{cells}")
    return lines


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder made by convert")
    parser.add_argument("--draft", type=Path, default=FOLDER / "draft")
    parser.add_argument("--map", type=Path, default=FOLDER / "token_map.safetensors")
    parser.add_argument("--prompts", type=int, default=60, help="how many held-out prompts")
    parser.add_argument("--candidates", type=int, default=LIST_SIZE)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    documents = sampled_replies(model, tokenizer, arguments.prompts, arguments.seed)
    positions = sum(len(d.reply) - 1 for d in documents)
    print(f"{len(documents)} replies, {positions} positions\n")
    draft, ranked = load_draft(arguments.draft), torch.from_numpy(load_token_map(arguments.map).ids)
    print("\n".join(table(model, draft, ranked, documents, arguments.candidates)))


if __name__ == "__main__":
    main()
