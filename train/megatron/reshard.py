"""A model spread over tensor- and pipeline-parallel ranks: each rank's part of whole tensors.

Tensors are split as Megatron-core splits them: queries, keys and values by key-value group, gate and up
each on its own, outputs by columns, the vocabulary by rows; layers go to pipeline stages in order. The
tensors of an expert are split like a dense layer's, or whole on every rank (`expert_tensor` 1). Experts
are not spread over ranks (expert parallelism is 1), and interleaved stages are not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from rollbook.store.errors import ModelError
from rollbook.train.megatron.shape import ModelShape
from rollbook.train.megatron.weight_names import Weight, checked, plan, shard


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Which part of a model a rank holds.

    `tensor` ranks share each tensor, of which this one is `tensor_rank`; `stages` counts the layers of
    every pipeline stage, and this rank is in stage `stage`. The tensors of an expert are shared by
    `expert_tensor` ranks: as many as `tensor`, or 1.
    """

    stages: tuple[int, ...]
    stage: int = 0
    tensor: int = 1
    tensor_rank: int = 0
    expert_tensor: int = 1

    @property
    def first(self) -> bool:
        """Whether it holds the embedding."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether it holds the output."""
        return self.stage == len(self.stages) - 1

    @property
    def offset(self) -> int:
        """Layers in the stages before."""
        return sum(self.stages[: self.stage])


def one_rank(shape: ModelShape) -> RankLayout:
    """The layout of a process that holds the whole model."""
    return RankLayout((shape.layers,))


def check_layout(shape: ModelShape, layout: RankLayout) -> None:
    """Check that every split is even.

    Raises:
        ModelError: one does not; it names the number and the ranks.
    """
    if sum(layout.stages) != shape.layers or min(layout.stages) < 1:
        raise ModelError(
            f"{shape.layers} layers cannot be {list(layout.stages)} per pipeline stage: "
            "choose a number of stages that divides them"
        )
    split = {"key-value heads": shape.kv_heads, "rows of the padded vocabulary": shape.padded_vocab}
    if shape.experts is None:
        split["intermediate_size"] = shape.ffn
    for what, count in split.items():
        if count % layout.tensor:
            raise ModelError(
                f"{count} {what} cannot be split over {layout.tensor} tensor-parallel ranks: "
                "choose a number that divides them"
            )
    if shape.experts is None:
        return
    if layout.expert_tensor not in (1, layout.tensor) or shape.experts.ffn % layout.expert_tensor:
        raise ModelError(
            f"experts of width {shape.experts.ffn} on {layout.tensor} tensor-parallel ranks cannot be split "
            f"over {layout.expert_tensor}: choose 1, or all the ranks if their number divides the width"
        )


def _stage_of(weight: Weight, layout: RankLayout) -> int:
    ends = [sum(layout.stages[: i + 1]) for i in range(len(layout.stages))]
    return next(i for i, end in enumerate(ends) if weight.layer < end)


def _local_name(weight: Weight, layout: RankLayout, stage: int) -> str:
    """Its name within its pipeline stage, whose layers are numbered from 0."""
    if not weight.megatron.startswith("decoder.layers."):
        return weight.megatron
    inner = weight.megatron.split(".", 3)[3]
    return f"decoder.layers.{weight.layer - sum(layout.stages[:stage])}.{inner}"


def _split_over(weight: Weight, layout: RankLayout) -> int:
    """How many ranks share the tensor; 1 where each has all of it."""
    if weight.kind == "replicated":
        return 1
    return layout.expert_tensor if weight.expert else layout.tensor


def rank_weights(
    tensors: Mapping[str, torch.Tensor], shape: ModelShape, layout: RankLayout
) -> Iterator[tuple[str, torch.Tensor]]:
    """A rank's Megatron tensors, one at a time, from whole Hugging Face tensors.

    A tied model's last stage has a copy of the embedding, `output_layer.weight`, if that is elsewhere.

    Raises:
        ModelError: a tensor is missing or ill-shaped, or the model cannot be split so.
    """
    check_layout(shape, layout)
    fitting = checked(tensors, shape)
    for weight in plan(shape):
        size = _split_over(weight, layout)
        rank = layout.tensor_rank if size > 1 else 0
        if _stage_of(weight, layout) == layout.stage:
            yield _local_name(weight, layout, layout.stage), shard(weight, fitting, shape, rank, size)
        if (
            weight.megatron.startswith("embedding.")
            and shape.tied
            and not shape.scores
            and layout.last
            and not layout.first
        ):
            yield "output_layer.weight", shard(weight, fitting, shape, rank, size)
