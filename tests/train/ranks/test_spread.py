"""A policy spread over ranks is the policy of one: its weights, outputs, gradients, steps and state."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollbook.engines.weights.digests import digest_tensors, read_weights
from rollbook.store.errors import ModelError
from rollbook.train.batches.batch import MicroBatch
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.config.lora import LoraConfig
from rollbook.train.config.parallel import ParallelConfig
from rollbook.train.model.lora import fresh_factors, merged
from rollbook.train.model.memory import Pass, Workload, memory_of
from rollbook.train.model.model import Build
from rollbook.train.model.shape import read_shape
from rollbook.train.model.weight_names import weight_shapes
from rollbook.train.ranks.policy import Policy
from rollbook.train.ranks.ranks import Ranks
from rollbook.train.step.predictions import Predictions

CPU = torch.device("cpu")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "expert 2": (2, {"expert": 2, "distributed_optimizer": True}),
    "expert 2, pipeline 2": (4, {"expert": 2, "pipeline": 2}),
    "data 3": (3, {"distributed_optimizer": True}),
    "data 2, tensor 2": (4, {"tensor": 2, "distributed_optimizer": True}),
    "tensor 2, pipeline 2, sequence": (4, {"tensor": 2, "pipeline": 2, "sequence": True}),
}
pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("warm_ranks")]
LORA = LoraConfig(rank=4, alpha=8.0)
OF_OUTPUT = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "o_proj", "lm_head"))
LORAS = {"qwen3-tied with factors": LORA, "qwen3-untied with factors of the output": OF_OUTPUT}
MODELS = ("qwen2", "qwen3-tied", "qwen3_moe", "gpt_oss", "gemma3", *LORAS)
TIED = {
    "qwen3-tied with factors of the output, too": OF_OUTPUT,
    "qwen3-tied with factors of the output alone": LoraConfig(rank=4, targets=("lm_head",)),
}
"""Their products cannot be merged into the weights."""
SPARSE = ("qwen3_moe", "gpt_oss")
OPTIMIZER = OptimizerConfig(lr=0.01, weight_decay=0.01)


@dataclass(frozen=True)
class Nll:
    """The mean negative log-probability of the trained tokens of all micro-batches."""

    tokens: int

    def __call__(self, logits: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.from_numpy(micro.loss_mask[:, 1:])
        losses = torch.where(mask, -Predictions(logits, micro).logprobs(), 0.0)
        return losses.sum() / self.tokens, losses.detach()


def read_logits(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """The logits themselves."""
    return logits.clone()


def _micro(rows: int, length: int, seed: int, *, packed: bool = False) -> MicroBatch:
    rng = np.random.default_rng(seed)
    shape = (rows, length)
    mask = rng.random(shape) < 0.7
    mask[:, 0] = False
    floats = [np.zeros(shape, np.float32), rng.uniform(0.5, 1.5, shape).astype(np.float32)]
    lengths = np.full(rows, length) if packed else None
    ones = np.ones(shape, np.float32)
    tokens = rng.integers(0, 90, shape)
    return MicroBatch(tokens, mask, *floats, ones, np.zeros(shape, np.int64), lengths=lengths)


BATCH = (_micro(2, 7, 0), _micro(1, 11, 1), _micro(3, 5, 2))
PACKED = tuple(_micro(n, length, n, packed=True) for n, length in ((2, 7), (1, 11), (3, 5)))


def _loss(batch: tuple[MicroBatch, ...]) -> Nll:
    return Nll(sum(int(micro.loss_mask.sum()) for micro in batch))


def _folder(folders: Path, model: str) -> Path:
    return folders / model.partition(" ")[0]


def _policy(ranks: Ranks, folders: Path, model: str) -> Policy:
    folder, lora = _folder(folders, model), (LORAS | TIED).get(model)
    policy = ranks.policy("actor", read_shape(folder), OPTIMIZER, Build(9, CPU, 0, 1, lora=lora))
    policy.load_weights(read_weights(folder))
    if lora is not None:
        policy.load_adapter(_factors(folder, lora))
    return policy


def _factors(folder: Path, lora: LoraConfig) -> dict[str, torch.Tensor]:
    """Factors in the middle of a training: none is 0."""
    generator = torch.Generator().manual_seed(5)
    fresh = fresh_factors(read_shape(folder), lora, 0).items()
    return {name: torch.randn(t.shape, generator=generator) / 10 if not t.any() else t for name, t in fresh}


def _close(tensors: dict[str, torch.Tensor], other: dict[str, torch.Tensor], most: float) -> None:
    assert tensors.keys() == other.keys()
    for name, tensor in tensors.items():
        scale = max(float(tensor.abs().max()), 1e-2)
        assert float((tensor - other[name]).abs().max()) <= most * scale, name


@dataclass(frozen=True)
class Course:
    """What a policy of one rank does."""

    logits: list[torch.Tensor]
    losses: list[torch.Tensor]
    packed: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    adapter: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    next_losses: torch.Tensor
    next_weights: dict[str, torch.Tensor]


def _course(policy: Policy) -> Course:
    """Three optimizer steps, the second on packed samples; weights and state are of before the third."""
    logits = policy.forward(BATCH, read_logits)
    losses = policy.forward_backward(BATCH, _loss(BATCH))
    gradients = {name: tensor.clone() for name, tensor in policy.stream_gradients()}
    norms = [policy.optimizer_step(0.01)]
    packed = policy.forward_backward(PACKED, _loss(PACKED))
    norms.append(policy.optimizer_step(0.01))
    weights = {name: tensor.clone() for name, tensor in policy.stream_weights()}
    adapter = {name: tensor.clone() for name, tensor in policy.adapter().items()}
    state = {name: tensor.clone() for name, tensor in policy.optimizer_state().items()}
    return Course(logits, losses, packed, gradients, norms, weights, adapter, state, *_next(policy))


def _next(policy: Policy) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The losses of one more step, and the weights after it."""
    losses = policy.forward_backward(BATCH, _loss(BATCH))
    policy.optimizer_step(0.01)
    return torch.cat([t.flatten() for t in losses]), {n: t.clone() for n, t in policy.stream_weights()}


@dataclass(frozen=True)
class Glance:
    """A step of a policy whose weights are not asked for."""

    logits: list[torch.Tensor]
    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    rate: float
    norm: float
    adapter: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]


def _glance(policy: Policy) -> Glance:
    """On packed samples, behind a forward pass on padded ones."""
    logits = policy.forward(BATCH, read_logits)
    losses = policy.forward_backward(PACKED, _loss(PACKED))
    gradients = {name: tensor.clone() for name, tensor in policy.stream_gradients()}
    rate = policy.learning_rate(0)
    norm = policy.optimizer_step(rate)
    adapter = {name: tensor.clone() for name, tensor in policy.adapter().items()}
    state = {name: tensor.clone() for name, tensor in policy.optimizer_state().items()}
    return Glance(logits, losses, gradients, rate, norm, adapter, state)


@pytest.fixture(scope="session")
def tied_of_one(model_folders: Path) -> dict[str, Glance]:
    """As `of_one`, of models whose output is their embedding and has factors."""
    return {name: _glance(_policy(Ranks(), model_folders, name)) for name in TIED}


@pytest.fixture(scope="session")
def of_one(model_folders: Path) -> dict[str, Course]:
    """Each model's course on one rank; before the others, since this process is rank 0 of those."""
    return {name: _course(_policy(Ranks(), model_folders, name)) for name in MODELS}


@pytest.fixture(scope="module", params=LAYOUTS)
def spread(
    request: pytest.FixtureRequest, of_one: dict[str, Course], tied_of_one: dict[str, Glance]
) -> Iterator[tuple[str, Ranks]]:
    """The ranks of a layout, started once for all tests of it."""
    count, sizes = LAYOUTS[request.param]
    with Ranks(ParallelConfig(**sizes, timeout_s=120.0), count) as ranks:
        yield request.param, ranks


def _moments(ranks: Ranks) -> int:
    """Bytes that rank 0 holds of them."""
    held = ranks._parts["actor"].policy.pieces("state").values()
    return sum(state[field].numbers.nbytes for state in held for field in ("exp_avg", "exp_avg_sq"))


def _moments_said(ranks: Ranks) -> int:
    """What `rollbook train --plan` says of them."""
    part = ranks._parts["actor"]
    sharing = ranks.copies if ranks.parallel.distributed_optimizer else 1
    workload = Workload(sharing=sharing, lora=part.policy.lora)
    return memory_of(part.shape, part.layout, Pass(1), workload).optimizer


def _fits(layout: str, model: str) -> bool:
    return "expert" not in layout or model in SPARSE


def _models(layout: str) -> list[str]:
    """Megatron trains experts on ranks that share matrices only where these share tokens too, and have no
    biases."""
    apart = SPARSE if "sequence" not in layout else ("gpt_oss",)
    fitting = [m for m in MODELS if _fits(layout, m) and not ("tensor" in layout and m in apart)]
    return fitting[:1] if layout == "data 3" else fitting


def test_it_computes_what_one_rank_does(
    spread: tuple[str, Ranks], model_folders: Path, of_one: dict[str, Course]
) -> None:
    """Logits, losses, gradients, norms, and the weights and moments after two steps."""
    layout, ranks = spread
    for model in _models(layout):
        course, single = _course(_policy(ranks, model_folders, model)), of_one[model]
        for ours, theirs, most in (
            (course.logits, single.logits, 1e-5),
            (course.losses, single.losses, 1e-5),
            (course.packed, single.packed, 1e-4),  # after a step, whose rounding they see
        ):
            assert [t.shape for t in ours] == [t.shape for t in theirs]
            assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) < most, model
        _close(single.gradients, course.gradients, 1e-5)
        assert course.norms == pytest.approx(single.norms, rel=1e-5)
        # Adam's first steps go by the sign of a gradient: one near zero may turn it.
        for name, tensor in single.weights.items():
            apart = (tensor - course.weights[name]).abs()
            assert float(apart.max()) <= 0.04, name
            assert float((apart > 1e-5).float().mean()) < 0.02, name
        _close(single.state, course.state, 1e-4)
        if layout == "data 3":
            stepped = ranks._parts["actor"].policy._stepped.values()
            assert any(shard.end < shard.parameter.numel() for shard in stepped), "no tensor is cut"
        assert _moments(ranks) == pytest.approx(_moments_said(ranks), rel=0.02), model


def test_an_output_that_is_the_embedding(
    spread: tuple[str, Ranks], model_folders: Path, tied_of_one: dict[str, Glance]
) -> None:
    """Factors of the output alone, or of layers too: logits, losses, gradients, their norm, and factors and
    moments after a step. The weights are refused, and the ranks stay usable."""
    layout, ranks = spread
    for model in TIED if "expert" not in layout else ():
        policy, single = _policy(ranks, model_folders, model), tied_of_one[model]
        glance = _glance(policy)
        for ours, theirs in ((glance.logits, single.logits), (glance.losses, single.losses)):
            assert [t.shape for t in ours] == [t.shape for t in theirs]
            assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) < 1e-5
        _close(single.gradients, glance.gradients, 1e-5)
        assert glance.rate == single.rate > 0
        assert glance.norm == pytest.approx(single.norm, rel=1e-5)
        _close(single.state, glance.state, 1e-4)
        apart = torch.cat([(t - glance.adapter[n]).abs().flatten() for n, t in single.adapter.items()])
        assert float((apart > 1e-5).float().mean()) < 0.02
        with pytest.raises(ModelError, match="output is its embedding"):
            policy.weights_digest()
        policy.load_optimizer_state(single.state)
        assert policy.optimizer_digest().digest == digest_tensors(single.state, tree=True)


def test_it_gives_its_weights_back(spread: tuple[str, Ranks], model_folders: Path) -> None:
    """Bit for bit, in the plan's order; also after a stream that nobody went on with."""
    layout, ranks = spread
    for model in _models(layout):
        policy, weights = _policy(ranks, model_folders, model), read_weights(_folder(model_folders, model))
        if (lora := LORAS.get(model)) is not None:
            factors = _factors(_folder(model_folders, model), lora)
            assert digest_tensors(policy.adapter()) == digest_tensors(factors)
            weights = dict(merged(weights.items(), factors, policy.shape, lora))
        begun = list(itertools.islice(policy.stream_weights(), 2))
        assert all(torch.equal(tensor, weights[name]) for name, tensor in begun)
        streamed = {name: tensor.clone() for name, tensor in policy.stream_weights()}
        assert list(streamed) == list(weight_shapes(policy.shape))
        assert all(torch.equal(streamed[name], weights[name]) for name in streamed)
        assert policy.weights_digest().digest == digest_tensors(weights, tree=True)


def test_other_weights_in_its_place(
    spread: tuple[str, Ranks], model_folders: Path, of_one: dict[str, Course]
) -> None:
    """For forward passes: what they give, and afterwards the own ones again, bit for bit."""
    layout, ranks = spread
    for model in _models(layout):
        policy = _policy(ranks, model_folders, model)
        own = policy.weights_digest().digest
        with policy.using(of_one[model].weights):
            assert policy.weights_digest().digest == digest_tensors(of_one[model].weights, tree=True)
            other = policy.forward(BATCH, read_logits)
        assert policy.weights_digest().digest == own
        assert not torch.allclose(other[0], of_one[model].logits[0], atol=1e-3)


def test_a_state_goes_on_from_another_layout(
    spread: tuple[str, Ranks], model_folders: Path, of_one: dict[str, Course]
) -> None:
    """Weights and optimizer state of one rank are put in place bit for bit, and the next step is the same one
    as there, to rounding."""
    layout, ranks = spread
    for model in _models(layout):
        policy, single = _policy(ranks, model_folders, model), of_one[model]
        if model in LORAS:
            policy.load_adapter(single.adapter)
        else:
            policy.load_weights(single.weights)
        assert policy.weights_digest().digest == digest_tensors(single.weights, tree=True)
        policy.load_optimizer_state(single.state)
        assert policy.optimizer_digest().digest == digest_tensors(single.state, tree=True)
        losses, weights = _next(policy)
        steps = {float(t) for name, t in policy.optimizer_state().items() if name.endswith(".step")}
        assert steps == {3.0}
        assert float((losses - single.next_losses).abs().max()) < 1e-5
        for name, tensor in single.next_weights.items():
            assert float((tensor - weights[name]).abs().max()) < 1e-6, (model, name)


def test_a_model_that_cannot_be_spread_so(spread: tuple[str, Ranks], model_folders: Path) -> None:
    """A layout that a model does not fit is an error that names the number; the ranks stay usable."""
    layout, ranks = spread
    if "expert" in layout:
        with pytest.raises(ModelError, match="the model has no experts to spread over ranks"):
            _policy(ranks, model_folders, "qwen2")
