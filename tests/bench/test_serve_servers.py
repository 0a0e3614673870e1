"""Starting several servers: their flags and memory, what happens when one does not start."""

import itertools
import os
import sys
import threading
from pathlib import Path

import pytest

from bench.commands import serve
from bench.serving import servers
from bench.serving.machine import GpuState, cpu_seconds, resident_bytes
from bench.serving.plugin_path import write_plugin_metadata
from bench.serving.prompts import Workload
from bench.serving.servers import Settings, kv_tokens_that_fit, running
from bench.serving.variants import Tree, Variant, parse_variants
from sgl_frspec.serve import ServerCommand
from sgl_frspec.server_process import ServerProcess

STUB = Path(__file__).with_name("stub_server.py")


def settings(logs, **changes):
    values = {"gpu": True, "start_together": True, "backend": "triton", "kv_tokens": 1000}
    return Settings(
        Path("target"), Path("draft"), Path("map.pt"), Tree(3, 4, 16), logs,
        batches=(1, 16), start_seconds=20.0, **values | changes,
    )  # fmt: skip


@pytest.fixture
def commands(monkeypatch):
    """The servers' commands, which start stubs."""
    seen = []

    def command(flags, environment, gpu):
        seen.append((list(flags), environment, gpu))
        return ServerCommand([sys.executable, str(STUB), *flags], environment, "gpu")

    monkeypatch.setattr(servers, "server_command", command)
    return seen


def value(flags, name):
    return flags[flags.index(name) + 1]


@pytest.mark.parametrize("together", [True, False])
def test_a_server_that_dies_is_reported_and_the_others_serve(tmp_path, commands, together):
    said: list[str] = []
    variants = parse_variants(["nospec", "bad=eagle --die", "frspec"])
    with running(variants, settings(tmp_path, start_together=together), said.append) as fleet:
        assert [server.variant.name for server in fleet.servers] == ["nospec", "frspec"]
        assert [server.kv_tokens for server in fleet.servers] == [4321, 4321]
        assert list(fleet.failures) == ["bad"]
        assert "ended with status 1" in fleet.failures["bad"]
        assert "CUDA out of memory on purpose" in fleet.failures["bad"]
        assert fleet.idle_cores(seconds=0.3) < 1
        pids = [pid for server in fleet.servers for pid in server.process.processes()]
        assert len(pids) == 2
        assert cpu_seconds(pids) > 0
        assert resident_bytes(pids) > 2e6
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert (tmp_path / "bad-3x4x16.log").read_text().strip().endswith("on purpose")
    assert any(line.startswith("bad FAILED") for line in said)


def test_servers_end_at_the_same_time(tmp_path, commands, monkeypatch):
    stop = ServerProcess.stop
    ending = threading.Barrier(3)
    with running(parse_variants(["nospec", "eagle", "frspec"]), settings(tmp_path), print) as fleet:
        processes = [server.process for server in fleet.servers]

        def stop_beside_the_others(process):
            # Broken, and an error, unless all three are here at once.
            ending.wait(timeout=20)
            monkeypatch.setattr(ServerProcess, "stop", stop)
            stop(process)

        monkeypatch.setattr(ServerProcess, "stop", stop_beside_the_others)
    assert not [pid for process in processes for pid in process.processes()]


def test_flags_of_servers_side_by_side(tmp_path, commands):
    variants = parse_variants(["eagle-map", "frspec", "x=frspec@fa3 --frspec-stock head"])
    with running(variants, settings(tmp_path, flags=("--dtype", "half")), lambda line: None):
        pass
    stock, ours, other = (flags for flags, _, _ in commands)
    assert {value(flags, "--max-total-tokens") for flags in (stock, ours, other)} == {"1000"}
    backends = [value(flags, "--attention-backend") for flags in (stock, ours, other)]
    assert backends == ["triton", "frspec", "fa3"]
    assert len({value(flags, "--port") for flags in (stock, ours, other)}) == 3
    assert other[-2:] == ["--frspec-stock", "head"]
    for flags in (stock, ours, other):
        assert "--sleep-on-idle" in flags
        assert value(flags, "--dtype") == "half"
        i = flags.index("--cuda-graph-bs-decode")
        assert flags[i + 1 : i + 3] == ["1", "16"]
    own = {"--speculative-algorithm", "--attention-backend", "--port"}
    same = [
        [flag for flag, before in zip(flags, ["", *flags], strict=False) if before not in own]
        for flags in (stock, ours)
    ]
    assert same[0] == same[1]


def test_servers_one_after_the_other_get_equal_shares(tmp_path, commands, monkeypatch):
    taken = [0]

    def state():
        # Each server takes its share and 4 GB more, for graphs.
        free = 100e9
        for flags, _, _ in commands:
            free -= free * float(value(flags, "--mem-fraction-static")) + 4e9
        taken.append(round(100e9 - free))
        return GpuState(total=140 << 30, free=round(free), used=0, busy=0.0)

    monkeypatch.setattr(servers, "gpu_state", state)
    variants = parse_variants(["nospec", "eagle", "frspec"])
    with running(variants, settings(tmp_path, start_together=False), lambda line: None):
        pass
    state()
    assert not [flags for flags, _, _ in commands if "--max-total-tokens" in flags]
    ends = sorted(set(taken))
    shares = [later - earlier - 4e9 for earlier, later in itertools.pairwise(ends)]
    assert shares == pytest.approx([82e9 / 3] * 3, rel=2e-3)


def test_a_checkout_is_found_as_a_plugin(tmp_path, commands, monkeypatch):
    monkeypatch.setattr(servers.importlib.metadata, "entry_points", lambda group: _NoPlugins())
    with running([Variant("n", "nospec")], settings(tmp_path), lambda line: None):
        pass
    [(_, environment, _)] = commands
    first, root, kernels, *_ = environment["PYTHONPATH"].split(os.pathsep)
    [entry_points] = Path(first).glob("sgl_frspec-*.dist-info/entry_points.txt")
    assert "frspec = sgl_frspec.plugin:register" in entry_points.read_text()
    assert (Path(root) / "sgl_frspec/plugin.py").exists()
    assert (Path(kernels) / "frspec_kernels").is_dir()
    assert write_plugin_metadata(Path(first)) == Path(first)


class _NoPlugins:
    names = frozenset()


def test_pools_are_as_large_as_wanted_or_as_fits(monkeypatch):
    state = GpuState(total=140 << 30, free=100 * 10**9, used=0, busy=0.0)
    monkeypatch.setattr(servers, "gpu_state", lambda: state)
    assert kv_tokens_that_fit(2, 17 * 10**9, 135_000, 50_000) == 50_000
    assert kv_tokens_that_fit(2, 17 * 10**9, 135_000, 10**9) == (41 - 17) * 10**9 // 135_000
    with pytest.raises(ValueError, match=r"5 servers of 17\.0 GB do not fit .* 100 GB"):
        kv_tokens_that_fit(5, 17 * 10**9, 135_000, 50_000)


def test_cache_tokens_of_a_workload_cover_prompts_answers_and_trees():
    assert Workload(16, 8192).kv_tokens(256, nodes=60, top_k=10, steps=6) >= 16 * (8192 + 256 + 120)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--shape", "8b", "--device", "cpu"], "needs a GPU; the CPU engine serves --shape tiny"),
        (["--shape", "tiny", "--variant", "medusa"], "'medusa' is none of nospec"),
        (["--shape", "tiny", "--tree", "3by4"], "'3by4' is no tree"),
        (["--shape", "tiny", "--tokens", "8"], "--tokens 8 must exceed --short-tokens 32"),
        (["--shape", "tiny", "--workload", "16"], "'16' is no workload: write batch x context"),
        (["--shape", "tiny", "--workload", "0x9"], "must be at least 1"),
        (["--shape", "tiny", "--workload", "1x9", "--batch", "1"], "leave --batch and --context"),
        (["--shape", "tiny", "--batch", "0"], "must be at least 1"),
        (["--merge", "/nowhere"], "no results of `bench serve` in /nowhere"),
        (["--soak", "8", "--variant", "frspec"], "--soak: give nospec"),
        (["--verify-text", "2", "--variant", "frspec"], "--verify-text: give nospec"),
        (
            ["--verify-text", "2", "--soak", "8", "--variant", "frspec"],
            "--verify-text and --soak: give nospec",
        ),
    ],
)
def test_bad_requests_end_with_status_2_and_the_remedy(argv, message, capsys, tmp_path):
    folder = [] if "--merge" in argv else ["--model-folder", str(tmp_path), "--device", "cpu"]
    if "--soak" in argv or "--verify-text" in argv:
        folder = ["--device", "cpu"]
    assert serve.main([*argv, *folder, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
