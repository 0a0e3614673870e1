"""Accept length of the draft on the held-out prompts, on any machine.

    python -m examples.smollm2_135m.evaluate_draft --model .cache/smollm2-135m

The target answers greedily, then the draft's trees are compared with its replies: with the whole
vocabulary and with the map cut to several sizes. About ten minutes on two CPU cores.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.eagle_training.corpus import Document, load_documents, loop_starts
from examples.eagle_training.decode import DecodeSettings, continue_all
from examples.eagle_training.evaluate import (
    ReplySet,
    accept_lengths,
    before,
    mean_by_domain,
    outside_share,
)
from examples.eagle_training.model import EagleDraft, load_draft
from examples.eagle_training.tree import Shared, TreeShape
from examples.smollm2_135m.prompts import Prompt, chat_ids, eval_prompts
from sgl_frspec.maps import load_token_map

FOLDER = Path(__file__).parent
MAP_SIZES = (32768, 16384, 8192)
REPLY_TOKENS = 128
_LONGEST_CONTEXT = 120


def greedy_replies(model: Any, tokenizer: Any, prompts: list[Prompt]) -> list[Document]:
    """Let the target answer every prompt of up to 120 tokens, its template included."""
    contexts = [(p, chat_ids(tokenizer, p.text)) for p in prompts]
    contexts = [(p, ids) for p, ids in contexts if len(ids) <= _LONGEST_CONTEXT]
    settings = DecodeSettings(
        stop_ids=(model.config.eos_token_id,),
        # A tree reaches a few tokens past the last one that counts.
        max_length=_LONGEST_CONTEXT + REPLY_TOKENS + 2 * TreeShape().steps,
        rows=len(contexts),
        seconds=math.inf,
    )
    written = continue_all(model, [ids for _, ids in contexts], [0.0] * len(contexts), settings)
    return [
        Document(tokens, len(ids), prompt.domain, True)
        for (prompt, ids), tokens in zip(contexts, written, strict=True)
        if len(tokens) > len(ids) + 2
    ]


def shared_with(model: Any, token_map: torch.Tensor | None = None) -> Shared:
    """Embedding and head of the target for its draft, the head cut to ``token_map``."""
    embedding = model.get_input_embeddings().weight.detach()
    head = model.get_output_embeddings().weight.detach()
    if token_map is None:
        return Shared(embedding, head, None)
    token_map = token_map.sort().values.to(head.device)
    return Shared(embedding, head[token_map], token_map)


def accept_table(
    model: Any, draft: EagleDraft, documents: list[Document], ranked: torch.Tensor
) -> dict[str, dict[str, float]]:
    """Mean accept length by vocabulary size and domain.

    Args:
        model: the target.
        draft: in the target's dtype.
        documents: the target's greedy replies.
        ranked: token ids in rank order, the whole vocabulary.

    Returns:
        By size. Beside the domains ``before_loops``, over all replies up to where they begin to
        repeat themselves, and ``outside``, the share of reply tokens that the map lacks.
    """
    replies = ReplySet(model, documents, REPLY_TOKENS)
    loops = loop_starts([d.reply for d in documents])
    table: dict[str, dict[str, float]] = {}
    for size in (len(ranked), *MAP_SIZES):
        token_map = None if size == len(ranked) else ranked[:size]
        cycles = accept_lengths(draft, shared_with(model, token_map), replies, TreeShape())
        row = mean_by_domain(cycles)
        row["before_loops"] = mean_by_domain(before(cycles, loops))["all"]
        row["outside"] = outside_share(documents, ranked[:size])
        table[str(size)] = {k: round(v, 4) for k, v in row.items()}
        print(size, table[str(size)], file=sys.stderr, flush=True)
    return table


def loop_share(documents: list[Document]) -> float:
    """Share of the counted reply tokens that only repeat what stands before them."""
    replies = [d.reply[:REPLY_TOKENS] for d in documents]
    starts = loop_starts(replies)
    looped = sum(len(r) - s for r, s in zip(replies, starts, strict=True) if s is not None)
    return looped / sum(map(len, replies))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder made by convert")
    parser.add_argument("--draft", type=Path, default=FOLDER / "draft")
    parser.add_argument("--map", type=Path, default=FOLDER / "token_map.safetensors")
    parser.add_argument("--replies", type=Path, help="train_draft's eval.safetensors, if at hand")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    dtype, device = (torch.bfloat16, "cuda") if cuda else (torch.float32, "cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
    model.to(device)
    draft = load_draft(arguments.draft, dtype).to(device)
    ranked = torch.from_numpy(load_token_map(arguments.map).ids)
    if arguments.replies:
        documents = load_documents(arguments.replies)
    else:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        documents = greedy_replies(model, tokenizer, eval_prompts())
    result = {
        "prompts": len(documents),
        "accept_length": accept_table(model, draft, documents, ranked),
        "loop_share": round(loop_share(documents), 4),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
