"""What the target itself, without speculation, thinks of tokens that some server generated."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.serving import client

TOP = 5  # more than two can be close together


@dataclass(frozen=True)
class Score:
    """The target's view of one generated token.

    Attributes:
        token: the token.
        logprob: its log probability.
        top: the most probable tokens with their log probabilities, the best first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]

    @property
    def behind_best(self) -> float:
        """By how much the best token's log probability, or logit, exceeds this one's."""
        return max(0.0, self.top[0][1] - self.logprob)

    def behind_rank(self, rank: int) -> float:
        """The same, for the token of that rank; ``top`` must reach so far."""
        return max(0.0, self.top[rank - 1][1] - self.logprob)

    @property
    def gap(self) -> float:
        """Between the two most probable tokens."""
        return self.top[0][1] - self.top[1][1]


def generated_with_scores(
    url: str, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[list[Score]]:
    """Greedy answers of a server without speculation, scored in the passes that made them."""
    answers = client.generate(
        url, prompts, new_tokens, return_logprob=True, top_logprobs_num=TOP, logprob_start_len=-1
    )
    return [
        _scores(meta["output_token_logprobs"], meta["output_top_logprobs"])
        for meta in (answer.raw["meta_info"] for answer in answers)
    ]


def scored(
    url: str, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], top: int = TOP
) -> list[list[Score]]:
    """Scores of continuations in one prefill each.

    Args:
        url: a server without speculation.
        pairs: prompts and what followed them, as token ids.
        top: how many of the most probable tokens to report.
    """
    body: dict[str, Any] = {
        "input_ids": [[*prompt, *continuation] for prompt, continuation in pairs],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "top_logprobs_num": top,
        # From the prompt's last token on: the first entry has no predecessor.
        "logprob_start_len": [max(0, len(prompt) - 1) for prompt, _ in pairs],
    }
    results = []
    for raw, (_, continuation) in zip(client.post(url, "/generate", body), pairs, strict=True):
        meta, count = raw["meta_info"], len(continuation)
        results.append(
            _scores(meta["input_token_logprobs"][-count:], meta["input_top_logprobs"][-count:])
            if count
            else []
        )
        if [score.token for score in results[-1]] != list(continuation):
            raise client.RequestFailedError(f"{url} scored other tokens than it was given")
    return results


def _scores(tokens: Sequence[Any], tops: Sequence[Any]) -> list[Score]:
    return [
        Score(int(token), float(logprob), [(int(t), float(p)) for p, t, *_ in top])
        for (logprob, token, *_), top in zip(tokens, tops, strict=True)
    ]


def rounding_bound(
    decoded: Sequence[Sequence[Score]], prefilled: Sequence[Sequence[Score]]
) -> float:
    """How far two correct passes of the target can move the gap between two tokens.

    Twice the largest difference of a token's log probability between decoding and prefill: the
    same tokens, the same weights, another order of summation. Each of two logits can move so far.
    """
    return 2 * max(
        abs(a.logprob - b.logprob)
        for one, other in zip(decoded, prefilled, strict=True)
        for a, b in zip(one, other, strict=True)
    )
