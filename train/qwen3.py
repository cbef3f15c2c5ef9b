"""Qwen3 between Hugging Face and Megatron-core (local layer spec): configuration and weight names.

Megatron's `linear_qkv` rows are, per key-value group, the group's query heads, its key head and its
value head; `linear_fc1` is gate then up; embeddings are zero-padded to a multiple of the vocabulary
divisor. The mapping is a bijection on the real rows, so weights survive the round trip bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch

from rollbook.ingest.engines.weights import Tensors
from rollbook.store.errors import ModelError

VOCAB_DIVISOR = 128


@dataclass(frozen=True, slots=True)
class Qwen3Shape:
    """What of a Qwen3 config decides the model."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_eps: float
    rope_theta: float
    tied: bool

    @property
    def padded_vocab(self) -> int:
        """Rows of Megatron's embedding."""
        return -(-self.vocab // VOCAB_DIVISOR) * VOCAB_DIVISOR


def read_shape(model: Path) -> Qwen3Shape:
    """The shape a model directory's config.json describes.

    Raises:
        ModelError: there is none, or it is another architecture's.
    """
    file = model / "config.json"
    if not file.exists():
        raise ModelError(f"{model}: holds no config.json, so it is no model directory")
    try:
        config: dict[str, Any] = orjson.loads(file.read_bytes())
    except ValueError as error:
        raise ModelError(f"{file}: not JSON: {error}") from error
    if config.get("model_type") != "qwen3":
        raise ModelError(
            f"{model}: architecture {config.get('model_type')!r} cannot be trained; this release trains qwen3"
        )
    if config.get("attention_bias") or config.get("use_sliding_window") or _scaled_rope(config):
        raise ModelError(f"{model}: attention_bias, sliding windows and rope scaling are not supported")
    try:
        return _shape(config)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{file}: a key is missing or ill-typed: {error!r}") from error


def _shape(config: dict[str, Any]) -> Qwen3Shape:
    rope = config.get("rope_parameters") or {}
    return Qwen3Shape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab=config["vocab_size"],
        context=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or config["rope_theta"]),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _scaled_rope(config: dict[str, Any]) -> bool:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope.get("rope_type", "default") != "default"


def to_megatron(tensors: Tensors, shape: Qwen3Shape) -> Tensors:
    """Hugging Face tensors under Megatron's names (one rank).

    Raises:
        ModelError: a tensor is missing, or not of the config's shape.
    """
    for name, expected in _expected_shapes(shape).items():
        if name not in tensors:
            raise ModelError(f"the weights do not fit their config.json: {name} is missing")
        if tuple(tensors[name].shape) != expected:
            found = tuple(tensors[name].shape)
            raise ModelError(f"the weights do not fit their config.json: {name} is {found}, not {expected}")
    mapped = {
        "embedding.word_embeddings.weight": _padded(tensors["model.embed_tokens.weight"], shape),
        "decoder.final_layernorm.weight": tensors["model.norm.weight"],
    }
    if not shape.tied:
        mapped["output_layer.weight"] = _padded(tensors["lm_head.weight"], shape)
    for layer in range(shape.layers):
        mapped |= _layer_to_megatron(tensors, shape, layer)
    return mapped


def _expected_shapes(shape: Qwen3Shape) -> dict[str, tuple[int, ...]]:
    """Shape of every Hugging Face tensor."""
    hidden, size = shape.hidden, shape.head_dim
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not shape.tied:
        expected["lm_head.weight"] = (shape.vocab, hidden)
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (shape.heads * size, hidden),
        "self_attn.k_proj": (shape.kv_heads * size, hidden),
        "self_attn.v_proj": (shape.kv_heads * size, hidden),
        "self_attn.o_proj": (hidden, shape.heads * size),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
        "mlp.gate_proj": (shape.ffn, hidden),
        "mlp.up_proj": (shape.ffn, hidden),
        "mlp.down_proj": (hidden, shape.ffn),
    }
    for i in range(shape.layers):
        expected |= {f"model.layers.{i}.{name}.weight": dims for name, dims in layer.items()}
    return expected


def _layer_to_megatron(tensors: Tensors, shape: Qwen3Shape, layer: int) -> Tensors:
    source, target = f"model.layers.{layer}.", f"decoder.layers.{layer}."
    attention = source + "self_attn."
    qkv = [tensors[f"{attention}{x}_proj.weight"] for x in "qkv"]
    gate, up = (tensors[f"{source}mlp.{x}_proj.weight"] for x in ("gate", "up"))
    return {
        target + "input_layernorm.weight": tensors[source + "input_layernorm.weight"],
        target + "pre_mlp_layernorm.weight": tensors[source + "post_attention_layernorm.weight"],
        target + "self_attention.linear_qkv.weight": _pack_qkv(qkv, shape),
        target + "self_attention.linear_proj.weight": tensors[attention + "o_proj.weight"],
        target + "self_attention.q_layernorm.weight": tensors[attention + "q_norm.weight"],
        target + "self_attention.k_layernorm.weight": tensors[attention + "k_norm.weight"],
        target + "mlp.linear_fc1.weight": torch.cat([gate, up]),
        target + "mlp.linear_fc2.weight": tensors[source + "mlp.down_proj.weight"],
    }


def to_huggingface(tensors: Tensors, shape: Qwen3Shape) -> Tensors:
    """The inverse of `to_megatron`; tied models have no `lm_head.weight`, as in their files."""
    mapped = {
        "model.embed_tokens.weight": tensors["embedding.word_embeddings.weight"][: shape.vocab],
        "model.norm.weight": tensors["decoder.final_layernorm.weight"],
    }
    if not shape.tied:
        mapped["lm_head.weight"] = tensors["output_layer.weight"][: shape.vocab]
    for layer in range(shape.layers):
        mapped |= _layer_to_huggingface(tensors, shape, layer)
    return mapped


def _layer_to_huggingface(tensors: Tensors, shape: Qwen3Shape, layer: int) -> Tensors:
    source, target = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    attention = target + "self_attn."
    q, k, v = _unpack_qkv(tensors[source + "self_attention.linear_qkv.weight"], shape)
    gate, up = tensors[source + "mlp.linear_fc1.weight"].chunk(2)
    return {
        target + "input_layernorm.weight": tensors[source + "input_layernorm.weight"],
        target + "post_attention_layernorm.weight": tensors[source + "pre_mlp_layernorm.weight"],
        attention + "q_proj.weight": q,
        attention + "k_proj.weight": k,
        attention + "v_proj.weight": v,
        attention + "o_proj.weight": tensors[source + "self_attention.linear_proj.weight"],
        attention + "q_norm.weight": tensors[source + "self_attention.q_layernorm.weight"],
        attention + "k_norm.weight": tensors[source + "self_attention.k_layernorm.weight"],
        target + "mlp.gate_proj.weight": gate,
        target + "mlp.up_proj.weight": up,
        target + "mlp.down_proj.weight": tensors[source + "mlp.linear_fc2.weight"],
    }


def _pack_qkv(qkv: list[torch.Tensor], shape: Qwen3Shape) -> torch.Tensor:
    groups, size, per = shape.kv_heads, shape.head_dim, shape.heads // shape.kv_heads
    q, k, v = qkv
    packed = torch.cat(
        [
            q.view(groups, per * size, shape.hidden),
            k.view(groups, size, shape.hidden),
            v.view(groups, size, shape.hidden),
        ],
        dim=1,
    )
    return packed.reshape(groups * (per + 2) * size, shape.hidden)


def _unpack_qkv(packed: torch.Tensor, shape: Qwen3Shape) -> tuple[torch.Tensor, ...]:
    groups, size, per = shape.kv_heads, shape.head_dim, shape.heads // shape.kv_heads
    parts = packed.view(groups, (per + 2) * size, shape.hidden).split([per * size, size, size], dim=1)
    return tuple(part.reshape(-1, shape.hidden) for part in parts)


def _padded(embedding: torch.Tensor, shape: Qwen3Shape) -> torch.Tensor:
    missing = shape.padded_vocab - embedding.shape[0]
    if not missing:
        return embedding
    return torch.cat([embedding, embedding.new_zeros(missing, embedding.shape[1])])
