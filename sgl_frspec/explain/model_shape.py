"""The sizes of a dense decoder, from its Hugging Face ``config.json``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The sizes of published models, by name, for use without a file.
_PRESETS: dict[str, dict[str, Any]] = {
    "llama-2-7b": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    },
    "llama-3-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936,
    },
    "gemma-3-270m": {
        "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "vocab_size": 262144, "tie_word_embeddings": True,
        "sliding_window": 512, "sliding_window_pattern": 6,
    },
    "gemma-3-4b": {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "vocab_size": 262208, "tie_word_embeddings": True,
        "sliding_window": 1024, "sliding_window_pattern": 6,
    },
}  # fmt: skip

# Keys that only mixture-of-experts configurations have.
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class ModelShape:
    """Sizes that decide the bytes and operations of a decoder with gated MLPs.

    ``window`` is the span of a sliding-window layer, ``full_layers`` the number of layers that
    attend to the whole context.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    window: int | None
    full_layers: int

    @property
    def attention_weights(self) -> int:
        """Elements of one layer's query, key, value and output projections."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_weights(self) -> int:
        """Elements of one layer's gate, up and down projections."""
        return 3 * self.hidden * self.intermediate

    @property
    def head_weights(self) -> int:
        """Elements of the LM head."""
        return self.hidden * self.vocab

    @property
    def layer_weights(self) -> int:
        """Elements of one decoder layer's matrices."""
        return self.attention_weights + self.mlp_weights


def preset_names() -> list[str]:
    """Names that :func:`read_model_shape` knows without a file."""
    return sorted(_PRESETS)


def read_model_shape(source: str) -> ModelShape:
    """The shape of a preset, a ``config.json`` or a model folder that holds one.

    Raises:
        ValueError: when ``source`` is neither, is not a configuration, or is a mixture of experts.
    """
    if source.lower() in _PRESETS:
        return _shape(_PRESETS[source.lower()], source)
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        known = ", ".join(preset_names())
        raise ValueError(f"{source} is neither a config.json, a model folder nor one of: {known}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, not a model configuration")
    return _shape(config.get("text_config", config), str(path))


def _shape(config: Mapping[str, Any], where: str) -> ModelShape:
    experts = next((key for key in _EXPERT_KEYS if config.get(key)), None)
    if experts:
        raise ValueError(
            f"{where}: {experts} = {config[experts]}; only dense models can be explained: the "
            "bytes of a mixture of experts depend on which experts a batch reaches"
        )
    hidden, heads = _size(config, "hidden_size", where), _size(config, "num_attention_heads", where)
    layers = _size(config, "num_hidden_layers", where)
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    return ModelShape(
        hidden=hidden,
        intermediate=_size(config, "intermediate_size", where),
        layers=layers,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab=_size(config, "vocab_size", where),
        window=window,
        full_layers=_full_layers(config, layers) if window else layers,
    )


def _size(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{where}: {key} is {value!r}; a positive whole number is needed")
    return value


def _full_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers without a window: listed one by one, or every n-th, or none."""
    kinds = config.get("layer_types")
    if kinds:
        return sum(kind == "full_attention" for kind in kinds)
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    return layers // pattern if pattern else 0
