"""The attention backend ``frspec``: results in a process with SGLang, and how it is chosen."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from sgl_frspec.attention_backend_registration import _chosen, _decode_hook, _default_hook
from tests.plugin.run_cases import case_names, complaints

CASES = sorted(Path(__file__).parent.glob("attention_*_cases.py"))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return complaints(CASES, tmp_path_factory.mktemp("cases") / "report.xml")


@pytest.mark.parametrize("name", case_names(CASES))
def test_in_a_process_with_sglang(name, outcomes):
    assert name in outcomes, "the case did not run"
    assert outcomes[name] == []


def arguments(**changes) -> SimpleNamespace:
    usual = {
        "speculative_algorithm": "frspec",
        "device": "cuda",
        "enable_deterministic_inference": False,
        "kv_cache_dtype": "auto",
        "dcp_size": 1,
    }
    return SimpleNamespace(**(usual | changes))


def stock_default(server_args, use_mla_backend, model_config) -> str:
    return "fa3"


def test_frspec_servers_get_frspec_by_default_and_the_log_says_so(caplog):
    caplog.set_level("INFO")
    assert _default_hook(stock_default, arguments(), False, None) == "frspec"
    [line] = caplog.messages
    assert "attention backend frspec" in line
    assert "--attention-backend triton" in line


@pytest.mark.parametrize("algorithm", [None, "EAGLE"])
def test_other_servers_keep_their_default(algorithm, caplog):
    caplog.set_level("INFO")
    chosen = _default_hook(stock_default, arguments(speculative_algorithm=algorithm), False, None)
    assert chosen == "fa3"
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("changes", "latent", "reason"),
    [
        ({"device": "cpu"}, False, "the device is not CUDA"),
        ({}, True, "latent attention"),
        ({"enable_deterministic_inference": True}, False, "--enable-deterministic-inference"),
        ({"kv_cache_dtype": "fp8_e5m2"}, False, "--kv-cache-dtype"),
        ({"dcp_size": 2}, False, "--dcp-size"),
    ],
)
def test_what_speaks_against_it_is_named(changes, latent, reason, caplog):
    caplog.set_level("INFO")
    assert _default_hook(stock_default, arguments(**changes), latent, None) == "fa3"
    [line] = caplog.messages
    assert "attention backend fa3; not frspec" in line
    assert reason in line


def factory(own: str | None, prefill: str, decode: str, steps: int = 3) -> SimpleNamespace:
    """SGLang's factory of draft backends, of a server with these choices."""
    backends = SimpleNamespace(get_attention_backends=lambda: (prefill, decode))
    return SimpleNamespace(
        draft_attn_backend=own, server_args=backends, speculative_num_steps=steps, topk=4
    )


@pytest.mark.parametrize(
    ("own", "prefill", "decode", "chosen"),
    [
        (None, "frspec", "frspec", {"frspec"}),
        ("frspec", "fa3", "fa3", {"frspec"}),
        ("fa3", "frspec", "frspec", {"fa3"}),
        (None, "fa3", "frspec", {"fa3", "frspec"}),
    ],
)
def test_the_drafts_own_choice_goes_before_the_servers(own, prefill, decode, chosen):
    made = factory(own, prefill, decode)
    assert {_chosen(made, decode=False), _chosen(made, decode=True)} == chosen


def test_drafts_of_other_backends_are_sglangs():
    assert _decode_hook(lambda made: ("stock", made.topk), factory("fa3", "frspec", "frspec")) == (
        "stock",
        4,
    )


def test_one_step_needs_no_decode_backend():
    assert _decode_hook(pytest.fail, factory(None, "frspec", "frspec", steps=1)) is None
