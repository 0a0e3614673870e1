"""``frspec rank`` against counts made with the tokenizer alone."""

import bz2
import collections
import gzip
import io
import json
import lzma
import subprocess
import sys
import types

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sgl_frspec import cli
from sgl_frspec.maps import load_token_map
from sgl_frspec.maps.corpus import counting, streams
from sgl_frspec.maps.corpus.checkpoint import Checkpoint
from sgl_frspec.maps.corpus.documents import PIECE_CHARS, split_text
from sgl_frspec.maps.corpus.sources import parse_source
from sgl_frspec.maps.rank import RankOptions, rank_sources, unseen_count
from sgl_frspec.maps.token_map import TokenMapError
from sgl_frspec.maps.vocabulary import read_vocabulary
from tests.maps.conftest import TEXT, write_tokenizer

TURN = [
    {"role": "user", "content": "the cat sat"},
    {"role": "assistant", "content": "on the mat"},
    {"role": "user", "content": "and the dog"},
    {"role": "assistant", "content": "sat on the log"},
]


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def expected_counts(tokenizer, texts):
    counts = collections.Counter()
    for text in texts:
        counts.update(tokenizer.encode(text, add_special_tokens=False).ids)
    return counts


def counted(token_map):
    assert token_map.counts is not None
    counts = zip(token_map.ids.tolist(), token_map.counts.tolist(), strict=True)
    return {token: count for token, count in counts if count}


def rank(model_dir, *sources, **options):
    vocabulary = read_vocabulary(model_dir)
    return rank_sources([parse_source(s) for s in sources], vocabulary, RankOptions(**options))


def test_counts_order_and_required_ids(model_dir, tokenizer, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("\n".join(TEXT * 3))
    token_map = rank(model_dir, str(file))
    assert counted(token_map) == expected_counts(tokenizer, [file.read_text()])
    assert token_map.counts is not None
    required = token_map.metadata.required_ids
    assert required[0] == tokenizer.token_to_id("<|im_end|>")
    assert set(required) == {
        tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|im_start|>", "<tool_call>")
    }
    assert tuple(token_map.ids[: len(required)]) == required
    rest = [
        (-c, i)
        for i, c in zip(token_map.ids.tolist(), token_map.counts.tolist(), strict=True)
        if c and i not in required
    ]
    assert rest == sorted(rest)
    assert sorted(token_map.ids) == list(range(tokenizer.get_vocab_size()))
    assert token_map.ids[-2:].tolist() == [
        tokenizer.token_to_id(t) for t in ("<|reserved_0|>", "<|pad|>")
    ]
    assert unseen_count(token_map) == len(token_map) - len(required) - len(rest)


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
        (".zst", zstandard.compress),
        ("", bytes),
    ],
)
def test_compressed_input_counts_the_same(model_dir, tokenizer, tmp_path, suffix, pack):
    data = "\n".join(json.dumps({"text": text}) for text in TEXT).encode()
    file = tmp_path / f"a.jsonl{suffix}"
    file.write_bytes(pack(data))
    assert counted(rank(model_dir, str(file))) == expected_counts(tokenizer, TEXT)


def test_parquet_field(model_dir, tokenizer, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2, 3, 4], "body": TEXT}), file)
    assert counted(rank(model_dir, f"{file},field=body")) == expected_counts(tokenizer, TEXT)
    with pytest.raises(TokenMapError, match="no field"):
        rank(model_dir, f"{file},field=text")


def test_parquet_messages_without_naming_the_field(model_dir, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table, lines = tmp_path / "a.parquet", tmp_path / "a.jsonl"
    parquet.write_table(pyarrow.table({"text": ["unused"], "messages": [TURN]}), table)
    lines.write_text(json.dumps({"messages": TURN}))
    assert counted(rank(model_dir, str(table))) == counted(rank(model_dir, str(lines)))


def hub(rows=(), error=None):
    """The package ``datasets``, with one data set and one way to fail."""

    def load_dataset(name, config, *, split, streaming):
        if error is not None:
            raise error
        assert (name, config, split, streaming) == ("org/set", "de", "test", True)
        return iter(rows)

    return types.SimpleNamespace(load_dataset=load_dataset)


def test_hugging_face_datasets(model_dir, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", hub([{"body": text} for text in TEXT]))
    source = "hf:org/set:de:test,field=body"
    assert counted(rank(model_dir, source)) == expected_counts(tokenizer, TEXT)
    output = tmp_path / "m.safetensors"
    argv = ["rank", "--tokenizer", str(model_dir), "-o", str(output), "--workers", "1", source]
    assert cli.main(argv) == 0
    assert load_token_map(output).metadata.sources[0].sha256 is None


def test_a_hub_out_of_reach_and_a_missing_package(model_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", hub(error=ConnectionError("no route")))
    with pytest.raises(TokenMapError, match=r"no route.*check the name and the network"):
        rank(model_dir, "hf:org/set")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TokenMapError, match=r"sgl-frspec\[maps\]"):
        rank(model_dir, "hf:org/set")


def test_chat_messages_count_what_the_assistant_wrote(model_dir, tokenizer, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": TURN}))
    written = ["on the mat<|im_end|>\n", "sat on the log<|im_end|>\n"]
    assert counted(rank(model_dir, str(file))) == expected_counts(tokenizer, written)
    whole = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TURN)
    assert counted(rank(model_dir, str(file), roles="all")) == expected_counts(tokenizer, [whole])


def test_sharegpt_names_mean_the_same(model_dir, tmp_path):
    names = {"user": "human", "assistant": "gpt"}
    rows = [{"from": names[m["role"]], "value": m["content"]} for m in TURN]
    one, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    one.write_text(json.dumps({"messages": TURN}))
    other.write_text(json.dumps({"conversations": rows}))
    assert counted(rank(model_dir, str(one))) == counted(rank(model_dir, str(other)))


def test_token_ids_and_request_logs(model_dir, tmp_path):
    ids = tmp_path / "a.ids"
    ids.write_text("5 6 6\n[7, 6]\n")
    log = tmp_path / "server.log"
    log.write_text(
        "[2026-01-01] Receive: obj=GenerateReqInput(text='x')\n"
        "[2026-01-01] Finish: obj=GenerateReqInput(input_ids=[9, 9]), "
        "out={'text': 'ab', 'output_ids': [5, 6, 6, 7, 6], 'meta_info': {}}\n"
        '{"event": "request.finished", "out": {"output_ids": [8]}}\n'
    )
    assert counted(rank(model_dir, str(ids))) == {5: 1, 6: 3, 7: 1}
    assert counted(rank(model_dir, str(log))) == {5: 1, 6: 3, 7: 1, 8: 1}


def test_weights_are_shares_whatever_the_size(model_dir, tmp_path):
    small, large = tmp_path / "a.ids", tmp_path / "b.ids"
    small.write_text("[5, 6]")
    large.write_text("[7, 8]\n" * 1000)
    token_map = rank(model_dir, f"{small},weight=3", f"{large},weight=1")
    counts = counted(token_map)
    total = sum(counts.values())
    assert {i: c / total for i, c in counts.items()} == pytest.approx(
        {5: 0.375, 6: 0.375, 7: 0.125, 8: 0.125}
    )
    assert token_map.metadata.count_unit == "share"
    assert [s.weight for s in token_map.metadata.sources] == [3, 1]


def test_folders_skip_hidden_and_binary_files(model_dir, tokenizer, tmp_path):
    folder = tmp_path / "corpus"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "x.txt").write_text("never counted")
    (folder / "b.txt").write_text(TEXT[1])
    (folder / "a.txt").write_text(TEXT[0])
    (folder / "image.png").write_bytes(b"\x89PNG\0\0\0")
    assert counted(rank(model_dir, str(folder))) == expected_counts(tokenizer, TEXT[:2])


def test_standard_input(model_dir, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT[0].encode())))
    output = tmp_path / "m.safetensors"
    assert cli.main(["rank", "--tokenizer", str(model_dir), "-o", str(output), "-"]) == 0
    assert counted(load_token_map(output)) == expected_counts(tokenizer, TEXT[:1])


@pytest.fixture
def many_batches(monkeypatch, tmp_path):
    monkeypatch.setattr(counting, "BATCH_DOCUMENTS", 3)
    file = tmp_path / "many.jsonl"
    rows = [{"text": f"{TEXT[i % 4]} {i} {i * i}"} for i in range(100)]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def test_any_number_of_workers_gives_the_same_bytes(model_dir, many_batches, tmp_path):
    outputs = []
    for workers in (1, 2, 3):
        output = tmp_path / f"{workers}.safetensors"
        argv = ["rank", "--tokenizer", str(model_dir), "-o", str(output), "--workers", str(workers)]
        assert cli.main([*argv, str(many_batches)]) == 0
        outputs.append(output.read_bytes())
    assert outputs[0] == outputs[1] == outputs[2]


def test_an_interrupted_run_goes_on_where_it_stopped(model_dir, many_batches, tmp_path):
    whole = rank(model_dir, str(many_batches))
    state = tmp_path / "state"
    options = {"checkpoint": state, "checkpoint_seconds": 0.0}
    vocabulary, source = read_vocabulary(model_dir), parse_source(str(many_batches))
    seen = []

    def interrupt(position):
        seen.append(position)
        if len(seen) == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rank_sources([source], vocabulary, RankOptions(**options), progress=interrupt)
    assert state.exists()
    counted_again = []
    encode = counting.DocumentCounter.count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            counting.DocumentCounter,
            "count",
            lambda self, documents: counted_again.append(1) or encode(self, documents),
        )
        resumed = rank_sources([source], vocabulary, RankOptions(**options))
    assert len(counted_again) < 34 - 8
    assert np.array_equal(resumed.ids, whole.ids)
    assert resumed.counts is not None
    assert whole.counts is not None
    assert np.array_equal(resumed.counts, whole.counts)


def test_the_state_of_another_run_is_neither_used_nor_lost(model_dir, many_batches, tmp_path):
    output = tmp_path / "m.safetensors"
    state = tmp_path / "m.safetensors.partial"
    Checkpoint(state, "another job", 0.0).save(counting.Tally.zero(1, 400))
    argv = ["rank", "--tokenizer", str(model_dir), "-o", str(output), str(many_batches)]
    before = state.read_bytes()
    assert cli.main(argv) == 1
    assert state.read_bytes() == before
    assert cli.main([*argv, "--restart"]) == 0
    assert counted(load_token_map(output)) == counted(rank(model_dir, str(many_batches)))
    assert not state.exists()


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="ab \n\té世", max_size=200), st.integers(1, 40))
def test_pieces_join_to_the_text(text, repeat):
    text = text * repeat * 40
    pieces = split_text(text)
    assert "".join(pieces) == text
    assert all(len(piece) <= PIECE_CHARS for piece in pieces)


def test_a_long_line_is_counted_in_pieces(model_dir, tokenizer, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("the cat " * 100_000)
    counts = counted(rank(model_dir, str(file)))
    whole = expected_counts(tokenizer, ["the cat " * 100_000])
    cuts = 800_000 // (PIECE_CHARS // 2)
    assert counts == {token: pytest.approx(count, abs=2 * cuts) for token, count in whole.items()}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "caf\xe9".encode("latin-1") * 100, "are not UTF-8"),
        ("a.txt", "text".encode("utf-16"), "UTF-16"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 50000)[:-40], "cut short"),
        ("a.jsonl.zst", zstandard.compress(b'{"text": "x"}\n' * 50000)[:-10], "cut short"),
        ("a.jsonl.xz", b"not an archive", "cut short"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "line 2 is not JSON"),
        ("a.jsonl", b'{"prompt": "x"}', "no field"),
        ("a.jsonl", b'{"text": 3}', "expected text"),
        ("a.ids", b"1 2 100000", "outside the vocabulary"),
        ("a.ids", b"1 two", "expected token ids"),
        ("a.txt", b"", "no tokens"),
        ("a.parquet", b"PAR1 no", "not a complete parquet"),
    ],
)
def test_bad_input_is_named(model_dir, tmp_path, name, content, message, capsys):
    file, output = tmp_path / name, tmp_path / "m.safetensors"
    file.write_bytes(content)
    argv = ["rank", "--tokenizer", str(model_dir), "-o", str(output), "--workers", "1", str(file)]
    assert cli.main(argv) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not output.exists()


def test_a_misspelt_path_suggests_the_right_one(model_dir, tmp_path):
    (tmp_path / "traffic.jsonl").write_text("{}")
    with pytest.raises(TokenMapError, match=r"did you mean traffic\.jsonl"):
        rank(model_dir, str(tmp_path / "trafic.jsonl"))


def test_no_known_end_of_turn_must_be_named(tmp_path, capsys):
    folder = write_tokenizer(tmp_path / "plain", eos=False)
    file, output = tmp_path / "a.txt", tmp_path / "m.safetensors"
    file.write_text(TEXT[0])
    argv = ["rank", "--tokenizer", str(folder), "-o", str(output), str(file)]
    assert cli.main(argv) == 1
    assert "--require" in capsys.readouterr().err
    assert cli.main([*argv, "--require", "300"]) == 0
    assert load_token_map(output).ids[0] == 300


def test_padding_past_the_tokenizer_is_never_ranked(model_dir, tokenizer, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text(TEXT[0])
    size = tokenizer.get_vocab_size()
    token_map = rank(model_dir, str(file), vocab_size=size + 64)
    assert token_map.metadata.vocab_size == size + 64
    assert token_map.ids.max() == size - 1


@settings(max_examples=25, deadline=None)
@given(st.integers(4, 300))
def test_a_cut_is_the_ranking_at_that_size(model_dir, tmp_path_factory, size):
    file = tmp_path_factory.mktemp("cut") / "a.txt"
    file.write_text("\n".join(TEXT))
    whole = rank(model_dir, str(file))
    output = file.with_name("m.safetensors")
    argv = ["rank", "--tokenizer", str(model_dir), "-o", str(output), "--size", str(size)]
    assert cli.main([*argv, "--workers", "1", str(file)]) == 0
    assert load_token_map(output).ids.tolist() == whole.ids[:size].tolist()


def test_help_needs_no_torch():
    code = (
        "import sys; from sgl_frspec import cli\n"
        "try: cli.main(['rank', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_tokens_added_past_the_head_are_left_out(model_dir, tokenizer, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text(TEXT[0] + "<tool_call>")
    beyond = tokenizer.token_to_id("<tool_call>")
    token_map = rank(model_dir, str(file), vocab_size=beyond)
    assert token_map.ids.max() == beyond - 1
    assert beyond not in token_map.metadata.required_ids
    with pytest.raises(TokenMapError, match=f"required id {beyond} is outside"):
        rank(model_dir, str(file), vocab_size=beyond, required_ids=(beyond,))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vocab-size", "290"], "leaves out every end-of-turn token"),
        (["--require", "999999"], "required id 999999 is outside"),
        (["--size", "999999"], "--size 999999 is more than the vocabulary"),
        (["--size", "many"], "many"),
    ],
)
def test_wrong_sizes_are_refused_before_anything_is_read(
    model_dir, tmp_path, flags, message, capsys
):
    argv = ["rank", "--tokenizer", str(model_dir), "-o", str(tmp_path / "m.safetensors"), *flags]
    (tmp_path / "a.txt").write_bytes(b"\xff" * 100)  # reading it would be refused
    assert cli.main([*argv, str(tmp_path / "a.txt")]) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_head_without_end_of_turn_needs_one_named(model_dir, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text(TEXT[0])
    assert rank(model_dir, str(file), vocab_size=290, required_ids=(5,)).ids[0] == 5


def test_a_record_without_end_is_refused(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "MAX_LINE_BYTES", 1 << 20)
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "x"}\n{"text": "' + "x" * (1 << 20))
    with pytest.raises(TokenMapError, match="line 2 is longer than 1 MiB"):
        rank(model_dir, str(file))


def test_memory_does_not_grow_with_a_line(model_dir, tmp_path):
    code = (
        "import re, sys\n"
        "from sgl_frspec import cli\n"
        "status = cli.main(sys.argv[1:])\n"
        "state = open('/proc/self/status').read()\n"
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', state)[1]) // 1024, file=sys.stderr)\n"
        "sys.exit(status)\n"
    )
    line = b"the cat sat on the mat and the dog sat on the log "
    peaks = []
    for mebibytes in (2, 24):
        file, output = tmp_path / "a.txt.gz", tmp_path / "m.safetensors"
        file.write_bytes(gzip.compress(line * (mebibytes * 2**20 // len(line)), 1))
        argv = ["rank", "--tokenizer", str(model_dir), "-o", str(output), "--workers", "1"]
        command = [sys.executable, "-c", code, *argv, str(file)]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        peaks.append(int(run.stderr.split()[-1]))
    # In MiB; the larger text has 22 more of characters and 5 million more of tokens.
    assert peaks[1] - peaks[0] < 15, peaks
