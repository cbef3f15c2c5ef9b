"""A model that several ranks hold, whole again on the first of them: what `reshard` split is compared so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rollbook.store.errors import ModelError
from rollbook.train.megatron.reshard import (
    RankLayout,
    _local_name,
    _split_over,
    _stage_of,
    check_layout,
)
from rollbook.train.megatron.shape import ModelShape
from rollbook.train.megatron.weight_names import Weight, parts, plan


def layout_here(shape: ModelShape) -> RankLayout:
    """The layout of this process in Megatron's process groups, stages of equal depth.

    Raises:
        ModelError: the model cannot be split so.
    """
    from megatron.core import parallel_state as ranks

    count = ranks.get_pipeline_model_parallel_world_size()
    layout = RankLayout(
        stages=(shape.layers // count,) * count,
        stage=ranks.get_pipeline_model_parallel_rank(),
        tensor=ranks.get_tensor_model_parallel_world_size(),
        tensor_rank=ranks.get_tensor_model_parallel_rank(),
        expert_tensor=ranks.get_expert_tensor_parallel_world_size(),
    )
    check_layout(shape, layout)
    return layout


@dataclass(frozen=True, slots=True)
class _Held:
    """What one rank says of itself: where it stands and the shape and type of each of its tensors."""

    layout: RankLayout
    rank: int
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]


def stream_from_ranks(
    held: Mapping[str, torch.Tensor], shape: ModelShape, layout: RankLayout, group: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole Hugging Face tensors on the first rank of a group, one at a time, in the order of `plan`.

    Every rank of the group calls this and exhausts the iterator; on all but the first it yields nothing.
    Each sends one tensor and waits until it is taken, so the first rank holds the parts of one Megatron
    tensor and one Hugging Face tensor made of them, besides its own.

    Args:
        held: the rank's own Megatron tensors, by their names in its stage.
        group: the process group of one copy of the model: its tensor- and pipeline-parallel ranks.

    Raises:
        ModelError: the ranks do not hold the model together; raised on all of them.
    """
    import torch.distributed as dist

    check_layout(shape, layout)
    told = {n: (tuple(t.shape), t.dtype) for n, t in held.items()}
    ranks: list[_Held] = [_Held(layout, dist.get_rank(), told)] * dist.get_world_size(group)
    dist.all_gather_object(ranks, ranks[0], group=group)
    at = {(r.layout.stage, r.layout.tensor_rank): r for r in ranks}
    first, here = dist.get_global_rank(group, 0), dist.get_rank()
    sources = [(w, *_sources(w, layout, at)) for w in plan(shape)]  # before anything is sent
    for weight, name, owners in sources:
        if here == first:
            shards = _received(name, owners, here, held)
            yield from zip(weight.huggingface, parts(weight, shards, shape), strict=True)
        elif any(owner.rank == here for owner in owners):
            dist.send(held[name].detach().contiguous(), dst=first)


def _sources(
    weight: Weight, layout: RankLayout, at: Mapping[tuple[int, int], _Held]
) -> tuple[str, list[_Held]]:
    """The local name of a weight, and the ranks it is gathered from in tensor-parallel order."""
    stage = _stage_of(weight, layout)
    name = _local_name(weight, layout, stage)
    owners = []
    for rank in range(_split_over(weight, layout)):
        owner = at.get((stage, rank))
        if owner is None or name not in owner.tensors:
            raise ModelError(
                f"{weight.huggingface[0]} cannot be gathered: tensor-parallel rank {rank} of stage {stage} "
                f"does not hold {name}; every rank of the model has to take part, with the same layout"
            )
        owners.append(owner)
    return name, owners


def _received(
    name: str, owners: list[_Held], here: int, held: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """The owners' tensors; this rank's own is not copied."""
    import torch.distributed as dist

    shards, pending = [], []
    device = next(iter(held.values())).device
    for owner in owners:
        if owner.rank == here:
            shards.append(held[name].detach())
            continue
        dims, dtype = owner.tensors[name]
        shards.append(torch.empty(dims, dtype=dtype, device=device))
        pending.append(dist.irecv(shards[-1], src=owner.rank))
    for request in pending:
        if request is not None:
            request.wait()
    return shards
