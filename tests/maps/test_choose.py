"""``frspec choose`` against published measurements and against worlds whose optimum is known."""

import json
import shlex
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_frspec import cli
from sgl_frspec.maps import MapMetadata, TokenMap, save_token_map
from sgl_frspec.maps.bench_results import head_times_ms
from sgl_frspec.maps.choosing import (
    AcceptModel,
    accept_length,
    cycle_time,
    fastest,
    nearly_fastest,
    predict,
    size_grid,
    step_chance,
)
from sgl_frspec.maps.token_map import TokenMapError

K = 1024
# Accept length and tokens per second by vocabulary, as published for FR-Spec (arXiv:2502.14856,
# tables 1, 2, 7, 8) and FastMTP (MiMo-7B on an A10, three steps, speed against no speculation).
PUBLISHED = {
    "Llama-3-8B, A800": (
        6,
        {128_256: (3.89, 180.99), 64 * K: (3.80, 196.86), 32 * K: (3.63, 201.87),
         16 * K: (3.40, 196.69), 8 * K: (3.13, 185.98)},
    ),
    "Llama-3.2-1B, RTX 3090": (
        3,
        {128_256: (2.809, 323.51), 64 * K: (2.773, 365.67), 32 * K: (2.690, 390.13),
         16 * K: (2.601, 401.90), 8 * K: (2.486, 391.01)},
    ),
    "MiMo-7B, A10, English": (
        3,
        {151_680: (2.690, 1.80), 64 * K: (2.677, 1.97), 32 * K: (2.622, 2.03),
         16 * K: (2.519, 1.99), 8 * K: (2.426, 1.93)},
    ),
    "MiMo-7B, A10, Chinese": (
        3,
        {151_680: (2.551, 1.72), 64 * K: (2.550, 1.90), 32 * K: (2.549, 1.97),
         16 * K: (2.525, 1.99), 8 * K: (2.448, 1.96)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_two_timings_and_three_accept_lengths_find_the_published_optimum(name):
    steps, table = PUBLISHED[name]
    full = max(table)
    cycle_ms = {size: 1000 * table[size][0] / table[size][1] for size in (8 * K, full)}
    accepts = {size: table[size][0] for size in (8 * K, 32 * K, full)}
    accept = AcceptModel(accepts, steps, None)
    sizes = sorted(table)
    predictions = predict(sizes, cycle_time(cycle_ms), accept, None)
    best = max(sizes, key=lambda size: table[size][1])
    assert abs(sizes.index(fastest(predictions).size) - sizes.index(best)) <= 1
    for prediction in predictions:
        assert prediction.tokens_per_s == pytest.approx(table[prediction.size][1], rel=0.03)


SERVED = Path(__file__).resolve().parents[2] / "docs" / "results"


@pytest.mark.parametrize(("model", "steps"), [("smollm2", 4), ("8b", 3)])
@pytest.mark.parametrize("ends", [*product(("ms_min", "ms_round", "ms_max"), repeat=2)])
def test_the_ends_of_served_sizes_name_the_fastest_on_an_h200(model, steps, ends):
    """Whichever of the ends' timed turns are believed; `bench map-sizes` wrote the files."""
    results = json.loads((SERVED / f"map-sizes-{model}-h200.json").read_text())
    served = {int(name.split("-")[1]): row for name, row in results["batch 1"].items()}
    covered = {int(size): p["coverage"] for size, p in results["choice"]["predicted"].items()}
    sizes = sorted(served)
    small, full = sizes[0], sizes[-1]
    time = cycle_time({small: served[small][ends[0]], full: served[full][ends[1]]})
    accepts = {size: served[size]["accept"]["all"] for size in sizes}
    known = {size: accepts[size] for size in (small, full)}
    predictions = predict(
        sizes, time, AcceptModel(known, steps, covered.__getitem__), covered.__getitem__
    )
    speeds = {size: 1000 * accepts[size] / served[size]["ms_round"] for size in sizes}
    assert fastest(predictions).size == max(speeds, key=speeds.__getitem__)
    for prediction in predictions:
        assert prediction.accept == pytest.approx(accepts[prediction.size], rel=0.015)


@given(st.floats(0, 1), st.integers(1, 12))
def test_chance_and_accept_length_are_inverse(chance, steps):
    accept = accept_length(chance, steps)
    assert accept_length(step_chance(accept, steps), steps) == pytest.approx(accept, abs=1e-9)


def test_accept_length_of_certain_and_impossible_drafts():
    assert accept_length(1, 4) == 5
    assert accept_length(0, 4) == 1
    assert accept_length(0.5, 3) == 1.875


@pytest.mark.parametrize("accept", [0.9, 5.1])
def test_impossible_accept_lengths(accept):
    with pytest.raises(TokenMapError, match="between 1 and 5"):
        step_chance(accept, 4)


def zipf_coverage(vocab, exponent):
    counts = 1 / np.arange(1, vocab + 1) ** exponent
    curve = np.cumsum(counts) / counts.sum()
    return lambda size: float(curve[size - 1])


@settings(max_examples=40, deadline=None)
@given(
    exponent=st.floats(0.9, 1.3),
    chance=st.floats(0.5, 0.9),
    steps=st.integers(2, 8),
    fixed=st.floats(1, 20),
    slope=st.floats(0.001, 0.1),
)
def test_the_optimum_of_a_world_that_follows_the_model(exponent, chance, steps, fixed, slope):
    vocab = 151_936
    coverage = zipf_coverage(vocab, exponent)
    sizes = [*size_grid(vocab - 1), vocab]

    def speed(size):
        accept = accept_length(chance * coverage(size), steps)
        return 1000 * accept / (fixed + slope * size / 1000)

    times = {size: fixed + slope * size / 1000 for size in (8 * K, 64 * K)}
    measured = {32 * K: accept_length(chance * coverage(32 * K), steps)}
    accept = AcceptModel(measured, steps, coverage)
    predictions = predict(sizes, cycle_time(times), accept, coverage)
    for prediction in predictions:
        assert prediction.tokens_per_s == pytest.approx(speed(prediction.size), rel=1e-6)
    near = nearly_fastest(predictions)
    assert fastest(predictions) in near
    assert {p.size for p in near} >= {max(sizes, key=speed)}


def test_the_model_goes_through_what_was_measured():
    measured = {8 * K: 3.13, 32 * K: 3.63, 128_256: 3.89}
    for coverage in (None, zipf_coverage(128_256, 1.1)):
        accept = AcceptModel(measured, 6, coverage)
        for size, length in measured.items():
            assert accept.accept(size) == pytest.approx(length)
        assert accept.within(20_000)
        assert not accept.within(4096)


def test_left_out_error_is_that_of_the_inner_sizes():
    coverage = zipf_coverage(64 * K, 1.0)
    exact = {size: accept_length(0.7 * coverage(size), 5) for size in (4 * K, 16 * K, 64 * K)}
    assert AcceptModel(exact, 5, coverage).left_out_error() == pytest.approx(0, abs=1e-9)
    off = {**exact, 16 * K: exact[16 * K] * 1.1}
    assert AcceptModel(off, 5, coverage).left_out_error() == pytest.approx(1 - 1 / 1.1)
    assert AcceptModel({4 * K: 2.0, 64 * K: 2.5}, 5, coverage).left_out_error() is None


def test_step_times_give_the_slope_and_a_cycle_the_rest():
    steps = {8 * K: 0.5 + 0.01 * 8, 64 * K: 0.5 + 0.01 * 64}
    line = cycle_time({32 * K: 20.0}, steps, 6)
    assert 1000 * line.seconds(32 * K) == pytest.approx(20)
    assert 1000 * line.seconds(64 * K) == pytest.approx(20 + 6 * 0.32)


@pytest.mark.parametrize(
    ("cycle_ms", "step_ms", "message"),
    [
        ({8192: 20.0}, None, "time a second size"),
        ({8192: 20.0}, {8192: 1.0}, "time a second size"),
        ({8192: 20.0, 65536: 19.0}, None, "fall as the vocabulary grows"),
        ({8192: 0.0, 65536: 19.0}, None, "give the time"),
        ({}, None, "give the time"),
    ],
)
def test_times_that_give_no_line(cycle_ms, step_ms, message):
    with pytest.raises(TokenMapError, match=message):
        cycle_time(cycle_ms, step_ms, 2)


def bench_file(path, rows):
    path.write_text(json.dumps({"machine": {}, "rows": rows}))
    return path


def bench_row(case, us, provider="ours", op="reduced_topk"):
    return {"op": op, "case": case, "provider": provider, "us_p50": us}


def test_head_times_out_of_bench_results(tmp_path):
    rows = [
        bench_row("rows1-V8192-H4096-k10-bf16-contiguous", 20),
        bench_row("rows1-V32768-H4096-k10-bf16-contiguous", 70),
        bench_row("rows4-V8192-H4096-k10-bf16-contiguous", 21),
        bench_row("rows4-V32768-H4096-k10-bf16-contiguous", 71),
        bench_row("rows1-V32768-H2048-k10-bf16-contiguous", 40),
        bench_row("rows1-V8192-H4096-k10-bf16-contiguous", 99, provider="eager"),
        bench_row("rows1-V131072-H4096-k10-bf16-contiguous", None),
        bench_row("rows1-V4096-H4096-k10-bf16-contiguous", 5, op="norm"),
    ]
    file = bench_file(tmp_path / "kernels.json", rows)
    times = head_times_ms(file, provider="ours", words=["rows1", "H4096"])
    assert times == pytest.approx({8192: 0.020, 32768: 0.070})
    with pytest.raises(TokenMapError, match=r"rows1-H4096.*; rows4-H4096"):
        head_times_ms(file, provider="ours", words=["H4096"])
    with pytest.raises(TokenMapError, match="series there: none"):
        head_times_ms(file, provider="flashinfer", words=[])
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(TokenMapError, match="not a result of"):
        head_times_ms(tmp_path / "other.json", provider="ours", words=[])


@pytest.fixture
def map_file(tmp_path):
    path = tmp_path / "m.safetensors"
    ids = np.arange(128_256, dtype=np.int64)
    save_token_map(TokenMap(ids, None, MapMetadata(vocab_size=128_256)), path)
    return str(path)


LLAMA = shlex.split(
    "--steps 6 --cycle-ms 8k=17.04 --cycle-ms full=21.63"
    " --accept 8k=3.13 --accept 32k=3.63 --accept full=3.89"
)


def choose(map_file, capsys, *argv):
    assert cli.main(["choose", map_file, *argv]) == 0
    return capsys.readouterr().out


def test_command_finds_the_best_size(map_file, capsys):
    document = json.loads(choose(map_file, capsys, *LLAMA, "--json"))
    assert document["best"] == 32 * K
    assert document["full"]["tokens_per_s"] == pytest.approx(1000 * 3.89 / 21.63)
    by_size = {row["size"]: row for row in document["sizes"]}
    assert min(by_size) == 8 * K, "sizes below the measured ones are not known"
    assert by_size[8 * K]["cycle_ms"] == pytest.approx(17.04)
    out = choose(map_file, capsys, *LLAMA)
    assert "| 32,768 (best)" in out
    assert "Best size: 32,768 ids" in out
    assert "loses" not in out


def test_two_times_say_nothing_of_how_straight_the_line_is(map_file, capsys):
    assert "R²" not in choose(map_file, capsys, *LLAMA)
    assert "(R² 0.9" in choose(map_file, capsys, *LLAMA, "--cycle-ms", "64k=19.5")


def test_it_says_when_a_map_or_speculation_loses(map_file, capsys):
    flat = "--steps 6 --cycle-ms 8k=20 --cycle-ms full=20.1 --accept 8k=3 --accept full=3.9"
    out = choose(map_file, capsys, *flat.split(), "--sizes", "8k,32k")
    assert "A map loses" in out
    assert "| full vocabulary (best)" in out
    assert "Speculation with a map loses" in choose(map_file, capsys, *LLAMA, "--token-ms", "4.9")
    assert "loses" not in choose(map_file, capsys, *LLAMA, "--token-ms", "5")


def test_coverage_of_text_carries_one_accept_length_to_all_sizes(model_dir, tmp_path, capsys):
    ids = tmp_path / "held-out.ids"
    ids.write_text(" ".join(["100"] * 60 + ["101"] * 30 + ["102"] * 10))
    path = tmp_path / "small.safetensors"
    order = np.asarray([100, 101, 102, 103], dtype=np.int64)
    save_token_map(TokenMap(order, None, MapMetadata(vocab_size=400)), path)
    argv = ["--steps", "1", "--cycle-ms", "100=2", "--cycle-ms", "400=5", "--accept", "2=1.45"]
    argv += ["--text", str(ids), "--tokenizer", str(model_dir), "--sizes", "1,2,3,4", "--json"]
    rows = json.loads(choose(str(path), capsys, *argv))["sizes"]
    assert [row["coverage"] for row in rows] == pytest.approx([0.6, 0.9, 1, 1])
    assert [row["accept"] for row in rows] == pytest.approx([1.3, 1.45, 1.5, 1.5])
    assert [row["measured"] for row in rows] == [False, True, False, False]


@pytest.mark.parametrize("suffix", [".html", ".png"])
def test_picture(map_file, tmp_path, capsys, suffix):
    picture = tmp_path / f"speed{suffix}"
    choose(map_file, capsys, *LLAMA, "--token-ms", "10", "--picture", str(picture))
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG") if suffix == ".png" else b"no speculation" in data


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--steps 6 --cycle-ms 8k=1 --cycle-ms full=2 --accept 8k=3", "full=X"),
        ("--steps 0 --cycle-ms 8k=1 --accept full=3", "one draft step"),
        ("--steps 6 --cycle-ms 8k=fast --accept full=3 --accept 8k=2", "write SIZE=X"),
        ("--steps 6 --cycle-ms 8k=1 --cycle-ms 8192=1 --accept full=3 --accept 8k=2", "twice"),
        ("--steps 6 --cycle-ms 999k=1 --accept full=3 --accept 8k=2", "beyond 128256"),
        ("--steps 6 --cycle-ms 8k=1 --accept full=3", "one accept length says nothing"),
    ],
)
def test_wrong_arguments_are_named(map_file, argv, message, capsys):
    assert cli.main(["choose", map_file, *argv.split()]) == 1
    assert message in capsys.readouterr().err
