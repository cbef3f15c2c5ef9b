"""A model spread over ranks: which part of its tensors each rank holds and sends, and how the parts
are put together again. Pure.

Tensors are split as Megatron-core splits them: queries, keys and values by key-value group, gate
and up each on its own, outputs by columns, the vocabulary by rows; layers go to pipeline stages
in order, experts to ranks in order. The tensors of an expert are split like a dense layer's, or
whole on every rank (`expert_tensor` 1). Interleaved stages are not supported here.

Where all ranks give their own pieces, the pieces hold every number exactly once. They are named
in terms of the whole model, so that any layout can load them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, Protocol, TypeVar

import torch

from rollbook.store.errors import ModelError
from rollbook.train.config.lora import LoraConfig
from rollbook.train.config.parallel import ParallelConfig
from rollbook.train.model.lora import factors
from rollbook.train.model.shape import ModelShape
from rollbook.train.model.weight_names import Weight, checked, parts, plan, shard

LAYERS = "decoder.layers."
EXPERTS = "mlp.experts.local_experts."
OUTPUT = "output_layer.weight"


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Which part of a model a rank holds.

    `tensor` ranks share each tensor, of which this one is `tensor_rank`; `stages` counts the layers of
    every pipeline stage, and this rank is in stage `stage`. The tensors of an expert are shared by
    `expert_tensor` ranks: as many as `tensor`, or 1. `spread` ranks share the experts of a layer, of which
    this one is `expert_rank`. `copy` numbers the ranks that hold the same part, `expert_copy` those that hold
    the same experts. With `sequence` the ranks that share each tensor share the tokens between them.
    """

    stages: tuple[int, ...]
    stage: int = 0
    tensor: int = 1
    tensor_rank: int = 0
    expert_tensor: int = 1
    spread: int = 1
    expert_rank: int = 0
    copy: int = 0
    expert_copy: int = 0
    sequence: bool = False

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

    @property
    def tells(self) -> bool:
        """Whether this rank returns what its copy of the model computes: the last stage has it, on
        each of the ranks that share its tensors."""
        return self.last and self.tensor_rank == 0


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What a rank sends of its part of a tensor: some of the numbers, or all.

    Attributes:
        dims: shape of the part.
        numbers: [count] of the flattened part, from `start` on.
    """

    dims: tuple[int, ...]
    start: int
    numbers: torch.Tensor

    @classmethod
    def all_of(cls, part: torch.Tensor) -> Piece:
        """A piece that is the whole part; a view, where the part is contiguous."""
        return cls(tuple(part.shape), 0, part.detach().reshape(-1))

    def whole(self) -> torch.Tensor:
        """The part, if this piece is all of it."""
        return self.numbers.view(self.dims)


def equal_stages(layers: int, count: int) -> tuple[int, ...]:
    """Layers of `count` pipeline stages of equal depth; more layers than there are, where that
    cannot be."""
    return (-(-layers // count),) * count


def stages_of(shape: ModelShape, sizes: ParallelConfig) -> list[RankLayout]:
    """The layout of one rank of every pipeline stage; all ranks of a stage hold as much."""
    depths = equal_stages(shape.layers, sizes.pipeline)
    of_first = RankLayout(
        depths,
        tensor=sizes.tensor,
        expert_tensor=sizes.expert_tensor or sizes.tensor,
        spread=sizes.expert,
        sequence=sizes.sequence,
    )
    return [replace(of_first, stage=stage) for stage in range(sizes.pipeline)]


def check_layout(shape: ModelShape, layout: RankLayout) -> None:
    """Check that every split is even.

    Raises:
        ModelError: one is not; it names the number and the ranks.
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
    _check_experts(shape, layout)


def _check_experts(shape: ModelShape, layout: RankLayout) -> None:
    experts = shape.experts
    if experts is None:
        if layout.spread > 1:
            raise ModelError(
                f"expert = {layout.spread}: the model has no experts to spread over ranks; leave it 1"
            )
        return
    if layout.tensor > 1 and shape.biases:
        raise ModelError(
            f"{shape.family} on {layout.tensor} tensor-parallel ranks: Megatron does not split experts that "
            "have biases; leave tensor 1, and spread the experts over ranks"
        )
    if layout.tensor > 1 and not layout.sequence:
        raise ModelError(
            f"a mixture of experts on {layout.tensor} tensor-parallel ranks: these must share the tokens, "
            "too: set parallel.sequence = true"
        )
    if layout.expert_tensor not in (1, layout.tensor) or experts.ffn % layout.expert_tensor:
        raise ModelError(
            f"experts of width {experts.ffn} on {layout.tensor} tensor-parallel ranks cannot be split "
            f"over {layout.expert_tensor}: choose 1, or all the ranks if their number divides the width"
        )
    if experts.count % layout.spread:
        raise ModelError(
            f"{experts.count} experts cannot be spread over {layout.spread} ranks: choose a number that "
            "divides them"
        )


def _stage_of(weight: Weight, layout: RankLayout) -> int:
    ends = [sum(layout.stages[: i + 1]) for i in range(len(layout.stages))]
    return next(i for i, end in enumerate(ends) if weight.layer < end)


def local_name(weight: Weight, shape: ModelShape, layout: RankLayout) -> str:
    """Its name on the ranks that hold it, where layers and experts are numbered from 0."""
    if not weight.megatron.startswith(LAYERS):
        return weight.megatron
    inner = weight.megatron.split(".", 3)[3]
    if weight.expert is not None and shape.experts is not None:
        own = weight.expert % (shape.experts.count // layout.spread)
        inner = f"{EXPERTS}{own}.{inner.removeprefix(EXPERTS).split('.', 1)[1]}"
    return f"{LAYERS}{weight.layer - sum(layout.stages[: _stage_of(weight, layout)])}.{inner}"


def _split_over(weight: Weight, layout: RankLayout) -> int:
    """How many ranks share the tensor; 1 if each has all of it."""
    if weight.kind == "replicated":
        return 1
    return layout.tensor if weight.expert is None else layout.expert_tensor


def holds(weight: Weight, shape: ModelShape, layout: RankLayout) -> bool:
    """Whether a rank holds the weight, or a part of it."""
    if _stage_of(weight, layout) != layout.stage:
        return False
    if weight.expert is None or shape.experts is None:
        return weight.expert is None or layout.expert_rank == 0
    return weight.expert // (shape.experts.count // layout.spread) == layout.expert_rank


def owners(weight: Weight, shape: ModelShape, layouts: Sequence[RankLayout]) -> list[list[int]]:
    """The ranks that hold each part of the weight, in order, one rank per copy: they sum its
    gradients, and may share its optimizer state.

    Args:
        layouts: of all ranks, by number.
    """
    by_part: dict[int, dict[int, int]] = {}
    for rank, layout in enumerate(layouts):
        copy = layout.copy if weight.expert is None else layout.expert_copy
        part = layout.tensor_rank if _split_over(weight, layout) > 1 else 0
        if holds(weight, shape, layout):
            by_part.setdefault(part, {}).setdefault(copy, rank)
    return [[copies[copy] for copy in sorted(copies)] for _, copies in sorted(by_part.items())]


def part_of(
    weight: Weight, whole: Mapping[str, torch.Tensor], shape: ModelShape, layout: RankLayout
) -> torch.Tensor:
    """A rank's part of a weight that it holds, taken from whole Hugging Face tensors."""
    size = _split_over(weight, layout)
    return shard(weight, whole, shape, layout.tensor_rank if size > 1 else 0, size)


def joined(weight: Weight, shards: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
    """The tensor that one rank with the whole model would hold, joined from the ranks' parts."""
    if len(shards) == 1:
        return shards[0]
    return shard(weight, dict(zip(weight.huggingface, parts(weight, shards, shape), strict=True)), shape)


def tied_output(weight: Weight, shape: ModelShape, layout: RankLayout) -> bool:
    """Whether the rank has a copy of the embedding as its output: the last stage of a tied model
    does, if the embedding is in another stage."""
    return (
        weight.megatron.startswith("embedding.")
        and shape.tied
        and not shape.scores
        and layout.last
        and not layout.first
    )


def rank_weights(
    tensors: Mapping[str, torch.Tensor], shape: ModelShape, layout: RankLayout
) -> Iterator[tuple[str, torch.Tensor]]:
    """A rank's Megatron tensors, one at a time, from whole Hugging Face tensors.

    Raises:
        ModelError: a tensor is missing or ill-shaped, or the model cannot be split so.
    """
    check_layout(shape, layout)
    fitting = checked(tensors, shape)
    for weight in plan(shape):
        if holds(weight, shape, layout):
            yield local_name(weight, shape, layout), part_of(weight, fitting, shape, layout)
        if tied_output(weight, shape, layout):
            yield OUTPUT, part_of(weight, fitting, shape, layout)


T = TypeVar("T")
Given = Literal["weights", "adapter", "state"]
"""What is given: weights, of low-rank factors those that these are beside; the factors; and the optimizer's
state."""


@dataclass(frozen=True, slots=True)
class Address:
    """Which numbers of the whole model a piece holds.

    Attributes:
        weight: the tensor's Megatron name in the whole model.
        field: of the optimizer's state; "" for all else.
        part, parts: which of the tensor's parts the numbers are of, as tensor-parallel ranks
            share it.
        dims: shape of the part; () of a single number.
        start: the first number, in the flattened part.
    """

    kind: Given
    weight: str
    field: str
    part: int
    parts: int
    dims: tuple[int, ...]
    start: int


Pieces = Iterable[tuple[Address, torch.Tensor]]
"""Pieces with their numbers, laid flat."""
Work = Callable[[int, int, Pieces], T]
"""(rank, how many there are, its pieces) -> what is said of it. Other ranks are sent it, so it can be
pickled."""


class Holder(Protocol):
    """The interface to a rank's part of a policy that is needed here."""

    shape: ModelShape
    lora: LoraConfig | None
    distributed_optimizer: bool

    def pieces(self, kind: Given) -> Mapping[str, Mapping[str, Piece]]:
        """What the rank holds, by its own names and by field."""


def held_pieces(
    policy: Holder, layouts: Sequence[RankLayout], rank: int
) -> Iterator[tuple[Address, torch.Tensor]]:
    """A rank's pieces, views of what it holds, looked up as they are iterated.

    Args:
        layouts: of all ranks, by number.
    """
    shape = policy.shape
    trained = plan(shape) if policy.lora is None else factors(shape, policy.lora)
    of_all: list[tuple[Given, Sequence[Weight]]] = [("weights", plan(shape)), ("state", trained)]
    if policy.lora is not None:
        of_all.append(("adapter", trained))
    for kind, weights in of_all:
        held, shared = policy.pieces(kind), kind == "state" and policy.distributed_optimizer
        for weight, by_part in zip(weights, senders(weights, shape, layouts, shared=shared), strict=True):
            fields = held.get(local_name(weight, shape, layouts[rank]), {})
            for part, by in enumerate(by_part):
                if rank in by:
                    yield from _pieces_of(kind, weight.megatron, part, len(by_part), fields)


def _pieces_of(
    kind: Given, name: str, part: int, parts: int, fields: Mapping[str, Piece]
) -> Iterator[tuple[Address, torch.Tensor]]:
    # Of ranks that share a part each has its single numbers: the first gives them.
    first = all(piece.start == 0 for piece in fields.values())
    for field, piece in sorted(fields.items()):
        if piece.dims or first:
            yield Address(kind, name, field, part, parts, piece.dims, piece.start), piece.numbers


def senders(
    weights: Sequence[Weight], shape: ModelShape, layouts: Sequence[RankLayout], *, shared: bool
) -> list[list[list[int]]]:
    """The ranks that send each part of each weight: all that share it; of ranks that hold the same,
    the one with the least to send so far."""
    load = [0] * len(layouts)
    all_holders = []
    for weight in weights:
        holders = owners(weight, shape, layouts)
        if not shared:
            holders = [[min(copies, key=load.__getitem__)] for copies in holders]
            for (rank,) in holders:
                load[rank] += sum(map(prod, weight.shapes)) // len(holders)
        all_holders.append(holders)
    return all_holders


def copied(pieces: Pieces) -> list[tuple[Address, torch.Tensor]]:
    """Copies in the host's memory, which the next step does not change."""
    return [(address, numbers.detach().to("cpu", copy=True)) for address, numbers in pieces]
