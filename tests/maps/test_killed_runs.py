"""``frspec rank`` killed without warning, and short of disk or memory."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from sgl_frspec import cli
from sgl_frspec.maps.corpus import counting
from tests.maps.conftest import TEXT

# Ranks with two workers, keeps its state after every batch, and is killed as batch 12 is counted.
KILLED = """
import os, signal, sys
from sgl_frspec import cli
from sgl_frspec.maps.commands import arguments, rank
from sgl_frspec.maps.corpus import counting
from sgl_frspec.maps.rank import RankOptions
counting.BATCH_DOCUMENTS = 3
seen = []
def progress(bar, position):
    seen.append(position)
    if len(seen) == 12:
        os.kill(os.getpid(), signal.SIGKILL)
rank.advance = progress
def options(**given):
    return RankOptions(**given, checkpoint_seconds=0.0)
rank.RankOptions = options
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture
def many_documents(tmp_path):
    file = tmp_path / "many.jsonl"
    rows = [{"text": f"{TEXT[i % 4]} {i} {i * i}"} for i in range(100)]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def test_a_killed_run_leaves_no_process_and_resumes_to_the_same_bytes(
    model_dir, many_documents, tmp_path, monkeypatch
):
    output, whole = tmp_path / "m.safetensors", tmp_path / "whole.safetensors"
    argv = ["rank", "--tokenizer", str(model_dir), "--workers", "2", str(many_documents), "-o"]
    # The pipe stays open as long as a worker lives, and communicate() waits for that.
    child = subprocess.run(
        [sys.executable, "-c", KILLED, *argv, str(output)], capture_output=True, timeout=60
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    assert not output.exists()
    assert (tmp_path / "m.safetensors.partial").exists()
    monkeypatch.setattr(counting, "BATCH_DOCUMENTS", 3)
    resumed = []
    count = counting.DocumentCounter.count
    monkeypatch.setattr(
        counting.DocumentCounter,
        "count",
        lambda self, documents: resumed.append(1) or count(self, documents),
    )
    argv[4] = "1"
    assert cli.main([*argv, str(output)]) == 0
    assert len(resumed) == 34 - 11
    assert cli.main([*argv, str(whole)]) == 0
    assert output.read_bytes() == whole.read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"m.safetensors", "whole.safetensors"} | {
        "many.jsonl"
    }


def test_a_full_disk_keeps_the_counts_for_the_next_try(
    model_dir, many_documents, tmp_path, monkeypatch, capsys
):
    from sgl_frspec.maps.commands import rank

    output = tmp_path / "m.safetensors"
    argv = ["rank", "--tokenizer", str(model_dir), "--workers", "1", "-o", str(output)]
    monkeypatch.setattr(rank, "RankOptions", without_delay(rank.RankOptions))
    sync = os.fsync
    files = []

    def full_at_the_end(descriptor):
        files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if ".partial" not in files[-1]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full_at_the_end)
    assert cli.main([*argv, str(many_documents)]) == 1
    assert "No space left on device; nothing was changed" in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"many.jsonl", "m.safetensors.partial"}
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(
        counting.DocumentCounter, "count", lambda *_: pytest.fail("counted already")
    )
    assert cli.main([*argv, str(many_documents)]) == 0
    assert output.exists()


def without_delay(options):
    return lambda **given: options(**given, checkpoint_seconds=0.0)


def test_a_dead_worker_is_reported(model_dir, many_documents, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(counting, "_count", die)
    output = tmp_path / "m.safetensors"
    argv = ["rank", "--tokenizer", str(model_dir), "--workers", "2", "-o", str(output)]
    assert cli.main([*argv, str(many_documents)]) == 1
    assert "fewer --workers" in capsys.readouterr().err
    assert not output.exists()


def die(documents):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_has_tokenized_in_parallel_can_still_fork_workers(
    model_dir, many_documents, tmp_path
):
    # The threads of the tokenizer's pool do not survive a fork; a worker must not wait for them.
    code = (
        "import sys\n"
        "from tokenizers import Tokenizer\n"
        "from sgl_frspec import cli\n"
        "tokenizer = Tokenizer.from_file(sys.argv[1] + '/tokenizer.json')\n"
        "tokenizer.encode_batch_fast(['the cat sat'] * 200)\n"
        "sys.exit(cli.main(sys.argv[2:]))\n"
    )
    output = tmp_path / "m.safetensors"
    argv = ["rank", "--tokenizer", str(model_dir), "--workers", "2", "-o", str(output)]
    command = [sys.executable, "-c", code, str(model_dir), *argv, str(many_documents)]
    run = subprocess.run(command, capture_output=True, timeout=60)
    assert run.returncode == 0, run.stderr.decode()
    assert output.exists()
