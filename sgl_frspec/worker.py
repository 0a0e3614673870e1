"""The worker behind ``FRSPEC``: EAGLE's, with a draft whose head holds the hot rows only."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2

from sgl_frspec.hot_ids import read_hot_ids
from sgl_frspec.reduced_head import gather_head, share_embedding_and_head

logger = logging.getLogger(__name__)


class FrSpecDraftWorker(EagleDraftWorker):
    """Drafts over the hot ids. Draft ids are rows of the reduced head, ascending by token id."""

    hot_token_id: torch.Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Before the KV pool takes the memory that is left; SGLang itself gathers afterwards.
        self._reduce_head()

    def _reduce_head(self) -> None:
        runner = self.target_worker.model_runner
        target: Any = runner.model
        embedding, head = target.get_embed_and_head()
        ids = torch.from_numpy(read_hot_ids(_decided(self.server_args)).ids).to(embedding.device)
        reduced = gather_head(head, ids, runner.model_config.vocab_size)
        share_embedding_and_head(self.draft_runner.model, embedding, reduced)
        self.hot_token_id = ids
        logger.info(
            "FRSPEC draft head: %d x %d, %.0f MB", *reduced.shape, reduced.nbytes / (1 << 20)
        )

    def init_token_map(self) -> None:
        """Nothing left to do when the pools have been made."""

    def init_lm_head(self) -> None:
        """Likewise."""


def _decided(server_args: Any) -> Any:
    """The arguments as SGLang decided them; its older releases write decisions into the record."""
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
    except ImportError:
        return server_args
    return resolving_view(server_args)


class FrSpecWorker(EAGLEWorkerV2):
    """EAGLE's cycle around a :class:`FrSpecDraftWorker`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _drafting_with(FrSpecDraftWorker):
            super().__init__(*args, **kwargs)


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
