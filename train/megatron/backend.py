"""The trainable policy: weights, optimizer and gradients of one Megatron model, as named tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rollbook.ingest.engines.weights.digests import Tensors, digest_tensors, line_of
from rollbook.store.digest import combine
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.data.batch import MicroBatch
from rollbook.train.megatron.model import MegatronParts, build
from rollbook.train.megatron.packed import pack
from rollbook.train.megatron.reshard import one_rank, rank_weights
from rollbook.train.megatron.shape import ModelShape
from rollbook.train.megatron.weight_names import stream_weights

LossOf = Callable[[torch.Tensor, MicroBatch], torch.Tensor]
"""(outputs, micro-batch) -> scalar loss of the micro-batch, already normalized. Outputs are logits [B, T, V],
or scores; of a packed micro-batch logits [N, V] of what precedes its N trained tokens, in their order."""
Read = Callable[[torch.Tensor, MicroBatch], torch.Tensor]
"""(outputs, micro-batch) -> a value of each token, [B, T - 1]."""


class TrainablePolicy:
    """One policy in training. All names of weights are Hugging Face's.

    Args:
        shape: the architecture.
        optimizer: Adam and its schedule; `decay_steps` falls back to `steps`.
        steps: steps the schedule spans.
    """

    def __init__(
        self,
        shape: ModelShape,
        optimizer: OptimizerConfig,
        *,
        steps: int,
        device: torch.device,
        seed: int,
        threads: int,
    ) -> None:
        self.shape = shape
        self._parts: MegatronParts = build(shape, optimizer, device, seed, threads)
        self._schedule = _schedule(self._parts.optimizer, optimizer, steps)
        self._wanted = optimizer
        self._names = {p: name for name, p in self._parts.module.named_parameters()}

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
        own = dict(self._parts.module.named_parameters())
        with torch.no_grad():
            for name, tensor in rank_weights(tensors, self.shape, one_rank(self.shape)):
                own[name].copy_(tensor)

    def stream_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under Hugging Face names, one at a time, in the order of `weight_names.plan`.

        Most are views of the live weights: use or copy each before the next step.
        """
        held = {name: p.detach() for name, p in self._parts.module.named_parameters()}
        return stream_weights(held, self.shape)

    def weights(self) -> Tensors:
        """The weights under Hugging Face names (views where possible)."""
        return dict(self.stream_weights())

    def gradients(self) -> Tensors:
        """The accumulated gradients, before clipping, under Megatron's names."""
        return {name: p.main_grad.detach() for p, name in self._names.items()}

    def optimizer_state(self) -> Tensors:
        """Adam's moments and step counts, `parameter.field`; empty before the first step."""
        state: Tensors = {}
        for parameter, fields in self._adam().state.items():
            for field, value in fields.items():
                state[f"{self._names[parameter]}.{field}"] = torch.as_tensor(value).detach()
        return state

    def load_optimizer_state(self, state: Tensors) -> None:
        """Put an optimizer state in place; an empty one starts Adam anew."""
        adam = self._adam()
        adam.state.clear()
        by_name = {name: p for p, name in self._names.items()}
        for key, value in state.items():
            name, field = key.rsplit(".", 1)
            adam.state[by_name[name]][field] = value.clone()

    def _adam(self) -> Any:
        return self._parts.optimizer.optimizer

    def weights_digest(self) -> str:
        """Digest of the weights, as in checkpoints and engines."""
        return combine(line_of(name, tensor) for name, tensor in self.stream_weights())

    def optimizer_digest(self) -> str:
        """Digest of the optimizer state."""
        return digest_tensors(self.optimizer_state())

    # Steps ------------------------------------------------------------------------------------

    def seed_step(self, seed: int) -> None:
        """Set every random generator for a step."""
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)

    def learning_rate(self, step: int, steps: int | None = None) -> float:
        """Learning rate of the phase's step (from 0), by Megatron's schedule.

        Args:
            steps: that the schedule is to span, if others than its own.
        """
        schedule = self._schedule
        if steps is not None:
            schedule = _schedule(self._parts.optimizer, self._wanted, steps)
        schedule.num_steps = 0
        schedule.step(step + 1)
        return float(self._parts.optimizer.param_groups[0]["lr"])

    def forward_backward(self, micro_batches: tuple[MicroBatch, ...], loss_of: LossOf) -> None:
        """Accumulate the gradients of all micro-batches."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._parts.wrapped.zero_grad_buffer()
        self._parts.optimizer.zero_grad()
        count = len(micro_batches)

        def forward(batches: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
            micro = next(batches)

            def scaled_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
                # Megatron divides by the number of micro-batches; the loss is normalized already.
                return loss_of(output, micro) * count, {}

            return self._outputs(model, micro), scaled_loss

        longest = max(m.tokens.shape[1] for m in micro_batches)
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(micro_batches),
            model=[self._parts.wrapped],
            num_microbatches=count,
            seq_length=longest,
            micro_batch_size=micro_batches[0].tokens.shape[0],
            forward_only=False,
        )

    def forward(self, micro_batches: tuple[MicroBatch, ...], read: Read) -> list[torch.Tensor]:
        """A forward pass alone: what is read of each micro-batch."""
        with torch.no_grad():
            return [read(self._outputs(self._parts.wrapped, micro), micro) for micro in micro_batches]

    @contextlib.contextmanager
    def using(self, weights: Tensors) -> Iterator[None]:
        """Other weights in place of its own, for forward passes.

        Raises:
            ModelError: they are another architecture's.
        """
        parameters = list(self._parts.module.parameters())
        own = [parameter.detach().clone() for parameter in parameters]
        try:
            self.load_weights(weights)
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(parameters, own, strict=True):
                    parameter.copy_(value)

    def _outputs(self, model: Any, micro: MicroBatch) -> torch.Tensor:
        """Logits of the vocabulary's tokens, [B, T, V] or [N, V]; or the scores of each token."""
        if micro.lengths is not None:
            return self._packed_outputs(model, micro)
        tokens = torch.from_numpy(micro.tokens).to(self.device)
        positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        logits: torch.Tensor = model(tokens, positions, None)[..., : self.shape.outputs]
        return logits

    def _packed_outputs(self, model: Any, micro: MicroBatch) -> torch.Tensor:
        of = pack(micro, self.device)
        places = None if self.shape.scores else of.before_trained
        with self._parts.output_places.only(places):
            given = model(of.tokens, of.positions, None, packed_seq_params=of.documents)
        outputs: torch.Tensor = given[0, :, : self.shape.outputs]
        if not self.shape.scores:
            return outputs
        placed = outputs.new_zeros((*micro.tokens.shape, self.shape.scores))
        return placed.index_put((of.rows, of.positions[0]), outputs)

    def gradient_norm(self) -> float:
        """The 2-norm of all gradients together, of which no step is taken."""
        norms = [gradient.norm() for gradient in self.gradients().values()]
        return float(torch.stack(norms).norm())

    def optimizer_step(self, learning_rate: float) -> float:
        """Clip and take one Adam step; the gradient norm before clipping."""
        for group in self._parts.optimizer.param_groups:
            group["lr"] = learning_rate
        _, norm, _ = self._parts.optimizer.step()
        return float(norm) if norm is not None else 0.0


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
