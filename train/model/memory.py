"""How much of each rank's memory a training takes, from its configuration alone. Pure.

What is kept for the backward pass was measured on small models, and a test compares the numbers
with them: they describe torch and Megatron as they are, and come from no paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from rollbook.train.config.lora import LoraConfig
from rollbook.train.model.lora import factors
from rollbook.train.model.reshard import RankLayout, holds, part_of, tied_output
from rollbook.train.model.shape import ModelShape
from rollbook.train.model.weight_names import Weight, plan, weight_shapes

LOGIT_BYTES = 16
"""Of a logit while a micro-batch runs: itself, its logprob, their gradients."""
FLOAT32 = 4
MOMENTS = 2 * FLOAT32
"""Adam's, of a parameter. Muon has one, of the matrices alone; it is counted as Adam."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a rank's part, beside torch itself.

    Attributes:
        parameters: the number of its weights.
        weights, gradients, optimizer: bytes of them; with a critic, of both.
        reference: bytes of the policy's own weights, put aside, and of the reference's in their
            place.
        activations: bytes kept for the backward pass, of all micro-batches that are under way.
        logits: bytes of a micro-batch's.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    logits: int

    @property
    def state(self) -> int:
        """Bytes that are held from the beginning to the end."""
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def total(self) -> int:
        """All of it."""
        return self.state + self.activations + self.logits


@dataclass(frozen=True, slots=True)
class Pass:
    """The size of a forward pass: its tokens, and the length they are padded to; None: they are
    packed."""

    tokens: int
    padded_to: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """The settings of a training that decide its memory.

    Attributes:
        dtype: of weights and activations; recompute: as of `Build`.
        critic, reference: whether it has them.
        sharing: data-parallel copies that share the optimizer's state; 1: each has its own.
        lora: the low-rank factors that are trained in place of the policy's weights. A critic is
            trained whole.
    """

    dtype: torch.dtype = torch.float32
    recompute: bool = False
    critic: bool = False
    reference: bool = False
    sharing: int = 1
    lora: LoraConfig | None = None


def parameters(shape: ModelShape) -> int:
    """The number of the model's weights."""
    return sum(prod(dims) for dims in weight_shapes(shape).values())


def parameters_of(shape: ModelShape, layout: RankLayout) -> int:
    """The number of weights that a rank holds; a copy of the embedding, as the output of another
    stage, counts too."""
    return sum(_held(plan(shape), shape, layout))


def _held(weights: Sequence[Weight], shape: ModelShape, layout: RankLayout) -> tuple[int, int]:
    """The number of weights, among these, that a rank holds: of experts, and all others."""
    count = {True: 0, False: 0}
    for weight in weights:
        copies = holds(weight, shape, layout) + tied_output(weight, shape, layout)
        if copies:
            names = zip(weight.huggingface, weight.shapes, strict=True)
            whole = {name: torch.empty(dims, device="meta") for name, dims in names}
            count[weight.expert is not None] += copies * part_of(weight, whole, shape, layout).numel()
    return count[True], count[False]


def _stepped(trained: Sequence[Weight], shape: ModelShape, layout: RankLayout, sharing: int) -> int:
    """The number of weights for which a rank's optimizer has the state."""
    experts, others = _held(trained, shape, layout)
    of_experts = sharing * layout.tensor // (layout.expert_tensor * layout.spread)
    return -(-others // sharing) + -(-experts // max(of_experts, 1))


def memory_of(shape: ModelShape, layout: RankLayout, forward_pass: Pass, workload: Workload) -> Memory:
    """The memory that a rank's part of a training takes."""
    count, width = parameters_of(shape, layout), workload.dtype.itemsize
    trained = [plan(shape) if workload.lora is None else factors(shape, workload.lora)]
    trained += [plan(shape)] * workload.critic
    gradients = sum(sum(_held(weights, shape, layout)) for weights in trained)
    beside = 0 if workload.lora is None else sum(_held(trained[0], shape, layout))
    mains = 0 if workload.dtype == torch.float32 else FLOAT32
    under_way = len(layout.stages) - layout.stage  # micro-batches, as a pipeline takes them in turns
    activations = _activation_bytes(shape, layout, forward_pass, workload)
    return Memory(
        parameters=count,
        weights=((1 + workload.critic) * count + beside) * width,
        gradients=gradients * FLOAT32,
        optimizer=sum(_stepped(w, shape, layout, workload.sharing) for w in trained) * (MOMENTS + mains),
        reference=workload.reference * count * (width + FLOAT32),
        activations=under_way * activations,
        logits=forward_pass.tokens * shape.outputs * LOGIT_BYTES if layout.last else 0,
    )


def _activation_bytes(shape: ModelShape, layout: RankLayout, forward_pass: Pass, workload: Workload) -> int:
    """Bytes that a forward pass keeps for its backward pass, beside the logits."""
    layers, width = layout.stages[layout.stage], workload.dtype.itemsize
    of_layer = forward_pass.tokens * _numbers(shape, layout, forward_pass, workload.dtype) * width
    if not workload.recompute:
        return layers * of_layer
    return layers * forward_pass.tokens * shape.hidden // _sharing_tokens(layout) * width + of_layer


def _sharing_tokens(layout: RankLayout) -> int:
    """How many ranks share the tokens between matrices."""
    return layout.tensor if layout.sequence else 1


def _numbers(shape: ModelShape, layout: RankLayout, forward_pass: Pass, dtype: torch.dtype) -> int:
    """How many numbers of the type a layer keeps per token.

    Norms are computed in float32: of narrower types they keep their input twice as wide.
    """
    wide, shared = dtype == torch.float32, layout.tensor
    heads, queries = shape.heads // shared, shape.heads * shape.head_dim // shared
    keys = shape.kv_heads * shape.head_dim // shared
    of_norms = (10 if wide else 18) if shape.output_norms else (6 if wide else 10)
    count = of_norms * shape.hidden // _sharing_tokens(layout) + 4 * queries + 3 * keys
    if shape.qk_norm:
        count += (2 * queries + keys) if wide else 4 * (queries + keys)
    if shape.experts is None:
        count += 5 * shape.ffn // shared
    else:
        chosen, of_inner = shape.experts.per_token, 6 if shape.experts.limit is None else 8
        count += chosen * (of_inner * shape.experts.ffn // layout.expert_tensor + 2 * shape.hidden)
    if forward_pass.padded_to is not None:  # Megatron's own attention holds the scores of all pairs
        count += (1 if wide else 3) * heads * forward_pass.padded_to
    return count
