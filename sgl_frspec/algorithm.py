"""The speculative algorithm ``FRSPEC`` as SGLang's scheduler sees it.

SGLang applies the defaults and checks of its EAGLE family by the algorithm's *name*, so a
registered algorithm brings its own. What the scheduler asks besides is answered by SGLang's own
methods, called on this class: they depend on ``is_eagle()`` and its siblings only.
"""

import logging
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sgl_frspec.hot_ids import read_hot_ids
from sgl_frspec.options import OptionError, read_options, set_option
from sgl_frspec.refusals import NAME, refuse_unsupported

logger = logging.getLogger(__name__)

DEFAULT_STEPS = 3
DEFAULT_TOP_K = 4
DEFAULT_DRAFT_TOKENS = 16
# The draft's cache and graphs grow with the batch: SGLang's own default for its EAGLE family.
DEFAULT_MAX_RUNNING_REQUESTS = 48
# Backends whose draft decoding gives every branch of a tree pages of its own.
PAGED_TREE_BACKENDS = ("flashinfer", "fa3", "triton", "frspec", "frspec_cpu")
CHAIN_ONLY_BACKENDS = ("trtllm_mha",)
# What the kernels of the token tree take; frspec_kernels.tree_args has the same, with torch.
MAX_STEPS, MAX_TOP_K, MAX_NODES = 16, 32, 1024


class FrSpecAlgorithm(CustomSpecAlgo):
    """EAGLE with a draft that proposes only frequent tokens."""

    def is_eagle(self) -> bool:
        """True: the draft reads the target's hidden states and shares its embedding and head."""
        return True

    def supports_grammar_overlap(self) -> bool:
        """True: verification is EAGLE's, which waits for the grammar where it must."""
        return True

    def need_topk(self) -> bool:
        """Whether cycles relay the draft's first candidates."""
        return SpeculativeAlgorithm.need_topk(self)  # pyright: ignore[reportArgumentType]

    def carries_draft_hidden_states(self) -> bool:
        """Whether a disaggregated prefill sends the draft's hidden states along."""
        return SpeculativeAlgorithm.carries_draft_hidden_states(
            self  # pyright: ignore[reportArgumentType]
        )

    def create_future_map(self, *args: Any, **kwargs: Any) -> Any:
        """The relay between overlapped cycles."""
        return SpeculativeAlgorithm.create_future_map(
            self,  # pyright: ignore[reportArgumentType]
            *args,
            **kwargs,
        )

    def handle_server_args(self, server_args: Any) -> None:
        """Fill in defaults, refuse what cannot work, and check the token map.

        Runs in the launching process, before any weights are loaded.

        Raises:
            OptionError: an option that FRSPEC cannot work with.
            TokenMapError: a wrong token map.
        """
        refuse_unsupported(server_args)
        take_over_rejection_sampling(server_args)
        set_defaults(server_args)
        check_tree(server_args)
        read_hot_ids(server_args, announce=True)


def take_over_rejection_sampling(server_args: Any) -> None:
    """Draw drafted tokens if ``--speculative-use-rejection-sampling`` is given.

    SGLang's own implementation, for chains over the target's vocabulary, must not see the option.

    Raises:
        OptionError: it is given beside options that it cannot work with.
    """
    draws = bool(server_args.speculative_use_rejection_sampling)
    set_option("draws", draws)
    if not draws:
        return
    flag = "--speculative-use-rejection-sampling"
    thresholds = (
        server_args.speculative_accept_threshold_single,
        server_args.speculative_accept_threshold_acc,
    )
    if thresholds != (1.0, 1.0):
        raise OptionError(
            f"{flag} accepts drawn tokens by p / q, without thresholds: leave out"
            " --speculative-accept-threshold-single and -acc, or the option"
        )
    left = [piece for piece in ("head", "tree", "accept") if not read_options().uses(piece)]
    if left:
        raise OptionError(
            f"{flag} needs FRSPEC's own {', '.join(left)}: leave {flag} out, or --frspec-stock"
        )
    server_args.speculative_use_rejection_sampling = False


def set_defaults(server_args: Any) -> None:
    """The defaults that SGLang gives its own EAGLE family, and what a CPU cannot do."""
    tree = {
        "--speculative-num-steps": server_args.speculative_num_steps,
        "--speculative-eagle-topk": server_args.speculative_eagle_topk,
        "--speculative-num-draft-tokens": server_args.speculative_num_draft_tokens,
    }
    missing = [flag for flag, value in tree.items() if value is None]
    if len(missing) == len(tree):
        server_args.speculative_num_steps = DEFAULT_STEPS
        server_args.speculative_eagle_topk = DEFAULT_TOP_K
        server_args.speculative_num_draft_tokens = DEFAULT_DRAFT_TOKENS
    elif missing == ["--speculative-num-draft-tokens"] and server_args.speculative_eagle_topk == 1:
        server_args.speculative_num_draft_tokens = server_args.speculative_num_steps + 1
    elif missing:
        raise OptionError(f"give {' and '.join(missing)} too, or none of {', '.join(tree)}")
    if server_args.max_running_requests is None:
        server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
        logger.warning(
            "--max-running-requests is set to %d for speculative decoding",
            DEFAULT_MAX_RUNNING_REQUESTS,
        )
    if server_args.enable_mixed_chunk:
        server_args.enable_mixed_chunk = False
        logger.warning("mixed chunked prefill is off: %s does not support it", NAME)
    if server_args.device == "cpu" and not server_args.disable_overlap_schedule:
        server_args.disable_overlap_schedule = True
        logger.warning("overlap scheduling is off: SGLang has none for speculation on a CPU")


def check_tree(server_args: Any) -> None:
    """Refuse shapes of the token tree that the worker or the attention backend cannot build.

    Raises:
        OptionError: naming the numbers and which to change.
    """
    steps = server_args.speculative_num_steps
    top_k = server_args.speculative_eagle_topk
    nodes = server_args.speculative_num_draft_tokens
    if min(steps, top_k) < 1 or nodes < 2:
        raise OptionError(
            f"steps {steps}, top-k {top_k}, draft tokens {nodes}: at least 1, 1 and 2 are needed"
        )
    if top_k == 1 and nodes != steps + 1:
        logger.warning("a chain of %d steps verifies %d tokens, not %d", steps, steps + 1, nodes)
        server_args.speculative_num_draft_tokens = nodes = steps + 1
    largest = top_k + (steps - 1) * top_k**2
    if nodes - 1 > largest:
        raise OptionError(
            f"--speculative-num-draft-tokens {nodes} asks for {nodes - 1} drafted tokens, but"
            f" {steps} steps of top-k {top_k} draft {largest}; lower it or draft more"
        )
    limits = {
        "--speculative-num-steps": (steps, MAX_STEPS),
        "--speculative-eagle-topk": (top_k, MAX_TOP_K),
        "--speculative-num-draft-tokens": (nodes, MAX_NODES),
    }
    for flag, (value, limit) in limits.items():
        if value > limit:
            raise OptionError(f"{flag} {value}: {NAME} grows trees of at most {limit}; lower it")
    backends = {
        server_args.attention_backend,
        server_args.decode_attention_backend,
        server_args.prefill_attention_backend,
        server_args.speculative_draft_attention_backend,
    } - {None}
    if top_k > 1 and backends & set(CHAIN_ONLY_BACKENDS):
        raise OptionError(
            f"attention backend {', '.join(backends & set(CHAIN_ONLY_BACKENDS))} verifies chains"
            " only; use --speculative-eagle-topk 1 or another --attention-backend"
        )
    unpaged = backends - set(PAGED_TREE_BACKENDS)
    if top_k > 1 and (server_args.page_size or 1) > 1 and unpaged:
        raise OptionError(
            f"top-k {top_k} with page size {server_args.page_size} needs one of the attention"
            f" backends {', '.join(PAGED_TREE_BACKENDS)}, not {', '.join(sorted(unpaged))}; or use"
            " --page-size 1"
        )
