"""The whole command on the real engine: two servers beside each other on the CPU."""

import json

import pytest

from bench.commands import serve
from bench.serving.chain_model import make_chain_model
from bench.serving.shapes import SHAPES

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOKENS, SHORT = 40, 8


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    status = serve.main(
        [
            *("--shape", "tiny", "--model-folder", str(folder / "models"), "--device", "cpu"),
            *("--variant", "eagle-map", "--variant", "small=frspec --frspec-map-size 1000"),
            *("--batch", "1", "3", "--context", "40", "--alternations", "2"),
            *("--tokens", str(TOKENS), "--short-tokens", str(SHORT)),
            *("--out", str(folder / "out")),
        ]
    )
    return status, folder


def test_every_answer_is_the_chain_and_accept_lengths_follow_from_it(run):
    status, folder = run
    assert status == 0
    document = json.loads((folder / "out/serve.json").read_text())
    rows = document["rows"]
    cases = [(row["variant"], row["batch"]) for row in rows]
    assert cases == [("eagle-map", 1), ("small", 1), ("eagle-map", 3), ("small", 3)]
    chain = make_chain_model(folder / "models/tiny", SHAPES["tiny"]).chain
    expected = (TOKENS - 1) / chain.cycles(0, TOKENS, 3, mapped=True)
    for row in rows:
        assert row["wrong"] == 0
        assert row["requests"] == 2 * 2 * row["batch"]
        assert len(row["ms_samples"]) == 2
        assert row["expected_accept"] == expected
        assert row["backend"] == "frspec_cpu"
    assert [row["accept_length"] for row in rows if row["variant"] == "eagle-map"] == [expected] * 2
    # A smaller map accepts less, and the command says what was asked of the server.
    small = [row for row in rows if row["variant"] == "small"]
    assert all(row["accept_length"] <= expected for row in small)
    assert small[0]["flags"].endswith("--frspec-map-size 1000")


def test_results_are_merged_into_one_table_and_a_plot(run, tmp_path, capsys):
    _, folder = run
    out = folder / "out"
    assert serve.main(["--merge", str(out), str(out), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "tiny, tree 3x4x16, batch 3, context 40 (2 alternations)" in printed
    assert len(json.loads((tmp_path / "serve.json").read_text())["rows"]) == 8
    assert (tmp_path / "serve.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "serve.md").read_text().startswith("| case | variant | ms/round |")
    assert sorted(path.name for path in (out / "logs").glob("*.log")) == [
        "eagle-map-3x4x16.log",
        "small-3x4x16.log",
    ]
