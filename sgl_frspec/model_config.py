"""A model's configuration as SGLang reads it, before any weights are loaded."""

import json
from typing import Any


def read_config(server_args: Any, path: str, revision: str | None) -> Any:
    """The Hugging Face configuration of the model at ``path``, with the server's overrides."""
    from sglang.srt.utils.hf_transformers.config import get_config

    return get_config(
        path,
        trust_remote_code=server_args.trust_remote_code,
        revision=revision,
        model_override_args=json.loads(server_args.json_model_override_args or "{}"),
    )
