"""The tower of a model that sees images: the shapes of its tensors, and the module, which is transformers'.

A tower takes the patches of images and gives a feature for every token that stands for one: as wide as the
language half, so that it goes where the token's embedding would.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from rollbook.train.model.vision import QWEN2_5_VL, QWEN3_VL, Vision

TOWER = "visual"
"""What the tower is called in a model, here and in files."""
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def tower_shapes(vision: Vision, width: int) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the tower, by its name in it.

    Args:
        width: of the language half.
    """
    return dict(_tensors(vision, width))


def _tensors(vision: Vision, width: int) -> Shapes:
    third = vision.kind == QWEN3_VL
    hidden, merged = vision.hidden, vision.hidden * vision.merge**2
    kernel = (hidden, vision.channels, vision.frames, vision.patch, vision.patch)
    yield "patch_embed.proj.weight", kernel
    if third:
        yield "patch_embed.proj.bias", (hidden,)
        yield "pos_embed.weight", (vision.positions, hidden)
    for layer in range(vision.layers):
        block = f"blocks.{layer}"
        for norm in ("norm1", "norm2"):
            yield from _norm(f"{block}.{norm}", hidden, bias=third)
        yield from _linear(f"{block}.attn.qkv", 3 * hidden, hidden)
        yield from _linear(f"{block}.attn.proj", hidden, hidden)
        for name in ("linear_fc1",) if third else ("gate_proj", "up_proj"):
            yield from _linear(f"{block}.mlp.{name}", vision.ffn, hidden)
        yield from _linear(f"{block}.mlp.{'linear_fc2' if third else 'down_proj'}", hidden, vision.ffn)
    if not third:
        yield from _norm("merger.ln_q", hidden, bias=False)
        yield from _linear("merger.mlp.0", merged, merged)
        yield from _linear("merger.mlp.2", width, merged)
        return
    mergers = [("merger", hidden)] + [
        (f"deepstack_merger_list.{at}", merged) for at in range(len(vision.deep))
    ]
    for name, normed in mergers:
        yield from _norm(f"{name}.norm", normed, bias=True)
        yield from _linear(f"{name}.linear_fc1", merged, merged)
        yield from _linear(f"{name}.linear_fc2", width, merged)


def _linear(name: str, rows: int, columns: int) -> Shapes:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def _norm(name: str, width: int, *, bias: bool) -> Shapes:
    yield f"{name}.weight", (width,)
    if bias:
        yield f"{name}.bias", (width,)


def build_tower(vision: Vision, width: int, *, sequence: bool, empty: bool) -> Any:
    """The module.

    Args:
        width: of the language half.
        sequence: ranks share the tokens, so that each has the gradients of its own tokens' features alone: a
            mark has Megatron sum them.
        empty: its parameters have shapes alone, and no memory.
    """
    if not empty:
        tower = _module(vision, width)
    else:
        with torch.device("meta"):
            tower = _module(vision, width)
        # What is computed, not loaded, needs its numbers; it is the same of fewer layers.
        computed = dict(_module(replace(vision, layers=1, whole=(0,), deep=()), width).named_buffers())
        for name, _ in [*tower.named_buffers()]:
            owner, _, own = name.rpartition(".")
            setattr(tower.get_submodule(owner), own, computed[name])
    for parameter in tower.parameters():
        parameter.sequence_parallel = sequence
    return tower


def _module(vision: Vision, width: int) -> Any:
    import transformers
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
    from transformers.models.qwen3_vl import modeling_qwen3_vl

    values: dict[str, Any] = {
        "depth": vision.layers,
        "hidden_size": vision.hidden,
        "intermediate_size": vision.ffn,
        "num_heads": vision.heads,
        "in_channels": vision.channels,
        "patch_size": vision.patch,
        "temporal_patch_size": vision.frames,
        "spatial_merge_size": vision.merge,
        "out_hidden_size": width,
    }
    if vision.kind == QWEN2_5_VL:
        values |= {"window_size": vision.window, "fullatt_block_indexes": list(vision.whole)}
        config: Any = transformers.Qwen2_5_VLConfig(vision_config=values).vision_config
        kind: Any = modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel
    else:
        values |= {"num_position_embeddings": vision.positions, "deepstack_visual_indexes": list(vision.deep)}
        config = transformers.Qwen3VLConfig(vision_config=values).vision_config
        kind = modeling_qwen3_vl.Qwen3VLVisionModel
    return kind._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
