"""A run's version 0 is one set of weights: a trainer with another model is refused, and leaves nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.fakes.stories import fabric

from rollbook.engines.model_files import origin_of
from rollbook.engines.weights.digests import digest_tensors, read_weights, widened
from rollbook.store import Event, Store
from rollbook.store.errors import ModelError, VersionError
from rollbook.store.events import CheckpointWritten, PolicyActivated, RunOpened, StepCommitted
from rollbook.store.fold.history import KINDS, fold_history
from rollbook.train.checkpoints.export import export_model


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A model of the same shape as the tiny one."""
    folder = Path(shutil.copytree(fabric.model_folder(), tmp_path / "other"))
    for file in folder.glob("*.safetensors"):
        held = load_file(file)
        save_file({name: tensor + 1 for name, tensor in held.items()}, file, metadata={"format": "pt"})
    return folder


def steps(log: Store) -> int:
    """How many were committed."""
    return sum(isinstance(event.record, StepCommitted) for event in log.events())


def test_a_proxy_has_recorded_with_another_model(recorded: Callable[..., Store], other: Path) -> None:
    """The trainer is refused with the remedy, before a step, and its checkpoint of version 0 is not left."""
    log = recorded()
    digest = digest_tensors(widened(read_weights(other)), tree=True)
    with log.writer("serve") as writer:
        activation = PolicyActivated("actor", 0, "http://e", digest, str(other), "demo/actor/0/mark", "c")
        writer.append([Event(activation, "demo")]).result()
    with pytest.raises(VersionError, match=rf"not version 0 .*{digest[:16]} since policy.activated .*--run"):
        fabric.train(log, fabric.config(fabric.SFT, steps=1))
    assert steps(log) == 0
    assert not any(isinstance(event.record, CheckpointWritten) for event in log.events())
    assert list((log.path / "checkpoints").rglob("*.safetensors")) == []
    fabric.train(log, fabric.config(fabric.SFT, steps=1, run="demo", model=str(other)))
    assert steps(log) == 1


def test_a_trainer_goes_on_with_another_model(recorded: Callable[..., Store], other: Path) -> None:
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


@pytest.mark.more_but("another run")
@pytest.mark.parametrize("of", ["another run", "the run of another store"])
def test_a_run_from_an_exported_model_begins_at_version_0(
    recorded: Callable[..., Store], trained: Callable[..., Store], tmp_path: Path, of: str
) -> None:
    """Also after a restart, whatever version of its own run the model was; its weights are those exported."""
    export_model(trained(), out := tmp_path / "exported", 4, None, "actor")
    log, run = recorded(), fabric.RUN
    if of == "another run":
        file = out / "rollbook.json"
        file.write_bytes(file.read_bytes().replace(b'"run": "demo"', b'"run": "other"'))
    begun = fabric.config(fabric.SFT, steps=1, model=str(out))
    fabric.train(log, begun)
    fabric.train(log, fabric.config(fabric.SFT, steps=2, model=str(out)))
    held = fold_history(log.events_of(KINDS), run, "actor")
    assert held.held_versions == [0, 1, 2]
    assert [s.planned.policy_version for s in held.steps.values()] == [0, 1]
    origin = origin_of(out)
    assert origin is not None
    assert held.checkpoints[0].weights_digest == origin.digest


def test_an_exported_model_that_was_changed_is_refused(
    recorded: Callable[..., Store], trained: Callable[..., Store], tmp_path: Path
) -> None:
    """At the start, where nothing is written, and where the run goes on; with both digests."""
    export_model(trained(), out := tmp_path / "exported", 4, None, "actor")
    kept = shutil.copytree(out, tmp_path / "kept")
    origin, file = origin_of(out), out / "model.safetensors"
    assert origin is not None
    save_file({n: tensor + 1 for n, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    changed = digest_tensors(read_weights(out), tree=True)
    log, wanted = (
        recorded(),
        rf"their digest is {changed[:16]}, and its rollbook.json names {origin.digest[:16]}",
    )
    with pytest.raises(ModelError, match=wanted):
        fabric.train(log, fabric.config(fabric.SFT, steps=1, model=str(out)))
    assert not any(isinstance(event.record, CheckpointWritten) for event in log.events())
    fabric.train(log, fabric.config(fabric.SFT, steps=1, model=str(kept)))
    with pytest.raises(ModelError, match=wanted):
        fabric.train(log, fabric.config(fabric.SFT, steps=2, model=str(out)))
    assert steps(log) == 1


def test_a_model_by_its_name_at_the_hub(
    recorded: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the cache, at the commit that the log names; a run that has begun goes on without it."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    log, folder = recorded(), tmp_path / "cache" / "models--tiny-org--tiny"
    with pytest.raises(ModelError, match=r"cannot be fetched: .* `hf download tiny-org/tiny`"):
        fabric.train(log, fabric.config(fabric.SFT, steps=1, model="tiny-org/tiny"))
    shutil.copytree(fabric.model_folder(), folder / "snapshots" / "abc123")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc123")
    fabric.train(log, fabric.config(fabric.SFT, steps=1, model="tiny-org/tiny"))
    shutil.rmtree(folder)
    fabric.train(log, fabric.config(fabric.SFT, steps=2, model="tiny-org/tiny"))
    opened = [event.record for event in log.events_of({RunOpened.KIND})]
    assert [o.config.get("model_at_hub") for o in opened] == ["tiny-org/tiny@abc123", None]
    assert steps(log) == 2
