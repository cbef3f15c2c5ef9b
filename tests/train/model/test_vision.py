"""Models that see images are in Megatron what they are in transformers: names, logits, gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.fakes.models.sighted import IMAGE, KINDS, sighted_folder, sighted_model
from tests.fakes.models.weight_maps import to_huggingface, to_megatron

from rollbook.engines.vision.sizes import token_count
from rollbook.engines.weights.digests import digest_tensors, read_weights
from rollbook.store.errors import ImageError, ModelError
from rollbook.train.batches.batch import MicroBatch
from rollbook.train.batches.images import Picture, collate_images
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.config.lora import LoraConfig
from rollbook.train.model.lora import fresh_factors
from rollbook.train.model.model import Build
from rollbook.train.model.shape import read_shape
from rollbook.train.model.weight_names import plan, weight_shapes
from rollbook.train.ranks.backend import TrainablePolicy

CPU = torch.device("cpu")
EACH = pytest.mark.parametrize("kind", KINDS)
LAYOUTS = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
IMAGES = (2, 0, 1, 3)
"""Of each sample: several, none, one."""


@dataclass(frozen=True)
class Sample:
    """Tokens, and the images among them."""

    tokens: npt.NDArray[np.int64]
    pictures: tuple[Picture, ...]


def _samples(kind: str, counts: Sequence[int] = IMAGES, *, seed: int = 5) -> list[Sample]:
    """Random text around random images; the last image of a sample is the first of the first sample."""
    rng = np.random.default_rng(seed)
    columns = read_shape(sighted_folder(kind)).vision.columns  # type: ignore[union-attr]
    shared, samples = None, []
    for count in counts:
        tokens: list[int] = []
        pictures: list[Picture] = []
        for number in range(count):
            tokens += rng.integers(0, 256, rng.integers(2, 7)).tolist()
            grid = (1, *(2 * rng.integers(1, 5, 2)).tolist())
            patches = rng.standard_normal((grid[1] * grid[2], columns)).astype(np.float32)
            picture = Picture(len(tokens), grid, f"{len(samples)}.{number}", patches)  # type: ignore[arg-type]
            if shared is not None and number == count - 1:
                picture = replace(shared, start=len(tokens))
            shared = shared or picture
            pictures.append(picture)
            tokens += [IMAGE] * token_count(picture.grid, 2)
        tokens += rng.integers(0, 256, rng.integers(3, 9)).tolist()
        samples.append(Sample(np.array(tokens), tuple(pictures)))
    return samples


def _micro(samples: Sequence[Sample], *, packed: bool) -> MicroBatch:
    """The samples as one micro-batch; all tokens but the first are trained."""
    lengths = np.array([len(sample.tokens) for sample in samples])
    shape = (len(samples), int(lengths.max()))
    tokens, mask = np.zeros(shape, np.int64), np.arange(shape[1]) < lengths[:, None]
    for row, sample in enumerate(samples):
        tokens[row, : len(sample.tokens)] = sample.tokens
    mask[:, 0] = False
    zeros, ones = np.zeros(shape, np.float32), np.ones(shape, np.float32)
    images = collate_images([s.pictures for s in samples], [s.tokens for s in samples], 2, IMAGE)
    return MicroBatch(
        *(tokens, mask, zeros, ones, ones, np.zeros(shape, np.int64)),
        lengths=lengths if packed else None,
        images=images,
    )


def _policy(kind: str, **how: Any) -> TrainablePolicy:
    """A policy of the tiny model, weights in place."""
    folder = sighted_folder(kind)
    policy = TrainablePolicy(read_shape(folder), OptimizerConfig(lr=1e-3), Build(4, CPU, 0, 1, **how))
    policy.load_weights(read_weights(folder))
    return policy


def _by_token(outputs: torch.Tensor, micro: MicroBatch) -> list[torch.Tensor]:
    """Of each sample the logits in front of its trained tokens, [T - 1, V]."""
    trained = micro.loss_mask[:, 1:].sum(1).tolist()
    if micro.lengths is not None:
        return list(outputs.split(trained))
    return [row[:count] for row, count in zip(outputs, trained, strict=True)]


def _loss(logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """A scalar to which every logit adds its own part."""
    return sum((row.float().square().mean() for row in logits), torch.zeros(()))


def _run(policy: TrainablePolicy, micros: Sequence[MicroBatch]) -> list[list[torch.Tensor]]:
    """The logits of one forward and backward pass; the gradients stay in the policy."""

    def loss_of(outputs: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        rows = _by_token(outputs, micro)
        return _loss(rows), [row.detach().clone() for row in rows]

    return policy.forward_backward(micros, loss_of)


def _seen(kind: str, sample: Sample, reference: Any = None) -> torch.Tensor:
    """Transformers' logits of a sample, from its patches, in front of all tokens but the first."""
    model = reference or sighted_model(kind)
    model.model.rope_deltas = None
    tokens = torch.from_numpy(sample.tokens)[None]
    images = {}
    if sample.pictures:
        images["pixel_values"] = torch.from_numpy(np.concatenate([p.patches for p in sample.pictures]))
        images["image_grid_thw"] = torch.tensor([p.grid for p in sample.pictures])
        images["mm_token_type_ids"] = (tokens == IMAGE).int()
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False, **images).logits[0, :-1]
    return logits


@functools.cache
def _reference(kind: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """(transformers' logits of each sample, one by one; the gradients of every tensor, by the names of files)"""
    model = sighted_model(kind)
    model.zero_grad()
    logits = [_seen(kind, sample) for sample in _samples(kind)]
    _loss(logits).backward()
    held = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    if kind == "qwen2_5_vl":
        held = {
            name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): gradient
            for name, gradient in held.items()
        }
    return [row.detach() for row in logits], held


def _compare(policy: TrainablePolicy, gradients: dict[str, torch.Tensor], *, tower: bool) -> None:
    """The policy's gradients are transformers' in every tensor; without `tower` it has none of that."""
    expected = to_megatron(gradients, policy.shape)
    held = policy.gradients()
    assert held.keys() == {name for name in expected if tower or not name.startswith("visual.")}
    for name, gradient in held.items():
        scale = float(expected[name].abs().max())
        assert scale > 1e-6, f"{name} has no gradient to compare"
        # A bias of keys adds the same to all scores of a query: what it has is rounding, but for its rotation.
        assert float((gradient - expected[name]).abs().max()) <= 1e-4 * scale, name


@EACH
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_names_and_values_survive_the_round_trip(kind: str, tied: bool) -> None:
    """Files to Megatron and back is bit for bit, the tower too; digests are those of the files."""
    folder = sighted_folder(kind, tied=tied)
    shape, tensors = read_shape(folder), read_weights(folder)
    assert shape.tied == tied == ("lm_head.weight" not in tensors)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == weight_shapes(shape)
    policy = TrainablePolicy(shape, OptimizerConfig(), Build(1, CPU, 0, 1))
    policy.load_weights(tensors)
    for back in (to_huggingface(to_megatron(tensors, shape), shape), policy.weights()):
        assert back.keys() == tensors.keys()
        assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert policy.weights_digest().digest == digest_tensors(tensors, tree=True)
    tower = [weight for weight in plan(shape) if weight.megatron.startswith("visual.")]
    tensors[tower[0].huggingface[0]] += 1
    policy.load_weights(tensors)
    assert policy.weights_digest().digest == digest_tensors(tensors, tree=True)


@EACH
@LAYOUTS
def test_logits_and_gradients_are_transformers(kind: str, packed: bool) -> None:
    """Of samples with several images, one and none together: of all tensors, with the tower trained."""
    expected, gradients = _reference(kind)
    policy = _policy(kind, train_vision=True)
    (logits,) = _run(policy, [_micro(_samples(kind), packed=packed)])
    assert max(float(row.abs().max()) for row in expected) > 1, "logits too small to tell anything"
    for own, theirs in zip(logits, expected, strict=True):
        assert own.shape == theirs.shape
        assert float((own - theirs).abs().max()) <= 1e-5
    _compare(policy, gradients, tower=True)


@EACH
@LAYOUTS
@pytest.mark.parametrize("train_vision", [False, True], ids=["frozen", "trained"])
def test_passes_that_are_computed_again(kind: str, packed: bool, train_vision: bool) -> None:
    """Recomputed layers give the same, over micro-batches with images and without; a step moves the tower only
    if that is trained."""
    expected, gradients = _reference(kind)
    policy = _policy(kind, train_vision=train_vision, recompute=True)
    before = {name: tensor.clone() for name, tensor in policy.own_weights().items()}
    samples = _samples(kind)
    micros = [_micro(part, packed=packed) for part in (samples[1:3], samples[:1], samples[1:2], samples[3:])]
    logits = _run(policy, [micros[0], micros[1], micros[3]])
    ordered = [*logits[1], *logits[0], *logits[2]]
    for own, theirs in zip(ordered, expected, strict=True):
        assert float((own - theirs).abs().max()) <= 1e-5
    _compare(policy, gradients, tower=train_vision)
    policy.optimizer_step(1e-3)
    moved = {name for name, tensor in policy.own_weights().items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if train_vision or not name.startswith("visual.")}
    held = {key.rpartition(".")[0] for key in policy.optimizer_state()}
    assert held == moved
