"""The contract table: true of the oldest and newest release and of our code; drift is named."""

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_frspec import plugin
from sgl_frspec.contract import NEEDS, SUPPORTED
from sgl_frspec.contract_check import check_contract, installed_tree, problem
from sgl_frspec.source_tree import SourceTree
from tests.plugin.used_names import server_arguments, sources, used_names

ROOT = Path(__file__).parents[2]
OLDEST = ROOT / ".cache" / f"sglang-{SUPPORTED[0]}"


@pytest.fixture(scope="session")
def newest() -> SourceTree:
    tree = installed_tree()
    assert tree, "SGLang is not installed: run `make`"
    return tree


@pytest.fixture(scope="session")
def oldest() -> SourceTree:
    assert (OLDEST / "sglang/version.py").exists(), (
        f"{OLDEST} lacks SGLang's source: run `make unit`"
    )
    return SourceTree(OLDEST)


def test_newest_release_is_the_installed_one():
    from importlib.metadata import version

    assert version("sglang") == SUPPORTED[1]


def test_newest_release_meets_all(newest):
    assert check_contract(newest, cpu_engine=True) == []


def test_oldest_release_meets_all_but_the_cpu_engine(oldest):
    assert check_contract(oldest, cpu_engine=False) == []


def test_optional_names_exist_in_one_release(oldest, newest):
    """An optional need that no release has would hide a typing error."""
    for need in (need for need in NEEDS if need.optional):
        strict = dataclasses.replace(need, optional=False)
        assert None in [problem(tree, strict) for tree in (oldest, newest)], need


def test_table_has_no_entry_twice():
    names = [str(need) for need in NEEDS]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("file", sources(), ids=lambda f: f.name)
def test_everything_that_our_code_uses_is_in_the_table(file, newest):
    table = {(need.module, need.name) for need in NEEDS}
    prefixes = {(m, n.rpartition(".")[0]) for m, n in table if "." in n}
    missing = used_names(file.read_text(), newest) - table - prefixes
    assert missing == set()
    fields = {need.name for need in NEEDS if need.kind == "field"}
    assert server_arguments(file.read_text()) - fields == set()


def test_every_field_in_the_table_is_used():
    used = set().union(*(server_arguments(file.read_text()) for file in sources()))
    assert {need.name for need in NEEDS if need.kind == "field"} - used == set()


def test_scan_finds_each_way_of_using_sglang(newest):
    source = """
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
T = "sglang.srt.managers.scheduler.Scheduler.run_batch"
class W(EAGLEWorkerV2):
    def verify(self, batch): return self.target_worker, self.own
    def unrelated(self): self.own = eagle_worker_v2.fast_topk
    def lengths(self, batch): return batch.seq_lens, self.target_worker.model_runner.model
def f(batch: "ForwardBatch"): return batch.seq_lens
"""
    worker = "sglang.srt.speculative.eagle_worker_v2"
    assert used_names(source, newest) == {
        (worker, "EAGLEWorkerV2"),
        (worker, "EAGLEWorkerV2.verify"),
        (worker, "EAGLEWorkerV2.target_worker"),
        (worker, "fast_topk"),
        ("sglang.srt.model_executor.forward_batch_info", "ForwardBatch"),
        ("sglang.srt.model_executor.forward_batch_info", "ForwardBatch.seq_lens"),
        ("sglang.srt.managers.scheduler", "Scheduler.run_batch"),
        ("sglang.srt.managers.schedule_batch", "ScheduleBatch.seq_lens"),
        ("sglang.srt.model_executor.model_runner", "ModelRunner.model"),
    }
    assert server_arguments("server_args.a = 1; getattr(server_args, 'b', 0)") == {"a", "b"}


DRIFTS = {
    "a renamed method": (
        "srt/speculative/eagle_worker_v2.py",
        "def init_lm_head(self)",
        "def make_lm_head(self)",
        "EagleDraftWorker.init_lm_head is missing",
    ),
    "a new required parameter": (
        "srt/models/llama.py",
        "def set_embed_and_head(self, embed, head)",
        "def set_embed_and_head(self, embed, head, norm)",
        "set_embed_and_head takes (self, embed, head, norm), not (self, embed, head)",
    ),
    "a keyword that is gone": (
        "srt/plugins/hook_registry.py",
        "hook_type: HookType = HookType.AFTER,\n        *,",
        "kind: HookType = HookType.AFTER,\n        *,",
        "HookRegistry.register takes (cls, target, hook, kind=, source=), without hook_type",
    ),
    "a class made elsewhere": (
        "srt/speculative/eagle_worker_v2.py",
        "EagleDraftWorker(\n                server_args,",
        "draft_worker_class()(\n                server_args,",
        "EAGLEWorkerV2.__init__ no longer uses EagleDraftWorker",
    ),
    "a server argument that is gone": (
        "srt/arg_groups/fields/spec.py",
        "    speculative_token_map: A[",
        "    speculative_hot_ids: A[",
        "speculative_token_map is no server argument",
    ),
}


@pytest.fixture(scope="module")
def shadow(newest, tmp_path_factory) -> Path:
    """SGLang's tree as symbolic links, so that single files can be replaced."""
    folder = tmp_path_factory.mktemp("shadow")
    shutil.copytree(
        newest.root / "sglang",
        folder / "sglang",
        ignore=shutil.ignore_patterns("__pycache__", "multimodal_gen", "jit_kernel"),
        copy_function=os.symlink,
    )
    return folder


@contextlib.contextmanager
def drifted(shadow: Path, file: str, old: str, new: str) -> Iterator[None]:
    """``shadow`` with one line changed."""
    path = shadow / "sglang" / file
    original = path.readlink()
    text = path.read_text()
    assert text.count(old) == 1, (file, old)
    path.unlink()
    path.write_text(text.replace(old, new))
    yield
    path.unlink()
    path.symlink_to(original)


@pytest.mark.parametrize("drift", DRIFTS, ids=list(DRIFTS))
def test_drift_is_found_and_named(drift, shadow):
    file, old, new, message = DRIFTS[drift]
    with drifted(shadow, file, old, new):
        [found] = check_contract(SourceTree(shadow), cpu_engine=True)
    assert message in str(found)


def test_a_drifted_sglang_loads_without_frspec_and_says_why(shadow):
    """The whole way: SGLang's own plugin loading, in a process of its own."""
    file, old, new, message = DRIFTS["a renamed method"]
    code = (
        "import logging; logging.basicConfig(level='ERROR')\n"
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.speculative.spec_info import SpeculativeAlgorithm as S\n"
        "print(S.from_string('EAGLE').name)\n"
        "try: S.from_string('FRSPEC')\n"
        "except ValueError as error: print(error)\n"
    )
    with drifted(shadow, file, old, new):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": f"{shadow}{os.pathsep}{ROOT}"},
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout == "EAGLE\nUnknown speculative algorithm name: FRSPEC\n"
    [line] = [line for line in done.stderr.splitlines() if "FRSPEC" in line]
    assert message in line
    assert all(version in line for version in SUPPORTED)


def test_an_older_sglang_with_the_cpu_engine_is_told_which_it_needs(oldest, monkeypatch, caplog):
    monkeypatch.setattr(plugin, "installed_tree", lambda: oldest)
    monkeypatch.setattr(plugin.cpu_engine, "is_enabled", lambda: True)
    plugin.register()
    [line] = caplog.messages
    assert f"release of the CPU engine, {SUPPORTED[1]}, in " in line
    assert "sglang.srt.arg_groups.choices.add_attention_backend_choices is missing" in line
