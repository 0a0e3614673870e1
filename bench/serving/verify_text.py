"""``bench serve --verify-text``: greedy texts with speculation against those without.

The target decodes every prompt without speculation and keeps the two best tokens' log
probabilities of every position. A server that speculates must generate the same tokens, unless
rounding decides: at the first difference the target's two best tokens must lie closer together than
its own rounding, measured in the same run, moves them. From there on the text is another one, so
the target then reads it: each of its tokens must be the best after those before it, up to the same
rounding.
"""

import json
import lzma
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.serving import client
from bench.serving.scoring import Score, generated_with_scores, rounding_bound, scored
from bench.serving.servers import Say, Server
from bench.serving.text_report import Difference, Verdict, describe, write
from examples.smollm2_135m.prompts import chat_ids, eval_prompts
from examples.smollm2_135m.serving import DRAFT, first_difference

TOKENS = 256


def prompts(model: Path, count: int) -> list[list[int]]:
    """Token ids of the held-out chat prompts, then of the draft's training prompts, spread evenly.

    Whether a text is the same does not depend on whether a draft has seen the prompt.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    texts = [prompt.text for prompt in eval_prompts()][:count]
    lines = lzma.decompress((DRAFT / "training_prompts.jsonl.xz").read_bytes()).splitlines()
    missing = count - len(texts)
    if missing > len(lines):
        raise ValueError(f"{count} prompts are more than the {len(texts) + len(lines)} there are")
    stride = len(lines) // max(1, missing)
    texts += [json.loads(lines[i * stride])["prompt"] for i in range(missing)]
    return [chat_ids(tokenizer, text) for text in texts]


def differences(
    plain: Sequence[Sequence[Score]], drafted: Sequence[Sequence[int]]
) -> list[Difference]:
    """The first difference of each text that has one."""
    found = []
    for i, (scores, ids) in enumerate(zip(plain, drafted, strict=True)):
        expected = [score.token for score in scores]
        place = first_difference(expected, ids)
        if place is None:
            continue
        if place >= min(len(expected), len(ids)):
            found.append(Difference(i, place, -1, -1, 0.0, None))
            continue
        score, token = scores[place], ids[place]
        logprobs = dict(score.top)
        behind = score.top[0][1] - logprobs[token] if token in logprobs else None
        found.append(Difference(i, place, expected[place], token, score.gap, behind))
    return found


class TextCheck:
    """Compares servers with the target; ``verdicts`` and ``bound`` hold the outcome."""

    def __init__(self, texts: Sequence[list[int]], batch: int, say: Say) -> None:
        self._texts, self._batch, self._say = texts, batch, say
        self.bound = float("nan")
        self.verdicts: list[Verdict] = []

    def run(
        self, servers: Sequence[Server], reference: Server, out: Path, tokens: int = TOKENS
    ) -> bool:
        """Whether every server answered and every difference is within rounding.

        All generate at once; ``reference``, one of ``servers``, is the target without speculation.
        """
        drafting = [server for server in servers if server is not reference]
        right = bool(drafting)
        with ThreadPoolExecutor(1 + len(drafting)) as pool:
            answers = [pool.submit(self._answers, server, tokens) for server in drafting]
            scores = self._reference(reference, tokens)
            for server, answered in zip(drafting, answers, strict=True):
                try:
                    verdict = judge(server.variant.name, scores, answered.result())
                    verdict.behind_after.extend(
                        behind_after(
                            *(reference.url, self._texts, verdict, answered.result(), self._batch)
                        )
                    )
                except client.RequestFailedError as error:
                    self._say(f"FAILED {server.variant.name}: {error}")
                    self._say(server.process.log_tail())
                    right = False
                    continue
                self.verdicts.append(verdict)
                self._say(describe(verdict, self.bound))
                write(self.verdicts, self.bound, out)
                right &= not verdict.unexplained(self.bound)
                right &= not verdict.wrong_after(self.bound)
        return right

    def _batches(self) -> list[list[list[int]]]:
        texts = list(self._texts)
        return [texts[i : i + self._batch] for i in range(0, len(texts), self._batch)]

    def _answers(self, server: Server, tokens: int) -> list[client.Answer]:
        batches = self._batches()
        return [one for batch in batches for one in client.generate(server.url, batch, tokens)]

    def _reference(self, server: Server, tokens: int) -> list[list[Score]]:
        decoded, prefilled = [], []
        for batch in self._batches():
            scores = generated_with_scores(server.url, batch, tokens)
            decoded += scores
            written = [[score.token for score in one] for one in scores]
            prefilled += scored(server.url, list(zip(batch, written, strict=True)))
        self.bound = rounding_bound(decoded, prefilled)
        count = sum(map(len, decoded))
        self._say(
            f"target: {len(decoded)} prompts, {count:,} tokens; two passes over the same tokens"
            f" move the gap of two logits by up to {self.bound:.2g}"
        )
        return decoded


def behind_after(
    url: str,
    texts: Sequence[Sequence[int]],
    verdict: Verdict,
    answers: Sequence[client.Answer],
    batch: int,
    known: dict[tuple[int, ...], list[float]] | None = None,
) -> list[float]:
    """How far each token after a first difference is behind the target's best.

    Args:
        url: of the target without speculation.
        texts: prompts.
        verdict: of the server that gave ``answers``; says where they differ.
        answers: to all prompts.
        batch: texts that are scored at once.
        known: what was scored before, for several servers: they often give the same text.
    """
    known = {} if known is None else known
    keys = {(d.prompt, d.position, *answers[d.prompt].ids): d for d in verdict.differences}
    new = [(key, d) for key, d in keys.items() if key not in known]
    for i in range(0, len(new), batch):
        part = new[i : i + batch]
        pairs = [(texts[d.prompt], answers[d.prompt].ids) for _, d in part]
        for (key, d), scores in zip(part, scored(url, pairs), strict=True):
            known[key] = [score.behind_best for score in scores[d.position + 1 :]]
    return [behind for key in keys for behind in known[key]]


def judge(name: str, plain: list[list[Score]], answers: Sequence[client.Answer]) -> Verdict:
    """The server ``name``, whose ``answers`` should be the texts that ``plain`` scores."""
    found = differences(plain, [answer.ids for answer in answers])
    total = sum(len(answer.ids) for answer in answers)
    cycles = sum(answer.cycles for answer in answers)
    accept = (total - len(answers)) / cycles if cycles else 1.0
    return Verdict(name, len(answers), total, len(answers) - len(found), accept, found)
