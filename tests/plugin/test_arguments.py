"""FRSPEC's defaults and refusals, through SGLang's own argument resolution."""

import argparse
import json

import pytest
import torch

from sgl_frspec.options import (
    ENVIRONMENT_VARIABLE,
    PIECES,
    OptionError,
    Options,
    add_server_flags,
    read_options,
)


@pytest.fixture(scope="session")
def flags(server_flags, tmp_path_factory) -> list[str]:
    file = tmp_path_factory.mktemp("map") / "map.pt"
    torch.save(list(range(500, 0, -1)), file)
    return [*server_flags, "--speculative-token-map", str(file)]


def tree(steps, top_k, nodes):
    return (
        f"--speculative-num-steps {steps} --speculative-eagle-topk {top_k}"
        f" --speculative-num-draft-tokens {nodes}"
    )


DRAWN = "--speculative-use-rejection-sampling"
# Extra flags, and what SGLang's arguments are then.
ACCEPTED = {
    "": {
        "disable_overlap_schedule": True,
        "max_running_requests": 48,
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 16,
    },
    "--max-running-requests 7 --enable-mixed-chunk": {
        "max_running_requests": 7,
        "enable_mixed_chunk": False,
    },
    tree(5, 1, 9): {"speculative_num_steps": 5, "speculative_num_draft_tokens": 6},
    "--speculative-num-steps 2 --speculative-eagle-topk 1": {"speculative_num_draft_tokens": 3},
    tree(3, 2, 11): {"speculative_num_draft_tokens": 11},
    "--frspec-map-size 100": {},
    "--frspec-stock head,round --frspec-target-norms": {},
    "--page-size 16": {},
    DRAWN: {"speculative_use_rejection_sampling": False},  # SGLang's own must not see it
    DRAWN + " " + tree(3, 1, 4): {"speculative_use_rejection_sampling": False},
}
# Extra flags, and what the message must name: the fault, and what to do.
REFUSED = {
    "--speculative-num-steps 2": ["give --speculative-eagle-topk", "or none of"],
    tree(3, 2, 12): ["12 asks for 11 drafted tokens", "draft 10", "lower it"],
    tree(0, 1, 2): ["steps 0"],
    tree(17, 1, 9): ["--speculative-num-steps 17", "at most 16"],
    tree(17, 2, 9): ["--speculative-num-steps 17", "at most 16"],
    tree(3, 33, 9): ["--speculative-eagle-topk 33", "at most 32"],
    tree(16, 32, 1025): ["--speculative-num-draft-tokens 1025", "at most 1024"],
    "--tp-size 2": ["tensor parallelism", "--speculative-algorithm EAGLE"],
    DRAWN + " --frspec-stock tree,round": ["needs FRSPEC's own tree", "leave " + DRAWN],
    DRAWN + " --speculative-accept-threshold-single 0.5": ["without thresholds", "leave out"],
    DRAWN + " --speculative-accept-threshold-acc 0.5": ["--speculative-accept-threshold-single"],
    "--enable-lora": ["--enable-lora"],
    "--lora-paths a=/nowhere": ["--enable-lora"],
    "--enable-custom-logit-processor": ["calls none", "leave it out"],
    "--pp-size 2": ["pipeline parallelism"],
    "--dcp-size 2": ["decode context parallelism", "--speculative-algorithm EAGLE"],
    "--enable-two-batch-overlap": ["--enable-two-batch-overlap"],
    "--enable-pdmux": ["--enable-pdmux"],
    "--enable-multi-layer-eagle": ["--enable-multi-layer-eagle"],
    "--disaggregation-mode decode": ["--disaggregation-mode"],
    "--page-size 16 --attention-backend torch_native": ["page size 16", "--page-size 1"],
    "--speculative-draft-attention-backend trtllm_mha": ["trtllm_mha verifies chains"],
    "--page-size 16 --speculative-draft-attention-backend torch_native": ["not torch_native"],
    "--frspec-map-size 2": ["2 ids", "top-k 4", "larger map"],
    "--frspec-map-size 501": ["size 501", "500 ids"],
}


@pytest.mark.parametrize("extra", ACCEPTED)
def test_defaults(extra, resolve, flags):
    outcome = resolve(flags + extra.split())
    assert outcome["error"] is None
    assert ACCEPTED[extra].items() <= outcome["arguments"].items()


@pytest.mark.parametrize("extra", REFUSED)
def test_refusals(extra, resolve, flags):
    error = resolve(flags + extra.split())["error"]
    assert error["type"] in ("OptionError", "TokenMapError")
    assert "\n" not in error["message"]
    for words in REFUSED[extra]:
        assert words in error["message"]


def test_size_of_the_map_is_said(resolve, flags):
    log = resolve([*flags, "--frspec-map-size", "100"])["log"]
    assert any("over 100 of 512 tokens (20%)" in line for line in log)
    log = resolve(flags)["log"]
    assert any("over 500 of 512 tokens (98%)" in line for line in log)


def test_flags_in_a_configuration_file(resolve, flags, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("frspec-map-size: 100\nfrspec-target-norms: true\nfrspec-stock: head,round\n")
    outcome = resolve([*flags, "--config", str(file)])
    assert outcome["error"] is None
    assert outcome["options"] == {
        "map_size": 100, "stock": ["head", "round"], "target_norms": True, "draws": False,
    }  # fmt: skip


def test_servers_without_frspec_are_left_alone(resolve, flags):
    """The same model, plain and with SGLang's own algorithm, and none of our log lines."""
    at = flags.index("--speculative-algorithm")
    eagle = [*flags[: at + 1], "EAGLE", *flags[at + 2 :]]
    plain = flags[:at]
    for outcome in (resolve(eagle), resolve([*plain, "--device", "cpu"])):
        assert outcome["error"] is None
        assert not any("FRSPEC" in line for line in outcome["log"])


def test_a_target_with_recurrent_layers_is_refused(resolve, flags, chain, tmp_path):
    config = json.loads((chain.target / "config.json").read_text())
    config |= {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    at = flags.index("--model-path")
    # SGLang's other way of keeping states asks for a GPU before our turn comes.
    states = ["--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"]
    error = resolve([*flags[: at + 1], str(tmp_path), *flags[at + 2 :], *states])["error"]
    assert error["type"] == "OptionError", error
    assert "Qwen3NextForCausalLM" in error["message"]
    assert "--speculative-algorithm EAGLE" in error["message"]


def test_an_eagle3_draft_is_refused(resolve, flags, chain, tmp_path):
    config = json.loads((chain.draft / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLMEagle3"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    at = flags.index("--speculative-draft-model-path")
    error = resolve([*flags[: at + 1], str(tmp_path), *flags[at + 2 :]])["error"]
    assert error["type"] == "OptionError"
    assert "--speculative-algorithm EAGLE3" in error["message"]


class TestOptions:
    @pytest.fixture(autouse=True)
    def _clean(self, monkeypatch):
        # Set first, so that what a test's parser writes is undone too.
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, "{}")

    def test_a_flag_reaches_processes_through_the_environment(self):
        parser = argparse.ArgumentParser()
        add_server_flags(parser)
        parser.parse_args([])
        assert read_options().map_size is None
        parser.parse_args(["--frspec-map-size", "77"])
        assert read_options().map_size == 77

    def test_flags_add_up(self):
        parser = argparse.ArgumentParser()
        add_server_flags(parser)
        assert read_options() == Options()
        assert all(read_options().uses(piece) for piece in PIECES)
        parser.parse_args(["--frspec-stock", "tree,head", "--frspec-map-size", "5"])
        parser.parse_args(["--frspec-target-norms"])
        options = read_options()
        assert options == Options(5, ("tree", "head"), target_norms=True)
        assert [piece for piece in PIECES if not options.uses(piece)] == ["head", "tree"]
        with pytest.raises(KeyError, match="tail"):
            options.uses("tail")

    def test_a_wrong_piece_is_refused_by_the_parser(self, capsys):
        parser = argparse.ArgumentParser()
        add_server_flags(parser)
        with pytest.raises(SystemExit):
            parser.parse_args(["--frspec-stock", "head,tail"])
        assert "'tail' is none of head, tree, accept, norms, round" in capsys.readouterr().err

    @pytest.mark.parametrize("value", ["0", "-3", "many"])
    def test_a_wrong_flag_is_refused_by_the_parser(self, value, capsys):
        parser = argparse.ArgumentParser()
        add_server_flags(parser)
        with pytest.raises(SystemExit):
            parser.parse_args(["--frspec-map-size", value])
        assert "--frspec-map-size" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "text",
        [
            "[1]",
            "{",
            '{"size": 3}',
            '{"map_size": 0}',
            '{"map_size": true}',
            '{"map_size": "9"}',
            '{"stock": "head"}',
            '{"stock": ["tail"]}',
            '{"target_norms": 1}',
            '{"draws": "yes"}',
        ],
    )
    def test_a_wrong_environment_is_refused(self, text, monkeypatch):
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, text)
        with pytest.raises(OptionError, match=ENVIRONMENT_VARIABLE):
            read_options()
