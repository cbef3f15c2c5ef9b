"""What a training is said to take of memory, held against what torch and Megatron take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from rollbook.train.batches.batch import MicroBatch
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.config.parallel import ParallelConfig
from rollbook.train.model.memory import Pass, Workload, memory_of, parameters, parameters_of
from rollbook.train.model.model import Build
from rollbook.train.model.reshard import stages_of
from rollbook.train.model.shape import Experts, ModelShape, Windows, Yarn
from rollbook.train.ranks.backend import TrainablePolicy
from rollbook.train.ranks.policy import Policy
from rollbook.train.ranks.ranks import Ranks

CPU = torch.device("cpu")
DENSE = ModelShape(
    family="llama",
    layers=2,
    hidden=128,
    ffn=384,
    heads=8,
    kv_heads=2,
    head_dim=32,
    vocab=512,
    context=1024,
    norm_eps=1e-6,
    rope_theta=10000.0,
    tied=False,
)
SHAPES = {
    "llama": DENSE,
    "qwen3": replace(DENSE, family="qwen3", kv_heads=4, tied=True),
    "qwen3_moe": replace(DENSE, family="qwen3_moe", experts=Experts(4, 2, 192, renormalized=True)),
    "gemma3": replace(
        DENSE,
        family="gemma3_text",
        tied=True,
        query_scalar=24.0,
        windows=Windows(48, (True, False, True), 1e3),
    ),
    "gpt_oss": replace(
        DENSE,
        family="gpt_oss",
        experts=Experts(4, 2, 192, renormalized=True, limit=7.0),
        windows=Windows(48, (True, False, True)),
        yarn=Yarn(8.0, 256, 32.0, 1.0, truncated=False),
    ),
}
"""Samples of `TOKENS // 2` are longer than the windows."""
TOKENS = 256


def _policy(shape: ModelShape, workload: Workload) -> TrainablePolicy:
    dtype = str(workload.dtype).removeprefix("torch.")
    return TrainablePolicy(shape, OptimizerConfig(), Build(1, CPU, 0, 1, dtype, recompute=workload.recompute))


def _kept(policy: Policy, own: TrainablePolicy, *, packed: bool = True) -> int:
    """Bytes that a forward pass over two samples keeps for its backward pass in this process, whose part of
    the policy is `own`."""
    shape, length = (2, TOKENS // 2), TOKENS // 2
    floats, mask = np.zeros(shape, np.float32), np.ones(shape, np.bool_)
    mask[:, 0] = False
    lengths = np.full(2, length) if packed else None
    versions = np.zeros(shape, np.int64)
    micro = MicroBatch(versions, mask, floats, floats + 1, floats, versions, lengths=lengths)
    kept: dict[int, torch.Tensor] = {}

    loss = _Loss()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not loss.come:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.forward_backward([micro], loss)
    weights = {weight.untyped_storage().data_ptr() for weight in own.own_weights().values()}
    return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in weights)


@dataclass
class _Loss:
    """Says whether the forward pass is over: what a backward pass computes again is kept for a moment."""

    come: bool = False

    def __call__(self, logits: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, float]:
        self.come = True
        return logits.float().sum() * 0.0, 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["packed", "padded", "recomputed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_layer_keeps(shape: str, way: str, dtype: torch.dtype) -> None:
    """The difference that two more layers make, to a twentieth."""
    workload = Workload(dtype, recompute=way == "recomputed")
    forward = Pass(TOKENS, TOKENS // 2 if way == "padded" else None)
    measured, estimated = [], []
    for layers in (1, 3):
        deep = replace(SHAPES[shape], layers=layers)
        policy = _policy(deep, workload)
        measured.append(_kept(policy, policy, packed=way != "padded"))
        [layout] = stages_of(deep, ParallelConfig())
        estimated.append(memory_of(deep, layout, forward, workload).activations)
    assert estimated[1] - estimated[0] == pytest.approx(measured[1] - measured[0], rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_always_there(shape: str, dtype: torch.dtype) -> None:
    """Weights, gradients, and after a step the optimizer's state, but for its counters."""
    workload, wanted = Workload(dtype), SHAPES[shape]
    policy = _policy(wanted, workload)
    for gradient in policy.gradients().values():
        gradient.fill_(0.1)
    policy.optimizer_step(1e-3)
    [layout] = stages_of(wanted, ParallelConfig())
    estimate = memory_of(wanted, layout, Pass(1), workload)
    assert estimate.parameters == parameters(wanted) == sum(t.numel() for t in policy.own_weights().values())
    assert estimate.weights == _bytes(policy.own_weights())
    assert estimate.gradients == _bytes(policy.gradients())
    state = {name: tensor for name, tensor in policy.optimizer_state().items() if tensor.dim()}
    assert estimate.optimizer == _bytes(state)


def _bytes(tensors: dict[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_share_it(shape: str) -> None:
    """Stages hold all layers between them, and the embedding twice where it is the output too; ranks that
    share matrices hold half of those, and all of the norms."""
    wanted = SHAPES[shape]
    whole = parameters(wanted)
    embedding = wanted.vocab * wanted.hidden
    stages = [parameters_of(wanted, layout) for layout in stages_of(wanted, ParallelConfig(pipeline=2))]
    assert sum(stages) == whole + wanted.tied * embedding
    if not wanted.biases:  # else tensors are not shared
        [half] = [parameters_of(wanted, layout) for layout in stages_of(wanted, ParallelConfig(tensor=2))]
        assert whole / 2 < half < 0.51 * whole
    if wanted.experts:
        [spread] = [parameters_of(wanted, layout) for layout in stages_of(wanted, ParallelConfig(expert=2))]
        assert spread == whole - _of_experts(wanted) // 2


def _of_experts(shape: ModelShape) -> int:
    """How many numbers the weights and biases of all experts are."""
    if shape.experts is None:
        return 0
    biases = 2 * shape.experts.ffn + shape.hidden if shape.biases else 0
    return shape.layers * shape.experts.count * (3 * shape.hidden * shape.experts.ffn + biases)


@pytest.mark.parametrize("shape", SHAPES)
def test_copies_share_the_state(shape: str) -> None:
    """Of four copies each has a quarter of the moments; of experts that two ranks share, a half of those that
    it holds."""
    wanted = SHAPES[shape]
    for sizes, experts_among in ((ParallelConfig(), 4), (ParallelConfig(expert=2), 2)):
        if experts_among == 2 and not wanted.experts:
            continue
        [layout] = stages_of(wanted, sizes)
        alone, shared = (memory_of(wanted, layout, Pass(1), Workload(sharing=n)) for n in (1, 4))
        of_experts = _of_experts(wanted) // layout.spread
        others = alone.parameters - of_experts
        assert shared.optimizer == 8 * (others // 4 + of_experts // experts_among)
        assert (shared.weights, shared.gradients) == (alone.weights, alone.gradients)


@pytest.mark.ranks
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("shape", "sequence"),
    [("qwen3", False), ("qwen3", True), ("gemma3", False), ("gemma3", True), ("qwen3_moe", True)],
)
def test_what_a_rank_of_two_keeps(shape: str, sequence: bool) -> None:
    """The difference that two more layers make to a rank that shares each tensor, and with `sequence` the
    tokens, to a sixteenth."""
    sizes, forward = ParallelConfig(tensor=2, sequence=sequence), Pass(TOKENS)
    measured, estimated = [], []
    for layers in (1, 3):
        deep = replace(SHAPES[shape], layers=layers)
        with Ranks(sizes, 2) as ranks:
            policy = ranks.policy("actor", deep, OptimizerConfig(), Build(1, CPU, 0, 1))
            measured.append(_kept(policy, policy._part.policy))
        [layout] = stages_of(deep, sizes)
        estimated.append(memory_of(deep, layout, forward, Workload()).activations)
    assert estimated[1] - estimated[0] == pytest.approx(measured[1] - measured[0], rel=1 / 16)
