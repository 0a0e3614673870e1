"""Mixed requests of a soak run, and what must be true of each answer."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Each with how often it is drawn.
KINDS = {
    "greedy": 6,
    "sampled": 5,
    "stream": 4,
    "abort": 3,
    "schema": 3,
    "regex": 2,
    "stop": 2,
    "several": 2,
    "logprobs": 2,
    "penalty": 1,
}
TOP_K = 20
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 9999},
        "coastal": {"type": "boolean"},
    },
    "required": ["city", "inhabitants", "coastal"],
    "additionalProperties": False,
}
REGEX = r"(yes|no|maybe), because [a-z ]{5,20}\."
STOP = " the"
# More than the longest text of the grammar needs, however it is cut into tokens.
GRAMMAR_TOKENS = 160


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        kind: a key of ``KINDS``.
        body: of ``/generate``.
        abort_after: chunks after which the client hangs up; 0 for never.
    """

    kind: str
    body: dict[str, Any]
    abort_after: int = 0

    @property
    def greedy(self) -> bool:
        """Whether each token must be the target's best."""
        return self.body["sampling_params"]["temperature"] == 0

    @property
    def free(self) -> bool:
        """Whether nothing but the target chooses the tokens: no grammar, no penalty."""
        return self.kind not in ("schema", "regex", "penalty")


@dataclass
class Outcome:
    """What came back.

    Attributes:
        answers: one, or as many as the request asked for.
        chunks: token ids after each chunk of a stream.
        error: why there is no answer.
        aborted: whether the client hung up.
    """

    request: Request
    answers: list[dict[str, Any]] = field(default_factory=list)
    chunks: list[list[int]] = field(default_factory=list)
    error: str = ""
    aborted: bool = False


def draw_request(draw: random.Random, tokens: Sequence[int], longest: int) -> Request:
    """A random request with a prompt out of ``tokens``, up to ``longest`` tokens long."""
    [kind] = draw.choices(list(KINDS), list(KINDS.values()))
    # Short prompts are frequent, long ones occur.
    length = min(longest, int(draw.paretovariate(0.6) * 8))
    begin = draw.randrange(len(tokens) - length)
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": draw.choice((1, 8, 32, 96))}
    body = {"input_ids": list(tokens[begin : begin + length]), "sampling_params": sampling}
    sample = {"temperature": draw.choice((0.7, 1.0)), "top_k": TOP_K, "top_p": 0.95}
    abort_after = 0
    if kind == "sampled":
        sampling |= sample
    elif kind == "stream":
        sampling |= draw.choice(({}, sample))
        body["stream"] = True
    elif kind == "abort":
        body["stream"] = True
        sampling["max_new_tokens"] = 96
        abort_after = draw.randint(1, 6)
    elif kind in ("schema", "regex"):
        grammar = {"json_schema": json.dumps(SCHEMA)} if kind == "schema" else {"regex": REGEX}
        sampling |= draw.choice(({}, sample)) | grammar | {"max_new_tokens": GRAMMAR_TOKENS}
    elif kind == "stop":
        sampling |= {"stop": [STOP], "max_new_tokens": 96}
    elif kind == "several":
        sampling |= sample | {"n": 3}
    elif kind == "logprobs":
        body |= {"return_logprob": True, "top_logprobs_num": 2}
    elif kind == "penalty":
        sampling |= {"frequency_penalty": 0.5}
    return Request(kind, body, abort_after)


def fault(outcome: Outcome) -> str:
    """What is wrong with an answer, as far as it shows without the target; empty if nothing."""
    request, sampling = outcome.request, outcome.request.body["sampling_params"]
    if outcome.error:
        return f"lost: {outcome.error}"
    if outcome.aborted:
        return ""
    if len(outcome.answers) != sampling.get("n", 1):
        return f"{len(outcome.answers)} answers to n = {sampling.get('n', 1)}"
    checks = {
        "schema": _schema_fault,
        "regex": _regex_fault,
        "stop": _stop_fault,
        "logprobs": _logprobs_fault,
    }
    check = checks.get(request.kind)
    for answer in outcome.answers:
        reason = _length_fault(answer, sampling) or (check(answer) if check else "")
        if reason:
            return reason
    return _stream_fault(outcome)


def _length_fault(answer: dict[str, Any], sampling: dict[str, Any]) -> str:
    ids, meta = answer["output_ids"], answer["meta_info"]
    finish = (meta.get("finish_reason") or {}).get("type")
    if finish not in ("length", "stop"):
        return f"finish reason {finish!r}"
    if len(ids) != meta["completion_tokens"]:
        return f"{len(ids)} tokens, {meta['completion_tokens']} counted"
    if finish == "length" and len(ids) != sampling["max_new_tokens"]:
        return f"{len(ids)} tokens at the limit of {sampling['max_new_tokens']}"
    return "too many tokens" if len(ids) > sampling["max_new_tokens"] else ""


def _schema_fault(answer: dict[str, Any]) -> str:
    import jsonschema

    try:
        jsonschema.validate(json.loads(answer["text"]), SCHEMA)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"not of the schema: {answer['text']!r}: {str(error).splitlines()[0]}"
    return ""


def _regex_fault(answer: dict[str, Any]) -> str:
    return "" if re.fullmatch(REGEX, answer["text"]) else f"not of the regex: {answer['text']!r}"


def _stop_fault(answer: dict[str, Any]) -> str:
    if STOP in answer["text"]:
        return f"goes on after its stop string: {answer['text']!r}"
    matched = (answer["meta_info"]["finish_reason"] or {}).get("matched")
    ended = answer["meta_info"]["finish_reason"]["type"] == "stop"
    return "" if not ended or matched is not None else "stopped without a reason"


def _logprobs_fault(answer: dict[str, Any]) -> str:
    meta = answer["meta_info"]
    tokens = [entry[1] for entry in meta["output_token_logprobs"]]
    if tokens != answer["output_ids"]:
        return "log probabilities of other tokens than the answer's"
    best = [entry[0][1] for entry in meta["output_top_logprobs"]]
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    tops = [entry[0][0] for entry in meta["output_top_logprobs"]]
    if any(
        logprob > 0 or logprob > top + 1e-3 for logprob, top in zip(logprobs, tops, strict=True)
    ):
        return "a log probability above the best"
    differ = [i for i, (a, b) in enumerate(zip(tokens, best, strict=True)) if a != b]
    # At a tie either may come first.
    unlike = [i for i in differ if tops[i] - logprobs[i] > 1e-3]
    return f"greedy token {unlike[0]} is not its own best" if unlike else ""


def _stream_fault(outcome: Outcome) -> str:
    """A stream only ever grows, and ends as its last chunk says."""
    for shorter, longer in zip(outcome.chunks, outcome.chunks[1:], strict=False):
        if longer[: len(shorter)] != shorter:
            return "a chunk of the stream takes back an earlier one"
    return ""
