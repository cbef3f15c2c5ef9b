"""`[checkpoint] keep_last` and `keep_every`: what a training removes, and that nothing is lost by it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook import store as rb
from rollbook.bench.scripted.job import Options
from rollbook.bench.scripted.sglang import ScriptedSGLang
from rollbook.engines.weights.name import version_in
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import TrainError
from rollbook.store.events import (
    CheckpointRemoved,
    CheckpointWritten,
    PolicyActivated,
    StepCommitted,
    StepPlanned,
)
from rollbook.testing.asgi import serving
from rollbook.train.config.config import CheckpointConfig
from rollbook.train.config.phase import family_names

Stores = Callable[..., Store]
KEEP = {"keep_last": 2, "keep_every": 6}


def _there(log: Store) -> list[str]:
    """Names of what is in the policy's folder of checkpoints."""
    return sorted(path.name for path in (log.path / "checkpoints/demo/actor").iterdir())


def _names(*versions: int) -> list[str]:
    return [f"v{version:08d}" for version in versions]


def _bytes(log: Store) -> int:
    return sum(path.stat().st_size for path in (log.path / "checkpoints").rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def settings() -> Any:
    """Twelve steps with a checkpoint each, of which few are kept."""
    return fabric.config(fabric.SFT, steps=12, checkpoint_every=1, checkpoint=KEEP)


@pytest.fixture(scope="module")
def plain_path(recorded_path: Path, settings: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training with all of its checkpoints. Copy it; never write."""
    log = rb.open(shutil.copytree(recorded_path, tmp_path_factory.mktemp("plain") / "store"))
    fabric.train(log, settings.model_copy(update={"checkpoint": CheckpointConfig()}))
    return log.path


@pytest.fixture(scope="module")
def kept_path(recorded_path: Path, settings: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The training that removes. Copy it; never write."""
    log = rb.open(shutil.copytree(recorded_path, tmp_path_factory.mktemp("kept") / "store"))
    fabric.train(log, settings)
    return log.path


@pytest.fixture
def kept(kept_path: Path, tmp_path: Path) -> Store:
    """A copy of the store whose training removed checkpoints."""
    return rb.open(shutil.copytree(kept_path, tmp_path / "kept"))


def _digests(log: Store) -> list[dict[str, Any]]:
    return [step.digests for step in records_of(log, StepCommitted)]


def test_it_keeps_what_it_says(settings: Any, kept: Store, plain_path: Path) -> None:
    """The newest two, the first of each six, version 0; no bit of training differs, and the disk has less."""
    assert _there(kept) == _names(0, 6, 11, 12)
    removed = records_of(kept, CheckpointRemoved)
    assert [r.policy_version for r in removed] == [1, 2, 3, 4, 5, 7, 8, 9, 10]
    assert {r.reason for r in removed} == {"[checkpoint] keep_last 2, keep_every 6"}
    written = {c.path: c for c in records_of(kept, CheckpointWritten)}
    for r in removed:
        record = written[r.path]
        assert (r.weights_digest, r.optimizer_digest) == (record.weights_digest, record.optimizer_digest)
    plain = rb.open(plain_path)
    assert _digests(kept) == _digests(plain)
    assert _bytes(kept) * 3 < _bytes(plain)
    others = settings.model_copy(update={"checkpoint": CheckpointConfig(keep_last=1)})
    assert family_names(settings, "cut") == family_names(others, "cut"), "the key is free to change"


def test_steps_in_between_are_replayed(kept: Store) -> None:
    """From the nearest one that is kept, each bit for bit."""
    for step, base in ((4, 0), (9, 6), (11, 11)):
        replayed = replay_step(kept, step)
        assert (replayed.bit_for_bit, replayed.from_version) == (True, base)


def test_going_back_to_one_that_was_removed(
    settings: Any, kept: Store, cli: Callable[..., tuple[int, str, str]]
) -> None:
    """It is said that it was removed, what makes it again, and where one can go back to."""
    before = kept.head()
    with pytest.raises(
        TrainError, match=r"it can from: 0, 6, 11, 12\. The checkpoint of version 8 was removed"
    ) as e:
        fabric.train(kept, settings, abandon_after=8)
    assert "`rollbook replay weights 8` makes its weights again" in str(e.value)
    assert kept.head() == before
    code, _, err = cli("export", "model", "--store", kept.path, "--version", 8, "-o", kept.path / "x")
    assert (code, "The checkpoint of version 8 was removed" in err) == (2, True)
    fabric.train(kept, settings, abandon_after=6)
    assert _digests(kept)[-1] == _digests(kept)[11]
    assert _there(kept)[:2] == _names(0, 6)


def test_a_reference_that_was_removed(kept: Store) -> None:
    """A training that names it says so."""
    algorithm = {**fabric.GRPO["algorithm"], "kl": 0.1, "reference_version": 8}
    with pytest.raises(TrainError, match=r"reference_version 8: .*checkpoint of version 8 was removed"):
        fabric.train(kept, fabric.config(fabric.GRPO, algorithm=algorithm))


def test_references_and_beginnings_stay(kept: Store) -> None:
    """Another configuration begins at version 12, with 11 as its reference: neither goes."""
    algorithm = {**fabric.GRPO["algorithm"], "kl": 0.1, "reference_version": 11}
    keep = {"keep_last": 1}
    fabric.train(kept, fabric.config(fabric.GRPO, algorithm=algorithm, checkpoint_every=1, checkpoint=keep))
    assert _there(kept) == _names(0, 11, 12, 15)
    assert all(replay_step(kept, step).bit_for_bit for step in (10, 13, 14))


def test_a_renewed_reference_stays(recorded: Stores) -> None:
    """Each one that a step was held to, as its replay needs it."""
    log = recorded()
    algorithm = {**fabric.GRPO["algorithm"], "kl": 0.1, "ref_update_interval": 2, "groups": 1}
    changes = {"algorithm": algorithm, "checkpoint_every": 1, "checkpoint": {"keep_last": 1}, "steps": 5}
    fabric.train(log, fabric.config(fabric.GRPO, **changes))
    named = {plan.algorithm["reference_version"] for plan in records_of(log, StepPlanned)}
    assert named == {0, 2, 4}
    assert _there(log) == _names(0, 2, 4, 5)
    assert replay_step(log, 3).bit_for_bit


class Killed(BaseException):
    """Stands for kill -9: nothing may be written on the way out."""


PLACES = ["before the event", "after the event", "after the rename", "in its files", "after its files"]


def _die(patch: pytest.MonkeyPatch, place: str) -> None:
    """Have the training die at a place of its third removal."""
    from rollbook.store.upkeep import checkpoints as removing

    counts = {"removals": 0}
    record, rename, rmtree, note = (
        *(removing.CheckpointRemoved, Path.rename, shutil.rmtree, removing.note_removed_checkpoint),
    )

    def at(here: str) -> None:
        if here == place and counts["removals"] == 3:
            raise Killed

    def removed(*values: Any) -> Any:
        counts["removals"] += 1
        at("before the event")
        return record(*values)

    def renamed(self: Path, target: Any) -> Any:
        if str(target).endswith(".removed"):
            at("after the event")
        return rename(self, target)

    def gone(path: Path, *rest: Any, **named: Any) -> None:
        if str(path).endswith(".removed") and Path(path).exists():
            at("after the rename")
            if place == "in its files" and counts["removals"] == 3:
                next(Path(path).glob("*.safetensors")).unlink()
                raise Killed
        rmtree(path, *rest, **named)

    def noted(*values: Any) -> None:
        at("after its files")
        note(*values)

    patch.setattr(removing, "CheckpointRemoved", removed)
    patch.setattr(Path, "rename", renamed)
    patch.setattr(shutil, "rmtree", gone)
    patch.setattr(removing, "note_removed_checkpoint", noted)


@pytest.mark.crashes
@pytest.mark.parametrize("place", PLACES)
def test_a_kill_around_a_removal(recorded: Stores, settings: Any, plain_path: Path, place: str) -> None:
    """The next start finishes it, and ends with the bits and the folders of a training that went through."""
    log = recorded()
    with pytest.MonkeyPatch.context() as patch:
        _die(patch, place)
        with pytest.raises(Killed):
            fabric.train(log, settings)
    fabric.train(log, settings)
    assert _digests(log) == _digests(rb.open(plain_path))
    assert _there(log) == _names(0, 6, 11, 12)
    assert [r.policy_version for r in records_of(log, CheckpointRemoved)] == [1, 2, 3, 4, 5, 7, 8, 9, 10]
    assert replay_step(log, 4).bit_for_bit


@pytest.mark.more
@pytest.mark.parametrize(
    "way",
    [{"overlap": True}, {"sharded": True}, {"overlap": True, "sharded": True}],
    ids=lambda w: "+".join(w),
)
def test_overlapped_and_sharded(
    recorded: Stores, settings: Any, plain_path: Path, way: dict[str, bool]
) -> None:
    """Nothing that is being written is touched, and the end is the same."""
    log = recorded()
    checkpoint = CheckpointConfig(**KEEP, **way)
    fabric.train(log, settings.model_copy(update={"checkpoint": checkpoint}))
    assert _there(log) == _names(0, 6, 11, 12)
    assert _digests(log) == _digests(rb.open(plain_path))
    assert replay_step(log, 9).from_version == 6


@pytest.fixture
def engine() -> Iterator[tuple[ScriptedSGLang, str]]:
    """An engine that serves the tiny model and keeps checksums of its weights."""
    with ExitStack() as stack:
        app = ScriptedSGLang(None, Options(model_path=str(fabric.model_folder()), weights="float32"))
        yield app, stack.enter_context(serving(app))


@pytest.mark.more_but("whole")
@pytest.mark.parametrize("way", [{}, {"sharded": True}], ids=["whole", "sharded"])
def test_what_an_engine_loaded_goes_once_it_has_another(
    recorded: Stores, engine: tuple[ScriptedSGLang, str], way: dict[str, bool]
) -> None:
    """Of the weights that were written for it alone those of the newest version are left; it is synced again
    from there after a restart."""
    app, url = engine
    log, sync = recorded(), {"engines": [url], "transport": "disk"}
    changes = {"checkpoint_every": 3, "sync": sync, "checkpoint": {"keep_last": 1, **way}}
    fabric.train(log, fabric.config(fabric.SFT, steps=8, **changes))
    written = records_of(log, CheckpointWritten)
    assert [c.policy_version for c in written if c.optimizer_digest is None][:4] == [0, 1, 2, 3 if way else 4]
    assert [a.policy_version for a in records_of(log, PolicyActivated)] == list(range(9))
    held = fabric.steps_of(log).checkpoints
    assert [c.policy_version for c in held] == [0, 8, *([8] if way else [])]
    assert len(_there(log)) == len(held)
    assert version_in(app.weight_version) == 8
    fabric.train(log, fabric.config(fabric.SFT, steps=10, **changes))
    assert version_in(app.weight_version) == 10
    assert {c.policy_version for c in fabric.steps_of(log).checkpoints} == {0, 10}
