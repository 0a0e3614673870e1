"""The chain and the model that continues it: order, cycles, files, generated tokens."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bench.serving.chain import SEGMENT, make_chain
from bench.serving.chain_model import make_chain_model
from bench.serving.shapes import SHAPES


def test_every_token_has_one_successor_and_the_map_its_size():
    chain = make_chain(4096, 2048, 0.8)
    assert sorted(chain.order.tolist()) == list(range(4096))
    assert int(chain.hot.sum()) == 2048
    assert chain.hot[[4094, 4095]].all()


def test_segments_share_one_pattern_of_the_wanted_share():
    chain = make_chain(8192, 6000, 0.75)
    patterns = chain.hot[chain.order[: chain.segments * SEGMENT]].view(chain.segments, SEGMENT)
    assert (patterns == patterns[0]).all()
    assert int(patterns[0].sum()) == 192
    assert chain.segments == min(6000 // 192, (8192 - 6000) // 64)


def test_a_prompt_ends_before_its_segment_and_prompts_differ():
    chain = make_chain(8192, 6000, 0.75)
    prompts = [chain.prompt(segment, 50, seed=0) for segment in range(8)]
    assert len({tuple(prompt) for prompt in prompts}) == 8
    for segment, prompt in enumerate(prompts):
        place = int((chain.order == prompt[-1]).nonzero())
        assert place % SEGMENT == SEGMENT - 1
        assert chain.continuation(segment, 3) == chain.order[place + 1 : place + 4].tolist()


def test_cycles_by_hand():
    chain = make_chain(4096, 2048, 0.8)
    # The first token is the prefill's; then inside, inside, outside, inside.
    hot = chain.hot.clone()
    tokens = chain.continuation(0, 5)
    hot[tokens] = torch.tensor([True, True, True, False, True])
    chain = dataclasses.replace(chain, hot=hot)
    assert chain.cycles(0, 4, steps=3, mapped=True) == 1  # two accepted, the third is the bonus
    assert chain.cycles(0, 5, steps=3, mapped=True) == 2
    assert chain.cycles(0, 4, steps=1, mapped=True) == 2
    assert chain.cycles(0, 5, steps=1, mapped=True) == 3
    assert chain.cycles(0, 9, steps=3, mapped=False) == 2
    assert chain.cycles(0, 10, steps=3, mapped=False) == 3


def test_all_segments_take_the_same_cycles():
    chain = make_chain(8192, 6000, 0.75)
    counts = {chain.cycles(segment, 200, 3, True) for segment in range(20)}
    assert len(counts) == 1
    assert counts.pop() > chain.cycles(0, 200, 3, False) == 50


def test_too_small_a_vocabulary_is_refused_with_its_numbers():
    with pytest.raises(ValueError, match="300 tokens, 200 of them in the map, make 0 segments"):
        make_chain(300, 200, 0.8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_chain_model(tmp_path_factory.mktemp("chain"), SHAPES["tiny"])


def test_another_implementation_generates_the_chain(model):
    target: Any = AutoModelForCausalLM.from_pretrained(model.target, dtype=torch.float32)
    prompts = torch.tensor([model.chain.prompt(segment, 33, seed=1) for segment in range(3)])
    mask = torch.ones_like(prompts)
    with torch.inference_mode():
        out = target.generate(
            prompts, attention_mask=mask, max_new_tokens=60, do_sample=False, eos_token_id=None
        )
        logits = target(prompts).logits[:, -1]
    for segment in range(3):
        assert out[segment, 33:].tolist() == model.chain.continuation(segment, 60)
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1] > 20).all()


def test_the_draft_knows_the_chain_and_has_no_input_norm(model):
    weights = load_file(model.draft / "model-00001-of-00001.safetensors")
    hidden = SHAPES["tiny"].hidden
    assert not [name for name in weights if "input_layernorm" in name]
    assert torch.allclose(weights["fc.weight"][:, :hidden], torch.eye(hidden), atol=1e-3)
    target = load_file(model.target / "model-00001-of-00003.safetensors")
    assert torch.equal(weights["embed_tokens.weight"], target["model.embed_tokens.weight"])


def test_no_matrix_is_zero_anywhere(model):
    for file in (*model.target.glob("*.safetensors"), *model.draft.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if tensor.dim() == 2:
                assert (tensor != 0).float().mean() > 0.999, name


def test_index_names_every_tensor_once(model):
    index = json.loads((model.target / "model.safetensors.index.json").read_text())
    files = {p.name: set(load_file(p)) for p in model.target.glob("*.safetensors")}
    assert len(files) == 1 + SHAPES["tiny"].layers
    assert index["weight_map"] == {name: file for file, names in files.items() for name in names}


def test_map_file_lists_the_hot_ids_in_no_order_of_ids(model):
    ids = torch.load(model.token_map, weights_only=True)
    assert sorted(ids) == model.chain.hot.nonzero().flatten().tolist()
    assert ids != sorted(ids)


def test_a_complete_folder_is_kept_and_another_shape_replaces_it(tmp_path):
    shape = SHAPES["tiny"]
    made = make_chain_model(tmp_path, shape)
    file = made.target / "model-00001-of-00003.safetensors"
    before = file.stat().st_mtime_ns
    make_chain_model(tmp_path, shape)
    assert file.stat().st_mtime_ns == before
    make_chain_model(tmp_path, dataclasses.replace(shape, layers=1))
    assert (made.target / "model-00001-of-00002.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "weights", "kv"), [("8b", 16.83e9, 135_168), ("1b", 3.27e9, 34_816)]
)
def test_memory_of_published_shapes(name, weights, kv):
    shape = SHAPES[name]
    assert shape.weight_bytes == pytest.approx(weights, rel=1e-3)
    assert shape.kv_bytes_per_token == kv
