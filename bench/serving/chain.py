"""The token chain that a synthetic target continues, whatever came before its last token.

Every token has one successor. The chain is cut into segments of ``SEGMENT`` tokens, and all
segments have the same pattern of tokens inside and outside the map. So requests that start at
segment boundaries accept the same number of drafts in every cycle: a batch stays in lockstep and
ends at once, and the accept length follows from the pattern.
"""

from dataclasses import dataclass

import torch

SEGMENT = 256


@dataclass(frozen=True)
class Chain:
    """The order of all tokens and which of them the map holds.

    Attributes:
        order: int64 ``[V]``, the tokens in the order in which they follow each other; the first
            follows the last.
        hot: bool ``[V]``, by token id.
        segments: how many segments the order begins with; leftover tokens follow them.
    """

    order: torch.Tensor
    hot: torch.Tensor
    segments: int

    def prompt(self, segment: int, length: int, seed: int) -> list[int]:
        """``length`` tokens, random but for the last, which the segment follows."""
        generator = torch.Generator().manual_seed(1_000_003 * seed + segment)
        filler = torch.randint(len(self.order), (length - 1,), generator=generator)
        return [*filler.tolist(), int(self.order[self._start(segment) - 1])]

    def continuation(self, segment: int, length: int) -> list[int]:
        """What the target generates after :meth:`prompt`."""
        places = (self._start(segment) + torch.arange(length)) % len(self.order)
        return self.order[places].tolist()

    def cycles(self, segment: int, length: int, steps: int, mapped: bool) -> int:
        """Verifications that ``length`` tokens take, the first of which the prefill gives.

        Args:
            segment: where the continuation starts.
            length: generated tokens.
            steps: drafted levels of the tree; one level more is the target's own token.
            mapped: whether the draft proposes tokens of the map only.
        """
        tokens = self.continuation(segment, length + steps + 1)
        done, count = 1, 0
        while done < length:
            accepted = 0
            while accepted < steps and (not mapped or bool(self.hot[tokens[done + accepted]])):
                accepted += 1
            done += accepted + 1
            count += 1
        return count

    def _start(self, segment: int) -> int:
        # Segment 0 would follow the last leftover token; start at 1, which follows a segment.
        return SEGMENT * (1 + segment % (self.segments - 1))


def make_chain(vocab: int, hot_ids: int, hot_rate: float, seed: int = 0) -> Chain:
    """A random chain.

    Args:
        vocab, hot_ids: sizes of the vocabulary and of the map.
        hot_rate: share of a segment's tokens that lie in the map.
        seed: of the random order.

    Raises:
        ValueError: the vocabulary is too small for two segments of that share.
    """
    generator = torch.Generator().manual_seed(seed)
    # The last two ids, the model's special tokens, are in every map: FRSPEC would add them.
    special = torch.tensor([vocab - 2, vocab - 1])
    ordinary = torch.randperm(vocab - 2, generator=generator)
    hot_tokens = torch.cat([special, ordinary[: hot_ids - 2]])
    hot_tokens = hot_tokens[torch.randperm(hot_ids, generator=generator)]
    cold_tokens = ordinary[hot_ids - 2 :]
    in_map = round(hot_rate * SEGMENT)
    pattern = torch.zeros(SEGMENT, dtype=torch.bool)
    pattern[torch.randperm(SEGMENT, generator=generator)[:in_map]] = True
    segments = min(
        len(tokens) // count
        for tokens, count in ((hot_tokens, in_map), (cold_tokens, SEGMENT - in_map))
        if count
    )
    if segments < 2:
        raise ValueError(
            f"{vocab} tokens, {hot_ids} of them in the map, make {segments} segments of {SEGMENT}"
            f" with {in_map} in the map; 2 are needed: take a larger vocabulary or map"
        )
    used_hot, used_cold = segments * in_map, segments * (SEGMENT - in_map)
    order = torch.empty(segments, SEGMENT, dtype=torch.long)
    order[:, pattern] = hot_tokens[:used_hot].view(segments, -1)
    order[:, ~pattern] = cold_tokens[:used_cold].view(segments, -1)
    leftover = torch.cat([hot_tokens[used_hot:], cold_tokens[used_cold:]])
    hot = torch.zeros(vocab, dtype=torch.bool)
    hot[hot_tokens] = True
    return Chain(torch.cat([order.flatten(), leftover]), hot, segments)
