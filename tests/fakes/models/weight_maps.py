"""All of a model's weights under the other's names, of one rank: Hugging Face's to Megatron's, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rollbook.train.model.shape import ModelShape
from rollbook.train.model.weight_names import checked, plan, shard, stream_weights


def to_megatron(tensors: Mapping[str, torch.Tensor], shape: ModelShape) -> dict[str, torch.Tensor]:
    """Hugging Face tensors under Megatron's names.

    Raises:
        ModelError: a tensor is missing, or not of the config's shape.
    """
    fitting = checked(tensors, shape)
    return {weight.megatron: shard(weight, fitting, shape) for weight in plan(shape)}


def to_huggingface(tensors: Mapping[str, torch.Tensor], shape: ModelShape) -> dict[str, torch.Tensor]:
    """The inverse of `to_megatron`; tied models have no `lm_head.weight`, as in their files."""
    return dict(stream_weights(tensors, shape))
