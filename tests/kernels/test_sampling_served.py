import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_acceptance_and_proposals_compile_on_sm_90_and_no_step_has_a_kernel_of_its_own(tmp_path):
    """Of the acceptance: without truncation and with it, and with it level by level; slots."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "triton_kernels")))
    environment = os.environ | {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.sampling_as_served"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = dict(line.split() for line in done.stdout.splitlines())
    assert counts["draw_children_kernel"] == "1"
    assert counts["narrow_bracket_kernel"] == "6"  # twice: all rows, level by level, single nodes
    assert counts["collect_candidates_kernel"] == "3"
    assert counts["softmax_parts_kernel"] == "4"  # and without truncation
