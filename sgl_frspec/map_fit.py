"""How well the token map fits the traffic: in the log, and in Prometheus with ``--enable-metrics``.

The draft cannot propose a token outside the map, so every such token of the target's ends a cycle.
A share that grows says that the map was ranked on other text than is served.
"""

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from frspec_kernels.map_tally import TOTALS, tally, tally_reference

logger = logging.getLogger(__name__)


class Counters(NamedTuple):
    """Prometheus counters, one for each of the totals."""

    cycles: Any
    tokens: Any
    outside: Any


class MapFit:
    """Counts on the device what rounds yield; the host reads along without waiting."""

    def __init__(
        self, hot_ids: Tensor, vocab_size: int, interval: int, counters: Counters | None = None
    ) -> None:
        """Count for ``hot_ids`` [K] of ``vocab_size`` tokens; report every ``interval`` rounds."""
        device = hot_ids.device
        self.is_hot = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.is_hot[hot_ids] = True
        self.totals = torch.zeros(TOTALS, dtype=torch.int64, device=device)
        self.interval = interval
        self.counters = counters
        self._rounds = 0
        self._reported = [0] * TOTALS
        self._read = torch.zeros(TOTALS, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copied: Any = torch.cuda.Event() if device.type == "cuda" else None
        self._pending = False

    def count(self, tokens: Tensor, lens: Tensor, rows: Tensor) -> None:
        """Count ``tokens`` [B, N], the first ``lens`` [B] of each request that has a row [B]."""
        if tokens.device.type == "cpu":
            tally_reference(tokens, lens, rows, self.is_hot, self.totals)
        else:
            tally(tokens, lens, rows, self.is_hot, self.totals)

    def after_round(self) -> None:
        """Report what has arrived on the host; ask for more when it is time."""
        self._rounds += 1
        if self._pending and (self._copied is None or self._copied.query()):
            self._pending = False
            self._report(self._read.tolist())
        if self._rounds % self.interval == 0 and not self._pending:
            self._read.copy_(self.totals, non_blocking=True)
            if self._copied is not None:
                self._copied.record()
            self._pending = True

    def _report(self, totals: list[int]) -> None:
        new = [now - before for now, before in zip(totals, self._reported, strict=True)]
        self._reported = totals
        cycles, tokens, outside = new
        if not cycles:
            return
        logger.info(
            "FRSPEC: accept length %.2f, tokens outside the map %.2f%% (%.2f%% since the start)",
            tokens / cycles,
            100 * outside / tokens,
            100 * totals[2] / totals[1],
        )
        for counter, value in zip(self.counters or (), new, strict=False):
            counter.inc(value)


def make_map_fit(server_args: Any, hot_ids: Tensor, vocab_size: int) -> MapFit:
    """Reports as often as SGLang logs decoding, counters with SGLang's metrics."""
    counters = None
    if server_args.enable_metrics:
        counters = prometheus_counters(server_args.served_model_name)
    return MapFit(hot_ids, vocab_size, server_args.decode_log_interval, counters)


def prometheus_counters(model_name: str) -> Counters:
    """Counters in the registry that SGLang's ``/metrics`` serves, labelled like its own."""
    # Its metrics live in files whose folder SGLang has set in the environment by now.
    from prometheus_client import Counter

    texts = {
        "cycles": "Verifications, counted for each request",
        "tokens": "Tokens that verifications added to replies",
        "outside_map": "Tokens among them that the draft could not have proposed",
    }
    made = (Counter(f"sglang:frspec_{name}", text, ["model_name"]) for name, text in texts.items())
    return Counters(*(counter.labels(model_name) for counter in made))
