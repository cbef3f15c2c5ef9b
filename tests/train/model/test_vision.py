"""Models that see images are in Megatron what they are in transformers: names, logits, gradients."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.fakes.models.sighted import (
    IMAGE,
    KINDS,
    SightedSample,
    sighted_folder,
    sighted_micro,
    sighted_model,
    sighted_samples,
)
from tests.fakes.models.weight_maps import to_huggingface, to_megatron
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook.engines.vision.pixels import decode, patches_of, png_of, resized
from rollbook.engines.vision.sizes import grid_of, read_image_settings, token_count
from rollbook.engines.weights.digests import digest_tensors, read_weights
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ImageError, ModelError
from rollbook.store.events import CheckpointWritten
from rollbook.train.batches.batch import MicroBatch
from rollbook.train.batches.images import Picture
from rollbook.train.checkpoints.checkpoint import write_checkpoint
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.config.lora import LoraConfig
from rollbook.train.model.lora import fresh_factors
from rollbook.train.model.model import Build, build_module
from rollbook.train.model.shape import read_shape
from rollbook.train.model.weight_names import plan, weight_shapes
from rollbook.train.ranks.backend import TrainablePolicy

CPU = torch.device("cpu")
EACH = pytest.mark.parametrize("kind", KINDS)
LAYOUTS = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])


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


def _seen(kind: str, sample: SightedSample, reference: Any = None) -> torch.Tensor:
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
    """(transformers' logits of each sample, one by one; the gradients of all tensors, by names of files)"""
    model = sighted_model(kind)
    model.zero_grad()
    logits = [_seen(kind, sample) for sample in sighted_samples(kind)]
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
    (logits,) = _run(policy, [sighted_micro(sighted_samples(kind), packed=packed)])
    assert max(float(row.abs().max()) for row in expected) > 1, "logits too small to tell anything"
    for own, theirs in zip(logits, expected, strict=True):
        assert own.shape == theirs.shape
        assert float((own - theirs).abs().max()) <= 1e-5
    _compare(policy, gradients, tower=True)


@EACH
@LAYOUTS
@pytest.mark.parametrize("train_vision", [False, True], ids=["frozen", "trained"])
def test_passes_that_are_computed_again(kind: str, packed: bool, train_vision: bool) -> None:
    """Recomputed layers give the same, over micro-batches with images and without; a step moves the tower
    only if that is trained."""
    expected, gradients = _reference(kind)
    policy = _policy(kind, train_vision=train_vision, recompute=True)
    before = {name: tensor.clone() for name, tensor in policy.own_weights().items()}
    samples = sighted_samples(kind)
    micros = [
        sighted_micro(part, packed=packed) for part in (samples[1:3], samples[:1], samples[1:2], samples[3:])
    ]
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


@EACH
def test_a_frozen_tower_has_no_gradients(kind: str) -> None:
    """The language half has all of its own; the tower has neither gradients nor state, and is streamed."""
    _, gradients = _reference(kind)
    policy = _policy(kind)
    _run(policy, [sighted_micro(sighted_samples(kind), packed=True)])
    _compare(policy, gradients, tower=False)
    assert not any(parameter.requires_grad for parameter in policy._parts.module.visual.parameters())
    assert any("visual" in name for name in policy.weights())


@EACH
@LAYOUTS
def test_text_alone_is_a_text_model(kind: str, packed: bool) -> None:
    """Micro-batches without images give the bits of a model that is the language half."""
    policy = _policy(kind)
    text = TrainablePolicy(replace(policy.shape, vision=None), OptimizerConfig(), Build(4, CPU, 0, 1))
    text.load_weights(
        {name.replace(policy.shape.prefix, "model."): t for name, t in policy.weights().items()}
    )
    micro = sighted_micro(sighted_samples(kind, (0, 0, 0)), packed=packed)
    assert micro.images is None
    (own,), (theirs,) = _run(policy, [micro]), _run(text, [micro])
    assert all(torch.equal(a, b) for a, b in zip(own, theirs, strict=True))
    gradients = text.gradients()
    assert all(torch.equal(gradient, gradients[name]) for name, gradient in policy.gradients().items())


@EACH
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "computed again"])
def test_factors_in_the_language_half(tmp_path: Path, kind: str, recompute: bool) -> None:
    """They get gradients, and the tower none; merged, they are the model that transformers computes; and PEFT
    finds each under its name."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForImageTextToText

    lora = LoraConfig(rank=4, alpha=8.0)
    policy = _policy(kind, lora=lora, recompute=recompute)
    generator = torch.Generator().manual_seed(3)
    fresh = fresh_factors(policy.shape, lora, 0)
    factors = {name: torch.randn(t.shape, generator=generator) / 20 for name, t in fresh.items()}
    policy.load_adapter(factors)
    samples = sighted_samples(kind)
    (logits,) = _run(policy, [sighted_micro(samples, packed=True)])
    gradients = policy.gradients()
    assert len(gradients) == len(factors)
    assert all(".adapter." in name and float(gradient.norm()) > 1e-6 for name, gradient in gradients.items())
    model = AutoModelForImageTextToText.from_pretrained(sighted_folder(kind)).eval()
    names = r"model\.language_model\..*\.(q|k|v|o|gate|up|down)_proj"
    theirs = get_peft_model(model, PeftConfig(r=4, lora_alpha=8, target_modules=names))
    assert get_peft_model_state_dict(theirs).keys() == factors.keys()
    shutil.copyfile(sighted_folder(kind) / "config.json", tmp_path / "config.json")
    save_file(policy.weights(), tmp_path / "model.safetensors", {"format": "pt"})
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    for own, sample in zip(logits, samples, strict=True):
        with torch.no_grad():
            assert float((own - _seen(kind, sample, merged)).abs().max()) <= 2e-5
            assert float((own - _seen(kind, sample)).abs().max()) > 1e-2


@EACH
@LAYOUTS
def test_bfloat16(kind: str, packed: bool) -> None:
    """The tower's weights are as narrow as all others, with float32 ones that are stepped; logits near."""
    expected, _ = _reference(kind)
    policy = _policy(kind, dtype="bfloat16", train_vision=True, recompute=packed)
    assert {tensor.dtype for tensor in policy.weights().values()} == {torch.bfloat16}
    (logits,) = _run(policy, [sighted_micro(sighted_samples(kind), packed=packed)])
    for own, theirs in zip(logits, expected, strict=True):
        assert float((own.float() - theirs).abs().max()) < 0.05 * float(theirs.abs().max())
    policy.optimizer_step(1e-3)
    state = policy.optimizer_state()
    tower = {name for name in policy.own_weights() if name.startswith("visual.")}
    assert {f"{name}.main" for name in tower} <= state.keys()
    assert {state[f"{name}.main"].dtype for name in tower} == {torch.float32}


@EACH
def test_weights_that_are_taken_over(kind: str) -> None:
    """A policy on the weights of another, where these are, sees what that sees."""
    micro = sighted_micro(sighted_samples(kind), packed=True)
    policy = _policy(kind)
    how = Build(1, CPU, 0, 1, trains=False)
    other = TrainablePolicy(policy.shape, OptimizerConfig(), how, policy.own_weights())
    own, theirs = (each.forward([micro], lambda outputs, _: outputs.clone())[0] for each in (policy, other))
    assert torch.equal(own, theirs)
    empty = build_module(policy.shape, policy.layout, empty=True)
    assert all(parameter.is_meta for parameter in empty.visual.parameters())
    held = other.own_weights()
    assert all(held[name].data_ptr() == t.data_ptr() for name, t in policy.own_weights().items())


@EACH
def test_all_that_is_seen_counts(kind: str) -> None:
    """Other pixels, other places, or no deep features: other logits."""
    policy, samples = _policy(kind), sighted_samples(kind)
    micro = sighted_micro(samples, packed=True)
    images = micro.images
    assert images is not None

    def logits() -> torch.Tensor:
        return policy.forward([micro], lambda outputs, _: outputs.clone())[0]

    as_it_is = logits()
    flat = np.broadcast_to(np.arange(images.places.shape[2]), images.places.shape)
    for changed in (replace(images, patches=images.patches * 1.5), replace(images, places=flat)):
        micro = replace(micro, images=changed)
        assert float((logits() - as_it_is).abs().max()) > 0.1
    micro = replace(micro, images=images)
    for name in {name for name in policy.own_weights() if "deepstack_merger_list" in name}:
        policy.put(name, torch.zeros(()))
    assert (float((logits() - as_it_is).abs().max()) > 0.1) == (policy.shape.deep_features > 0)


@EACH
def test_other_weights_in_its_place(kind: str) -> None:
    """The tower's are among them, and come back."""
    policy, micro = _policy(kind), sighted_micro(sighted_samples(kind), packed=True)
    others = {name: tensor * 1.5 if "visual" in name else tensor for name, tensor in policy.weights().items()}

    def logits() -> torch.Tensor:
        return policy.forward([micro], lambda outputs, _: outputs.clone())[0]

    own, digest = logits(), policy.weights_digest().digest
    with policy.using(others):
        assert not torch.equal(logits(), own)
    assert torch.equal(logits(), own)
    assert policy.weights_digest().digest == digest


@LAYOUTS
def test_images_that_were_not_recorded_are_missed(packed: bool) -> None:
    """Tokens that stand for an image are never computed as if they were text."""
    policy, micro = _policy("qwen3_vl"), sighted_micro(sighted_samples("qwen3_vl"), packed=packed)
    with pytest.raises(
        ImageError, match=f"tokens of samples are {IMAGE}, .* there are images of 0: they were"
    ):
        policy.forward([replace(micro, images=None)], lambda outputs, _: outputs)
    (logits,) = policy.forward([micro], lambda outputs, _: outputs.clone())
    assert torch.isfinite(logits).all()


def test_what_cannot_be_trained_together_is_refused() -> None:
    """A tower and factors; and the tower of a model that has none."""
    with pytest.raises(ModelError, match="train_vision with low-rank factors"):
        _policy("qwen3_vl", train_vision=True, lora=LoraConfig(rank=4))
    shape = replace(read_shape(sighted_folder("qwen3_vl")), vision=None)
    with pytest.raises(ModelError, match="train_vision: the model is of text alone"):
        TrainablePolicy(shape, OptimizerConfig(), Build(1, CPU, 0, 1, train_vision=True))


@EACH
def test_an_image_is_seen_as_transformers_sees_it(kind: str) -> None:
    """From its file to the logits: decoded, resized, cut into patches, placed; beside its processor."""
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    folder = sighted_folder(kind)
    settings = read_image_settings(folder)
    rng = np.random.default_rng(8)
    images = [
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in ((90, 150), (70, 31))
    ]
    tokens, pictures = [1, 2], []
    for at, image in enumerate(images):
        seen = decode(png_of(resized(image, settings)))
        patches = patches_of(seen, settings)
        grid = grid_of(seen.height, seen.width, settings)
        pictures.append(Picture(len(tokens), grid, f"{at}", patches))
        tokens += [IMAGE] * token_count(grid, settings.merge) + [3, 4]
    sample = SightedSample(np.array(tokens), tuple(pictures))
    (logits,) = _policy(kind).forward(
        [sighted_micro([sample], packed=True)], lambda outputs, _: outputs.clone()
    )
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    values = processor(images, return_tensors="pt")
    model = sighted_model(kind)
    model.model.rope_deltas = None
    ids = torch.tensor([tokens])
    with torch.no_grad():
        expected = model(
            input_ids=ids,
            mm_token_type_ids=(ids == IMAGE).int(),
            pixel_values=values["pixel_values"],
            image_grid_thw=values["image_grid_thw"],
            use_cache=False,
        ).logits[0, :-1]
    assert float((logits - expected).abs().max()) <= 1e-5


@EACH
def test_a_step_has_the_same_bits_again_and_is_written(tmp_path: Path, kind: str) -> None:
    """Of the tower, too; what transformers loads of the checkpoint sees what the policy does."""
    from transformers import AutoModelForImageTextToText

    samples, digests = sighted_samples(kind), []
    for _ in range(2):
        policy = _policy(kind, train_vision=True)
        _run(policy, [sighted_micro(samples, packed=True)])
        policy.optimizer_step(0.01)
        digests.append((policy.weights_digest().digest, policy.optimizer_digest().digest))
    assert digests[0] == digests[1]
    begun = read_weights(sighted_folder(kind))
    still = [name for name, tensor in policy.stream_weights() if torch.equal(tensor, begun[name])]
    assert still == []
    like, stream = sighted_folder(kind), policy.stream_weights()
    record = write_checkpoint(tmp_path, "r", "actor", 1, stream, None, like=like, phase=None)
    assert record.weights_digest == digests[0][0]
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / record.path).eval()
    (logits,) = _run(policy, [sighted_micro(samples, packed=True)])
    for own, sample in zip(logits, samples, strict=True):
        with torch.no_grad():
            assert float((own - _seen(kind, sample, model)).abs().max()) <= 1e-5


@pytest.mark.more_but("qwen3_vl")
@EACH
def test_a_training_of_text(recorded: Callable[..., Store], kind: str) -> None:
    """From a log without images: its steps replay, and the tower is in its checkpoints as it came."""
    log = recorded()
    settings = fabric.config(fabric.SFT, model=str(sighted_folder(kind)), steps=2, checkpoint_every=1)
    fabric.train(log, settings)
    last = records_of(log, CheckpointWritten)[-1]
    weights, begun = read_weights(log.path / last.path), read_weights(sighted_folder(kind))
    assert weights.keys() == begun.keys()
    still = {name for name in weights if torch.equal(weights[name], begun[name])}
    # Rows of the embedding that no sample has stay, too, but not all of it.
    assert still == {name for name in weights if "visual." in name}
    assert replay_step(log, 1).bit_for_bit
