"""A round's averages from traces that are made up, kernel by kernel."""

import gzip
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

from bench.serving.client import post
from bench.serving.trace import analyse, profile
from bench.serving.trace_file import TraceError
from tests.bench.fake_server import fake_server


def kernel(name, ts, dur, cat="kernel"):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


def call(name, ts):
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "ts": ts, "dur": 1.0}


def decode_trace(rounds, jitter=0.0):
    """Rounds of 100 µs: gemm twice, one beside the other; accept once; a copy. 70 µs busy."""
    draw = random.Random(0)
    events = [kernel("prefill", -500.0, 300.0), call("cudaLaunchKernel", -510.0)]
    for i in range(rounds):
        t = 100.0 * i + draw.uniform(0, jitter)
        events += [
            kernel("gemm", t, 40.0),
            kernel("gemm", t + 20.0, 30.0),  # 10 µs beyond the first
            kernel("accept", t + 60.0, 15.0),
            kernel("Memcpy DtoH", t + 80.0, 5.0, cat="gpu_memcpy"),
            call("cudaGraphLaunch", t + 1),
            call("cudaLaunchKernelExC", t + 2),
            call("cuLaunchKernelEx", t + 3),
            call("cudaMemcpyAsync", t + 4),
            call("cudaStreamSynchronize", t + 5),
            call("cudaGetDevice", t + 6),
        ]
    # A trace is in no order of time.
    draw.shuffle(events)
    return events


@pytest.mark.parametrize("traced", [38, 40, 41])
def test_averages_of_a_round(traced):
    result = analyse(decode_trace(traced), 40)
    assert result.rounds == traced - 1
    assert result.kernels == pytest.approx(4)
    assert result.graphs == 1
    assert result.launches == 2
    assert result.copies == 1
    assert result.waits == 1
    assert result.busy_ms == pytest.approx((50 + 15 + 5) / 1e3)
    assert result.traced_ms == pytest.approx(0.1)
    assert list(result.by_kernel) == ["gemm", "accept", "Memcpy DtoH"]
    assert result.by_kernel["gemm"] == pytest.approx((2, 70))


def test_the_window_holds_whole_rounds_though_they_differ_in_length():
    result = analyse(decode_trace(40, jitter=9.0), 40)
    assert result.kernels == pytest.approx(4, abs=0.03)
    assert result.busy_ms == pytest.approx(0.070, rel=0.02)


def test_gaps_inside_a_graph_are_told_from_those_between_launches():
    events = decode_trace(40)
    graphs = {"gemm": 1, "accept": 1, "Memcpy DtoH": 2}  # launches of a round; the copy is alone
    for event in events:
        if event["name"] in graphs:
            event["args"] = {"correlation": 10 * (event["ts"] // 100) + graphs[event["name"]]}
    result = analyse(events, 40)
    # From 50 to 60 µs, behind the longer gemm; the window's first round begins behind it.
    assert result.gaps_ms == pytest.approx(0.010 * 38 / 39)
    assert analyse(decode_trace(40), 40).gaps_ms == 0  # without correlations nothing is known


def test_a_kernel_of_the_same_count_that_runs_in_a_burst_is_no_anchor():
    burst = [kernel("warm-up", -300.0 + i, 0.5) for i in range(40)]
    result = analyse(decode_trace(40) + burst, 40)
    assert result.traced_ms == pytest.approx(0.1)
    assert "warm-up" not in result.by_kernel


def test_a_trace_without_rounds_is_refused():
    events = [kernel(f"k{i}", float(i), 1.0) for i in range(100)]
    with pytest.raises(TraceError, match="trace of 100 GPU events"):
        analyse(events, 40)
    with pytest.raises(TraceError, match="trace of 0 GPU events"):
        analyse([], 40)


def test_profile_traces_an_answer_from_its_start_and_reads_what_is_written(tmp_path):
    asked = []

    def reply(path, body):
        asked.append((path, body))
        if path == "/start_profile":
            trace = {"traceEvents": decode_trace(body["num_steps"])}
            with gzip.open(f"{body['output_dir']}/1-TP-0.trace.json.gz", "wt") as file:
                json.dump(trace, file)
            return "Start profiling."
        meta = {"completion_tokens": 1}
        return [{"output_ids": [1], "meta_info": meta} for _ in body["input_ids"]]

    with fake_server(reply) as url:
        server: Any = SimpleNamespace(url=url)
        result = profile(server, [[1, 2], [3, 4]], tmp_path / "traces", 20)
        assert post(url, "/generate", {"input_ids": []}) == []
    assert result.rounds == 19
    assert [path for path, _ in asked[:2]] == ["/start_profile", "/generate"]
    assert asked[1][1]["sampling_params"]["max_new_tokens"] == 200
    # Tracing the host's work would slow it, and with it the round.
    assert asked[0][1]["activities"] == ["GPU"]
    assert asked[0][1]["with_stack"] is False
