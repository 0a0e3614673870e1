"""Kernels of servers to parts: synthetic traces with known answers."""

import dataclasses
import gzip
import json
import math
import re
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import frspec_kernels
import sgl_frspec
from bench.breakdown import server_clock, server_rounds, server_run
from bench.breakdown.parts import UNKNOWN
from bench.breakdown.server_clock import NEW_TOKENS, STREAM_INTERVAL, TURNS, Stretch
from bench.breakdown.server_kernels import kind, label
from bench.breakdown.server_rounds import Rounds
from bench.breakdown.server_run import Asked
from bench.breakdown.server_trace import split
from bench.breakdown.timeline import busy
from bench.serving import client
from bench.serving.chain import make_chain
from bench.serving.chain_model import ChainModel
from bench.serving.prompts import ChainPrompts, Workload
from bench.serving.servers import Fleet
from bench.serving.trace_file import TraceError, read_events
from bench.serving.variants import EAGLE, EAGLE_MAP, Tree, Variant
from sgl_frspec.explain import Speculation, read_model_shape
from tests.bench import breakdown_traces as synthetic
from tests.bench.fake_server import fake_server


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


def test_every_kernel_of_ours_is_known_by_its_name():
    root = Path(frspec_kernels.__file__).parent
    sources = [*root.glob("*.py"), *Path(sgl_frspec.__file__).parent.glob("*.py")]
    kernel = re.compile(r"^@triton\.jit(?:\(.*?\))?\ndef (\w+_kernel)\(", re.MULTILINE | re.DOTALL)
    names = [name for path in sources for name in kernel.findall(path.read_text())]
    assert "slice_topk_kernel" in names
    assert "pack_mask_kernel" in names
    assert {name: kind(name) for name in names if kind(name) in (None, "glue")} == {}


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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("stock", Asked("stock", None)),
        ("stock:8192", Asked("stock", 8192)),
        ("frspec:32768", Asked("frspec", 32768)),
    ],
)
def test_servers_are_named_by_their_map(given, expected):
    assert Asked.parse(given) == expected


@pytest.mark.parametrize("given", ["frspec", "eagle", "stock:", "stock:0", "frspec:many"])
def test_what_names_no_server_is_refused(given):
    with pytest.raises(ValueError, match="write stock for the whole vocabulary"):
        Asked.parse(given)


def test_servers_of_every_map_size_and_the_shape_they_serve(tmp_path):
    chain = make_chain(2048, 1024, 0.8)
    asked = [Asked.parse(text) for text in ("stock", "stock:400", "frspec:400", "frspec:1024")]
    servers = {v.name: (v, each) for v, each in server_run.variants(chain, tmp_path, asked).items()}
    assert {name: each for name, (_, each) in servers.items()} == {
        "stock": asked[0],
        "stock-400": asked[1],
        "frspec-400": asked[2],
        "frspec-1024": asked[3],
    }
    assert servers["frspec-400"][0].backend == "frspec"
    assert not servers["stock-400"][0].backend
    maps = {}
    for name, (variant, each) in servers.items():
        flags = variant.speculative_flags(tmp_path, tmp_path, Tree(2, 3, 6)) + list(variant.flags)
        if each.size is None:
            assert "--speculative-token-map" not in flags
            continue
        last = len(flags) - 1 - flags[::-1].index("--speculative-token-map")
        maps[name] = torch.load(flags[last + 1], weights_only=True)
        assert len(set(maps[name])) == len(maps[name]) == each.size
        assert bool(chain.hot[maps[name]].all())
    assert maps["stock-400"] == maps["frspec-400"] == maps["frspec-1024"][:400]
    # What is generated is in a small map as far as it is in the largest.
    generated = torch.tensor(chain.continuation(0, 200))
    assert set(generated[chain.hot[generated]].tolist()) <= set(maps["stock-400"])
    shape = server_run.serving_shape("x", read_model_shape("llama-3-8b"), 400)
    assert (shape.vocab, shape.hidden, shape.layers, shape.hot) == (128_256, 4096, 32, 400)


class _Servers:
    """Two servers that trace what they are given, in the place of ``running``."""

    def __init__(self, url):
        self.url = url
        self.stopped = False

    @contextmanager
    def __call__(self, variants, settings, say):
        assert settings.gpu
        assert settings.start_together
        process = SimpleNamespace(log_tail=lambda: "last line")
        servers = [
            SimpleNamespace(variant=v, url=f"{self.url}/{v.name}", process=process)
            for v in variants
        ]
        yield Fleet(cast(Any, servers))
        self.stopped = True


def test_servers_are_timed_and_traced_again_and_again(tmp_path, monkeypatch):
    shape = dataclasses.replace(read_model_shape("llama-3-8b"), vocab=2048, hidden=64)
    chain = make_chain(2048, 1024, 0.8)
    model = ChainModel(tmp_path, tmp_path, tmp_path / "map.pt", chain)
    us = {"stock": 0.0, "frspec-1024": 0.0}
    traced = []

    def reply(path, body):
        _, name, what = path.split("/")
        if what == "start_profile":
            events, truth = synthetic.trace(body["num_steps"], name != "stock", gap=1.0)
            us[name] = sum(truth.values())
            if name == "stock" and len(traced) == 2:
                events = events[:5]
            traced.append((name, body["activities"]))
            with gzip.open(f"{body['output_dir']}/1-TP-0.trace.json.gz", "wt") as file:
                json.dump({"traceEvents": events}, file)
            return "Start profiling."
        tokens = body["sampling_params"]["max_new_tokens"]
        meta = {"completion_tokens": tokens, "spec_verify_ct": tokens // 4}
        return [{"output_ids": chain.continuation(0, tokens), "meta_info": meta}]

    def time_in_turns(servers, *rest):
        # Medians of 4 and of 5 ms a round.
        times = {"stock": (39.0, 40.0, 90.0), "frspec-1024": (50.0, 10.0, 60.0)}
        return {
            s.variant.name: [Stretch(1e3 * ms, 10, 4.0, 0) for ms in times[s.variant.name]]
            for s in servers
        }

    found, lines = [], []
    monkeypatch.setattr(server_run, "make_chain_model", lambda folder, served: model)
    monkeypatch.setattr(server_rounds, "time_in_turns", time_in_turns)
    with fake_server(reply) as url:
        servers = _Servers(url)
        monkeypatch.setattr(server_run, "running", servers)
        failures = server_run.measure(
            "x",
            shape,
            Speculation(draft_vocab=100, steps=2, top_k=3, nodes=6, context=5),
            [Asked("stock", None), Asked("frspec", 1024)],
            backend="triton",
            repeat=2,
            model_folder=tmp_path,
            out=tmp_path / "out",
            start_seconds=1.0,
            time_limit=math.inf,
            keep_traces=True,
            say=lines.append,
            found=found.append,
        )
    assert servers.stopped
    assert traced == [("stock", ["CPU", "GPU"]), ("frspec-1024", ["CPU", "GPU"])] * 2
    first, second = found
    assert [(s.implementation, s.vocab) for s in first] == [("stock", 2048), ("frspec", 1024)]
    assert [split.busy_us for split in first] == pytest.approx([us["stock"], us["frspec-1024"]])
    assert [split.cycle_us for split in first] == [4000, 5000]
    assert [split.implementation for split in second] == ["frspec"]
    assert list(failures) == ["stock:2048"]
    assert "0 rounds end in a trace of 5 GPU events" in failures["stock:2048"]
    assert any("4000 us a round (3900 to 9000), accept length 4.00" in line for line in lines)
    assert len(list((tmp_path / "out" / "traces").rglob("*.gz"))) == 4


def _streamed(chain, requests, lengths, rounds):
    """Parts of streamed answers that long; the last ones say in how many rounds."""
    parts = []
    for length in lengths:
        for place in range(requests):
            meta = {"completion_tokens": length}
            meta |= {"spec_verify_ct": rounds} if length == lengths[-1] else {}
            ids = chain.continuation(place, length)
            parts.append({"index": place, "output_ids": ids, "meta_info": meta})
    return parts


class _Clock:
    """A millisecond for every line of an answer."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1e-3
        return self.now


def _fleet(url, names):
    process = SimpleNamespace(log_tail=lambda: "last line")
    return [
        cast(Any, SimpleNamespace(variant=Variant(n, EAGLE_MAP), url=url + n, process=process))
        for n in names
    ]


@pytest.mark.parametrize("requests", [1, 2])
def test_rounds_are_timed_between_parts_of_a_streamed_answer(requests, monkeypatch):
    chain = make_chain(2048, 1024, 0.8)
    monkeypatch.setattr(client, "time", _Clock())
    asked = []
    rounds = chain.cycles(0, NEW_TOKENS, 3, True)
    early = next(n for n in range(5, 30) if chain.cycles(0, n, 3, True) == 4)

    def reply(path, body):
        assert body["stream"]
        assert len(body["input_ids"]) == requests
        sampling = body["sampling_params"]
        assert sampling["max_new_tokens"] == NEW_TOKENS
        assert sampling["stream_interval"] == STREAM_INTERVAL
        assert sampling["temperature"] == 0
        asked.append(path)
        parts = _streamed(chain, requests, (1, early, 100, NEW_TOKENS), rounds)
        if path.startswith("/wrong"):
            parts[-1]["output_ids"][-1] += 1
        return parts

    lines = []
    with fake_server(reply) as url:
        servers = _fleet(url, ("/a", "/wrong"))
        workload = Workload(requests, 5)
        found = server_clock.time_in_turns(servers, workload, ChainPrompts(chain), 3, lines.append)
    # Two parts of every request later, two lines each.
    ms = 2 * 2 * requests
    assert [stretch.us for stretch in found["/a"]] == pytest.approx([1e3 * ms] * TURNS)
    for name, wrong in (("/a", 0), ("/wrong", 1)):
        expected = {(rounds - 4, (NEW_TOKENS - 1) / rounds, wrong)}
        assert {(s.rounds, s.accept_length, s.wrong) for s in found[name]} == expected
    assert found["/a"][0].us_per_round == pytest.approx(1e3 * ms / (rounds - 4))
    assert asked[:4] == [f"/{name}/generate" for name in ("wrong", "a", "a", "wrong")]
    assert lines == [f"/wrong: 1 of {requests} answers WRONG"] * (TURNS + 1)


def test_a_server_without_a_map_runs_fewer_rounds(monkeypatch):
    chain = make_chain(2048, 1024, 0.8)
    full = chain.cycles(0, NEW_TOKENS, 3, False)
    assert full == -(-(NEW_TOKENS - 1) // 4)
    monkeypatch.setattr(client, "time", _Clock())
    with fake_server(lambda *_: _streamed(chain, 1, (1, 9, NEW_TOKENS), full)) as url:
        servers = [SimpleNamespace(variant=Variant("full", EAGLE), url=url)]
        found = server_clock.time_in_turns(
            cast(Any, servers), Workload(1, 5), ChainPrompts(chain), 3, print
        )
    assert {stretch.rounds for stretch in found["full"]} == {full - 2}


@pytest.mark.parametrize(
    ("lengths", "rounds", "message"),
    [
        ((), 0, "a stream of 0 parts with rounds"),
        ((1, NEW_TOKENS), 85, "a stream of 1 parts with rounds"),
        ((1, 9, NEW_TOKENS), 3, r"256 tokens in 3 rounds, \d+ by the chain"),
    ],
)
def test_a_stream_of_other_rounds_is_a_failed_server(lengths, rounds, message):
    chain = make_chain(2048, 1024, 0.8)
    lines = []
    with fake_server(lambda *_: _streamed(chain, 1, lengths, rounds)) as url:
        servers = _fleet(url, ("/a",))
        found = server_clock.time_in_turns(
            servers, Workload(1, 5), ChainPrompts(chain), 3, lines.append
        )
    assert found == {"/a": []}
    assert re.search(message, lines[0])
    assert len(lines) == 1


def test_an_error_in_a_stream_is_a_failed_server():
    lines = []
    with fake_server(lambda *_: [{"error": {"message": "out of memory"}}]) as url:
        prompts = ChainPrompts(make_chain(2048, 1024, 0.8))
        found = server_clock.time_in_turns(
            _fleet(url, ("/a",)), Workload(1, 5), prompts, 3, lines.append
        )
    assert found == {"/a": []}
    assert "the stream says {'error': {'message': 'out of memory'}}" in lines[0]


def test_nothing_is_traced_behind_the_time_limit(tmp_path):
    lines = []
    workload, prompts = Workload(1, 5), ChainPrompts(make_chain(2048, 1024, 0.8))
    fleet = Fleet([cast(Any, object())])
    spec = Speculation(draft_vocab=100)
    rounds = Rounds(fleet, prompts, workload, spec, {}, time.monotonic() - 1, lines.append)
    assert rounds.measure(tmp_path) == []
    assert lines == ["time limit reached: nothing is measured again"]
    assert not fleet.failures


def test_maps_of_the_whole_vocabulary_are_refused(tmp_path):
    shape = read_model_shape("llama-2-7b")
    with pytest.raises(ValueError, match="name a server with fewer than 32000 ids"):
        server_run.measure(
            "x",
            shape,
            Speculation(draft_vocab=100),
            [Asked("frspec", 32000)],
            backend="triton",
            repeat=1,
            model_folder=tmp_path,
            out=tmp_path,
            start_seconds=1.0,
            time_limit=math.inf,
            keep_traces=False,
            say=print,
            found=print,
        )
