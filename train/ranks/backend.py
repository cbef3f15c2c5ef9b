"""A rank's part of a trainable policy: weights, optimizer and gradients of one Megatron model, as
named tensors. With a single rank, it is the whole policy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from rollbook.engines.weights.digests import Look, Tensors
from rollbook.train.batches.batch import MicroBatch
from rollbook.train.clock import timed
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.model.lora import ADAPTED, check_factors, factors, merged
from rollbook.train.model.model import Build, MegatronParts, build
from rollbook.train.model.offload import Offloaded
from rollbook.train.model.optimizer_slices import stepped_of
from rollbook.train.model.packed import pack
from rollbook.train.model.reshard import Piece, Work, copied, held_pieces, rank_weights
from rollbook.train.model.routing import Routing
from rollbook.train.model.shape import ModelShape
from rollbook.train.model.weight_names import parts, shard, stream_weights
from rollbook.train.ranks.kept_digests import Digest, KeptDigests
from rollbook.train.ranks.policy import LossOf, Read

T = TypeVar("T")
Kind = Literal["weights", "adapter", "gradients", "state"]
"""Of what a rank holds; `adapter`: low-rank factors. Gradients and state are of what is trained: the factors,
or where there are none the weights."""
MAIN = "main"
"""Field of an optimizer's state: the float32 weights of a parameter that the model has in bfloat16."""


class TrainablePolicy:
    """One policy in training, or a rank's part of it. All weights have Hugging Face names.

    Args:
        shape: the architecture.
        optimizer: Adam and its schedule; `decay_steps` falls back to the steps of `how`.
        how: it computes.
        weights: that it takes over, under Megatron's names, where they are in memory; None: it has its own.
    """

    def __init__(
        self, shape: ModelShape, optimizer: OptimizerConfig, how: Build, weights: Tensors | None = None
    ) -> None:
        self.shape = shape
        self._parts: MegatronParts = build(shape, optimizer, how, weights)
        self._routing = Routing(self._parts.module, self._parts.layout, again=how.recompute)
        self._schedule: Any = None  # of a policy that is not trained
        if how.trains:
            self._schedule = _schedule(self._parts.optimizer, optimizer, how.steps)
        self._wanted = optimizer
        self._stepped = stepped_of(self._parts.module, self._parts.optimizers)
        self.lora, self._flash = how.lora, how.flash
        self.layout, self.distributed_optimizer = self._parts.layout, how.distributed_optimizer
        self._aside: list[torch.Tensor] = []
        self._digests = KeptDigests()
        self._offloaded: Offloaded | None = None

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._parts.device

    # State ------------------------------------------------------------------------------------

    def load_weights(self, tensors: Tensors) -> None:
        """Put Hugging Face weights in place.

        Raises:
            ModelError: they are another architecture's.
        """
        for name, tensor in rank_weights(tensors, self.shape, self.layout):
            self.put(name, tensor)

    def stream_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under Hugging Face names, one at a time, in the order of `weight_names.plan`.

        Most are views of the live weights: use or copy each before the next step.

        Raises:
            ModelError: products of low-rank factors cannot be merged into them.
        """
        own = stream_weights(self.own_weights(), self.shape)
        if self.lora is None or self._aside:  # others in their place come without factors
            return own
        return merged(own, self.adapter(), self.shape, self.lora)

    def load_adapter(self, tensors: Tensors) -> None:
        """Put low-rank factors in place, under PEFT's names.

        Raises:
            ModelError: they are others than the policy has.
        """
        assert self.lora is not None
        check_factors(tensors, self.shape, self.lora)
        for factor in factors(self.shape, self.lora):
            self.put(factor.megatron, shard(factor, tensors, self.shape))

    def adapter(self) -> Tensors:
        """The low-rank factors, under PEFT's names; none of a policy that is trained whole."""
        if self.lora is None:
            return {}
        held = self.own_adapter()
        return {
            factor.huggingface[0]: next(parts(factor, [held[factor.megatron]], self.shape))
            for factor in factors(self.shape, self.lora)
        }

    def own_weights(self) -> Tensors:
        """The weights that this rank holds, under Megatron's names; of a policy with low-rank
        factors the base weights."""
        return self._named(of_adapter=False)

    def own_adapter(self) -> Tensors:
        """The low-rank factors that this rank holds, or its parts of them, under Megatron's names."""
        return self._named(of_adapter=True)

    def _named(self, *, of_adapter: bool) -> Tensors:
        held = self._parts.module.named_parameters()
        return {name: p.detach() for name, p in held if (ADAPTED in name) == of_adapter}

    def weights(self) -> Tensors:
        """The weights under Hugging Face names (views where possible)."""
        return dict(self.stream_weights())

    def gradients(self) -> Tensors:
        """The accumulated gradients of what is trained, before clipping, under Megatron's names."""
        held = self._parts.module.named_parameters()
        return {name: p.main_grad.detach() for name, p in held if p.requires_grad}

    def stream_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The accumulated gradients, before clipping, under Megatron's names."""
        yield from self.gradients().items()

    def load_gradients(self, gradients: Tensors) -> None:
        """Put gradients in place, under Megatron's names; those that are not there are 0."""
        self._parts.wrapped.zero_grad_buffer()
        held = self.gradients()
        for name, gradient in gradients.items():
            held[name].copy_(gradient)

    def optimizer_state(self) -> Tensors:
        """Adam's moments and step counts, and the float32 weights where the model's are narrower,
        `parameter.field`; empty before the first step."""
        held = self.pieces("state").items()
        return {f"{name}.{field}": piece.whole() for name, fields in held for field, piece in fields.items()}

    def pieces(self, kind: Kind) -> dict[str, dict[str, Piece]]:
        """The pieces that this rank holds, by Megatron's name and field; weights and gradients have
        one field, "". Pieces of gradients and state are what its optimizer steps."""
        if kind == "weights":
            return {name: {"": Piece.all_of(tensor)} for name, tensor in self.own_weights().items()}
        if kind == "adapter":
            return {name: {"": Piece.all_of(tensor)} for name, tensor in self.own_adapter().items()}
        stepped = self._stepped.items()
        if kind == "gradients":
            return {name: {"": part.piece(part.gradient)} for name, part in stepped}
        held = {}
        for name, part in stepped:
            if fields := dict(part.state):
                fields |= {MAIN: part.tensor} if part.narrow else {}
                held[name] = {field: part.piece(torch.as_tensor(value)) for field, value in fields.items()}
        return held

    def each(self, work: Work[T], *, meanwhile: bool = False) -> Callable[[], list[T]]:
        """Call a function with the pieces of the one rank. As `Policy`."""
        own = held_pieces(self, [self.layout], 0)
        pieces = copied(own) if meanwhile else own
        return lambda: [work(0, 1, pieces)]

    def load_optimizer_state(self, state: Tensors) -> None:
        """Put an optimizer state in place; an empty one starts Adam anew."""
        self.forget_optimizer_state()
        for key, value in state.items():
            name, _, field = key.rpartition(".")
            self.put_optimizer_state(name, field, value)

    def forget_optimizer_state(self) -> None:
        """Start the optimizer anew."""
        self._digests.changed("state")
        for optimizer in self._parts.optimizers:
            optimizer.optimizer.state.clear()

    def put(self, name: str, value: torch.Tensor) -> None:
        """Set a weight by its Megatron name. Weights that only stand in while the policy's own are
        put aside do not change the optimizer's."""
        self._digests.changed("weights")
        parameter, part = self._parts.module.get_parameter(name), self._stepped.get(name)
        with torch.no_grad():
            parameter.copy_(value)
            if not self._aside and part is not None and part.narrow:
                self._digests.changed("state")
                part.tensor.copy_(part.own(parameter))

    def put_optimizer_state(self, name: str, field: str, value: torch.Tensor) -> None:
        """Set one field of a parameter's optimizer state from a value laid out as the parameter;
        this rank takes the part that its optimizer steps."""
        self._digests.changed("state")
        if (part := self._stepped.get(name)) is None:
            return
        if field == MAIN:
            with torch.no_grad():
                part.tensor.copy_(part.own(value))
        else:  # a copy each, since torch counts steps in place, and on the host
            held = part.own(value).to(part.tensor.device, copy=True) if value.dim() else value.clone()
            part.optimizer.state[part.tensor][field] = held

    def weights_digest(self, look: Look | None = None, *, tree: bool = True) -> Digest:
        """Digest of the weights, as in checkpoints and engines. Arguments as of `Policy`."""
        return self._digests.of("weights", self.stream_weights, look, tree=tree)

    def optimizer_digest(self, *, tree: bool = True) -> Digest:
        """Digest of the optimizer state. Arguments as of `Policy`."""
        return self._digests.of("state", lambda: iter(self.optimizer_state().items()), tree=tree)

    # Steps ------------------------------------------------------------------------------------

    def seed_step(self, seed: int) -> None:
        """Set every random generator for a step."""
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)

    def learning_rate(self, step: int, steps: int | None = None) -> float:
        """Learning rate of the phase's step (from 0), by Megatron's schedule.

        Args:
            steps: that the schedule is to span, if different from its own.
        """
        schedule = self._schedule
        if steps is not None:
            schedule = _schedule(self._parts.optimizer, self._wanted, steps)
        schedule.num_steps = 0
        schedule.step(step + 1)
        return float(self._parts.optimizer.param_groups[0]["lr"])

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss_of: LossOf[T], shares: Sequence[int] | None = None
    ) -> list[T]:
        """Accumulate the gradients of all micro-batches; returns what is kept of each, on the last
        pipeline stage."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._parts.wrapped.zero_grad_buffer()
        self._parts.optimizer.zero_grad()
        self._routing.begin()
        # Megatron divides by both; the loss is normalized already.
        count = len(micro_batches) * parallel_state.get_data_parallel_world_size()

        def scaled(output: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, T]:
            loss, kept = loss_of(output, micro)
            return loss * count, kept

        schedule = self._schedule_of(micro_batches, scaled)
        with timed("backward"):  # the forward passes within count as such
            results: list[T] = get_forward_backward_func()(**schedule, forward_only=False)
        return results

    def forward(
        self, micro_batches: Sequence[MicroBatch], read: Read[T], shares: Sequence[int] | None = None
    ) -> list[T]:
        """A forward pass only; returns what is read of each micro-batch, on the last pipeline
        stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        with torch.no_grad():
            if len(self.layout.stages) == 1:
                return [read(self._outputs(self._parts.wrapped, micro), micro) for micro in micro_batches]
            only = {"forward_only": True, "collect_non_loss_data": True}
            results: list[T] = get_forward_backward_func()(**self._schedule_of(micro_batches, read), **only)
            return results

    def _schedule_of(
        self, micro_batches: Sequence[MicroBatch], of_output: Callable[[torch.Tensor, MicroBatch], Any]
    ) -> dict[str, Any]:
        """Arguments for Megatron's schedules: on the last stage each output goes to `of_output`."""

        def forward(batches: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
            micro = next(batches)

            @timed("forward")
            def of_this(output: torch.Tensor, non_loss_data: bool = False) -> Any:
                return of_output(output, micro)

            with timed("forward"):
                return self._outputs(model, micro), of_this

        return {
            "forward_step_func": forward,
            "data_iterator": iter(micro_batches),
            "model": [self._parts.wrapped],
            "num_microbatches": len(micro_batches),
            "seq_length": max(m.tokens.shape[1] for m in micro_batches),
            "micro_batch_size": micro_batches[0].tokens.shape[0],
        }

    @contextlib.contextmanager
    def using(self, weights: Tensors) -> Iterator[None]:
        """A context in which other weights are in place of its own, for forward passes.

        Raises:
            ModelError: they are another architecture's.
        """
        self.put_aside()
        try:
            self.load_weights(weights)
            yield
        finally:
            self.put_back()

    def put_aside(self) -> None:
        """Keep a copy of the current weights until `put_back`; low-rank factors are inactive until
        then."""
        self._aside = [parameter.detach().clone() for parameter in self._parts.module.parameters()]
        for adapter in self._parts.adapters:
            adapter.active = False

    def put_back(self) -> None:
        """Restore the weights of the last `put_aside`."""
        self._digests.changed("weights")
        with torch.no_grad():
            for parameter, value in zip(self._parts.module.parameters(), self._aside, strict=True):
                parameter.copy_(value)
        self._aside = []
        for adapter in self._parts.adapters:
            adapter.active = True

    def offload(self) -> None:
        """Release the memory of weights, gradients and the optimizer's state, until `onload`."""
        if self._offloaded is not None:
            return
        parts, wrapped = self._parts, self._parts.wrapped
        buffers = [*wrapped.buffers, *wrapped.expert_parallel_buffers]
        tensors: list[torch.Tensor] = [parameter.data for parameter in parts.module.parameters()]
        tensors += [buffer.param_data for buffer in buffers if buffer.param_data is not None]
        for part in self._stepped.values():
            tensors += [part.tensor, *(value for value in part.state.values() if value.dim())]
        self._offloaded = Offloaded(tensors, [buffer.grad_data for buffer in buffers])

    def onload(self) -> None:
        """Allocate it again; gradients are lost."""
        if self._offloaded is not None:
            self._offloaded.bring_back()
            self._offloaded = None

    def _outputs(self, model: Any, micro: MicroBatch) -> torch.Tensor:
        """Logits of the vocabulary's tokens, [B, T, V] or [N, V]; or the scores of each token."""
        with self._routing.of(micro, self._multiple, self.device):
            padded = micro.lengths is None
            return self._padded_outputs(model, micro) if padded else self._packed_outputs(model, micro)

    def _padded_outputs(self, model: Any, micro: MicroBatch) -> torch.Tensor:
        tokens = torch.from_numpy(micro.tokens).to(self.device, non_blocking=True)
        length = tokens.shape[1]
        tokens = torch.nn.functional.pad(tokens, (0, -length % self._multiple))
        positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        outputs: torch.Tensor = model(tokens, positions, None)
        return outputs[:, :length, : self.shape.outputs] if self.layout.last else outputs

    @property
    def _multiple(self) -> int:
        """The number of which the length of a forward pass is a multiple."""
        return self.layout.tensor if self.layout.sequence else 1

    def _packed_outputs(self, model: Any, micro: MicroBatch) -> torch.Tensor:
        packed = pack(micro, self.device, self._multiple, flash=self._flash)
        places = None if self.shape.scores else packed.before_trained
        with self._parts.output_places.only(places):
            output: torch.Tensor = model(
                packed.tokens, packed.positions, None, packed_seq_params=packed.documents
            )
        if not self.layout.last:  # hidden states for the next stage
            return output
        outputs: torch.Tensor = output[0, :, : self.shape.outputs]
        if not self.shape.scores:
            return outputs
        placed = outputs.new_zeros((*micro.tokens.shape, self.shape.scores))
        count = len(packed.rows)
        return placed.index_put((packed.rows, packed.positions[0, :count]), outputs[:count])

    def gradient_norm(self) -> float:
        """The 2-norm of all gradients together, without taking a step."""
        norms = [gradient.norm() for gradient in self.gradients().values()]
        return float(torch.stack(norms).norm())

    def optimizer_step(self, learning_rate: float) -> float:
        """Clip and take one Adam step; returns the gradient norm before clipping."""
        self._digests.changed("weights", "state")
        for group in self._parts.optimizer.param_groups:
            group["lr"] = learning_rate
        with timed("optimizer"):
            _, norm, _ = self._parts.optimizer.step()
        return float(norm) if norm is not None else 0.0

    def adam_step(self, settings: AdamSettings) -> float:
        """Take one step of Adam with settings of its own; returns the gradient norm before clipping."""
        for group in self._parts.optimizer.param_groups:
            group["betas"], group["eps"] = settings.betas, settings.eps
            group["weight_decay"] = settings.weight_decay
        for optimizer in self._parts.optimizers:
            optimizer.config.clip_grad = settings.clip_grad
        return self.optimizer_step(settings.learning_rate)


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """Of one step of Adam, with decoupled weight decay; gradients are clipped to the norm `clip_grad`, unless
    it is 0."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad: float


def _schedule(optimizer: Any, wanted: OptimizerConfig, steps: int) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=wanted.lr,
        min_lr=wanted.min_lr,
        lr_warmup_steps=wanted.warmup_steps,
        lr_decay_steps=max(wanted.decay_steps or steps, wanted.warmup_steps + 1),
        lr_decay_style=wanted.decay,
        start_wd=wanted.weight_decay,
        end_wd=wanted.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        wsd_decay_steps=wanted.wsd_decay_steps,
        lr_wsd_decay_style="linear" if wanted.decay == "WSD" else None,
    )
