"""What a training takes of each rank's memory, by its configuration alone. Pure.

What the backward pass is kept for was measured on small models and is held against them by a test: it is of
torch and Megatron as they are, not of a paper.
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
    """What a rank's part takes beside torch itself.

    Attributes:
        parameters: how many numbers its weights are.
        weights, gradients, optimizer: bytes of them; with a critic, of both.
        reference: bytes of the policy's own weights, put aside, and of the reference's in their place.
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
        """Bytes that are there from the beginning to the end."""
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def total(self) -> int:
        """All of it."""
        return self.state + self.activations + self.logits


@dataclass(frozen=True, slots=True)
class Pass:
    """What a forward pass is given: tokens, and to which length they are padded; None: they are packed."""

    tokens: int
    padded_to: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What a training asks of its ranks.

    Attributes:
        dtype: of weights and activations; recompute: as of `Build`.
        critic, reference: whether it has them.
        sharing: data-parallel copies that share the optimizer's state; 1: each has its own.
        lora: the low-rank factors that are trained in place of the policy's weights. A critic is trained
            whole.
    """

    dtype: torch.dtype = torch.float32
    recompute: bool = False
    critic: bool = False
    reference: bool = False
    sharing: int = 1
    lora: LoraConfig | None = None


def parameters(shape: ModelShape) -> int:
    """How many numbers the model's weights are."""
    return sum(prod(dims) for dims in weight_shapes(shape).values())


def parameters_of(shape: ModelShape, layout: RankLayout) -> int:
    """How many of them a rank holds; a copy of the embedding, as the output of another stage, counts too."""
    return sum(_held(plan(shape), shape, layout))


def _held(weights: Sequence[Weight], shape: ModelShape, layout: RankLayout) -> tuple[int, int]:
    """The numbers that a rank holds of some weights: of experts, and all others."""
    count = {True: 0, False: 0}
    for weight in weights:
        copies = holds(weight, shape, layout) + tied_output(weight, shape, layout)
        if copies:
            names = zip(weight.huggingface, weight.shapes, strict=True)
            whole = {name: torch.empty(dims, device="meta") for name, dims in names}
            count[weight.expert is not None] += copies * part_of(weight, whole, shape, layout).numel()
    return count[True], count[False]


def _stepped(trained: Sequence[Weight], shape: ModelShape, layout: RankLayout, sharing: int) -> int:
    """How many numbers a rank's optimizer has the state of."""
    experts, others = _held(trained, shape, layout)
    of_experts = sharing * layout.tensor // (layout.expert_tensor * layout.spread)
    return -(-others // sharing) + -(-experts // max(of_experts, 1))


def memory_of(shape: ModelShape, layout: RankLayout, given: Pass, asked: Asked) -> Memory:
    """What a rank's part of a training takes."""
    count, width = parameters_of(shape, layout), asked.dtype.itemsize
    trained = [plan(shape) if asked.lora is None else factors(shape, asked.lora)]
    trained += [plan(shape)] * asked.critic
    gradients = sum(sum(_held(weights, shape, layout)) for weights in trained)
    beside = 0 if asked.lora is None else sum(_held(trained[0], shape, layout))
    mains = 0 if asked.dtype == torch.float32 else FLOAT32
    under_way = len(layout.stages) - layout.stage  # micro-batches, as a pipeline takes them in turns
    kept = _kept(shape, layout, given, asked)
    return Memory(
        parameters=count,
        weights=((1 + asked.critic) * count + beside) * width,
        gradients=gradients * FLOAT32,
        optimizer=sum(_stepped(w, shape, layout, asked.sharing) for w in trained) * (MOMENTS + mains),
        reference=asked.reference * count * (width + FLOAT32),
        activations=under_way * kept,
        logits=given.tokens * shape.outputs * LOGIT_BYTES if layout.last else 0,
    )


def _kept(shape: ModelShape, layout: RankLayout, given: Pass, asked: Asked) -> int:
    """Bytes that a forward pass keeps for its backward pass, beside the logits."""
    layers, width = layout.stages[layout.stage], asked.dtype.itemsize
    of_layer = given.tokens * _numbers(shape, layout, given, asked.dtype) * width
    if not asked.recompute:
        return layers * of_layer
    return layers * given.tokens * shape.hidden // _sharing_tokens(layout) * width + of_layer


def _sharing_tokens(layout: RankLayout) -> int:
    """How many ranks share the tokens between matrices."""
    return layout.tensor if layout.sequence else 1


def _numbers(shape: ModelShape, layout: RankLayout, given: Pass, dtype: torch.dtype) -> int:
    """Numbers of the type that a layer keeps of a token.

    Norms are computed in float32: of narrower types they keep their input twice as wide.
    """
    wide, shared = dtype == torch.float32, layout.tensor
    heads, queries = shape.heads // shared, shape.heads * shape.head_dim // shared
    keys = shape.kv_heads * shape.head_dim // shared
    of_norms = (10 if wide else 18) if shape.output_norms else (6 if wide else 10)
    found = of_norms * shape.hidden // _sharing_tokens(layout) + 4 * queries + 3 * keys
    if shape.qk_norm:
        found += (2 * queries + keys) if wide else 4 * (queries + keys)
    if shape.experts is None:
        found += 5 * shape.ffn // shared
    else:
        chosen, of_inner = shape.experts.per_token, 6 if shape.experts.limit is None else 8
        found += chosen * (of_inner * shape.experts.ffn // layout.expert_tensor + 2 * shape.hidden)
    if given.padded_to is not None:  # Megatron's own attention holds the scores of all pairs
        found += (1 if wide else 3) * heads * given.padded_to
    return found
