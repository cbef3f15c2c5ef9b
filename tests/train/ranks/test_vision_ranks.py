"""A model that sees images, spread over ranks, is that of one: the ranks of the first stage have all of the
tower."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.fakes.models.sighted import KINDS, sighted_folder, sighted_micro, sighted_samples

from rollbook.engines.weights.digests import digest_tensors, read_weights
from rollbook.store.errors import ModelError
from rollbook.train.batches.batch import MicroBatch
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.config.parallel import ParallelConfig
from rollbook.train.model.model import Build
from rollbook.train.model.shape import read_shape
from rollbook.train.ranks.policy import Policy
from rollbook.train.ranks.ranks import Ranks

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("warm_ranks")]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data 2": (2, {"distributed_optimizer": True}),
    "tensor 2": (2, {"tensor": 2}),
    "tensor 2, sequence": (2, {"tensor": 2, "sequence": True}),
    "pipeline 3": (3, {"pipeline": 3}),
}
WAYS: dict[str, dict[str, Any]] = {
    "frozen": {},
    "trained": {"train_vision": True},
    "computed again": {"train_vision": True, "recompute": True},
}


@dataclass(frozen=True)
class Squares:
    """A loss to which every logit of a trained token adds, and the logits."""

    tokens: int

    def __call__(self, logits: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.square().mean(-1).sum() / self.tokens, logits.detach().clone()


@dataclass(frozen=True)
class Course:
    """What a policy does in a step."""

    logits: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    norm: float
    state: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def _course(ranks: Ranks, kind: str, way: str) -> Course:
    folder = sighted_folder(kind)
    build = Build(9, torch.device("cpu"), 0, 1, **WAYS[way])
    policy: Policy = ranks.policy("actor", read_shape(folder), OptimizerConfig(lr=0.01), build)
    policy.load_weights(read_weights(folder))
    assert policy.weights_digest().digest == digest_tensors(read_weights(folder), tree=True)
    samples = sighted_samples(kind)
    batch = [sighted_micro(part, packed=True) for part in (samples[:2], samples[2:3], samples[3:])]
    logits = policy.forward_backward(batch, Squares(sum(int(micro.loss_mask.sum()) for micro in batch)))
    gradients = {name: tensor.clone() for name, tensor in policy.stream_gradients()}
    norm = policy.optimizer_step(0.01)
    weights = {name: tensor.clone() for name, tensor in policy.stream_weights()}
    return Course(logits, gradients, norm, policy.optimizer_state(), weights)


@pytest.fixture(scope="module")
def of_one() -> dict[str, dict[str, Course]]:
    """What one rank does; before the others, since this process is rank 0 of those."""
    return {kind: {way: _course(Ranks(), kind, way) for way in WAYS} for kind in KINDS}


@pytest.fixture(scope="module", params=LAYOUTS)
def spread(request: pytest.FixtureRequest, of_one: Any) -> Iterator[tuple[str, Ranks]]:
    """The ranks of a layout, started once for all tests of it."""
    count, sizes = LAYOUTS[request.param]
    with Ranks(ParallelConfig(**sizes, timeout_s=120.0), count) as ranks:
        yield request.param, ranks


def test_it_computes_what_one_rank_does(spread: tuple[str, Ranks], of_one: Any) -> None:
    """Logits, gradients, their norm, the moments and the weights after a step."""
    layout, ranks = spread
    for kind in KINDS:
        if "pipeline" in layout and kind == "qwen3_vl":
            continue
        for way, single in of_one[kind].items():
            course = _course(ranks, kind, way)
            for ours, theirs in zip(course.logits, single.logits, strict=True):
                assert float((ours - theirs).abs().max()) < 1e-5, (kind, way)
            assert course.norm == pytest.approx(single.norm, rel=1e-5)
            _close(course.gradients, single.gradients, (kind, way))
            _close(course.state, single.state, (kind, way))
            assert course.weights.keys() == single.weights.keys()
            # Adam's first step goes by the sign of a gradient: one near zero may turn it.
            apart = torch.cat([(t - course.weights[n]).abs().flatten() for n, t in single.weights.items()])
            assert float(apart.max()) <= 0.02
            assert float((apart > 1e-5).float().mean()) < 0.001, (kind, way)


def _close(tensors: dict[str, torch.Tensor], other: dict[str, torch.Tensor], which: Any) -> None:
    assert tensors.keys() == other.keys()
    for name, tensor in tensors.items():
        scale = float(other[name].abs().max())
        assert float((tensor - other[name]).abs().max()) <= 1e-4 * scale, (*which, name)


def test_images_go_to_the_first_stage_alone(spread: tuple[str, Ranks]) -> None:
    """A stage with fewer layers than take features is refused; the ranks stay usable."""
    layout, ranks = spread
    if "pipeline" in layout:
        with pytest.raises(ModelError, match="1 layers in the first pipeline stage, which sees the images"):
            _course(ranks, "qwen3_vl", "frozen")
