"""What each rank gives of a policy where all give their own pieces: together every number, and each once.

Which piece is which is said in terms of the whole model, so that it can be taken up in any layout. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol, TypeVar

import torch

from rollbook.train.config.lora import LoraConfig
from rollbook.train.megatron.lora import factors
from rollbook.train.megatron.reshard import Piece, RankLayout, givers, local_name
from rollbook.train.megatron.shape import ModelShape
from rollbook.train.megatron.weight_names import Weight, plan

T = TypeVar("T")
Given = Literal["weights", "adapter", "state"]
"""What is given: weights, of low-rank factors those that these are beside; the factors; and the optimizer's
state."""


@dataclass(frozen=True, slots=True)
class Address:
    """Which numbers of the whole model a piece is.

    Attributes:
        weight: the tensor's name in the whole model, Megatron's.
        field: of the optimizer's state; "" of what has none.
        part, parts: which of the tensor's parts the numbers are of, as tensor-parallel ranks share it.
        dims: shape of the part; () of a single number.
        start: of the part, laid flat, the first number.
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
    """A rank's part of a policy, as far as it is read here."""

    shape: ModelShape
    lora: LoraConfig | None
    distributed_optimizer: bool

    def pieces(self, kind: Given) -> Mapping[str, Mapping[str, Piece]]:
        """What the rank holds, by its own names and field."""


def given(policy: Holder, layouts: Sequence[RankLayout], rank: int) -> Iterator[tuple[Address, torch.Tensor]]:
    """A rank's pieces, views of what it holds, which are found when they are asked for.

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
        for weight, by_part in zip(weights, turns(weights, shape, layouts, shared=shared), strict=True):
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


def turns(
    weights: Sequence[Weight], shape: ModelShape, layouts: Sequence[RankLayout], *, shared: bool
) -> list[list[list[int]]]:
    """The ranks that give each part of each weight: all that share it; of those that hold the same the one
    that has least to give so far."""
    load = [0] * len(layouts)
    found = []
    for weight in weights:
        holders = givers(weight, shape, layouts)
        if not shared:
            holders = [[min(copies, key=load.__getitem__)] for copies in holders]
            for (rank,) in holders:
                load[rank] += sum(map(prod, weight.shapes)) // len(holders)
        found.append(holders)
    return found


def copied(pieces: Pieces) -> list[tuple[Address, torch.Tensor]]:
    """Copies in the host's memory, which the next step does not change."""
    return [(address, numbers.detach().to("cpu", copy=True)) for address, numbers in pieces]
