"""A rank's part of a policy that is spread over ranks: what each rank does when rank 0 asks all of
them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from rollbook.engines.weights.digests import Tensors
from rollbook.store.errors import RankError
from rollbook.train.batches.batch import MicroBatch
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.model.lora import factors
from rollbook.train.model.model import Build
from rollbook.train.model.reshard import (
    OUTPUT,
    Piece,
    Pieces,
    RankLayout,
    Work,
    copied,
    held_pieces,
    holds,
    local_name,
    owners,
    part_of,
    tied_output,
)
from rollbook.train.model.shape import ModelShape
from rollbook.train.model.weight_names import Weight, parts, plan
from rollbook.train.ranks.backend import Kind, TrainablePolicy
from rollbook.train.ranks.policy import LossOf

T = TypeVar("T")


Named = tuple[str, tuple[int, ...], torch.dtype]
"""What a tensor that is sent is called, its shape and its type."""
Held = dict[str, dict[str, Piece]]
"""What a rank holds, by Megatron's name and field."""
Givers = Sequence[tuple[Weight, list[list[int]]]]
"""Of each weight the ranks that send each of its parts."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank's failure: its host, the error, and the errno of an OSError."""

    host: str
    error: str
    number: int | None


class Part:
    """A rank's part of a policy. Every rank calls each method, with the same arguments, in the same order.

    Args:
        wait_s: longest wait of one rank for another.
    """

    def __init__(self, policy: TrainablePolicy, layouts: Sequence[RankLayout], wait_s: float) -> None:
        self.policy, self.layouts, self.rank = policy, layouts, dist.get_rank()
        self.shape, self.layout = policy.shape, policy.layout
        self.factors = () if policy.lora is None else factors(self.shape, policy.lora)
        self._givers = {kind: self._givers_of(self.named(kind)) for kind in ("weights", "state")}
        self._streaming: Iterator[Any] | None = None
        self._wait, self._worker = timedelta(seconds=wait_s), ThreadPoolExecutor(1, "rollbook-pieces")
        self._meeting: Any = None
        """A group in which ranks meet while training goes on in the others."""

    @classmethod
    def made(cls, shape: ModelShape, optimizer: OptimizerConfig, how: Build, wait_s: float) -> Part:
        """The part of a new policy.

        Raises:
            ModelError: the model cannot be spread so.
        """
        policy = TrainablePolicy(shape, optimizer, how)
        layouts: list[RankLayout] = [policy.layout] * dist.get_world_size()
        dist.all_gather_object(layouts, policy.layout)
        return cls(policy, layouts, wait_s)

    def named(self, kind: Kind) -> tuple[Weight, ...]:
        """All weights of a kind, in the order of the stream."""
        return plan(self.shape) if kind == "weights" or not self.factors else self.factors

    def _givers_of(self, weights: Sequence[Weight]) -> Givers:
        return [(weight, owners(weight, self.shape, self.layouts)) for weight in weights]

    @property
    def copies(self) -> int:
        """Data-parallel copies of the model."""
        return max(layout.copy for layout in self.layouts) + 1

    # Passes -----------------------------------------------------------------------------------

    def pass_over(self, work: Any, backward: bool, shares: list[list[MicroBatch]] | None = None) -> list[Any]:
        """Run a forward, or forward and backward, pass over the rank's share, which it gets from
        rank 0; there, returns the results of all micro-batches.

        Args:
            work: of a micro-batch, a `LossOf` or a `Read`.
            shares: of every copy, on rank 0.
        """
        mine: list[Any] = [None]
        sent = None if shares is None else [_padded_share(shares, layout.copy) for layout in self.layouts]
        dist.scatter_object_list(mine, sent, src=0)
        micro_batches, real = mine[0]
        if backward:
            results = self.policy.forward_backward(micro_batches, _without_loss(work, micro_batches[real:]))
        else:
            results = self.policy.forward(micro_batches, work)
        gathered: list[Any] | None = [None] * len(self.layouts) if self.rank == 0 else None
        dist.gather_object(results[:real] if self.layout.tells else None, gathered, dst=0)
        if gathered is None:
            return []
        tellers = sorted((place.copy, rank) for rank, place in enumerate(self.layouts) if place.tells)
        return [result for _, rank in tellers for result in gathered[rank]]

    # Tensors ----------------------------------------------------------------------------------

    def stream(self, kind: Kind) -> Iterator[tuple[Weight, str, list[torch.Tensor]]]:
        """On rank 0: for each weight and field the parts that the ranks hold, one after the other.
        Other ranks send theirs, and yield nothing."""
        held = self.policy.pieces(kind)
        shared = kind in ("gradients", "state") and self.policy.distributed_optimizer
        all_givers = self._givers["weights" if kind == "weights" else "state"]
        from_ = [(w, [copies if shared else copies[:1] for copies in entry]) for w, entry in all_givers]
        if all(copies == [0] for _, entry in from_ for copies in entry):  # there is nothing to send
            return self._receiving([held], from_) if self.rank == 0 else iter(())
        announced = {
            name: {field: _announced(entry[field]) for field in entry} for name, entry in held.items()
        }
        all_said: list[Held] | None = [announced] * len(self.layouts) if self.rank == 0 else None
        dist.gather_object(announced, all_said, dst=0)
        if all_said is None:
            return self._sending(held, from_)
        self._streaming = self._receiving([held, *all_said[1:]], from_)
        return self._streaming

    def drain(self) -> None:
        """Receive what is still being sent of a stream that was not read to its end."""
        for _ in self._streaming or ():
            pass
        self._streaming = None

    def _sending(self, held: Held, from_: Givers) -> Iterator[Any]:
        for weight, of_parts in from_:
            if not any(self.rank in copies for copies in of_parts):
                continue
            for _, piece in sorted(held.get(local_name(weight, self.shape, self.layout), {}).items()):
                if piece.dims:
                    dist.send(piece.numbers.contiguous(), dst=0)
        return iter(())

    def _receiving(
        self, held: Sequence[Held], from_: Givers
    ) -> Iterator[tuple[Weight, str, list[torch.Tensor]]]:
        for weight, of_parts in from_:
            names = [local_name(weight, self.shape, layout) for layout in self.layouts]
            at = [{rank: held[rank].get(names[rank], {}) for rank in copies} for copies in of_parts]
            for field in sorted({field for part in at for fields in part.values() for field in fields}):
                pieces = ({rank: item[field] for rank, item in part.items() if field in item} for part in at)
                yield weight, field, [self._whole(item) for item in pieces]

    def _whole(self, pieces: dict[int, Piece]) -> torch.Tensor:
        """A whole part, from this rank's own pieces and those that others send."""
        some = next(iter(pieces.values()))
        count = prod(some.dims)
        if not some.dims or (0 in pieces and len(some.numbers) == count):
            return some.whole()
        whole = torch.empty(count, dtype=some.numbers.dtype, device=self.policy.device)
        for rank, piece in pieces.items():
            into = whole[piece.start : piece.start + len(piece.numbers)]
            if rank:
                dist.recv(into, src=rank)
            else:
                into.copy_(piece.numbers)
        return whole.view(some.dims)

    def each(self, work: Work[T], meanwhile: bool) -> Callable[[], list[T]]:
        """Call a function with the rank's own pieces; on rank 0 when the result is called, which
        waits for the others, too."""
        own = held_pieces(self.policy, self.layouts, self.rank)
        pieces = copied(own) if meanwhile else own
        if self._meeting is None:
            self._meeting = dist.new_group(backend="gloo", timeout=self._wait)

        def together() -> list[T]:
            mine, error = _run_work(work, self.rank, len(self.layouts), pieces)
            results: list[Any] | None = [None] * len(self.layouts) if self.rank == 0 else None
            dist.gather_object(mine, results, dst=0, group=self._meeting)
            if error is not None and results is not None:
                raise error
            return _checked_results(results or [])

        if self.rank == 0:
            return together
        # Also where training waits: rank 0 may ask for more before it waits, such as for the critic's.
        self._worker.submit(together)
        return list  # of nothing: rank 0 alone is told

    def take(self, kind: Kind, specs: Sequence[Named]) -> None:
        """Set the rank's part of weights, or of low-rank factors, which it gets whole from rank 0.

        Args:
            specs: of every Hugging Face tensor, in the order of `named`.
        """
        self.spread(kind, {name: torch.empty(dims, dtype=dtype) for name, dims, dtype in specs})

    def spread(self, kind: Kind, tensors: Tensors) -> None:
        """The same on rank 0, which has the tensors."""
        for weight in self.named(kind):
            whole = {name: tensors[name] for name in weight.huggingface}
            for tensor in whole.values():
                dist.broadcast(tensor, src=0)
            if holds(weight, self.shape, self.layout):
                name = local_name(weight, self.shape, self.layout)
                self.policy.put(name, part_of(weight, whole, self.shape, self.layout))
            if tied_output(weight, self.shape, self.layout):
                self.policy.put(OUTPUT, part_of(weight, whole, self.shape, self.layout))

    def take_state(self, specs: Sequence[tuple[int, str, tuple[int, ...], torch.dtype]]) -> None:
        """Set the rank's part of an optimizer's state, which it gets whole from rank 0.

        Args:
            specs: number of the weight in `named`, field, shape and type, of each tensor.
        """
        self.spread_state([(at, f, torch.empty(dims, dtype=dtype)) for at, f, dims, dtype in specs])

    def spread_state(self, state: Sequence[tuple[int, str, torch.Tensor]]) -> None:
        """The same on rank 0, which has the state."""
        self.policy.forget_optimizer_state()
        for at, field, tensor in state:
            dist.broadcast(tensor, src=0)
            weight = self.named("state")[at]
            names = []
            if holds(weight, self.shape, self.layout):
                names.append(local_name(weight, self.shape, self.layout))
            if tied_output(weight, self.shape, self.layout):
                names.append(OUTPUT)
            for name in names:
                part = tensor
                if tensor.dim():
                    split = dict(zip(weight.huggingface, parts(weight, [tensor], self.shape), strict=True))
                    part = part_of(weight, split, self.shape, self.layout)
                self.policy.put_optimizer_state(name, field, part)

    # What needs nothing of others -------------------------------------------------------------

    def seed_step(self, seed: int) -> None:
        """As the policy's."""
        self.policy.seed_step(seed)

    def optimizer_step(self, learning_rate: float) -> float:
        """As the policy's, of all ranks together."""
        return self.policy.optimizer_step(learning_rate)

    def offload(self) -> None:
        """As the policy's."""
        self.policy.offload()

    def onload(self) -> None:
        """As the policy's."""
        self.policy.onload()

    def put_aside(self) -> None:
        """As the policy's."""
        self.policy.put_aside()

    def put_back(self) -> None:
        """As the policy's."""
        self.policy.put_back()


def _run_work(work: Work[T], rank: int, count: int, pieces: Pieces) -> tuple[T | Failed, Exception | None]:
    """The result of a rank's work; or its failure, for the other ranks, and the error."""
    try:
        return work(rank, count, pieces), None
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        return Failed(socket.gethostname(), repr(error), number), error


def _checked_results(results: Sequence[Any]) -> list[Any]:
    """The results of all ranks, in order.

    Raises:
        RankError: one failed.
    """
    for rank, result in enumerate(results):
        if isinstance(result, Failed):
            cause = None if result.number is None else OSError(result.number, result.error)
            raise RankError(f"rank {rank} on {result.host} failed: {result.error}") from cause
    return list(results)


def _announced(piece: Piece) -> Piece:
    """A piece as it is announced before it is sent: without the numbers, unless it is a single one."""
    return replace(piece, numbers=piece.numbers.to("meta")) if piece.dims else piece


def _padded_share(shares: list[list[MicroBatch]], copy: int) -> tuple[list[MicroBatch], int]:
    """A copy's share, and how much of it is real: all copies have as many micro-batches, since
    ranks that share experts meet in each; those that fill a share up train nothing."""
    share = shares[copy]
    most = max(map(len, shares))
    nothing = next(micro for batches in shares for micro in batches)
    nothing = replace(nothing, loss_mask=np.zeros_like(nothing.loss_mask))
    return [*share, *[nothing] * (most - len(share))], len(share)


def _without_loss(loss_of: LossOf[T], without: Sequence[MicroBatch]) -> LossOf[T]:
    """The loss function, with a loss of 0 for some micro-batches."""
    muted = {id(micro) for micro in without}

    def of(outputs: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, T]:
        loss, kept = loss_of(outputs, micro)
        return (loss * 0 if id(micro) in muted else loss), kept

    return of
