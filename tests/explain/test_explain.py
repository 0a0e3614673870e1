"""The arithmetic model against sums made by hand and a floor known from measurements."""

import dataclasses
import json
import subprocess
import sys
import time

import pytest

from sgl_frspec import cli
from sgl_frspec.explain import (
    Device,
    ModelShape,
    Speculation,
    cycle_cost,
    find_device,
    read_model_shape,
    vocabulary_line,
)
from sgl_frspec.explain.cycle import Head
from sgl_frspec.explain.model_shape import preset_names

TINY = ModelShape(
    hidden=8, intermediate=16, layers=3, heads=4, kv_heads=2, head_dim=2, vocab=100, window=None,
    full_layers=3,
)  # fmt: skip
# So fast at multiplying that bytes decide, and the other way round.
MEMORY_BOUND = Device("memory", 1.0, 1e30)
COMPUTE_BOUND = Device("compute", 1e30, 1.0)
SPEC = Speculation(draft_vocab=50, steps=3, top_k=4, nodes=7, batch=2, context=11)


def parts(device: Device, head: Head = "chain", spec=SPEC, shape=TINY):
    cost = cycle_cost(shape, device, spec, head=head)
    return {(part.phase, part.name): part for part in cost.parts}


def test_draft_bytes_by_hand():
    found = parts(MEMORY_BOUND)
    # One step of 2 rows, two steps of 2 x 4 rows.
    rows = 2 + 8 + 8
    assert found["draft", "LM head"].nbytes == 3 * 8 * 50 * 2 + rows * 50 * 2
    assert found["draft", "softmax"].nbytes == rows * 50 * (2 + 12)
    assert found["draft", "top-k"].nbytes == rows * 50 * 4
    assert found["draft", "fc"].nbytes == 3 * 2 * 8 * 8 * 2 + rows * 3 * 8 * 2
    assert found["draft", "MLP"].nbytes == 3 * 3 * 8 * 16 * 2
    # q and o: 8 x 8 each; k and v: 8 x 4 each.
    assert found["draft", "attention projections"].nbytes == 3 * (64 + 64 + 32 + 32) * 2
    # Both requests' contexts, keys and values of 2 heads x 2, once a step.
    assert found["draft", "attention"].nbytes == 3 * 2 * 11 * 2 * 2 * 2 * 2


def test_verification_operations_by_hand():
    found = parts(COMPUTE_BOUND)
    rows = 2 * 7
    assert found["verify", "LM head"].seconds == 2 * rows * 8 * 100
    assert found["verify", "MLP"].seconds == 3 * 2 * rows * 3 * 8 * 16
    # Scores and weighted sums: 2 products of 2 operations, 4 heads of 2, each row its own context.
    assert found["verify", "attention"].seconds == 3 * 4 * rows * 11 * 4 * 2


def test_time_is_bytes_or_operations_whichever_is_longer():
    both = Device("both", 2.0, 3.0)
    for key, part in parts(both).items():
        assert part.seconds >= max(part.nbytes / 2, part.flops / 3) * (1 - 1e-12), key


def test_a_fused_head_writes_nothing():
    chain, fused = parts(MEMORY_BOUND), parts(MEMORY_BOUND, head="fused")
    assert set(chain) - set(fused) == {("draft", "softmax"), ("draft", "top-k")}
    assert fused["draft", "LM head"].nbytes == 3 * 8 * 50 * 2


def test_expected_time_adds_the_starts_of_kernels():
    slow = Device("slow", 1e30, 1e30, product_start_s=100.0, kernel_s=1.0)
    found = parts(slow)
    expected = {
        ("draft", "fc"): 3 * 101,  # the concatenation is a kernel
        ("draft", "LM head"): 3 * 100,
        ("draft", "softmax"): 3 * 2,
        ("draft", "attention projections"): 3 * 200,
        ("draft", "MLP"): 3 * 201,
        ("verify", "MLP"): 3 * 201,  # three layers
        ("verify", "norms"): 3 * 2,
        ("verify", "LM head"): 100,
    }
    assert {key: found[key].expected_s for key in expected} == pytest.approx(expected)
    assert not any(part.memory_bound for part in found.values())
    apart = cycle_cost(TINY, slow, SPEC, head="chain", merged_products=False)
    assert apart.expected_s("verify", "attention projections") == pytest.approx(3 * 400)
    assert apart.expected_s("verify", "MLP") == pytest.approx(3 * 302)


def test_a_product_streams_starts_and_is_summed_where_it_is_split():
    device = Device("x", 2.0, 4.0, product_start_s=10.0, split_sum_s=3.0)
    stream = 97.0 / (0.97 * 2.0)
    assert device.product_seconds(97.0, 0.0, 4097) == pytest.approx(stream + 10)
    assert device.product_seconds(97.0, 0.0, 4096) == pytest.approx(stream + 13)
    # A third of the multiplications stands beside the stream, until they take longer than it.
    assert device.product_seconds(97.0, 40.0, 4097) == pytest.approx(stream + 3.3 + 10)
    assert device.product_seconds(97.0, 4000.0, 4097) == pytest.approx(1000 + 10)


def test_the_merge_behind_a_fused_head_is_a_kernel():
    slow = Device("slow", 1e30, 1e30, product_start_s=100.0, kernel_s=1.0, split_sum_s=0.0)
    assert parts(slow, "fused")["draft", "LM head"].expected_s == pytest.approx(3 * 101)


def test_softmax_is_as_fast_as_one_block_a_row():
    # 50 ids x 16 bytes a row, in three steps; nothing else takes any time.
    device = Device("x", 1e30, 1e30, 0.0, 0.0, block_bytes_per_s=8.0)
    softmax = parts(device)["draft", "softmax"]
    assert softmax.expected_s == pytest.approx(3 * 100)
    assert not softmax.memory_bound
    # With many rows the GPU's rate decides; then the block's row is hidden behind it.
    busy = Device("x", 1.0, 1e30, 0.0, 0.0, block_bytes_per_s=8.0)
    softmax = parts(busy)["draft", "softmax"]
    assert softmax.expected_s == softmax.seconds == pytest.approx(18 * 50 * 14)


# PyTorch's log_softmax with a cast in front, 10 rows, in a graph on an H200: microseconds of six
# steps (the first has one row).
@pytest.mark.parametrize(
    ("vocab", "us"), [(8192, 38.5), (32768, 66.4), (128256, 214.1), (262144, 391.5)]
)
def test_softmax_of_few_rows_is_within_15_percent_of_measurements(vocab, us):
    shape = dataclasses.replace(read_model_shape("llama-3-8b"), vocab=262144)
    cost = cycle_cost(shape, find_device("h200"), Speculation(draft_vocab=vocab), head="chain")
    assert 1e6 * cost.expected_s("draft", "softmax") == pytest.approx(us, rel=0.15)


def test_a_part_is_memory_bound_where_bytes_take_the_most_of_it():
    # A product of 2 x 8 x 8 weights in bf16 and 3 rows' activations, once with 2 and twice with 8
    # rows; one start and one kernel each: 3 x 0.5 seconds.
    nbytes = 3 * 256 + 18 * 3 * 16
    for rate, bound in ((nbytes / 1.6, True), (nbytes / 1.4, False)):
        device = Device("x", rate, 1e30, product_start_s=0.4, kernel_s=0.1)
        assert parts(device)["draft", "fc"].memory_bound is bound
    assert not parts(Device("x", 1e30, 1.0, 0.0, 0.0))["draft", "fc"].memory_bound


# A trace of SGLang 0.5.17 with a fused draft head on an H200: 8 layers of Llama-3-8B's sizes,
# three steps, top-k 4, 16 nodes, a map of 32,768 ids. Microseconds a cycle.
MEASURED = {
    ("draft", "fc"): 69.7,
    ("draft", "attention projections"): 84.0,
    ("draft", "MLP"): 277.1,
    ("draft", "LM head"): 197.3,
    ("verify", "attention projections"): 227.6,
    ("verify", "MLP"): 750.5,
    ("verify", "LM head"): 241.7,
}


def test_memory_bound_parts_of_a_real_server_are_within_15_percent():
    shape = dataclasses.replace(read_model_shape("llama-3-8b"), layers=8, full_layers=8)
    spec = Speculation(draft_vocab=32768, steps=3, top_k=4, nodes=16)
    found = parts(find_device("h200"), "fused", spec, shape)
    assert {key for key, part in found.items() if part.memory_bound} == set(MEASURED)
    for key, us in MEASURED.items():
        assert 1e6 * found[key].expected_s == pytest.approx(us, rel=0.15), key


def test_sliding_layers_read_their_window():
    sliding = dataclasses.replace(TINY, window=5, full_layers=1)
    found = parts(MEMORY_BOUND, shape=sliding)
    assert found["verify", "attention"].nbytes == (11 + 5 + 5) * 2 * 2 * 2 * 2 * 2


def test_llama_3_8b_reproduces_the_weight_floor():
    # The weights of 32 layers, the head and three draft steps at 4.4 TB/s take 4.46 ms,
    # and 3.93 with a map of 32,768 ids: the floor under SGLang's measured 7.96 and 7.08 ms.
    device = Device("h200", 4.4e12, 1e30)
    shape = read_model_shape("llama-3-8b")

    def weights_ms(vocab: int) -> float:
        spec = Speculation(draft_vocab=vocab, steps=3, top_k=4, nodes=16)
        cost = cycle_cost(shape, device, spec, head="fused")
        return 1e3 * cost.seconds(None, "fc", "attention projections", "MLP", "LM head")

    assert weights_ms(128256) == pytest.approx(4.46, rel=0.01)
    assert weights_ms(32768) == pytest.approx(3.93, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.738),
        ("llama-3-8b", 8.030),
        ("llama-3.2-1b", 1.236),
        ("qwen3-8b", 8.191),
        ("gemma-3-270m", 0.268),
        ("gemma-3-4b", 3.880),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, billions):
    shape = read_model_shape(name)
    tied = name.startswith("gemma") or name == "llama-3.2-1b"
    total = shape.layers * shape.layer_weights + shape.head_weights * (1 if tied else 2)
    assert total / 1e9 == pytest.approx(billions, rel=2e-3)


def test_every_preset_is_checked_above():
    assert len(preset_names()) == 6


def test_line_recovers_its_own_numbers():
    line = vocabulary_line([8, 16, 64], [2.0 + 0.5 * v for v in (8, 16, 64)])
    assert line.fixed_s == pytest.approx(2.0)
    assert line.per_token_s == pytest.approx(0.5)
    assert line.r_squared == pytest.approx(1.0)
    assert line.ceiling(12) == pytest.approx(4.0)


def test_line_reports_a_bad_fit():
    assert vocabulary_line([1, 2, 3, 4], [1.0, 3.0, 0.0, 2.0]).r_squared < 0.1


def test_a_line_needs_two_points():
    with pytest.raises(ValueError, match="two different vocabularies"):
        vocabulary_line([8, 8], [1.0, 2.0])


def test_config_with_text_config_and_layer_types(tmp_path):
    text = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 1000,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 512,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    shape = read_model_shape(str(tmp_path))
    assert shape == ModelShape(64, 128, 4, 4, 1, 32, 1000, 512, 1)


def test_an_unused_window_is_ignored(tmp_path):
    config = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 1000,
        "num_attention_heads": 4, "sliding_window": 4096, "use_sliding_window": False,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert read_model_shape(str(path)) == ModelShape(64, 128, 4, 4, 4, 16, 1000, None, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "holds a list"),
        ('{"hidden_size": 64}', "num_attention_heads is None"),
        ('{"hidden_size": 64, "num_experts": 8}', "num_experts = 8; only dense"),
        ('{"hidden_size": true, "num_attention_heads": 1}', "hidden_size is True"),
    ],
)
def test_bad_configurations_say_what_is_wrong(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_model_shape(str(path))


def test_unknown_names_list_the_known_ones(capsys):
    with pytest.raises(ValueError, match="h200"):
        find_device("h20000")
    assert cli.main(["explain", "llama-9"]) == 1
    assert "llama-3-8b" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--steps", "--batch", "--nodes", "--map-size"])
def test_numbers_must_be_positive(flag, capsys):
    assert cli.main(["explain", "llama-3-8b", flag, "0"]) == 1
    assert "must be positive" in capsys.readouterr().err


def test_command_prints_both_forms(capsys):
    assert cli.main(["explain", "llama-3-8b"]) == 0
    text = capsys.readouterr().out
    assert "The head weighs as much as 2.4 decoder layers" in text
    assert cli.main(["explain", "llama-3-8b", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    full = {(p["phase"], p["name"]): p for p in report["cycles"]["stock, full"]}
    assert full["draft", "LM head"]["nbytes"] == pytest.approx(
        6 * 4096 * 128256 * 2 + 51 * 128256 * 2
    )
    assert report["line"]["r_squared"] > 0.99


def test_every_preset_takes_less_than_two_seconds():
    for name in preset_names():
        begin = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "sgl_frspec.cli", "explain", name],
            check=True,
            capture_output=True,
        )
        assert time.monotonic() - begin < 2, name
