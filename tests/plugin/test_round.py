"""The pieces of a round, greedy and sampled, tested in a process with SGLang."""

from pathlib import Path

import pytest

from tests.plugin.run_cases import case_names, complaints

CASES = [Path(__file__).parent / name for name in ("round_cases.py", "sampling_cases.py")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, list[str]]:
    return complaints(CASES, tmp_path_factory.mktemp("round") / "report.xml")


@pytest.mark.parametrize("name", case_names(CASES))
def test_in_a_process_with_sglang(name, outcomes):
    assert name in outcomes, "the case did not run"
    assert outcomes[name] == []
