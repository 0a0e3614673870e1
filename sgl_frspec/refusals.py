"""What FRSPEC cannot work with, refused in the launching process with the reason."""

from typing import Any

from sgl_frspec.model_config import read_config
from sgl_frspec.options import OptionError, read_options

NAME = "FRSPEC"


def refuse_unsupported(server_args: Any) -> None:
    """Name the first option that FRSPEC does not implement, and what to do instead."""
    if not server_args.speculative_draft_model_path:
        raise OptionError(
            f"{NAME} needs --speculative-draft-model-path: an EAGLE-2 draft of this target"
        )
    _refuse_unsupported_draft(server_args)
    _refuse_unsupported_target(server_args)
    refusals = {
        "tensor parallelism (--tp-size > 1)": server_args.tp_size > 1,
        "pipeline parallelism (--pp-size > 1)": server_args.pp_size > 1,
        "decode context parallelism (--dcp-size > 1)": server_args.dcp_size > 1,
        "--enable-two-batch-overlap": server_args.enable_two_batch_overlap,
        "--enable-pdmux": server_args.enable_pdmux,
        "--enable-dp-attention": server_args.enable_dp_attention
        or getattr(server_args, "attn_dp_size", 1) > 1,
        "--enable-multi-layer-eagle": bool(server_args.enable_multi_layer_eagle),
        "--enable-lora": bool(server_args.enable_lora or server_args.lora_paths),
        "--startup-weight-load-mode overlap": getattr(
            server_args, "startup_weight_load_mode", "serial"
        )
        == "overlap",
        "--disaggregation-mode": server_args.disaggregation_mode not in (None, "null"),
    }
    for option, given in refusals.items():
        if given:
            raise OptionError(
                f"{NAME} does not support {option}; leave it out, or use"
                " --speculative-algorithm EAGLE"
            )
    if server_args.enable_custom_logit_processor:
        raise OptionError(
            "--enable-custom-logit-processor: the verification of drafted tokens calls none, under"
            f" {NAME} as under SGLang's EAGLE, so that they would change a reply's first token"
            " alone; leave it out, or serve without speculation"
        )
    refuse_rounding_by_batch(server_args)


def refuse_rounding_by_batch(server_args: Any) -> None:
    """Norms of the target's whose sums follow the batch are not deterministic inference."""
    if server_args.enable_deterministic_inference and read_options().target_norms:
        raise OptionError(
            "--frspec-target-norms under --enable-deterministic-inference: the norms' launches"
            " follow the batch, and so would the rounding of sums; leave one of them out"
        )


def _refuse_unsupported_draft(server_args: Any) -> None:
    config = read_config(
        server_args,
        server_args.speculative_draft_model_path,
        server_args.speculative_draft_model_revision,
    )
    architecture = (config.architectures or ["an unnamed architecture"])[0]
    if "eagle3" in architecture.lower() or getattr(config, "draft_vocab_size", None):
        raise OptionError(
            f"the draft ({architecture}) has a reduced vocabulary of its own, trained into its"
            f" head; use --speculative-algorithm EAGLE3 for it. {NAME} reduces the head of EAGLE-2"
            " drafts, which share the target's"
        )


def _refuse_unsupported_target(server_args: Any) -> None:
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import ModelConfig

    config = ModelConfig.from_server_args(server_args)
    if mambaish_config(config) is not None:
        [architecture, *_] = config.hf_config.architectures or ["an unnamed architecture"]
        raise OptionError(
            f"the target ({architecture}) has layers with a recurrent state, which {NAME} does not"
            " take back when it rejects drafted tokens; use --speculative-algorithm EAGLE for it"
        )
