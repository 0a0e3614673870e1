"""``bench map-sizes``: what is sent, what is timed, what is predicted; no server is needed."""

import gzip
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.commands.map_sizes import main, parse_arguments
from bench.serving import map_choice
from bench.serving.chain import make_chain
from bench.serving.client import Answer, RequestFailedError, generate
from bench.serving.graded_map import COVERAGE, graded_ranking
from bench.serving.map_size_models import ServedModel, model_in_folders
from bench.serving.map_size_profile import profile_round
from bench.serving.map_size_run import MapSizeRun
from bench.serving.map_speed import Speed, accept_by_domain, table
from bench.serving.measure import Lengths
from bench.serving.one_at_a_time import starting
from bench.serving.servers import Fleet
from bench.serving.traffic import Asking, Prompt, Turn, mixed, take_turns
from bench.serving.variants import Variant
from sgl_frspec.maps import TokenMap
from sgl_frspec.maps.choosing import accept_length
from tests.bench import breakdown_traces
from tests.bench.fake_server import fake_server
from tests.bench.test_serve_answers import Speller

CHAIN = make_chain(4096, 2048, 0.8)


def test_a_graded_ranking_covers_as_it_should():
    chain = make_chain(128_256, 32_768, 0.8)
    ranking = graded_ranking(chain, 30, 200)
    assert sorted(ranking) == list(range(128_256))
    text = [token for s in range(30) for token in chain.continuation(s, 200)]
    rank = {token: i for i, token in enumerate(ranking)}
    places = np.array([rank[token] for token in text])
    for size, share in COVERAGE.items():
        # 6,000 tokens drawn independently: four standard deviations.
        assert (places < size).mean() == pytest.approx(share, abs=4 * (share * 0.08 / 6000) ** 0.5)
    assert (places >= 65_536).any()
    assert {rank[128_254], rank[128_255]} < set(range(8_192))
    assert graded_ranking(chain, 30, 200) == ranking


def test_a_graded_ranking_refuses_more_tokens_than_fit():
    with pytest.raises(ValueError, match="more tokens than 256 ids"):
        graded_ranking(CHAIN, 4, 200, {256: 0.9})


def test_domains_take_turns_among_the_prompts():
    prompts = mixed({"a": [[1], [2], [3]], "b": [[4]]})
    assert prompts == [Prompt("a", [1]), Prompt("b", [4]), Prompt("a", [2]), Prompt("a", [3])]


def counted(ids: list[int], cycles: int) -> Answer:
    return Answer(ids, cycles, 0, {})


def test_accept_lengths_are_weighted_by_cycles():
    prompts = [Prompt("a", []), Prompt("b", []), Prompt("a", [])]
    answers = [counted([0] * 13, 4), counted([0] * 3, 2), counted([0] * 5, 4)]
    assert accept_by_domain(prompts, answers) == {"a": 2.0, "b": 1.0, "all": 1.8}


def reply(order: list[str], name: str, end: int = 10**9):
    """Two tokens a round at 5 ms a round behind 20 ms; answers have ``end`` tokens at most."""

    def answer(path: str, body: Any) -> Any:
        order.append(name)
        sampling = body["sampling_params"]
        new = sampling["max_new_tokens"] if sampling["ignore_eos"] else 0
        new = min(new, end)
        cycles = (new - 1) // 2
        time.sleep(0.02)
        if body.get("stream"):
            assert sampling["stream_interval"] > sampling["max_new_tokens"]
            return streamed(len(body["input_ids"]), new, cycles)
        time.sleep(0.005 * cycles)
        meta = {"completion_tokens": new, "spec_verify_ct": cycles}
        return [{"output_ids": [7] * new, "meta_info": meta} for _ in body["input_ids"]]

    return answer


def streamed(requests: int, new: int, cycles: int) -> Iterator[dict[str, Any]]:
    """The prefills' tokens one after the other, then all answers."""
    for place in range(requests):
        meta: dict[str, Any] = {"completion_tokens": 1, "spec_verify_ct": 0}
        yield {"index": place, "output_ids": [7], "meta_info": meta}
    time.sleep(0.005 * cycles)
    meta = {"completion_tokens": new, "spec_verify_ct": cycles}
    for place in reversed(range(requests)):
        yield {"index": place, "output_ids": [7] * new, "meta_info": meta}


def serve(stack: ExitStack, replies: dict[str, Any]) -> list[Any]:
    return [
        SimpleNamespace(
            variant=Variant(name, "frspec"),
            url=stack.enter_context(fake_server(one)),
            process=SimpleNamespace(log_tail=lambda: "last words"),
        )
        for name, one in replies.items()
    ]


def test_turns_time_the_difference_and_alternate():
    order: list[str] = []
    asking = Asking(Lengths(5, 25), ignore_eos=True)
    with ExitStack() as stack:
        servers = serve(stack, {n: reply(order, n) for n in "ab"})
        seen: list[dict[str, int]] = []

        def on_turn(taken: dict[str, list[Turn]]) -> None:
            seen.append({name: len(turns) for name, turns in taken.items()})

        taken = take_turns(servers, asking, [[[1], [2]]], 2, float("inf"), print, on_turn)
    # What there is after each counted turn, for those whose time runs out.
    assert seen == [{"a": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 2}]
    # One that wakes it, a short and a long answer.
    assert "".join(order) == "bbbaaa" + "aaabbb" + "bbbaaa"
    for turns in taken.values():
        assert len(turns) == 2
        for turn in turns:
            assert (turn.rounds, turn.tokens) == (12 - 2, 2 * 20)
            assert turn.ms_round >= 4.5  # a sleep is never shorter than asked


def test_what_comes_before_the_first_part_is_not_timed():
    def slow_prefill(path: str, body: Any) -> Any:
        time.sleep(0.2 if body["sampling_params"]["max_new_tokens"] == 25 else 0.0)
        return streamed(1, body["sampling_params"]["max_new_tokens"], 10)

    asking = Asking(Lengths(5, 25), ignore_eos=True)
    with ExitStack() as stack:
        server = serve(stack, {"a": slow_prefill})[0]
        ms, answers = asking._timed(server, [[1]], 25)
    assert 50 <= ms < 150
    assert (answers[0].ids, answers[0].cycles) == ([7] * 25, 10)


def test_a_stream_without_all_answers_is_refused():
    asking = Asking(Lengths(5, 25), ignore_eos=True)
    with ExitStack() as stack:
        server = serve(stack, {"a": lambda path, body: streamed(1, 25, 10)})[0]
        with pytest.raises(RequestFailedError, match="1 of 2 answers"):
            asking.turn(server, [[[1], [2]]])


def test_answers_that_end_early_do_not_count_as_rounds():
    asking = Asking(Lengths(5, 25), ignore_eos=True)
    with ExitStack() as stack:
        server = serve(stack, {"a": reply([], "a", end=3)})[0]
        assert asking.turn(server, [[[1]]]) == Turn(0.0, 0, 0)


def test_the_time_limit_leaves_one_turn():
    said: list[str] = []
    asking = Asking(Lengths(2, 4), ignore_eos=True)
    with ExitStack() as stack:
        servers = serve(stack, {"a": reply([], "a")})
        taken = take_turns(servers, asking, [[[1]]], 5, 0.0, said.append)
    assert len(taken["a"]) == 1
    assert said == ["time limit after 1 of 5 turns"]


def test_a_server_that_fails_is_left_out():
    def fails(path: str, body: Any) -> Any:
        raise RuntimeError("out of memory")

    said: list[str] = []
    asking = Asking(Lengths(2, 4), ignore_eos=True)
    prompts = [Prompt("a", [1])] * 3
    with ExitStack() as stack:
        servers = serve(stack, {"good": reply([], "good"), "bad": fails})
        answers = asking.all_answers(servers, prompts, 2, said.append)
        assert {name: len(found) for name, found in answers.items()} == {"good": 3}
        assert set(take_turns(servers, asking, [[[1]]], 1, float("inf"), said.append)) == {"good"}
    assert all("bad FAILED" in line and "out of memory" in line for line in said)
    assert len(said) == 2


def speed(ms: float, accept: float) -> Speed:
    return Speed(5, ms, ms, ms, 1000 * accept / ms, {"all": accept})


def world(sizes: list[int], best_p: float, fixed: float, slope: float, curve: dict[int, float]):
    """Servers that behave exactly as the model of ``frspec choose`` says, and their text."""
    vocab = sizes[-1]
    text: list[int] = []
    bounds = [0, *sizes]
    shares = [curve.get(size, 1.0) for size in sizes]
    for low, share, before in zip(bounds[:-1], shares, [0.0, *shares[:-1]], strict=True):
        text += [low] * round(10_000 * (share - before))
    served = {
        s: speed(fixed + slope * s, accept_length(best_p * c, 3))
        for s, c in zip(sizes, shares, strict=True)
    }
    return TokenMap(np.arange(vocab, dtype=np.int64)), vocab, served, text


def test_the_prediction_finds_the_best_size_of_a_world_that_is_as_it_assumes():
    sizes = [8_192, 16_384, 32_768, 65_536, 128_256]
    token_map, vocab, served, text = world(sizes, 0.9, 5.5, 6e-6, COVERAGE)
    choice = map_choice.choose(token_map, vocab, 3, served, text)
    assert choice.best_served == choice.best_predicted == 32_768
    assert choice.steps_apart == 0
    for size in sizes:
        assert choice.predicted[size].cycle_ms == pytest.approx(served[size].ms_round, rel=1e-9)
        assert choice.predicted[size].accept == pytest.approx(served[size].accept_length, rel=1e-3)
    shown = "\n".join(map_choice.lines(choice))
    assert "names 32,768, served best 32,768: 0 steps" in shown
    json.dumps(choice.record())


def test_steps_apart_count_served_sizes():
    sizes = [8_192, 16_384, 32_768, 65_536, 128_256]
    token_map, vocab, served, text = world(sizes, 0.9, 5.5, 6e-6, COVERAGE)
    served[65_536] = speed(3.0, 3.5)
    assert map_choice.choose(token_map, vocab, 3, served, text).steps_apart == 1
    served[65_536] = speed(5.9, 3.5)
    served[8_192] = speed(3.0, 3.4)  # an end: the line follows it
    assert map_choice.choose(token_map, vocab, 3, served, text).best_served == 8_192


def test_the_table_has_tokens_by_domain():
    shown = table({"frspec-8": Speed(5, 2.0, 1.9, 2.1, 999.0, {"code": 3.0, "all": 2.5})})
    assert shown.splitlines()[0].split()[-2:] == ["accept", "code"]
    assert "1250.0   2.500  3.00 1500" in shown


def test_nobody_measures_while_another_starts(tmp_path: Path):
    order: list[str] = []
    other_started, go_on = threading.Event(), threading.Event()

    def slow_start():
        with starting(tmp_path / "lock") as machine:
            other_started.set()
            go_on.wait(10)
            order.append("slow has started")
            machine.measure()
            order.append("slow measures")

    thread = threading.Thread(target=slow_start)
    thread.start()
    assert other_started.wait(10)
    threading.Timer(0.2, go_on.set).start()
    with starting(tmp_path / "lock") as machine:
        machine.measure()
        # Either may be the first to measure, but not before both have started.
        assert order[0] == "slow has started"
        order.append("quick measures")
        time.sleep(0.05)
        assert order[-1] == "quick measures"
    thread.join(10)
    assert sorted(order[1:]) == ["quick measures", "slow measures"]


def test_prompts_of_a_file(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    rows = [
        {"domain": "b", "ids": [1, 2]},
        {"domain": "a", "ids": [3]},
        {"domain": "b", "ids": [4]},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = model_in_folders(tmp_path, tmp_path, tmp_path / "map.safetensors", file)
    assert model.domains == {"b": [[1, 2], [4]], "a": [[3]]}
    assert model.vocab == 9
    # A large tokenizer costs every server's start seconds, several times.
    assert "--skip-tokenizer-init" in model.flags
    file.write_text("")
    with pytest.raises(ValueError, match="holds no prompts"):
        model_in_folders(tmp_path, tmp_path, tmp_path / "map.safetensors", file)
    for line in ("x", "[1]", '{"domain": "a"}', '{"domain": "a", "ids": 3}'):
        file.write_text(json.dumps(rows[0]) + "\n\n" + line)
        with pytest.raises(ValueError, match=r"prompts\.jsonl, line 3: write "):
            model_in_folders(tmp_path, tmp_path, tmp_path / "map.safetensors", file)
    for ids in ([], [9], [-1]):
        file.write_text(json.dumps({"domain": "a", "ids": ids}))
        with pytest.raises(ValueError, match="line 1: give ids from 0 to 8"):
            model_in_folders(tmp_path, tmp_path, tmp_path / "map.safetensors", file)
    with pytest.raises(ValueError, match=r"missing holds no config\.json"):
        model_in_folders(tmp_path, tmp_path / "missing", tmp_path / "map.safetensors", file)
    file.unlink()
    with pytest.raises(ValueError, match=r"--prompts cannot be read.*prompts\.jsonl"):
        model_in_folders(tmp_path, tmp_path, tmp_path / "map.safetensors", file)


def small_run(
    folder: Path, say: Any, *more: str, prompts: dict[str, list[list[int]]] | None = None
) -> MapSizeRun:
    """Of a model of nine tokens, whose servers are made up."""
    torch.save(list(range(9)), folder / "map.pt")
    prompts = prompts or {"a": [[1], [2]]}
    model = ServedModel("nine", *(folder, folder, folder / "map.pt", 9, prompts), ignore_eos=True)
    words = ["--sizes", "4", "full", "--out", str(folder / "out"), "--tokens", "8"]
    words += ["--short-tokens", "3", "--groups", "1", "--alternations", "1"]
    words += more
    return MapSizeRun(parse_arguments(words), model, False, time.monotonic(), say)


@pytest.mark.parametrize(
    ("present", "finished", "status"), [((), None, 1), ((4,), False, 1), ((4, 9), True, 0)]
)
def test_a_run_is_finished_when_all_servers_were_measured(
    present: tuple[int, ...], finished: bool | None, status: int, tmp_path: Path
):
    run = small_run(tmp_path, print)
    names = [f"frspec-{size}" for size in present]
    with ExitStack() as stack:
        servers = serve(stack, {name: reply([], name) for name in names})
        assert run.measure(Fleet(servers)) == status
    assert run.results.get("finished") is finished


@pytest.mark.parametrize("late", [0.0, 0.5])
def test_texts_are_those_of_the_target_up_to_ties_and_beyond_them(tmp_path: Path, late: float):
    """Two servers slip at a tie; what they write behind it the target must agree with."""
    target = Speller(gap=0.015)
    scored_texts: list[int] = []

    def judges(path: str, body: Any) -> Any:
        answers = target(path, body)
        if body["sampling_params"]["max_new_tokens"] == 1:
            for ids, answer in zip(body["input_ids"], answers, strict=True):
                if 77 in ids:
                    scored_texts.append(ids[0])
                    answer["meta_info"]["input_token_logprobs"][-2][0] -= late
        return answers

    lines: list[str] = []
    words = ["--check-text", "--variant", "nospec", "--answer-batch", "2"]
    prompts = {"a": [[300, 307], [400, 407], [500, 507]]}
    run = small_run(tmp_path, lines.append, *words, prompts=prompts)
    replies = {"nospec": judges, "one": Speller((300, 4)), "two": Speller((300, 4))}
    with ExitStack() as stack:
        servers = serve(stack, replies)
        servers[0].variant = Variant("nospec", "nospec")
        texts = [prompt.ids for prompt in run.prompts]
        given = {s.variant.name: generate(s.url, texts, 8) for s in servers}
        assert run._same_texts(servers, given) is (late == 0)
    # The same text of two servers is scored once.
    assert scored_texts == [300]
    written = json.loads((tmp_path / "out" / "map_sizes.json").read_text())
    first, second = written["texts"]["verdicts"]
    assert (first["variant"], second["variant"]) == ("one", "two")
    assert first["same"] == second["same"] == 2
    assert first["after"] == second["after"]
    assert first["after"] == {"tokens": 3, "farthest_behind": pytest.approx(late)}
    assert (
        "| two | 0 | 4 | 312 | 77 | 0.0150 | 0.0150 |"
        in (tmp_path / "out" / "verify_text.md").read_text()
    )
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --shape, or --target"),
        (["--shape", "tiny", "--sizes", "3k"], "the map has 2048 ids"),
        (["--shape", "tiny", "--sizes", "1k", "--check-text"], "--variant nospec"),
        (["--shape", "tiny", "--sizes", "1k", "--batch", "1", "8"], "--batch 8: there are 4"),
    ],
)
def test_bad_requests_of_a_shape_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folders = ["--model-folder", str(tmp_path / "model"), "--out", str(tmp_path / "out")]
    assert main([*words, "--tokens", "40", "--per-domain", "4", *folders]) == 2
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "1", "0"], "--batch 0: give at least 1"),
        (["--answer-batch", "0"], "--answer-batch 0"),
        (["--groups", "-1"], "--groups -1"),
        (["--alternations", "0"], "--alternations 0"),
        (["--short-tokens", "0"], "--short-tokens 0"),
        (["--tokens", "3"], "--tokens 3: a round is timed by a long answer less a short one of 3"),
        (["--flags", "--x 'a"], "--flags"),
        (["--variant", ""], "names no variant"),
        (["--variant", "x=frspec 'a"], "No closing quotation"),
        (["--profile", "frspec-5"], "--profile frspec-5: there is no such server, only frspec-4"),
        (["--variant", "frspec-4=frspec"], "servers of the same name: frspec-4"),
        (["--variant", "eagle-4=eagle", "--stock-size", "4"], "of the same name: eagle-4"),
        (["--variant", "x=frspec --frspec-map-size"], "x: --frspec-map-size has no value"),
        (["--variant", "x=frspec --frspec-map-size abc"], "'abc' is not a number of ids"),
    ],
)
def test_bad_requests_are_refused_before_anything_starts(
    words: list[str], message: str, tmp_path: Path
):
    with pytest.raises(ValueError, match=re.escape(message)):
        small_run(tmp_path, print, *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", ["--frspec-map-size=5", "--frspec-map-size 5"])
def test_a_variants_own_size_is_what_its_draft_proposes(given: str, tmp_path: Path):
    run = small_run(tmp_path, print, "--variant", f"x=frspec {given}", "--variant", "eagle")
    assert run._vocabularies == {"x": 5, "eagle": 9, "frspec-4": 4, "frspec-9": 9}


def test_what_an_earlier_run_found_is_kept_aside(tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "map_sizes.json").write_text("earlier")
    small_run(tmp_path, print)
    assert (out / "map_sizes.earlier.json").read_text() == "earlier"
    assert not (out / "map_sizes.json").exists()
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match="file is a file; name a folder"):
        small_run(tmp_path, print, "--out", str(file))


def test_a_profiled_round_is_split_into_parts(tmp_path: Path):
    events, truth = breakdown_traces.trace(40, fused=True, gap=0.5)

    def writes_trace(path: str, body: Any) -> Any:
        if path == "/start_profile":
            with gzip.open(f"{body['output_dir']}/1-TP-0.trace.json.gz", "wt") as file:
                json.dump({"traceEvents": events}, file)
            return "Start profiling."
        return [{"output_ids": [1], "meta_info": {"completion_tokens": 1}}]

    said: list[str] = []
    with ExitStack() as stack:
        server = serve(stack, {"frspec-8192": writes_trace})[0]
        found: Any = profile_round(
            *(server, [1, 2], tmp_path / "traces"),
            **{"drafted": 8192, "steps": breakdown_traces.STEPS},
            **{"ms_round": 1.0, "say": said.append},
        )
    json.dumps(found)
    assert found["profile"]["kernels"] == len(breakdown_traces.round_of(fused=True))
    measured = {(phase, part): us for phase, part, us in found["parts"]["gpu_us"]}
    # Two kernels of index bookkeeping follow what stood before them.
    moved = {key for key in truth if key[1] in ("attention", "acceptance", "copies")}
    for key in truth.keys() - moved:
        assert measured[key] == pytest.approx(truth[key], rel=1e-9), key
    assert sum(measured.values()) == pytest.approx(sum(truth.values()), rel=1e-9)
    assert found["parts"]["vocab"] == 8192
    # Idle is what is left of the untraced round.
    assert found["parts"]["idle_us"] == pytest.approx(1000 - sum(truth.values()), rel=1e-9)
    assert "draft LM head" in said[-1]


def test_a_trace_without_rounds_is_said(tmp_path: Path):
    def writes_nothing(path: str, body: Any) -> Any:
        if path == "/start_profile":
            with gzip.open(f"{body['output_dir']}/1-TP-0.trace.json.gz", "wt") as file:
                json.dump({"traceEvents": []}, file)
            return "Start profiling."
        return [{"output_ids": [1], "meta_info": {"completion_tokens": 1}}]

    said: list[str] = []
    with ExitStack() as stack:
        server = serve(stack, {"frspec-8192": writes_nothing})[0]
        found = profile_round(
            *(server, [1, 2], tmp_path / "traces"),
            **{"drafted": 8192, "steps": 2, "ms_round": None, "say": said.append},
        )
    assert found == {}
    assert len(said) == 1
    assert said[0].startswith("frspec-8192: no profile: no kernel runs about 40 times")
