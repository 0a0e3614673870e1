"""Models whose map sizes are compared: target, draft, ranked map of all ids, prompts by domain."""

import dataclasses
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.serving.chain_model import make_chain_model
from bench.serving.graded_map import COVERAGE, graded_ranking
from bench.serving.shapes import SHAPES
from examples.smollm2_135m.prompts import chat_ids, eval_prompts
from examples.smollm2_135m.serving import DRAFT, MODEL, TOKEN_MAP

_CHAIN_CONTEXT = 128


@dataclass(frozen=True)
class ServedModel:
    """What the servers of all sizes have in common.

    Attributes:
        token_map: file that ranks every id.
        vocab: rows of the head.
        domains: tokenised prompts.
        flags: SGLang's, that the model needs.
        ignore_eos: whether its answers have no end.
    """

    name: str
    target: Path
    draft: Path
    token_map: Path
    vocab: int
    domains: dict[str, list[list[int]]]
    flags: tuple[str, ...] = ()
    ignore_eos: bool = False


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"{folder} holds no config.json: convert the model first") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): convert the model again") from None
    if not isinstance(config, dict) or not isinstance(config.get("vocab_size"), int):
        raise ValueError(f"{path} has no vocab_size: it is no language model's")
    return config


def embedded_model(folder: Path) -> ServedModel:
    """SmolLM2-135M-Instruct with its committed draft and map, on its held-out chat prompts."""
    from transformers import AutoTokenizer

    target = folder if (folder / "config.json").exists() else MODEL
    vocab = _config(target)["vocab_size"]
    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    domains: dict[str, list[list[int]]] = defaultdict(list)
    for prompt in eval_prompts():
        domains[prompt.domain].append(chat_ids(tokenizer, prompt.text))
    return ServedModel("SmolLM2-135M-Instruct", target, DRAFT, TOKEN_MAP, vocab, dict(domains))


def chain_model(
    folder: Path, shape_name: str, layers: int | None, prompts: int, tokens: int
) -> ServedModel:
    """A synthetic model, with a map of its vocabulary that covers as a real one does.

    Args:
        folder: where its files are, or will be.
        shape_name, layers: of the model.
        prompts: how many.
        tokens: that an answer may have, those drafted beyond its end included.

    Raises:
        ValueError: the shape needs a GPU.
    """
    shape = SHAPES[shape_name]
    if layers:
        shape = dataclasses.replace(shape, layers=layers)
    if not torch.cuda.is_available() and shape.dtype != "float32":
        raise ValueError(f"shape {shape_name} needs a GPU; the CPU engine serves --shape tiny")
    name = f"{shape_name}-{layers}-layers" if layers else shape_name
    model = make_chain_model(folder / name, shape)
    # The shape for CPUs has fewer tokens than a small map.
    small = {shape.vocab // 4: 0.92, shape.vocab // 2: 0.97}
    coverage = COVERAGE if shape.vocab > max(COVERAGE) else small
    ranking = graded_ranking(model.chain, prompts, tokens, coverage)
    token_map = folder / name / "graded-map.pt"
    torch.save(ranking, token_map)
    texts = [model.chain.prompt(i, _CHAIN_CONTEXT, seed=i) for i in range(prompts)]
    return ServedModel(
        name,
        *(model.target, model.draft, token_map),
        vocab=shape.vocab,
        domains={"chain": texts},
        flags=("--skip-tokenizer-init",),
        ignore_eos=True,
    )


def model_in_folders(target: Path, draft: Path, token_map: Path, prompts: Path) -> ServedModel:
    """Any model, with prompts from a file.

    Raises:
        ValueError: a file is missing or damaged, or a prompt is none of this model's.
    """
    _config(draft)
    vocab = _config(target)["vocab_size"]
    domains = _prompts(prompts, vocab)
    name = target.resolve().name
    return ServedModel(
        name,
        *(target, draft, token_map, vocab, domains),
        # Asked in token ids: a server loads a large tokenizer several times, seconds each.
        flags=("--skip-tokenizer-init",),
        ignore_eos=True,
    )


def _prompts(path: Path, vocab: int) -> dict[str, list[list[int]]]:
    """Token ids by domain, from a line of JSON each."""
    domains: dict[str, list[list[int]]] = defaultdict(list)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            domain, ids = str(row["domain"]), [int(token) for token in row["ids"]]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f'{path}, line {number}: write {{"domain": …, "ids": [token ids]}}'
                f" ({type(error).__name__}: {error})"
            ) from None
        if not ids or min(ids) < 0 or max(ids) >= vocab:
            raise ValueError(f"{path}, line {number}: give ids from 0 to {vocab - 1}, one at least")
        domains[domain].append(ids)
    if not domains:
        raise ValueError(f"{path} holds no prompts")
    return dict(domains)
