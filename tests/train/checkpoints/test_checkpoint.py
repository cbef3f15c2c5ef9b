"""Checkpoints: whole or not there, exact, checked when read, and loadable by transformers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.engines.model_files import MANIFEST
from rollbook.engines.weights.digests import Tensors, digest_tensors, read_weights
from rollbook.store.errors import ModelError
from rollbook.store.events import CheckpointWritten, StepFailed, SyncFailed
from rollbook.store.fold.history import fold_history
from rollbook.store.redaction import Scrubber
from rollbook.store.secret import SECRETS, store_secret
from rollbook.train.checkpoints.checkpoint import OPTIMIZER, read_checkpoint, write_checkpoint
from rollbook.train.config.config import OptimizerConfig, parse_config
from rollbook.train.model.model import Build
from rollbook.train.model.shape import read_shape
from rollbook.train.model.weight_names import weight_shapes
from rollbook.train.publish.publish import Publisher
from rollbook.train.ranks.backend import TrainablePolicy


def _optimizer() -> Tensors:
    """A state like Adam's: moments and a step count that is a scalar."""
    torch.manual_seed(5)
    return {"a.exp_avg": torch.randn(3, 4), "a.exp_avg_sq": torch.rand(3, 4), "a.step": torch.tensor(7.0)}


def _write(store: Path, model: Path, version: int = 1, weights: Tensors | None = None) -> CheckpointWritten:
    weights = read_weights(model) if weights is None else weights
    return write_checkpoint(store, "run", "actor", version, weights, _optimizer(), like=model, phase="p")


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Weights and optimizer state come back bit for bit, and the event names their digests."""
    model = fabric.model_folder()
    weights = read_weights(model)
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    record = _write(tmp_path, model, 3, weights)
    assert record.path == "checkpoints/run/actor/v00000003"
    held = read_checkpoint(tmp_path / record.path)
    assert held.optimizer is not None
    for loaded, saved in ((held.weights, weights), (held.optimizer, _optimizer())):
        assert loaded.keys() == saved.keys()
        for name, tensor in saved.items():
            assert loaded[name].shape == tensor.shape
            assert loaded[name].numpy().tobytes() == tensor.numpy().tobytes(), name
    assert record.weights_digest == digest_tensors(weights, tree=True)
    assert record.optimizer_digest == digest_tensors(_optimizer(), tree=True)
    files = [f for f in (tmp_path / record.path).iterdir() if f.name != MANIFEST]
    assert record.bytes == sum(f.stat().st_size for f in files)


def test_a_checkpoint_of_weights_alone_has_no_optimizer(tmp_path: Path) -> None:
    """Without an optimizer no such file is written, and reading gives None for it."""
    model = fabric.model_folder()
    record = write_checkpoint(tmp_path, "r", "actor", 0, read_weights(model), None, like=model, phase=None)
    assert record.optimizer_digest is None
    assert read_checkpoint(tmp_path / record.path).optimizer is None
    assert not (tmp_path / record.path / OPTIMIZER).exists()


def test_the_next_step_is_the_same_after_a_round_trip(tmp_path: Path) -> None:
    """A policy restored from a checkpoint has the same digests, and so has its next step."""
    model = fabric.model_folder()
    shape = read_shape(model)

    def policy() -> TrainablePolicy:
        return TrainablePolicy(shape, OptimizerConfig(lr=0.01), Build(5, torch.device("cpu"), 0, 1))

    def step(actor: TrainablePolicy, scale: float) -> tuple[str, str]:
        for gradient in actor.gradients().values():
            gradient.copy_(torch.linspace(-scale, scale, gradient.numel()).view_as(gradient))
        actor.optimizer_step(0.01)
        return actor.weights_digest().digest, actor.optimizer_digest().digest

    first = policy()
    first.load_weights(read_weights(model))
    assert first.optimizer_state() == {}
    step(first, 1.0)
    record = write_checkpoint(
        tmp_path, "r", "actor", 1, first.weights(), first.optimizer_state(), like=model, phase="p"
    )
    held = read_checkpoint(tmp_path / record.path)
    second = policy()
    second.load_weights(held.weights)
    second.load_optimizer_state(held.optimizer or {})
    assert (second.weights_digest().digest, second.optimizer_digest().digest) == (
        record.weights_digest,
        record.optimizer_digest,
    )
    assert step(second, 2.0) == step(first, 2.0)


@pytest.mark.parametrize("file", ["model.safetensors", OPTIMIZER])
@pytest.mark.parametrize("place", [0, 9, 40, -1, -200])
def test_a_flipped_byte_is_found(tmp_path: Path, file: str, place: int) -> None:
    """One changed byte, in a file's head or in its numbers, is a ModelError that names the file's folder."""
    record = _write(tmp_path, fabric.model_folder())
    target = tmp_path / record.path / file
    data = bytearray(target.read_bytes())
    place = max(place, -len(data) // 3)
    data[place] ^= 0x10
    target.write_bytes(data)
    with pytest.raises(ModelError, match="v00000001"):
        read_checkpoint(tmp_path / record.path)


def test_the_damaged_tensor_is_named(tmp_path: Path) -> None:
    """The manifest has the xxh3-128 of each tensor; the error names those that differ."""
    model = fabric.model_folder()
    record = _write(tmp_path, model)
    place = tmp_path / record.path
    manifest = orjson.loads((place / MANIFEST).read_bytes())
    weights = read_weights(model)
    hashes = {n: xxhash.xxh3_128_hexdigest(t.numpy().tobytes()) for n, t in weights.items()}
    assert manifest["tensors"] == hashes
    assert set(manifest["optimizer_tensors"]) == set(_optimizer())
    damaged = {n: t + 1 if "layers.1.mlp" in n else t for n, t in weights.items()}
    save_file(damaged, place / "model.safetensors")
    with pytest.raises(ModelError) as raised:
        read_checkpoint(place)
    names = [f"model.layers.1.mlp.{x}_proj.weight" for x in ("down", "gate", "up")]
    assert f"weights damaged: {', '.join(names)} (not what {MANIFEST} names)" in str(raised.value)
    save_file({n: t + 1 for n, t in _optimizer().items()}, place / OPTIMIZER)
    save_file(weights, place / "model.safetensors")
    with pytest.raises(ModelError, match=r"optimizer damaged: a\.exp_avg, "):
        read_checkpoint(place)
    del manifest["tensors"], manifest["optimizer_tensors"]  # as those written before it had them
    (place / MANIFEST).write_bytes(orjson.dumps(manifest))
    with pytest.raises(ModelError, match="optimizer damaged: they are not what"):
        read_checkpoint(place)
    save_file(_optimizer(), place / OPTIMIZER)
    assert read_checkpoint(place).weights.keys() == weights.keys()


def test_a_stream_is_written_as_it_comes(tmp_path: Path) -> None:
    """A policy's stream of weights makes the files that its dict makes; the base's index stays behind."""
    model = shutil.copytree(fabric.model_folder(), tmp_path / "model")
    (model / "model.safetensors.index.json").write_text("{}")
    weights = read_weights(model)
    order = weight_shapes(read_shape(model))
    stream = ((name, weights[name]) for name in order)
    record = write_checkpoint(tmp_path, "r", "actor", 1, stream, None, like=model, phase=None)
    place = tmp_path / record.path
    assert record.weights_digest == digest_tensors(weights, tree=True)
    assert read_checkpoint(place).weights.keys() == weights.keys()
    assert digest_tensors(load_file(place / "model.safetensors"), tree=True) == record.weights_digest
    assert not (place / "model.safetensors.index.json").exists()
    halves = ((name, weights[name].bfloat16()) for name in order)
    half = write_checkpoint(tmp_path, "r", "actor", 2, halves, None, like=model, phase=None)
    assert orjson.loads((tmp_path / half.path / "config.json").read_bytes())["dtype"] == "bfloat16"
    assert {t.dtype for t in read_weights(tmp_path / half.path).values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda pairs: pairs[:-1], "1 tensors did not come, the first of them model.norm.weight"),
        (lambda pairs: [pairs[1], *pairs], "model.layers.0.input_layernorm.weight, .* came where"),
        (lambda pairs: [*pairs, ("more", torch.zeros(1))], "more, .* came where None"),
        (lambda pairs: [*pairs[:-1], (pairs[-1][0], pairs[-1][1].half())], "float16"),
    ],
)
def test_a_stream_of_another_model(tmp_path: Path, change: Any, reason: str) -> None:
    """Tensors that are missing, too many, out of order or of another type are told; no checkpoint appears."""
    model = fabric.model_folder()
    weights = read_weights(model)
    pairs = change([(name, weights[name]) for name in weight_shapes(read_shape(model))])
    with pytest.raises(ModelError, match=reason):
        write_checkpoint(tmp_path, "r", "actor", 1, iter(pairs), None, like=model, phase=None)
    assert not (tmp_path / "checkpoints/r/actor/v00000001").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"weights_digest": "x"}'])
def test_a_damaged_manifest(tmp_path: Path, content: bytes) -> None:
    """A manifest that cannot be read, or names no digests, is a ModelError too."""
    record = _write(tmp_path, fabric.model_folder())
    (tmp_path / record.path / MANIFEST).write_bytes(content)
    with pytest.raises(ModelError, match=MANIFEST):
        read_checkpoint(tmp_path / record.path)


@pytest.mark.parametrize("file", [MANIFEST, "model.safetensors", OPTIMIZER])
def test_a_missing_file(tmp_path: Path, file: str) -> None:
    """A checkpoint without one of its files cannot be read."""
    record = _write(tmp_path, fabric.model_folder())
    (tmp_path / record.path / file).unlink()
    with pytest.raises(ModelError):
        read_checkpoint(tmp_path / record.path)


def test_what_a_crash_left_does_no_harm(tmp_path: Path) -> None:
    """A half-written folder, of this process id or another, is neither read nor in the way."""
    record = _write(tmp_path, fabric.model_folder(), 1)
    place = (tmp_path / record.path).parent
    import os

    for pid in (os.getpid(), 99999):
        left = place / f".v00000002.{pid}"
        left.mkdir()
        (left / "model.safetensors").write_bytes(b"half")
        (left / "junk").write_bytes(b"junk")
    again = _write(tmp_path, fabric.model_folder(), 2)
    assert again.path == "checkpoints/run/actor/v00000002"
    assert not (tmp_path / again.path / "junk").exists()
    assert read_checkpoint(tmp_path / again.path).optimizer is not None


def test_an_earlier_attempt_at_a_version_is_kept(tmp_path: Path) -> None:
    """A version that was written before gets a second folder; the first stays as it was."""
    model = fabric.model_folder()
    first = _write(tmp_path, model)
    before = (tmp_path / first.path / MANIFEST).read_bytes()
    weights = {name: tensor + 1 for name, tensor in read_weights(model).items()}
    second = _write(tmp_path, model, 1, weights)
    assert second.path != first.path
    assert second.path.startswith(first.path + "-")
    assert (tmp_path / first.path / MANIFEST).read_bytes() == before
    assert digest_tensors(read_checkpoint(tmp_path / first.path).weights, tree=True) == first.weights_digest
    assert digest_tensors(read_checkpoint(tmp_path / second.path).weights, tree=True) == second.weights_digest


def test_transformers_loads_it(tmp_path: Path) -> None:
    """A checkpoint is a model directory: transformers finds equal tensors in it, and it can be `like`."""
    from transformers import AutoModelForCausalLM

    model = fabric.model_folder()
    weights = {name: tensor * 2 for name, tensor in read_weights(model).items()}
    record = _write(tmp_path, model, 1, weights)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / record.path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
    child = write_checkpoint(
        tmp_path, "run", "actor", 2, weights, None, like=tmp_path / record.path, phase="p"
    )
    names = {f.name for f in (tmp_path / child.path).iterdir()}
    assert names == {f.name for f in model.iterdir()} | {MANIFEST}, "the optimizer does not go along"
    manifest = orjson.loads((tmp_path / child.path / MANIFEST).read_bytes())
    assert manifest["policy_version"] == 2
    shutil.rmtree(tmp_path / record.path)
    assert read_checkpoint(tmp_path / child.path).weights.keys() == weights.keys()


def test_a_checkpoint_has_the_stores_modes(tmp_path: Path) -> None:
    """Weights, what goes along, the manifest and every folder are the owner's alone, whatever the umask."""
    model = fabric.model_folder()
    log = rb.open(tmp_path / "store", create=True)
    before = os.umask(0o000)
    try:
        record = write_checkpoint(
            log.path, "r", "actor", 0, read_weights(model), _optimizer(), like=model, phase=None
        )
    finally:
        os.umask(before)
    folder = log.path / record.path
    assert {p.name for p in folder.iterdir()} >= {"config.json", MANIFEST, OPTIMIZER}
    for path in [folder, *folder.iterdir(), folder.parent, folder.parent.parent, folder.parents[2]]:
        assert oct(path.stat().st_mode & 0o7777) == oct(0o700 if path.is_dir() else 0o600), path


def test_what_a_trainer_records_of_errors_holds_no_secret(tmp_path: Path) -> None:
    """Its steps' and its syncs', by the store's own digests."""
    log = rb.open(tmp_path / "store", create=True)
    values = {"model": "m", "steps": 1, "algorithm": {"name": "sft", "batch_size": 1}}
    config = parse_config(values, "train.toml")
    with log.writer("train") as writer:
        publisher = Publisher(config, log, writer, fold_history([], config.run, config.policy))
        publisher.write(
            StepFailed(1, 1, "actor", "password=hunter2"),
            SyncFailed("actor", 1, "s", "http://h", "http://u:hunter2@h said no"),
        )
        publisher.close()
    errors = [event.record.error for event in log.events()]  # type: ignore[union-attr]
    digest = Scrubber(store_secret(log.path, SECRETS)).digest
    assert errors == [f"password={digest('hunter2')}", f"http://{digest('u:hunter2')}@h said no"]
