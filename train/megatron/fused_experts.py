"""Files in which the experts of a layer are one tensor: taken apart, and put together. Pure.

As transformers 5 holds Qwen3-MoE in memory: [expert, out, in], gate above up. As files of gpt-oss are:
weights [expert, in, out] and biases [expert, out], gate and up in turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from rollbook.ingest.engines.weights.digests import Tensors
from rollbook.store.errors import ModelError
from rollbook.train.megatron.shape import Experts, ModelShape

PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""What fused tensors hold of every expert."""


def prefix_of(layer: int) -> str:
    """What the names of a layer's experts begin with."""
    return f"model.layers.{layer}.mlp.experts."


def expect(name: str, tensor: torch.Tensor, dims: tuple[int, ...]) -> None:
    """Check the shape of a tensor.

    Raises:
        ModelError: it is another.
    """
    if tuple(tensor.shape) != dims:
        found = tuple(tensor.shape)
        raise ModelError(f"the weights do not fit their config.json: {name} is {found}, not {dims}")


def fused_shapes(shape: ModelShape, experts: Experts) -> dict[str, tuple[int, ...]]:
    """Shape of every fused tensor of a layer."""
    count, ffn, hidden = experts.count, experts.ffn, shape.hidden
    if not shape.fused_experts:
        return {"gate_up_proj": (count, 2 * ffn, hidden), "down_proj": (count, hidden, ffn)}
    return {
        "gate_up_proj": (count, hidden, 2 * ffn),
        "gate_up_proj_bias": (count, 2 * ffn),
        "down_proj": (count, ffn, hidden),
        "down_proj_bias": (count, hidden),
    }


def taken_apart(tensors: Mapping[str, torch.Tensor], shape: ModelShape) -> Mapping[str, torch.Tensor]:
    """The tensors, and of fused ones one per expert and projection, as views.

    Raises:
        ModelError: a fused one is not of the config's shape.
    """
    experts = shape.experts
    if experts is None:
        return tensors
    apart: Tensors = {}
    for layer in range(shape.layers):
        prefix = prefix_of(layer)
        for fused, dims in fused_shapes(shape, experts).items():
            if prefix + fused not in tensors:
                continue
            expect(prefix + fused, tensors[prefix + fused], dims)
            names, field = _named(fused)
            for expert, stacked in enumerate(tensors[prefix + fused]):
                for name, tensor in zip(names, _split(stacked, len(names), shape), strict=True):
                    apart[f"{prefix}{expert}.{name}.{field}"] = tensor
    return {**tensors, **apart}


def _named(fused: str) -> tuple[tuple[str, ...], str]:
    """The projections in a fused tensor, and whether it is their weight or bias."""
    return PARTS[fused.removesuffix("_bias")], "bias" if fused.endswith("_bias") else "weight"


def _split(stacked: torch.Tensor, count: int, shape: ModelShape) -> Iterable[torch.Tensor]:
    if not shape.fused_experts:
        return stacked.chunk(count)
    return [stacked[..., i::count].T for i in range(count)]


def put_together(
    stream: Iterable[tuple[str, torch.Tensor]], shape: ModelShape
) -> Iterator[tuple[str, torch.Tensor]]:
    """A stream of tensors by the names of files: where these fuse experts, after the last of a layer."""
    experts = shape.experts
    if experts is None or not shape.fused_experts:
        yield from stream
        return
    held: Tensors = {}
    for name, tensor in stream:
        before, of_experts, _ = name.partition(".mlp.experts.")
        if not of_experts:
            yield name, tensor
            continue
        held[name] = tensor
        if len(held) == 6 * experts.count:  # weight and bias of three projections
            yield from _fused(held, before + of_experts, shape, experts)
            held = {}


def _fused(
    held: Tensors, prefix: str, shape: ModelShape, experts: Experts
) -> Iterator[tuple[str, torch.Tensor]]:
    for fused, dims in fused_shapes(shape, experts).items():
        names, field = _named(fused)
        found = held[f"{prefix}0.{names[0]}.{field}"].new_empty(dims)
        for expert, stacked in enumerate(found):
            for name, into in zip(names, _split(stacked, len(names), shape), strict=True):
                into.copy_(held[f"{prefix}{expert}.{name}.{field}"])
        yield prefix + fused, found
