"""The worker behind ``FRSPEC``: EAGLE's cycle on FRSPEC's draft, tree and acceptance."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2
from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN

from sgl_frspec.draft_worker import FrSpecDraftWorker
from sgl_frspec.memory_report import report_memory
from sgl_frspec.options import read_options
from sgl_frspec.round_conditions import obstacle
from sgl_frspec.round_graph import RoundGraphs
from sgl_frspec.slot_copies import limit_copies
from sgl_frspec.verify import is_plain_greedy, verify_greedy
from sgl_frspec.verify_input import TreeVerifyInput

logger = logging.getLogger(__name__)


class FrSpecWorker(EAGLEWorkerV2):
    """EAGLE's cycle around a :class:`FrSpecDraftWorker`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _drafting_with(FrSpecDraftWorker):
            super().__init__(*args, **kwargs)
        self.options = read_options()
        self._rounds: RoundGraphs | None = None

    def init_cuda_graphs(self) -> None:
        """Capture SGLang's graphs of each phase, then whole rounds."""
        target_runner = self.target_worker.model_runner
        limit_copies(target_runner.token_to_kv_pool)
        super().init_cuda_graphs()
        draft_worker: Any = self._draft_worker
        report_memory(draft_worker, target_runner)
        if not self.options.uses("round"):
            return
        reason = obstacle(draft_worker, target_runner)
        if reason is None:
            self._rounds = RoundGraphs(draft_worker, target_runner)
        else:
            logger.info("FRSPEC runs the phases of a round one by one: %s", reason)

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """A prefill, or a round: a captured one where the batch is plain and greedy."""
        mode = batch.forward_mode
        if mode.is_extend() or mode.is_idle() or batch.is_extend_in_batch:
            return super().forward_batch_generation(batch, on_publish, *args, **kwargs)
        draft_worker: Any = self._draft_worker
        rounds = self._rounds
        if (
            rounds is None
            or batch.spec_info is None
            or not rounds.fits(batch.seq_lens.shape[0])
            or not is_plain_greedy(batch)
        ):
            result = super().forward_batch_generation(batch, on_publish, *args, **kwargs)
        else:
            result = rounds.run(batch, on_publish, copy_all=not draft_worker.relay_copies)
        draft_worker.map_fit.after_round()
        return result

    def verify(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Verify what was drafted: a plain greedy batch on our kernels, others by SGLang."""
        if batch.forward_mode.is_idle():
            return super().verify(batch, *args, **kwargs)
        ours = self.options.uses("accept") and isinstance(batch.spec_info, TreeVerifyInput)
        if ours and SIMULATE_ACC_LEN <= 0 and is_plain_greedy(batch):
            allocator: Any = self.token_to_kv_pool_allocator
            result: Any = verify_greedy(
                batch, self.target_worker, self.req_to_token_pool, allocator.get_kvcache()
            )
        else:
            result = super().verify(batch, *args, **kwargs)
        draft_worker: Any = self._draft_worker
        lens = result.accept_lens
        tokens = result.next_token_ids.view(lens.shape[0], -1)
        draft_worker.map_fit.count(tokens, lens, batch.req_pool_indices)
        return result


@contextlib.contextmanager
def _drafting_with(draft_worker: type[EagleDraftWorker]) -> Iterator[None]:
    """Let ``EAGLEWorkerV2.__init__`` construct ``draft_worker``.

    It names the class it constructs through its module and takes no factory; its own body differs
    between SGLang's releases, so it is called rather than repeated. One thread constructs workers.
    """
    original = eagle_worker_v2.EagleDraftWorker
    eagle_worker_v2.EagleDraftWorker = draft_worker
    try:
        yield
    finally:
        eagle_worker_v2.EagleDraftWorker = original
