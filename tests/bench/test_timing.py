"""What a capture that fails leaves behind, with a stand-in for CUDA."""

from contextlib import contextmanager

import pytest
import torch

from bench import timing


@pytest.fixture
def captures(monkeypatch):
    """Captures on the CPU; each list entry is what ending one of them raises, or None."""
    ends: list[Exception | None] = []

    @contextmanager
    def graph(cuda_graph):
        try:
            yield
        finally:
            if (error := ends.pop(0)) is not None:
                raise error

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    return ends


def _synchronise():
    raise RuntimeError("operation not permitted when stream is capturing")


def _out_of_memory():
    raise torch.OutOfMemoryError("no pool is that large")


def test_all_calls_are_captured(captures):
    captures.append(None)
    done = []
    timing._record([lambda: done.append(1), lambda: done.append(2)])
    assert done == [1, 2]


def test_a_capture_that_cannot_be_ended_says_which_call_broke_it(captures):
    captures.append(RuntimeError("capture is invalid"))
    with pytest.raises(timing.CaptureBrokenError, match="RuntimeError: operation not permitted"):
        timing._record([_synchronise])


def test_a_capture_that_breaks_without_a_failing_call_says_so(captures):
    captures.append(RuntimeError("capture is invalid"))
    with pytest.raises(timing.CaptureBrokenError, match="RuntimeError: capture is invalid"):
        timing._record([lambda: None])


def test_a_failing_call_leaves_the_process_usable_if_its_capture_ends(captures):
    captures.append(None)
    with pytest.raises(torch.OutOfMemoryError, match="no pool is that large"):
        timing._record([_out_of_memory])


@pytest.fixture
def lanes(monkeypatch):
    """Times that need no GPU: a lane only records its calls."""

    class Lane:
        def __init__(self, calls, repeatable, replay_us):
            timing._record(calls)

        def timing(self):
            return timing.Timing(1.0, 2.0, 3.0)

    monkeypatch.setattr(timing, "_Lane", Lane)
    monkeypatch.setattr(timing, "_Flush", lambda l2: None)
    monkeypatch.setattr(timing, "_warm_up", lambda lanes, effort: None)
    monkeypatch.setattr(timing, "_take_turns", lambda lanes, flush, effort: None)
    monkeypatch.setattr(timing, "l2_bytes", lambda: 1)


def test_nothing_is_timed_after_a_capture_that_cannot_be_ended(captures, lanes):
    captures += [None, RuntimeError("capture is invalid"), None]
    later = []
    calls = {"good": [int], "bad": [_synchronise], "later": [lambda: later.append(1)]}
    with pytest.raises(timing.CaptureBrokenError) as raised:
        timing.time_interleaved(calls, touched=1.0)
    assert raised.value.provider == "bad"
    assert later == []


def test_the_others_are_timed_after_a_call_that_fails_in_a_sound_capture(captures, lanes):
    captures += [None, None, None]
    calls = {"good": [int], "bad": [_out_of_memory], "later": [int]}
    times = timing.time_interleaved(calls, touched=1.0)
    assert times["bad"] == "OutOfMemoryError: no pool is that large"
    assert times["good"] == times["later"] == timing.Timing(1.0, 2.0, 3.0)
