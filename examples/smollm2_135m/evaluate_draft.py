"""Accept length of the draft on the held-out prompts, on any machine.

    python -m examples.smollm2_135m.evaluate_draft --model .cache/smollm2-135m

The target answers greedily, then the draft's trees are compared with its replies: with the whole
vocabulary and with the map cut to several sizes. About ten minutes on two CPU cores.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.eagle_training.accept_by_size import REPLY_TOKENS, accept_by_size, loop_share
from examples.eagle_training.corpus import Document, load_documents
from examples.eagle_training.decode import DecodeSettings, continue_all
from examples.eagle_training.evaluate import ReplySet
from examples.eagle_training.model import load_draft
from examples.eagle_training.tree import TreeShape
from examples.smollm2_135m.prompts import Prompt, chat_ids, eval_prompts
from sgl_frspec.maps import load_token_map

FOLDER = Path(__file__).parent
MAP_SIZES = (32768, 16384, 8192)
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
    replies = ReplySet(model, documents, REPLY_TOKENS)
    sizes = (len(ranked), *MAP_SIZES)
    result = {
        "prompts": len(documents),
        "accept_length": accept_by_size(model, draft, replies, ranked, sizes),
        "loop_share": round(loop_share(documents), 4),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
