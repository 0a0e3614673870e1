"""The entry point ``sglang.srt.plugins``: called by SGLang in every process that it starts."""

import logging
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sgl_frspec import cpu_engine
from sgl_frspec.attention_backend_registration import register_attention_backend
from sgl_frspec.contract import SUPPORTED
from sgl_frspec.contract_check import check_contract, installed_tree
from sgl_frspec.maps import TokenMapError
from sgl_frspec.options import OptionError, add_server_flags

if TYPE_CHECKING:
    import argparse

logger = logging.getLogger(__name__)

_RELEASES = f"releases {' to '.join(SUPPORTED)}"
_ADD_CLI_ARGS = "sglang.srt.server_args.ServerArgs.add_cli_args"


def register() -> None:
    """Register the algorithm ``FRSPEC``, its flags, its attention backend or the CPU engine.

    If the installed SGLang is not what :mod:`sgl_frspec.contract` describes, one line says what
    differs and nothing is registered.
    """
    tree = installed_tree()
    drifts = check_contract(tree, cpu_engine=cpu_engine.is_enabled()) if tree else []
    if drifts:
        cpu_only = all(drift.need.cpu_only for drift in drifts)
        logger.error(
            "FRSPEC is not available: this SGLang differs from the supported %s in %s"
            " (`frspec check` lists everything)",
            f"release of the CPU engine, {SUPPORTED[1]}," if cpu_only else _RELEASES,
            "; ".join(map(str, drifts[:3])),
        )
        return
    if cpu_engine.is_enabled():
        cpu_engine.register()
    else:
        register_attention_backend()
    _register_flags()
    _register_algorithm()
    _print_users_errors_plainly()


def _register_flags() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_ADD_CLI_ARGS, _after_add_cli_args, hook_type=HookType.AFTER)


def _after_add_cli_args(result: Any, parser: "argparse.ArgumentParser") -> None:
    add_server_flags(parser)


def _register_algorithm() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sgl_frspec.algorithm import NAME, FrSpecAlgorithm

    @SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=FrSpecAlgorithm)
    def worker_class(server_args: Any) -> type:
        from sgl_frspec import sampled_acceptance, slot_table
        from sgl_frspec.worker import FrSpecWorker

        sampled_acceptance.install()
        slot_table.install()
        return FrSpecWorker


def _print_users_errors_plainly() -> None:
    """A wrong map or option is a user's error: one line and exit status 1, not a traceback."""
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, TokenMapError | OptionError):
            sys.stderr.write(f"frspec: error: {error}\n")
        else:
            previous(kind, error, traceback)

    sys.excepthook = hook
