"""Kernels of servers to parts: synthetic traces with known answers."""

import gzip
import json

import pytest
import torch

from bench.breakdown import server_run
from bench.breakdown.parts import UNKNOWN
from bench.breakdown.server_kernels import kind, label
from bench.breakdown.server_trace import TraceError, read_events, split
from bench.breakdown.timeline import busy
from bench.serving.chain import make_chain
from bench.serving.chain_model import ChainModel
from bench.serving.variants import Tree
from sgl_frspec.explain import Speculation, read_model_shape
from tests.bench import breakdown_traces as synthetic


def _split(events, **given):
    fixed = {"implementation": "x", "vocab": 100, "steps": synthetic.STEPS}
    return split(events, **fixed | given)


@pytest.mark.parametrize("fused", [True, False])
def test_every_kernel_of_a_round_gets_its_part(fused):
    rows = synthetic.round_of(fused) * 3
    labels = label([name for name, _, _ in rows])
    wrong = [
        (row, given)
        for row, given in zip(rows, labels, strict=True)
        if row[1:] != given and row[0] not in (synthetic.GATHER, synthetic.INDICES)
    ]
    assert not wrong


@pytest.mark.parametrize("fused", [True, False])
def test_a_trace_splits_into_the_times_it_was_made_of(fused):
    events, truth = synthetic.trace(12, fused, gap=0.5)
    found = _split(events)
    # Two kernels of index bookkeeping follow what stood before them.
    moved = {key for key in truth if key[1] in ("attention", "acceptance", "copies")}
    for key in truth.keys() - moved:
        assert found.gpu_us[key] == pytest.approx(truth[key]), key
    assert sum(found.gpu_us.values()) == pytest.approx(sum(truth.values()))
    kernels = len(synthetic.round_of(fused))
    assert found.kernels == kernels
    assert found.idle_us == pytest.approx(0.5 * kernels)
    assert (
        found.cycle_us
        == found.traced_cycle_us
        == pytest.approx(sum(truth.values()) + 0.5 * kernels)
    )
    assert found.cycles == 12 - 3 - 1
    assert found.adds_up


def test_a_kernel_that_no_rule_knows_makes_the_sum_fail():
    events, _ = synthetic.trace(12, True, gap=0.0, extra="mystery_kernel")
    found = _split(events)
    assert found.unattributed_us == pytest.approx(40.0)
    assert found.missing == pytest.approx(40.0 / found.cycle_us)
    assert not found.adds_up


def test_gpu_time_beyond_the_untraced_cycle_makes_the_sum_fail():
    events, truth = synthetic.trace(12, True, gap=0.0)
    found = _split(events, cycle_us=0.9 * sum(truth.values()))
    assert found.missing == pytest.approx(-1 / 9)
    assert not found.adds_up
    assert _split(events, cycle_us=0.98 * sum(truth.values())).adds_up


def test_the_untraced_cycle_gives_the_idle_time():
    events, truth = synthetic.trace(12, True, gap=3.0)
    found = _split(events, cycle_us=sum(truth.values()) + 25)
    assert found.idle_us == pytest.approx(25)


def test_overlapping_kernels_count_once_for_the_first():
    events = [{"ts": 0.0, "dur": 10.0}, {"ts": 4.0, "dur": 3.0}, {"ts": 8.0, "dur": 6.0}]
    assert busy(events, ["a", "b", "c"]) == {"a": 10.0, "b": 0.0, "c": 4.0}


def test_normed_queries_and_keys_do_not_hide_the_projection():
    norm, gemm = synthetic.NORM, synthetic.GEMM.format("64x16")
    names = [synthetic.EMBED, norm, gemm, norm, norm, synthetic.ROPE, "flash_fwd", gemm, norm]
    parts = [part for _, part in label(names)]
    assert parts[2] == parts[7] == "attention projections"


def test_host_time_comes_from_the_phases_that_sglang_annotates():
    events, _ = synthetic.trace(12, True, gap=1.0)
    ends = [e["ts"] for e in events if "accept" in e["name"]]
    for ts in ends:
        events += [
            {"cat": "user_annotation", "name": "scheduler.run_batch", "ts": ts, "dur": 100.0},
            {"cat": "user_annotation", "name": "draft", "ts": ts + 1, "dur": 20.0},
            {"cat": "user_annotation", "name": "draft_extend", "ts": ts + 2, "dur": 10.0},
            {"cat": "user_annotation", "name": "step[TARGET_VERIFY bs=1]", "ts": ts, "dur": 25.0},
        ]
    host = {phase: us for (phase, _), us in _split(events).host_us.items()}
    assert host == {"draft": 30.0, "verify": 25.0, "between": 45.0}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float, ArgMaxOps<float>>>", "acceptance"),
        ("copy_all_layer_kv_cache_tiled", "copies"),
        ("BatchDecodeWithPagedKVCacheKernel", "attention"),
        ("merge_splits_kernel", "attention"),
        ("void cublasLt::splitKreduce_kernel<32>", "split-k"),
        ("build_tree_efficient(long*, long*)", "tree"),
        ("triton_poi_fused_add_gather_view_1", "glue"),
        ("assign_draft_cache_locs_contiguous", "attention metadata"),
        ("anything", None),
    ],
)
def test_names_of_kernels(name, expected):
    assert kind(name) == expected


def test_a_product_without_known_neighbours_is_unattributed():
    assert label([synthetic.GEMM]) == [("between", UNKNOWN)]


def test_a_trace_without_rounds_is_refused():
    with pytest.raises(TraceError, match="0 rounds end in a trace of 1 GPU events"):
        _split([{"cat": "kernel", "name": "a", "ts": 1.0, "dur": 1.0}])


def test_traces_are_read_compressed_and_plain(tmp_path):
    events, _ = synthetic.trace(2, True, gap=0.0)
    text = json.dumps({"traceEvents": events})
    (tmp_path / "a.json").write_text(text)
    with gzip.open(tmp_path / "a.json.gz", "wt") as file:
        file.write(text)
    assert read_events(tmp_path / "a.json") == read_events(tmp_path / "a.json.gz") == events


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_file_that_is_no_trace_is_named(tmp_path, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(TraceError, match="is no torch profiler trace"):
        read_events(tmp_path / name)


def test_servers_of_every_map_size_and_the_shape_they_serve(tmp_path):
    model = ChainModel(tmp_path, tmp_path, tmp_path / "map.pt", make_chain(2048, 1024, 0.8))
    torch.save(list(range(500, 0, -1)), model.token_map)
    sizes = server_run.variants(model, tmp_path, [100, 400])
    named = {variant.name: size for variant, size in sizes.items()}
    assert named == {
        "stock": None,
        "stock-map-100": 100,
        "frspec-100": 100,
        "stock-map-400": 400,
        "frspec-400": 400,
    }
    ours = next(variant for variant in sizes if variant.name == "frspec-100")
    assert ours.backend == "frspec"
    flags = ours.speculative_flags(tmp_path, tmp_path, Tree(2, 3, 6)) + list(ours.flags)
    last = len(flags) - 1 - flags[::-1].index("--speculative-token-map")
    assert torch.load(flags[last + 1], weights_only=True) == list(range(500, 400, -1))
    shape = server_run.serving_shape("x", read_model_shape("llama-3-8b"), 400)
    assert (shape.vocab, shape.hidden, shape.layers, shape.hot) == (128_256, 4096, 32, 400)


def test_maps_of_the_whole_vocabulary_are_refused(tmp_path):
    shape = read_model_shape("llama-2-7b")
    with pytest.raises(ValueError, match="give sizes below 32000 tokens"):
        server_run.measure(
            "x",
            shape,
            Speculation(draft_vocab=100),
            [32000],
            backend="triton",
            model_folder=tmp_path,
            out=tmp_path,
            start_seconds=1.0,
            keep_traces=False,
            say=print,
        )
