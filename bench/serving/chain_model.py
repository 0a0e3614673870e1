"""A target of any shape that continues a known chain, its EAGLE draft, and a token map.

``lm_head[next(t)]`` is a multiple of ``embedding[t]``, and the layers add to the residual stream
three orders of magnitude less than the embedding, so the most probable token after ``t`` is
``next(t)`` by a wide margin. The draft's ``fc`` passes the embedding of its input token through, so
it knows the chain too, wherever the next token is in its vocabulary.

No weight matrix is zero: products with zeros draw less power, and so run faster, than a real
model's. All layers hold the same random values, which are written, not drawn, once for each: a
server reads the bytes of every layer all the same. Accept lengths of such a model follow from the
chain and say nothing about real drafts.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.serving.chain import Chain, make_chain
from bench.serving.shapes import Shape

HOT_RATE = 0.8
# Raised when the files of a shape change, so that an older folder is written again.
FORMAT_VERSION = 2
MAX_POSITIONS = 40_960
_INPUT_STD, _OUTPUT_STD = 0.02, 1e-5
# The logit of the right token; others are normal around 0, with this over the root of the width.
_LOGIT = 80.0
_WRITERS = 8
_TYPE_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}


@dataclass(frozen=True)
class ChainModel:
    """Where the files lie, and what they generate."""

    target: Path
    draft: Path
    token_map: Path
    chain: Chain


def make_chain_model(folder: Path, shape: Shape, hot_rate: float = HOT_RATE) -> ChainModel:
    """Write target, draft and map under ``folder``, or find them there.

    The weights are drawn on the GPU where there is one.

    Args:
        folder: holds one model; it is complete when ``shape.json`` is there.
        shape: the dimensions.
        hot_rate: share of generated tokens that the map holds.
    """
    chain = make_chain(shape.vocab, shape.hot, hot_rate)
    model = ChainModel(folder / "target", folder / "draft", folder / "map.pt", chain)
    record = {"version": FORMAT_VERSION, "shape": vars(shape), "hot_rate": hot_rate}
    mark = folder / "shape.json"
    if mark.exists() and json.loads(mark.read_text()) == record:
        return model
    folder.mkdir(parents=True, exist_ok=True)
    mark.unlink(missing_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(1)
    _write_model(model, shape, generator)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the servers need this process's share
    ids = chain.hot.nonzero().flatten()
    # A ranked list is in no order of ids.
    rank = torch.randperm(len(ids), generator=torch.Generator().manual_seed(2))
    torch.save(ids[rank].tolist(), model.token_map)
    mark.write_text(json.dumps(record))
    return model


def _write_model(model: ChainModel, shape: Shape, generator: torch.Generator) -> None:
    dtype = getattr(torch, shape.dtype)

    def random(rows: int, columns: int, std: float) -> torch.Tensor:
        values = torch.empty(rows, columns, device=generator.device, dtype=torch.float32)
        return (values.normal_(generator=generator) * std).to(dtype).cpu()

    embedding = random(shape.vocab, shape.hidden, 1.0)
    head = torch.empty_like(embedding)
    head[model.chain.order.roll(-1)] = embedding[model.chain.order] * (_LOGIT / shape.hidden)
    ones = torch.ones(shape.hidden, dtype=dtype)
    layer = _layer(shape, random, ones)
    tables = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    parts = [tables | {"model.norm.weight": ones}]
    parts += [
        {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
        for i in range(shape.layers)
    ]
    _write_checkpoint(model.target, _config(shape, "LlamaForCausalLM", shape.layers), parts)
    fc = random(shape.hidden, 2 * shape.hidden, _OUTPUT_STD)
    fc[:, : shape.hidden] += torch.eye(shape.hidden, dtype=dtype)
    draft = {"fc.weight": fc, "fc.bias": torch.zeros(shape.hidden, dtype=dtype)}
    draft["embed_tokens.weight"] = embedding
    # The first layer of an EAGLE-2 draft has no input norm.
    draft |= {
        f"layers.0.{name}": tensor
        for name, tensor in layer.items()
        if not name.startswith("input_layernorm")
    }
    _write_checkpoint(model.draft, _config(shape, "LlamaForCausalLMEagle", 1), [draft])


def _layer(shape: Shape, random: Any, ones: torch.Tensor) -> dict[str, torch.Tensor]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "self_attn.q_proj.weight": random(queries, shape.hidden, _INPUT_STD),
        "self_attn.k_proj.weight": random(keys, shape.hidden, _INPUT_STD),
        "self_attn.v_proj.weight": random(keys, shape.hidden, _INPUT_STD),
        "self_attn.o_proj.weight": random(shape.hidden, queries, _OUTPUT_STD),
        "mlp.gate_proj.weight": random(shape.intermediate, shape.hidden, _INPUT_STD),
        "mlp.up_proj.weight": random(shape.intermediate, shape.hidden, _INPUT_STD),
        "mlp.down_proj.weight": random(shape.hidden, shape.intermediate, _OUTPUT_STD),
        "input_layernorm.weight": ones,
        "post_attention_layernorm.weight": ones,
    }


def _config(shape: Shape, architecture: str, layers: int) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": shape.vocab - 2,
        "eos_token_id": shape.vocab - 1,
        "torch_dtype": shape.dtype,
    }


def _write_checkpoint(
    folder: Path, config: Mapping[str, Any], parts: list[dict[str, torch.Tensor]]
) -> None:
    """One safetensors file for each part, written side by side, and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(_write_safetensors, (folder / name for name in names), parts))
    files = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    size = sum(tensor.nbytes for part in parts for tensor in part.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """The format is a length, a JSON header and the tensors' bytes.

    Written here because the library copies every tensor first, one at a time for all threads.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        span = [offset, offset + tensor.nbytes]
        entry = {"dtype": _TYPE_NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = entry | {"data_offsets": span}
        offset = span[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(torch.uint8).numpy().data)
