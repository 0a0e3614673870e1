import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_round_compiles_on_sm_90_and_no_step_or_batch_size_has_a_kernel_of_its_own(tmp_path):
    """First, middle and last step, with and without hidden states; the last copies none."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "triton_kernels")))
    environment = os.environ | {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.tree_as_served"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = dict(line.split() for line in done.stdout.splitlines())
    assert counts["grow_tree_kernel"] == "5"
    assert counts["build_tree_kernel"] == "3"  # no byte mask, one of each kind
