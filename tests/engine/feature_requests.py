"""Calls of ``Engine.generate`` that use everything a request can ask for."""

import json
from typing import Any

TOKENS = 24
REGEX = "(yes|no): [a-z]{3,9}[.]"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9999}, "b": {"enum": ["on", "off"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
# Some token again and again, unless something speaks against it.
LIKED = {"logit_bias": {"300": 3.0}}
# Ways to ask, all greedy, that change the answer.
ASKED = {
    "bias": LIKED,
    "frequency penalty": {**LIKED, "frequency_penalty": 0.2},
    "presence penalty": {**LIKED, "presence_penalty": 0.3},
    "repetition penalty": {**LIKED, "repetition_penalty": 1.05},
    "end of text": {"ignore_eos": False, "logit_bias": {"1": 3.0}},
    "no end before": {"ignore_eos": False, "logit_bias": {"1": 3.0}, "min_new_tokens": 20},
    "schema": {"json_schema": json.dumps(SCHEMA), "ignore_eos": False, "max_new_tokens": 60},
    "regex": {"regex": REGEX, "ignore_eos": False, "max_new_tokens": 60},
}
PENALTIES = [name for name in ASKED if name.endswith("penalty")]


def sampling(**asked: Any) -> dict[str, Any]:
    """Greedy parameters with what is ``asked`` besides."""
    return {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True} | asked


def crowd(prompts: list[list[int]]) -> list[list[int]]:
    """Prompts whose answers the cache does not hold at once."""
    return [[*prompts[4], i] for i in range(2, 14)]


def requests(prompts: list[list[int]], stop: str) -> dict[str, dict[str, Any]]:
    """The calls by name, to be made in this order: later ones find earlier prompts in the cache."""
    one = {"input_ids": prompts[0]}
    kinds = [sampling(**asked) for asked in ASKED.values()]
    found = {
        "prompts": {"input_ids": prompts, "sampling_params": sampling()},
        "longer prompts": {
            "input_ids": [[*prompt, 9] for prompt in prompts], "sampling_params": sampling(),
        },
        "n": one | {"sampling_params": sampling(n=3)},
        "stop string": one | {"sampling_params": sampling(stop=[stop])},
        "stop string kept": one | {"sampling_params": sampling(stop=[stop], no_stop_trim=True)},
        "stop pattern": one | {"sampling_params": sampling(stop_regex=stop[:-1] + "[a-z]")},
        "log probabilities": {
            "input_ids": prompts[:3], "sampling_params": sampling(), "return_logprob": True,
            "logprob_start_len": [0, 140, 3], "top_logprobs_num": 3,
            "token_ids_logprob": [[3, 400], [5], [6]],
        },
        "hidden states": one | {"sampling_params": sampling(), "return_hidden_states": True},
        "one batch": {"input_ids": [prompts[2]] * len(kinds), "sampling_params": kinds},
        "beside a sampled one": {
            "input_ids": [prompts[0], *[prompts[2]] * len(kinds)],
            "sampling_params": [sampling(temperature=1.0), *kinds],
        },
    }  # fmt: skip
    # With ignore_eos, SGLang would know how long they get and let some wait.
    long = sampling(max_new_tokens=180, ignore_eos=False)
    found["crowd"] = {"input_ids": crowd(prompts), "sampling_params": long}
    for name, asked in ASKED.items():
        found[name] = {"input_ids": prompts[2], "sampling_params": sampling(**asked)}
    return found
