"""The weights that the golden store of engines is of: numbers that any machine makes the same."""

from __future__ import annotations

import torch

LAYER = "model.layers.0"
SHAPES = {
    "model.embed_tokens.weight": (70, 8),
    f"{LAYER}.self_attn.q_proj.weight": (8, 8),
    f"{LAYER}.self_attn.k_proj.weight": (4, 8),
    f"{LAYER}.self_attn.v_proj.weight": (4, 8),
    f"{LAYER}.self_attn.o_proj.weight": (8, 8),
    f"{LAYER}.mlp.experts.0.gate_proj.weight": (4, 8),
    f"{LAYER}.mlp.experts.0.up_proj.weight": (4, 8),
    f"{LAYER}.mlp.experts.0.down_proj.weight": (8, 4),
    f"{LAYER}.mlp.experts.1.gate_proj.weight": (4, 8),
    f"{LAYER}.mlp.experts.1.up_proj.weight": (4, 8),
    f"{LAYER}.mlp.experts.1.down_proj.weight": (8, 4),
    f"{LAYER}.mlp.shared_expert.gate_proj.weight": (4, 8),
    f"{LAYER}.mlp.shared_expert.up_proj.weight": (4, 8),
    f"{LAYER}.mlp.shared_expert.down_proj.weight": (8, 4),
    "model.norm.weight": (8,),
}


def golden_weights() -> dict[str, torch.Tensor]:
    """Tensors of numbers that go on from one to the next, in float32."""
    tensors, first = {}, 0
    for name, shape in SHAPES.items():
        count = torch.Size(shape).numel()
        tensors[name] = torch.arange(first, first + count, dtype=torch.float32).reshape(shape)
        first += count
    return tensors
