"""A run's version 0 is one set of weights: a trainer with another model is refused, and leaves nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rollbook.ingest.engines.weights.digests import digest_tensors, read_weights, widened
from rollbook.store import Event, Store
from rollbook.store.errors import VersionError
from rollbook.store.events import CheckpointWritten, PolicyActivated, StepCommitted


@pytest.fixture
def other(fabric: Any, tmp_path: Path) -> Path:
    """A model of the same shape as the tiny one."""
    folder = Path(shutil.copytree(fabric.model_folder(), tmp_path / "other"))
    for file in folder.glob("*.safetensors"):
        held = load_file(file)
        save_file({name: tensor + 1 for name, tensor in held.items()}, file, metadata={"format": "pt"})
    return folder


def steps(log: Store) -> int:
    """How many were committed."""
    return sum(isinstance(event.record, StepCommitted) for event in log.events())


def test_a_proxy_has_recorded_with_another_model(
    fabric: Any, recorded: Callable[..., Store], other: Path
) -> None:
    """The trainer is refused with the remedy, before a step, and its checkpoint of version 0 is not left."""
    log = recorded()
    digest = digest_tensors(widened(read_weights(other)))
    with log.writer("serve") as writer:
        told = PolicyActivated("actor", 0, "http://e", digest, str(other), "demo/actor/0/mark", "c")
        writer.append([Event(told, "demo")]).result()
    with pytest.raises(VersionError, match=rf"not version 0 .*{digest[:16]} since policy.activated .*--run"):
        fabric.train(log, fabric.config(fabric.SFT, steps=1))
    assert steps(log) == 0
    assert not any(isinstance(event.record, CheckpointWritten) for event in log.events())
    assert list((log.path / "checkpoints").rglob("*.safetensors")) == []
    fabric.train(log, fabric.config(fabric.SFT, steps=1, run="demo", model=str(other)))
    assert steps(log) == 1


def test_a_trainer_goes_on_with_another_model(
    fabric: Any, recorded: Callable[..., Store], other: Path
) -> None:
    """Refused too, though the checkpoint has the weights; a model that is gone is not compared."""
    log = recorded()
    own = Path(shutil.copytree(fabric.model_folder(), other.parent / "own"))
    settings = fabric.config(fabric.SFT, steps=1, model=str(own))
    fabric.train(log, settings)
    with pytest.raises(VersionError, match=r"CONFIG's model .*other is not version 0"):
        fabric.train(log, fabric.config(fabric.SFT, steps=2, model=str(other)))
    assert steps(log) == 1
    [checkpoint] = [path for path in (log.path / "checkpoints").rglob("v00000001") if path.is_dir()]
    fabric.train(log, fabric.config(fabric.SFT, steps=2, model=str(checkpoint)))
    shutil.rmtree(own)
    fabric.train(log, fabric.config(fabric.SFT, steps=3, model=str(own)))
    assert steps(log) == 3
