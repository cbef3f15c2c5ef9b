"""What a training of a model that sees images is said to take of memory, held against what it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.fakes.models.sighted import KINDS, sighted_folder, sighted_micro, sighted_samples

from rollbook.train.batches.batch import MicroBatch
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.config.parallel import ParallelConfig
from rollbook.train.model.memory import Pass, Workload, memory_of, parameters_of
from rollbook.train.model.model import Build
from rollbook.train.model.reshard import stages_of
from rollbook.train.model.shape import read_shape
from rollbook.train.model.weight_names import weight_shapes
from rollbook.train.ranks.backend import TrainablePolicy

EACH = pytest.mark.parametrize("kind", KINDS)
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def _policy(kind: str, dtype: torch.dtype, *, train_vision: bool) -> TrainablePolicy:
    named = str(dtype).removeprefix("torch.")
    build = Build(1, torch.device("cpu"), 0, 1, named, train_vision=train_vision)
    return TrainablePolicy(read_shape(sighted_folder(kind)), OptimizerConfig(), build)


def _bytes(tensors: dict[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@EACH
@TYPES
@pytest.mark.parametrize("train_vision", [False, True], ids=["frozen", "trained"])
def test_what_is_always_there(kind: str, dtype: torch.dtype, train_vision: bool) -> None:
    """Weights of all, gradients and the optimizer's state of what is trained."""
    policy = _policy(kind, dtype, train_vision=train_vision)
    for gradient in policy.gradients().values():
        gradient.fill_(0.1)
    policy.optimizer_step(1e-3)
    [layout] = stages_of(policy.shape, ParallelConfig())
    estimate = memory_of(policy.shape, layout, Pass(1), Workload(dtype, train_vision=train_vision))
    assert estimate.parameters == sum(t.numel() for t in policy.own_weights().values())
    assert estimate.weights == _bytes(policy.own_weights())
    assert estimate.gradients == _bytes(policy.gradients())
    state = {name: tensor for name, tensor in policy.optimizer_state().items() if tensor.dim()}
    assert estimate.optimizer == _bytes(state)


@EACH
@TYPES
def test_what_a_tower_keeps(kind: str, dtype: torch.dtype) -> None:
    """The difference that training it makes to a forward pass, to a tenth; where layers are computed again,
    it is there after theirs."""
    micro = sighted_micro(sighted_samples(kind), packed=True)
    assert micro.images is not None
    size = Pass(int(micro.loss_mask.sum()) + len(micro.tokens), patches=len(micro.images.patches))
    shape = read_shape(sighted_folder(kind))
    [layout] = stages_of(shape, ParallelConfig())
    measured, estimated = [], []
    for train_vision in (False, True):
        measured.append(_kept(_policy(kind, dtype, train_vision=train_vision), micro))
        estimated.append(
            memory_of(shape, layout, size, Workload(dtype, train_vision=train_vision)).activations
        )
    assert estimated[1] - estimated[0] == pytest.approx(measured[1] - measured[0], rel=0.1)
    again = Workload(dtype, recompute=True, train_vision=True)
    assert memory_of(shape, layout, size, again).activations == max(
        memory_of(shape, layout, size, Workload(dtype, recompute=True)).activations,
        estimated[1] - estimated[0],
    )


def _kept(policy: TrainablePolicy, micro: MicroBatch) -> int:
    """Bytes that a forward pass keeps for its backward pass."""
    kept: dict[int, torch.Tensor] = {}
    over = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not over:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def loss_of(logits: torch.Tensor, _: MicroBatch) -> tuple[torch.Tensor, float]:
        over.append(True)
        return logits.float().sum() * 0.0, 0.0

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.forward_backward([micro], loss_of)
    weights = {weight.untyped_storage().data_ptr() for weight in policy.own_weights().values()}
    return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in weights)


@EACH
def test_the_first_stage_has_the_tower(kind: str) -> None:
    """All of it, where ranks share matrices too; other stages have none."""
    shape = read_shape(sighted_folder(kind))
    tower = sum(torch.Size(dims).numel() for name, dims in weight_shapes(shape).items() if "visual." in name)
    [layout] = stages_of(shape, ParallelConfig(tensor=2))
    assert parameters_of(shape, layout) == parameters_of(replace(shape, vision=None), layout) + tower
    assert tower > 30_000
    if not shape.deep_features:
        text = replace(shape, vision=None)
        stages = zip(*(stages_of(each, ParallelConfig(pipeline=3)) for each in (shape, text)), strict=True)
        more = [parameters_of(shape, a) - parameters_of(text, b) for a, b in stages]
        assert more == [tower, 0, 0]
