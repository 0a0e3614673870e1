"""The draft head on a real model: SmolLM2-135M-Instruct's hidden states, norm and head rows."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.checks import ties_to_smaller_id
from bench.ops._reduced_topk_check import Reference, check_float32
from bench.ops._reduced_topk_inputs import logits_of, normed
from frspec_kernels.reduced_topk import FinalNorm, reduced_vocab_topk
from sgl_frspec.maps import load_token_map

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".cache/smollm2-135m"
EXAMPLE = ROOT / "examples/smollm2_135m"
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# tl.dot on bf16 is not right under the interpreter.
DTYPE = torch.bfloat16 if CUDA else torch.float16
SIZE, K = 4096, 10


@dataclass
class RealHead:
    """Hidden states [B, H] before the final norm, its weight [H], the full head [V, H], hot ids."""

    hidden: torch.Tensor
    norm_weight: torch.Tensor
    eps: float
    head: torch.Tensor
    hot_ids: torch.Tensor


@pytest.fixture(scope="module")
def real() -> RealHead:
    if not (MODEL / "conversion.json").exists():
        pytest.skip("`make unit` converts the model first")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    lines = (EXAMPLE / "prompts/eval.jsonl").read_text().splitlines()
    prompt = json.loads(lines[0])["prompt"]
    seen = []
    model.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    with torch.inference_mode():
        model(**tokenizer(prompt, return_tensors="pt"))
    hot_ids = torch.as_tensor(load_token_map(EXAMPLE / "token_map.safetensors").ids[:SIZE])
    tensors = (seen[0][-16:], model.model.norm.weight, model.lm_head.weight)
    hidden, weight, head = (t.detach().clone().to(DEVICE, DTYPE) for t in tensors)
    eps = model.config.rms_norm_eps
    return RealHead(hidden, weight, eps, head, hot_ids.long().sort().values.to(DEVICE))


def reference_of(real, weights, scale=None):
    """Exact, in the type of hidden, and in float32, all with the model's final norm."""
    norm = FinalNorm(real.norm_weight, real.eps)
    hidden = normed(real.hidden, norm).float()
    return Reference(
        logits_of(real.hidden.double(), weights.double(), scale, norm),
        logits_of(real.hidden, weights.to(DTYPE), scale, norm),
        logits_of(hidden, weights.float(), scale, None),
        hidden.shape[1],
        real.hot_ids,
    )


def assert_right(real, weights, **options: Any):
    norm = FinalNorm(real.norm_weight, real.eps)
    out = reduced_vocab_topk(real.hidden, options.pop("head"), K, norm=norm, **options)
    verdict = check_float32(out, reference_of(real, weights, options.get("head_scale")))
    verdict &= ties_to_smaller_id(out.probs, out.token_ids)
    assert verdict.ok, verdict.why


def test_copied_rows(real):
    weights = real.head[real.hot_ids]
    assert_right(real, weights, head=weights, token_map=real.hot_ids)


def test_rows_gathered_from_the_full_head(real):
    assert_right(real, real.head[real.hot_ids], head=real.head, row_ids=real.hot_ids)


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.int8, 127.0)], ids=["fp8", "int8"]
)
def test_quantised_rows(real, dtype, largest):
    weights = real.head[real.hot_ids].float()
    scale = weights.abs().amax(1) / largest
    scaled = weights / scale[:, None]
    head = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
    options = {"token_map": real.hot_ids, "head_scale": scale}
    assert_right(real, head.float(), head=head, **options)


def test_the_most_probable_token_is_the_models_own(real):
    """Where the full head's best token is a hot id, the draft head names it too."""
    weights = real.head[real.hot_ids]
    norm = FinalNorm(real.norm_weight, real.eps)
    out = reduced_vocab_topk(real.hidden, weights, 1, token_map=real.hot_ids, norm=norm)
    full = logits_of(real.hidden.double(), real.head.double(), None, norm)
    best = full.argmax(1)
    gap = full.topk(2).values.diff(dim=1).abs()[:, 0] > 0.1
    hot = torch.isin(best, real.hot_ids) & gap
    assert hot.sum() >= 8
    assert (out.token_ids[hot, 0] == best[hot]).all()
