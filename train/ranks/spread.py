"""A policy whose weights are spread over ranks, used as one: each call has rank 0 ask all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from rollbook.engines.weights.digests import Look, Tensors
from rollbook.train.batches.batch import MicroBatch, evenly
from rollbook.train.model.lora import check_factors, merged
from rollbook.train.model.reshard import Work, joined
from rollbook.train.model.weight_names import checked, fuse_experts, parts
from rollbook.train.ranks.backend import Kind
from rollbook.train.ranks.kept_digests import Digest, KeptDigests
from rollbook.train.ranks.part import Part
from rollbook.train.ranks.policy import LossOf, Read

T = TypeVar("T")


class Ask(Protocol):
    """Has all ranks call a method of their parts, and returns rank 0's result.

    On rank 0, `own` is called instead of the method, where rank 0 has more to pass to it than
    the others.
    """

    def __call__(self, method: str, *args: Any, own: Callable[[], Any] | None = None) -> Any: ...


class SpreadPolicy:
    """A policy whose weights are spread over ranks, of which this process is rank 0. As `Policy`.

    Args:
        ask: has all ranks call a method of their parts.
    """

    def __init__(self, part: Part, ask: Ask) -> None:
        self._part, self._ask = part, ask
        self.shape, self.device, self.lora = part.shape, part.policy.device, part.policy.lora
        self._digests = KeptDigests()
        self._others = False
        """Whether others are in the place of its own weights, which come without factors."""

    def load_weights(self, tensors: Tensors) -> None:
        """Put Hugging Face weights in place, on each rank its part. As `Policy`.

        Raises:
            ModelError: they are another architecture's.
        """
        self._digests.changed("state")  # the float32 weights that it may have
        self._spread("weights", checked(tensors, self.shape))

    def _spread(self, kind: Kind, tensors: Mapping[str, torch.Tensor]) -> None:
        self._digests.changed("weights")
        names = [name for weight in self._part.named(kind) for name in weight.huggingface]
        own = {name: tensors[name].contiguous() for name in names}
        specs = [(n, tuple(t.shape), t.dtype) for n, t in own.items()]
        self._ask("take", kind, specs, own=lambda: self._part.spread(kind, own))

    def load_adapter(self, tensors: Tensors) -> None:
        """Put low-rank factors in place, on each rank its part. As `Policy`."""
        assert self.lora is not None
        check_factors(tensors, self.shape, self.lora)
        self._digests.changed("state")
        self._spread("adapter", tensors)

    def stream_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under Hugging Face names, one at a time, gathered from the ranks."""
        own = self._stream("weights")
        if self.lora is None or self._others:
            return own
        return merged(own, self.adapter(), self.lora.scale)

    def adapter(self) -> Tensors:
        """The low-rank factors, under PEFT's names, gathered from the ranks."""
        return {} if self.lora is None else dict(self._stream("adapter"))

    def _stream(self, kind: Kind) -> Iterator[tuple[str, torch.Tensor]]:
        each = (
            zip(weight.huggingface, parts(weight, shards, self.shape), strict=True)
            for weight, _, shards in self._ask("stream", kind)
        )
        yield from fuse_experts((named for pair in each for named in pair), self.shape)

    def weights(self) -> Tensors:
        """The weights under Hugging Face names."""
        return dict(self.stream_weights())

    def stream_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The accumulated gradients, before clipping, one at a time."""
        for weight, _, shards in self._ask("stream", "gradients"):
            yield weight.megatron, joined(weight, shards, self.shape)

    def optimizer_state(self) -> Tensors:
        """Moments and step counts, `parameter.field`."""
        return dict(self._stream_state())

    def _stream_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for weight, field, shards in self._ask("stream", "state"):
            whole = shards[0] if not shards[0].dim() else joined(weight, shards, self.shape)
            yield f"{weight.megatron}.{field}", whole

    def each(self, work: Work[T], *, meanwhile: bool = False) -> Callable[[], list[T]]:
        """Have each rank call a function with its own pieces. As `Policy`."""
        wait: Callable[[], list[T]] = self._ask("each", work, meanwhile)
        return wait

    def load_optimizer_state(self, state: Tensors) -> None:
        """Put an optimizer state in place, on each rank its part."""
        self._digests.changed("state")
        number = {weight.megatron: at for at, weight in enumerate(self._part.named("state"))}
        split = [(key.rpartition("."), value.contiguous()) for key, value in state.items()]
        own = [(number[name], field, value) for (name, _, field), value in split]
        specs = [(at, f, tuple(t.shape), t.dtype) for at, f, t in own]
        self._ask("take_state", specs, own=lambda: self._part.spread_state(own))

    def weights_digest(self, look: Look | None = None) -> Digest:
        """Digest of the weights, as in checkpoints and engines. Arguments as of `Policy`."""
        return self._digests.of("weights", self.stream_weights, look)

    def optimizer_digest(self) -> Digest:
        """Digest of the optimizer state."""
        return self._digests.of("state", self._stream_state)

    def seed_step(self, seed: int) -> None:
        """Set every random generator of all ranks for a step."""
        self._ask("seed_step", seed)

    def learning_rate(self, step: int, steps: int | None = None) -> float:
        """Learning rate of the phase's step (from 0), by Megatron's schedule."""
        return self._part.policy.learning_rate(step, steps)

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss_of: LossOf[T], shares: Sequence[int] | None = None
    ) -> list[T]:
        """Accumulate the gradients of all micro-batches, each copy those of its share; returns what
        is kept of each."""
        return self._pass_over(micro_batches, loss_of, shares, backward=True)

    def forward(
        self, micro_batches: Sequence[MicroBatch], read: Read[T], shares: Sequence[int] | None = None
    ) -> list[T]:
        """A forward pass only; returns what is read of each micro-batch."""
        return self._pass_over(micro_batches, read, shares, backward=False)

    def _pass_over(
        self, micro_batches: Sequence[MicroBatch], work: Any, shares: Sequence[int] | None, *, backward: bool
    ) -> list[T]:
        copies = self._part.copies
        counts = shares or [len(some) for some in evenly(micro_batches, copies)]
        remaining = iter(micro_batches)
        own = [[next(remaining) for _ in range(count)] for count in counts]
        own += [[] for _ in range(copies - len(own))]
        results: list[T] = self._ask(
            "pass_over", work, backward, own=lambda: self._part.pass_over(work, backward, own)
        )
        return results

    @contextlib.contextmanager
    def using(self, weights: Tensors) -> Iterator[None]:
        """A context in which other weights are in place of its own, on all ranks, for forward
        passes.

        Raises:
            ModelError: they are another architecture's.
        """
        self._ask("put_aside")
        self._others = True
        try:
            self._spread("weights", checked(weights, self.shape))
            yield
        finally:
            self._others = False
            self._digests.changed("weights")
            self._ask("put_back")

    def offload(self) -> None:
        """Release the memory that all ranks hold, until `onload`."""
        self._ask("offload")

    def onload(self) -> None:
        """Allocate it again; gradients are lost."""
        self._ask("onload")

    def gradient_norm(self) -> float:
        """The 2-norm of all gradients together, without taking a step."""
        return float(torch.stack([gradient.norm() for _, gradient in self.stream_gradients()]).norm())

    def optimizer_step(self, learning_rate: float) -> float:
        """Clip and take one step; returns the gradient norm before clipping."""
        self._digests.changed("weights", "state")
        norm: float = self._ask("optimizer_step", learning_rate)
        return norm
