"""The interface that a training has to a policy, wherever its weights are: in this process, or
spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch

from rollbook.engines.weights.digests import Look, Tensors
from rollbook.train.batches.batch import MicroBatch
from rollbook.train.model.reshard import Work
from rollbook.train.model.shape import ModelShape
from rollbook.train.ranks.kept_digests import Digest

T = TypeVar("T")
LossOf = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, T]]
"""(outputs, micro-batch) -> scalar loss of the micro-batch, already normalized, and what is kept of it.
Outputs are logits [B, T, V], or scores; of a packed micro-batch logits [N, V] of what precedes its N trained
tokens, in their order. Other ranks are sent it, so it can be pickled."""
Read = Callable[[torch.Tensor, MicroBatch], T]
"""(outputs, micro-batch) -> what is read of it, such as a value of each token, [B, T - 1]."""


class Policy(Protocol):
    """One policy in training. Weights have Hugging Face names; gradients and the optimizer's state
    have those of Megatron, as one rank with the whole model would."""

    @property
    def shape(self) -> ModelShape:
        """The architecture."""

    @property
    def device(self) -> torch.device:
        """Where this rank's part is."""

    def load_weights(self, tensors: Tensors) -> None:
        """Put Hugging Face weights in place; of a policy with low-rank factors the base weights.

        Raises:
            ModelError: they are another architecture's.
        """

    def stream_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights, one at a time, in the order of `weight_names.plan`.

        Most are views of the live weights: use or copy each before the next step.

        Raises:
            ModelError: products of low-rank factors cannot be merged into them.
        """

    def weights(self) -> Tensors:
        """The weights (views where possible)."""

    def load_adapter(self, tensors: Tensors) -> None:
        """Put low-rank factors in place, under PEFT's names.

        Raises:
            ModelError: they are others than the policy has.
        """

    def adapter(self) -> Tensors:
        """The low-rank factors, under PEFT's names; none for a policy that is trained whole. Their
        products are merged into the weights."""

    def stream_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The accumulated gradients, before clipping."""

    def optimizer_state(self) -> Tensors:
        """Moments and step counts, `parameter.field`; empty before the first step."""

    def load_optimizer_state(self, state: Tensors) -> None:
        """Put an optimizer state in place; an empty one starts the optimizer anew."""

    def each(self, work: Work[T], *, meanwhile: bool = False) -> Callable[[], list[T]]:
        """Have each rank call a function with its own pieces of weights, low-rank factors and
        optimizer state, which together are every number once.

        Args:
            meanwhile: it gets copies in the host's memory, and runs while training goes on; else
                the policy must stay as it is until the result was called.

        Returns:
            A function to be called once, which waits until all ranks are done and returns their
            results by rank. It raises RankError, which names the rank that failed; where rank 0
            did, its error.
        """

    def weights_digest(self, look: Look | None = None, *, tree: bool = True) -> Digest:
        """Digest of the weights, as in checkpoints and engines; cached until a method here changes
        them.

        Args:
            look: called with each tensor first; it may raise.
            tree: whether it is of blocks; those of a run that an earlier release began are not.
        """

    def optimizer_digest(self, *, tree: bool = True) -> Digest:
        """Digest of the optimizer state, cached likewise.

        Args:
            tree: whether it is of blocks, as steps and checkpoints have it; those of earlier releases do not.
        """

    def seed_step(self, seed: int) -> None:
        """Set every random generator for a step."""

    def learning_rate(self, step: int, steps: int | None = None) -> float:
        """Learning rate of the phase's step (from 0), by Megatron's schedule.

        Args:
            steps: that the schedule is to span, if different from its own.
        """

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss_of: LossOf[T], shares: Sequence[int] | None = None
    ) -> list[T]:
        """Accumulate the gradients of all micro-batches; returns what is kept of each.

        Args:
            micro_batches: of all data-parallel ranks, rank by rank.
            shares: how many of them are each rank's; None: they are shared out evenly.
        """

    def forward(
        self, micro_batches: Sequence[MicroBatch], read: Read[T], shares: Sequence[int] | None = None
    ) -> list[T]:
        """A forward pass only; returns what is read of each micro-batch. Arguments as of
        `forward_backward`."""

    def using(self, weights: Tensors) -> AbstractContextManager[None]:
        """A context in which other weights are in place of its own, for forward passes.

        Raises:
            ModelError: they are another architecture's.
        """

    def offload(self) -> None:
        """Release the memory of weights, gradients and the optimizer's state, until `onload`."""

    def onload(self) -> None:
        """Allocate it again; gradients are lost. Does nothing if it was not released."""

    def gradient_norm(self) -> float:
        """The 2-norm of all gradients together, without taking a step."""

    def optimizer_step(self, learning_rate: float) -> float:
        """Clip and take one step; returns the gradient norm before clipping."""
