"""The target's logits of a captured round, left in the type of the matrix product.

SGLang converts them to float32, 6 bytes a logit more to move, for samplers that compute with them.
A greedy round only compares them, and the conversion is exact: no comparison comes out otherwise.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from sglang.srt.layers.logits_processor import LogitsProcessor
from torch import Tensor


@contextlib.contextmanager
def unconverted_logits(model: Any) -> Iterator[None]:
    """Let ``model`` give its logits as they come from the head; for passes that are captured.

    Soft-capped logits are computed in float32 and stay SGLang's.
    """
    processor: Any = getattr(model, "logits_processor", None)
    if type(processor) is not LogitsProcessor or processor.final_logit_softcapping:
        yield
        return

    def as_they_are(logits: Tensor, *unused: Any, **also_unused: Any) -> Tensor:
        return logits[:, : processor.vocab_size]

    processor._copy_logits_to_buffer = as_they_are
    try:
        yield
    finally:
        del processor._copy_logits_to_buffer
