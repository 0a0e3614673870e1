"""Fits, tables and the report of ``bench breakdown``; the report in a real browser."""

import dataclasses
import json
import random
import re
from pathlib import Path

import pytest

from bench.breakdown import page, svg, text
from bench.breakdown.eager_models import ALL_TIMED
from bench.breakdown.fit import fit, two_sided
from bench.breakdown.parts import PARTS, Split, Work, from_json
from bench.breakdown.predict import with_prediction
from bench.breakdown.results import earlier
from bench.breakdown.sweep import fit_line, sweeps
from bench.commands import breakdown
from bench.serving.trace_file import read_events
from sgl_frspec.explain import Speculation, cycle_cost, find_device, read_model_shape
from tests.bench import breakdown_traces as synthetic
from tests.bench.browser import Browser, executable

RESULTS = Path(__file__).parents[2] / "docs" / "results"
DEVICE = find_device("h200")
SHAPE = read_model_shape("llama-3-8b")
SPEC = Speculation(draft_vocab=SHAPE.vocab)


def _split(name="eager", vocab=32768, **changes):
    gpu = {("draft", "LM head"): 300.0, ("draft", "softmax"): 60.0, ("draft", "MLP"): 240.0}
    gpu |= {("draft", "top-k"): 40.0, ("verify", "MLP"): 360.0}
    host = {("draft", "LM head"): 30.0, ("verify", "MLP"): 500.0}
    split = Split(name, vocab, 6, 5, 2000.0, gpu, host, 700, 650, {}, 2400.0)
    return dataclasses.replace(split, **changes)


def test_numbers_of_a_split():
    split = _split()
    assert split.busy_us == 1000
    assert split.idle_us == 1000
    assert split.missing == 0
    assert split.phase_us("draft") == 640
    assert split.part_us("MLP") == 600
    assert split.part_us("MLP", phase="verify") == 360


def test_a_split_survives_json():
    split = _split(work={("draft", "MLP"): Work(1.0, 2.0, 3.0, 4.0, True)})
    assert from_json(json.loads(json.dumps(split.as_json()))) == split


def test_the_table_shows_steps_percents_and_ratios():
    split = _split(work={("draft", "MLP"): Work(1e9, 1e9, 150.0, 200.0, True)})
    row = next(line for line in text.table(split).splitlines() if line.startswith("draft MLP"))
    assert row.split() == ["draft", "MLP", "*", "240.0", "40.0", "12.0%", "200.0", "1.20"]
    row = next(line for line in text.table(split).splitlines() if line.startswith("draft LM head"))
    assert row.split() == ["draft", "LM", "head", "300.0", "50.0", "15.0%", "30.0"]
    assert "parts and idle time add up: +0.0%" in text.table(split)


def test_shares_of_head_and_softmax():
    line = text.head_shares(_split())
    assert "LM head + softmax 56.2% of the draft's GPU time, 18.0% of the cycle" in line
    assert (
        "with top-k 62.5% and 20.0%; softmax alone 6.0% of the GPU's work, 3.0% of the cycle"
        in line
    )
    assert line.endswith("of the cycle; the GPU works in 50.0% of the cycle")
    host = {("draft", "softmax"): 40.0, ("verify", "MLP"): 360.0}
    assert "3.0% of the cycle, 10.0% of the host's time; the" in text.head_shares(
        _split(host_us=host)
    )


def test_parts_that_differ_between_two_runs_are_named():
    first, again = _split(), _split(gpu_us={**_split().gpu_us, ("draft", "MLP"): 253.0})
    assert text.disagreements([first, again]) == [
        "eager, V 32,768: draft MLP took 240.0 us in one run and 253.0 in another"
    ]
    again = _split(gpu_us={**_split().gpu_us, ("draft", "MLP"): 252.0, ("draft", "top-k"): 20.0})
    assert text.disagreements([first, again]) == []
    assert text.disagreements([first, _split(vocab=8192, gpu_us={})]) == []


def test_students_t_at_tabulated_points():
    for freedom, t in ((1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (10, 2.22814)):
        assert two_sided(t, freedom) == pytest.approx(0.05, abs=2e-6)
    assert two_sided(0.0, 5) == pytest.approx(1.0)
    assert two_sided(4.03214, 5) == pytest.approx(0.01, abs=1e-6)


def test_a_line_is_found_again_with_its_error():
    vocabs = [8192, 16384, 32768, 65536, 131072]
    noise = [1e-6, -2e-6, 0.5e-6, 1.5e-6, -1e-6]
    found = fit(vocabs, [5e-3 + 4e-8 * v + e for v, e in zip(vocabs, noise, strict=True)])
    assert found.line.fixed_s == pytest.approx(5e-3, rel=1e-3)
    assert found.line.per_token_s == pytest.approx(4e-8, rel=1e-3)
    assert found.significant
    # Least squares by hand: the residual variance over the spread of V.
    mean = sum(vocabs) / 5
    spread = sum((v - mean) ** 2 for v in vocabs)
    slope = sum((v - mean) * e for v, e in zip(vocabs, noise, strict=True)) / spread
    left = sum(
        (e - sum(noise) / 5 - slope * (v - mean)) ** 2 for v, e in zip(vocabs, noise, strict=True)
    )
    assert found.slope_error_s == pytest.approx((left / 3 / spread) ** 0.5, rel=1e-6)


def test_noise_has_no_significant_slope():
    vocabs = [8192 * 2**i for i in range(6)]
    chance = random.Random(0)
    found = [fit(vocabs, [chance.gauss(1e-2, 1e-4) for _ in vocabs]) for _ in range(400)]
    false = sum(one.significant for one in found)
    assert false < 14  # 4 expected; 14 or more with probability below 1e-4
    assert "no significant slope" in fit_line("x", fit(vocabs, [1e-2] * 6), 128256)


def test_two_points_are_no_sweep():
    with pytest.raises(ValueError, match="three different vocabularies"):
        fit([1, 2, 2], [1.0, 2.0, 2.0])
    assert sweeps([_split(vocab=8192), _split(vocab=16384)]) == {}


def test_the_gpus_work_has_a_line_of_its_own():
    # Idle time of a noisy host, 0.4 ms more at the smallest vocabulary, hides the slope.
    idle = {8192: 800.0, 32768: 300.0, 65536: 500.0, 128256: 100.0}
    work = {vocab: 5000.0 + 0.01 * vocab for vocab in idle}
    splits = [
        _split("frspec", v, cycle_us=work[v] + idle[v], gpu_us={("draft", "MLP"): work[v]})
        for v in idle
    ]
    found = sweeps(splits)["frspec"]
    assert found.vocabs == sorted(idle)
    assert found.work_us == pytest.approx([work[v] for v in found.vocabs])
    assert found.work.line.r_squared == pytest.approx(1.0)
    assert found.work.line.per_token_s == pytest.approx(1e-8)
    assert found.cycle.line.r_squared < 0.9
    cycle, gpu = found.lines("frspec", 128256)
    assert re.match(r"frspec: cycle = 5\.\d+ ms \+ .* R\^2 0\.\d{4}; no significant slope", cycle)
    assert gpu.startswith("frspec: GPU work = 5.000 ms + 0.01000 ms x V/1000, R^2 1.0000; slope")
    assert set(found.as_json(128256)) == {"cycle", "gpu_work"}
    lines = text.summary(splits, 128256).splitlines()
    assert lines[-2:] == [f"  {cycle}", f"  {gpu}"]


def test_predictions_take_the_head_of_the_implementation_and_a_wider_vocabulary():
    stock = with_prediction(_split("stock", 32768), SHAPE, DEVICE, SPEC)
    ours = with_prediction(_split("frspec", 32768), SHAPE, DEVICE, SPEC)
    assert ("draft", "softmax") in stock.work
    assert ("draft", "softmax") not in ours.work
    wide = with_prediction(_split("eager", 262144), SHAPE, DEVICE, SPEC)
    full = {(p.phase, p.name): p for p in cycle_cost(SHAPE, DEVICE, SPEC, head="chain").parts}
    head, verify = wide.work["draft", "LM head"], wide.work["verify", "LM head"]
    assert head.nbytes == pytest.approx(full["draft", "LM head"].nbytes * 262144 / 128256)
    assert verify.nbytes == full["verify", "LM head"].nbytes
    assert stock.ratio(("draft", "MLP")) == pytest.approx(
        240.0 / (1e6 * full["draft", "MLP"].expected_s)
    )


def test_the_eager_loop_is_expected_to_start_more_products():
    key = "verify", "attention projections"
    stock = with_prediction(_split("stock"), SHAPE, DEVICE, SPEC).work[key]
    eager = with_prediction(_split("eager, one CUDA graph"), SHAPE, DEVICE, SPEC).work[key]
    assert eager.nbytes == stock.nbytes
    # Query, key and value apart have so few columns each that they are split.
    more = 1e6 * SHAPE.layers * (2 * DEVICE.product_start_s + 3 * DEVICE.split_sum_s)
    assert eager.expected_us == pytest.approx(stock.expected_us + more)


def test_memory_bound_parts_off_their_expected_time_are_named():
    work = {
        ("draft", "MLP"): Work(1e9, 1e9, 190.0, 200.0, True),  # measured 240
        ("verify", "MLP"): Work(1e9, 1e9, 300.0, 400.0, True),  # 360
        ("draft", "top-k"): Work(1e6, 0.0, 1.0, 10.0, False),  # 40
        ("verify", "LM head"): Work(1e9, 1e9, 190.0, 200.0, True),  # not measured
    }
    found = text.mispredicted([_split(work=work)])
    assert found == (
        2,
        ["eager, V 32,768: draft MLP took 240.0 us, 1.20 times what was expected"],
    )
    lines = text.summary([_split(work=work)], 128256).splitlines()
    assert "Memory-bound parts within 15% of the arithmetic model: 1 of 2" in lines


@pytest.mark.parametrize(
    ("run", "measurements", "memory_bound"),
    [("breakdown-llama-3-8b-h200", 26, 182), ("breakdown-llama-3-8b-streamed-h200", 12, 84)],
)
def test_the_model_holds_against_every_part_measured_on_an_h200(run, measurements, memory_bound):
    splits = [
        with_prediction(split, SHAPE, DEVICE, SPEC) for split in earlier(RESULTS / run).splits
    ]
    assert len(splits) == measurements
    assert text.mispredicted(splits) == (memory_bound, [])
    assert all(split.adds_up for split in splits)
    assert text.disagreements(splits) == []


def test_ticks_are_round_and_within_the_axis():
    axis = svg.Axis(0, 1234, 100, 900)
    assert axis.ticks() == [0, 500, 1000]
    assert [axis.at(v) for v in (0, 1234)] == [100, 900]
    log = svg.Axis(0.5, 2000, 0, 100, log=True)
    assert log.ticks() == [1, 10, 100, 1000]
    assert log.at(0.5) == 0
    assert log.at(2000) == pytest.approx(100)


def _splits():
    splits = []
    for name, per_id in (("eager", 0.0), ("stock", 0.01), ("frspec", 0.006)):
        for place, vocab in enumerate((8192, 32768, 128256)):
            gpu = {("draft", part): 20.0 + 3 * i for i, part in enumerate(PARTS[:10])}
            gpu |= {("verify", part): 30.0 + i for i, part in enumerate(PARTS)}
            gpu["draft", "LM head"] += per_id * vocab
            cycle = sum(gpu.values()) + 100 + place
            found = _split(name, vocab, gpu_us=gpu, cycle_us=cycle)
            splits.append(with_prediction(found, SHAPE, DEVICE, SPEC))
    return splits


def _page(splits, note=""):
    machine = {"gpu": "none & <none>"}
    return page.render(splits, machine, "a <b> & c", "6 steps", DEVICE, SHAPE.vocab, note)


def test_text_in_the_report_is_escaped():
    html = _page(_splits(), "x < y")
    assert "a &lt;b&gt; &amp; c" in html
    assert "none &amp; &lt;none&gt;" in html
    assert "x &lt; y" in html


def test_bars_stand_by_implementation_and_vocabulary_and_once():
    splits = _splits()
    html = _page([*reversed(splits), splits[0]])
    bars = html[: html.index("<h2>Draft step")]
    labels = re.findall(r">(\w+, V [\d,]+)</text>", bars)
    names = ("frspec", "stock", "eager")
    sizes = ("8,192", "32,768", "128,256")
    assert labels == [f"{name}, V {size}" for name in names for size in sizes]


def test_the_report_opens_in_a_browser_and_shows_its_charts(tmp_path):
    program = executable()
    if program is None:
        pytest.skip("no Chromium: `make unit` fetches one")
    path = tmp_path / "report.html"
    splits = _splits()
    path.write_text(_page(splits), encoding="utf-8")
    with Browser(program) as browser:
        browser.open(path)
        charts = browser.evaluate(
            "[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().height)"
        )
        bars = browser.evaluate(
            "[...document.querySelectorAll('svg')[0].querySelectorAll('rect.bar')]"
            ".map(r => [r.getBoundingClientRect().width, r.textContent])"
        )
        points = browser.evaluate(
            "document.querySelectorAll('svg')[2].querySelectorAll('circle').length"
        )
        roof = browser.evaluate(
            "document.querySelectorAll('svg')[3].querySelectorAll('circle').length"
        )
        wider = browser.evaluate("document.documentElement.scrollWidth > window.innerWidth")
        outside = browser.evaluate(
            "[...document.querySelectorAll('svg')].flatMap(s => {"
            "const a = s.getBoundingClientRect();"
            "return [...s.querySelectorAll('rect,circle,text')].map(e => e.getBoundingClientRect())"
            ".filter(b => b.left < a.left - 1 || b.right > a.right + 1 || b.top < a.top - 1"
            " || b.bottom > a.bottom + 1)}).length"
        )
        assert browser.screenshot().startswith(b"\x89PNG")
        events = browser.events
    assert len(charts) == 4
    assert all(height > 100 for height in charts)
    assert len(bars) == len(splits) * (len(PARTS) + 1)
    # A bar's pixels are its share of the time.
    total = sum(width for width, words in bars if words.startswith("stock, V 128,256"))
    head = next(w for w, words in bars if words.startswith("stock, V 128,256: LM head"))
    stock = splits[5]
    assert head / total == pytest.approx(stock.part_us("LM head") / stock.cycle_us, abs=5e-3)
    assert points == len(splits)
    assert roof == sum(
        bool(work.flops and split.gpu_us.get(key))
        for split in splits
        for key, work in split.work.items()
    )
    assert not wider
    assert outside == 0
    problems = [e for e in events if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
    problems += [e for e in events if e["method"] == "Runtime.consoleAPICalled"]
    assert not problems
    asked = [e["params"]["request"]["url"] for e in events if e["method"].endswith("WillBeSent")]
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]


def _config(folder, layers=2):
    path = folder / "tiny.json"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    path.write_text(json.dumps(sizes))
    return str(path)


TREE = ("--steps", "2", "--top-k", "3", "--nodes", "6", "--context", "5", "--cycles", "2")


def test_the_command_runs_on_a_cpu_and_says_what_its_times_mean(tmp_path, capsys):
    vocabs = ("--vocab", "32", "64", "128")
    out = tmp_path / "out"
    assert breakdown.main([_config(tmp_path), *TREE, *vocabs, "--out", str(out)]) == 0
    assert breakdown.CPU_NOTE in capsys.readouterr().out
    assert breakdown.CPU_NOTE in (out / "breakdown.html").read_text()
    written = json.loads((out / "breakdown.json").read_text())
    assert [row["vocab"] for row in written["splits"]] == [32, 64, 128]
    assert set(written["fits"]) == {"eager"}
    assert not any(row["work"] for row in written["splits"])


def test_several_models_have_a_folder_each(tmp_path, capsys):
    out = tmp_path / "out"
    other = tmp_path / "qwen3-tiny.json"
    other.write_text(Path(_config(tmp_path)).read_text())
    arguments = [_config(tmp_path), str(other), *TREE, "--vocab", "64", "full"]
    assert breakdown.main([*arguments, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    # All loops are timed before the first is traced.
    assert printed.index("qwen3-tiny: 2 draft vocabularies timed") < printed.index(ALL_TIMED)
    for name in ("tiny", "qwen3-tiny"):
        assert printed.index(ALL_TIMED) < printed.index(f"{name}: eager, V 64")
        written = json.loads((out / name / "breakdown.json").read_text())
        assert [row["vocab"] for row in written["splits"]] == [64, 128]


def test_traces_are_kept_on_request(tmp_path):
    out = tmp_path / "out"
    arguments = [_config(tmp_path), *TREE, "--vocab", "64", "--out", str(out), "--keep-traces"]
    assert breakdown.main(arguments) == 0
    events = read_events(out / "traces" / "eager-64.json.gz")
    names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {"draft/LM head", "draft/softmax", "verify/acceptance", "verify/copies"} <= names


def _trace_file(folder, extra=""):
    events, _ = synthetic.trace(12, True, gap=0.5, extra=extra)
    path = folder / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_a_servers_trace_is_split_and_merged(tmp_path, capsys):
    out = tmp_path / "one"
    given = f"frspec:64={_trace_file(tmp_path)}"
    config = _config(tmp_path, synthetic.LAYERS)
    arguments = [config, "--steps", str(synthetic.STEPS), "--trace", given, "--out", str(out)]
    assert breakdown.main(arguments) == 0
    assert "frspec, draft vocabulary 64" in capsys.readouterr().out
    merged = ["--merge", str(out), str(out), "--out", str(tmp_path / "both")]
    assert breakdown.main([config, *merged]) == 2
    assert "it was measured with 2 steps" in capsys.readouterr().err
    assert breakdown.main([config, "--steps", str(synthetic.STEPS), *merged]) == 0
    assert "differ by more than 5%: none" in capsys.readouterr().out


def test_kernels_of_a_wrong_part_fail_the_command(tmp_path, capsys):
    given = f"stock:64={_trace_file(tmp_path)}"  # it has no product for the draft's head
    config = _config(tmp_path, synthetic.LAYERS + 1)
    out = tmp_path / "out"
    arguments = [config, "--steps", "2", "--trace", given, "--out", str(out)]
    assert breakdown.main(arguments) == 1
    printed = capsys.readouterr()
    for reason in (
        "draft LM head has 0.0 products a cycle, not 2",
        "verify MLP has 6.0 products a cycle, not 8",
        "verify attention projections has 6.0 products a cycle, not 8",
    ):
        assert f"WRONG tiny, stock, V 64: {reason}" in printed.err
        assert reason in printed.out
        assert reason in (out / "breakdown.html").read_text()
    assert "verify LM head has" not in printed.err


def test_parts_that_do_not_add_up_fail_the_command(tmp_path, capsys):
    given = f"frspec:64={_trace_file(tmp_path, 'mystery_kernel')}"
    assert breakdown.main([_config(tmp_path), "--trace", given]) == 1
    assert "WRONG tiny, frspec, V 64: parts and idle time DO NOT ADD UP" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep-traces"], "give --out"),
        (["--cycles", "0"], "--cycles is 0; it must be at least 1"),
        (["--repeat", "0"], "--repeat is 0; it must be at least 1"),
        (["--graphs"], "--graphs needs a GPU"),
        (["--no-eager", "--servers"], "--servers needs a GPU"),
        (["--no-eager"], "nothing was measured"),
        (["--trace", "frspec=x"], "write NAME:V[:US]=FILE"),
        (["--trace", "frspec:1=missing.json"], "there is no file missing.json"),
        (["--vocab", "4"], "--vocab 4: write full, or a number of ids of at least --top-k 10"),
        (["--vocab", "all"], "--vocab all: write full"),
        (["llama-3-8b", "--merge", "x"], "about one model, not 2"),
        (["--merge", "missing"], "cannot be read"),
    ],
)
def test_bad_requests_are_named(tmp_path, capsys, arguments, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert breakdown.main([_config(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err
