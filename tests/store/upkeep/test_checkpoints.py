"""Checkpoints that are removed: the event first, then the folder, and every reader of the log knows it."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories.records import step_planned
from typer.testing import CliRunner

from rollbook import store as rb
from rollbook.cli.app import app
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.catalog.catalog import Catalog, note_checkpoint
from rollbook.store.catalog.rebuild import rebuild_catalog
from rollbook.store.errors import LaneLockedError, OutsideError, RollbookError, UpkeepError
from rollbook.store.fold.history import KINDS, History, fold_history
from rollbook.store.safe_paths import reading
from rollbook.store.upkeep import checkpoints
from rollbook.store.upkeep.checkpoints import Keep, finish_removals, list_checkpoints, remove_checkpoints
from rollbook.store.upkeep.retention_policy import needed_by

FOLDER = "checkpoints/demo/actor"


def _path(version: int) -> str:
    return f"{FOLDER}/v{version:08d}"


def _written(version: int, optimizer: str | None = "o", phase: str | None = "p") -> kinds.CheckpointWritten:
    return kinds.CheckpointWritten("actor", version, _path(version), f"w{version}", optimizer, phase, 8)


def _write(log: Store, lane: str, *records: Any, run: str = "demo") -> None:
    with log.writer(lane) as writer:
        writer.append([Event(record, run) for record in records]).result(30)


def _make(log: Store, record: kinds.CheckpointWritten) -> None:
    (log.path / record.path).mkdir(parents=True)
    (log.path / record.path / "model.safetensors").write_bytes(b"x" * 8)
    note_checkpoint(log.path, "demo", record)


@pytest.fixture
def log(store: Store) -> Store:
    """Six steps, each with a checkpoint; step 3 has version 2 as its reference."""
    _make(store, _written(0, None, None))
    records: list[Any] = [_written(0, None, None)]
    for step in range(6):
        algorithm = {"reference_version": 2 if step == 3 else 0}
        records.append(
            step_planned(
                step,
                policy_version=step,
                samples=[{"trajectory_id": f"t{step}", "turn_id": f"t{step}.0"}],
                partition=[[[0]]],
                algorithm=algorithm,
            )
        )
        records.append(kinds.StepCommitted(step, 1, "actor", step + 1, {}, {}))
        record = _written(step + 1)
        records += [
            record,
            kinds.PolicyPublished("actor", step + 1, step, record.path, record.weights_digest),
        ]
        _make(store, record)
    _write(store, "train", *records)
    return store


def _history(log: Store) -> History:
    return fold_history(log.events_of(KINDS), "demo", "actor")


def _folders(log: Store) -> list[str]:
    return sorted(path.name for path in (log.path / FOLDER).iterdir())


def _names(*versions: int) -> list[str]:
    return [f"v{version:08d}" for version in versions]


def test_what_may_go_goes(log: Store) -> None:
    """Folders, history, catalog, SQL: all know what is left, and the rule said again does nothing."""
    assert remove_checkpoints(log, Keep(1, 4), "demo", "actor") == {_path(1), _path(3), _path(5)}
    assert _folders(log) == _names(0, 2, 4, 6)
    history = _history(log)
    assert history.held_versions == [0, 2, 4, 6]
    removal = kinds.CheckpointRemoved("actor", 3, _path(3), "w3", "o", "keep_last 1, keep_every 4")
    assert removal in history.removed
    assert [r.policy_version for r in history.removed] == [1, 3, 5]
    with contextlib.closing(Catalog.of(log.path)) as catalog:
        before = catalog.rows()["checkpoints"]
    assert [row["policy_version"] for row in before] == [0, 2, 4, 6]
    rebuild_catalog(log)
    with contextlib.closing(Catalog.of(log.path)) as catalog:
        assert catalog.rows()["checkpoints"] == before
    with rb.connect(log.path) as connection:
        rows = connection.execute(
            "SELECT policy_version, removed IS NULL FROM policies ORDER BY 1"
        ).fetchall()
    assert rows == [(1, False), (2, True), (3, False), (4, True), (5, False), (6, True)]
    head = log.head()
    assert remove_checkpoints(log, Keep(1, 4), "demo", "actor") == set()
    assert log.head() == head


def test_why_each_stays(log: Store) -> None:
    """The list says what needs which, and what went."""
    _write(log, "serve", kinds.RunOpened("serve", {}, f"/elsewhere/{_path(5)}"))
    _write(log, "other", kinds.RunOpened("train", {}), kinds.SyncStarted("actor", 4, "s", "e1", "disk"))
    remove_checkpoints(log, Keep(1), "demo", "actor")
    listed = {checkpoint.policy_version: checkpoint for checkpoint in list_checkpoints(log, Keep(1))}
    assert {version: checkpoint.why_kept for version, checkpoint in listed.items() if checkpoint.bytes} == {
        0: ("version 0",),
        2: ("the reference of step 3",),
        4: ("engine e1 is being given it",),
        5: ("rollbook serve of lane serve was started with it",),
        6: ("the newest", "to resume"),
    }
    assert {
        v: checkpoint.removed for v, checkpoint in listed.items() if not checkpoint.bytes
    } == dict.fromkeys((1, 3), "keep_last 1")
    assert listed[6].step == 5
    _write(log, "other", kinds.SyncFinished("actor", 4, "s", "e1", 1, 0.1))
    _write(log, "serve", kinds.RunOpened("serve", {}, "/elsewhere/model"))
    assert remove_checkpoints(log, Keep(1), "demo", "actor") == {_path(4), _path(5)}


def test_an_engine_keeps_what_it_holds(log: Store) -> None:
    """Until it holds another; and what a process before the lane's last one saw counts no more."""
    held = [kinds.PolicyActivated("actor", v, "e1", f"w{v}", _path(v), f"n{v}", f"c{v}") for v in (3, 4)]
    _write(log, "other", kinds.RunOpened("train", {}), *held)
    assert remove_checkpoints(log, Keep(1), "demo", "actor") == {_path(v) for v in (1, 3, 5)}
    assert [
        checkpoint.why_kept for checkpoint in list_checkpoints(log, Keep(1)) if checkpoint.policy_version == 4
    ] == [("engine e1 holds it",)]
    _write(log, "other", kinds.RunOpened("train", {}))
    assert remove_checkpoints(log, Keep(1), "demo", "actor") == {_path(4)}


def test_what_is_read_stays(log: Store) -> None:
    """A reader keeps it, and it goes the next time."""
    with reading(log.path / _path(3)):
        assert remove_checkpoints(log, Keep(1), "demo", "actor") == {_path(v) for v in (1, 4, 5)}
        assert _history(log).held_versions == [0, 2, 3, 6]
    assert remove_checkpoints(log, Keep(1), "demo", "actor") == {_path(3)}


def test_steps_that_cannot_be_run_again(log: Store) -> None:
    """What is after a retired step, or one whose tokens were erased, is not made again: it stays."""
    _write(
        log,
        "upkeep",
        kinds.TrajectoryErased("t4", False, "asked", 1),
        kinds.TrajectoryErased("t0", True, "", 1),
    )
    assert {
        checkpoint.policy_version for checkpoint in list_checkpoints(log, Keep(1)) if checkpoint.goes
    } == {1, 3, 4}
    _write(log, "upkeep", kinds.StepRetired(0, "actor", "space"))
    assert {
        checkpoint.policy_version for checkpoint in list_checkpoints(log, Keep(1)) if checkpoint.goes
    } == {3, 4}
    assert [
        checkpoint.why_kept
        for checkpoint in list_checkpoints(log, Keep(1))
        if checkpoint.policy_version in (1, 5)
    ] == [("nothing that stays makes it again",)] * 2


def test_retention_keeps_what_an_earlier_checkpoint_needs(log: Store) -> None:
    """A replay begins further back, and runs steps that are retired, too: their trajectories stay."""
    _write(log, "upkeep", *(kinds.StepRetired(step, "actor", "space") for step in (0, 1, 2)))
    late = {trajectory for trajectory, _ in needed_by(_history(log))}
    assert late == {"t3", "t4", "t5"}
    assert remove_checkpoints(log, Keep(1), "demo", "actor") == {_path(4), _path(5)}
    assert _history(log).held_versions == [0, 1, 2, 3, 6], "what retired steps made is not made again"
    assert dict(needed_by(_history(log))).keys() == late
    _write(log, "upkeep", kinds.StepRetired(3, "actor", "space"))
    needed = dict(needed_by(_history(log)))
    assert needed.keys() == late, "the checkpoint of version 4 is gone"
    assert needed["t3"] == "step 4 of policy 'actor' in run 'demo'"


class CutShort(BaseException):
    """Stands for kill -9."""


@pytest.mark.parametrize("place", ["write", "rename", "_discard", "rmtree"])
def test_a_removal_that_is_cut_short(log: Store, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its event all is as it was; after it the next start removes what is left."""

    def die(*_: Any, **__: Any) -> Any:
        raise CutShort

    whole = shutil.rmtree

    def half(path: Path, *rest: Any, **named: Any) -> None:
        if path.exists():
            (path / "model.safetensors").unlink()
            raise CutShort
        whole(path, *rest, **named)

    with monkeypatch.context() as patch:
        if place == "write":
            patch.setattr(checkpoints, "CheckpointRemoved", die)
        elif place == "rename":
            patch.setattr(Path, "rename", die)
        elif place == "_discard":
            patch.setattr(checkpoints, "_discard", die)
        else:
            patch.setattr(shutil, "rmtree", half)
        with pytest.raises(CutShort):
            remove_checkpoints(log, Keep(1), "demo", "actor")
    history = _history(log)
    assert history.held_versions == [0, *([1] if place == "write" else []), 2, 3, 4, 5, 6]
    finish_removals(log, history)
    assert _folders(log) == _names(*history.held_versions)
    assert remove_checkpoints(log, Keep(1), "demo", "actor") >= {_path(v) for v in (3, 4, 5)}
    assert _folders(log) == _names(0, 2, 6)


def test_written_again_at_its_path(log: Store) -> None:
    """It counts again, whichever lanes say so; only once it is removed again does its folder go."""
    remove_checkpoints(log, Keep(1), "demo", "actor")
    assert not (log.path / _path(4)).exists()
    _make(log, _written(4))
    _write(log, "again", _written(4))
    history = _history(log)
    assert history.held_versions == [0, 2, 4, 6]
    assert [r.policy_version for r in history.removed] == [1, 3, 5]
    finish_removals(log, history)
    assert _folders(log) == _names(0, 2, 4, 6)
    with contextlib.closing(Catalog.of(log.path)) as catalog:
        rebuild_catalog(log)
        assert [row["policy_version"] for row in catalog.rows()["checkpoints"]] == [0, 2, 4, 6]
    assert remove_checkpoints(log, Keep(1), "demo", "actor") == {_path(4)}
    assert _history(log).held_versions == [0, 2, 6]


def test_only_folders_of_its_checkpoints_go(log: Store) -> None:
    """Whatever path an event names: no lane, no other version, no other run."""
    odd = [(3, "lanes/train"), (3, f"{FOLDER}/v00000002"), (3, "checkpoints/other/actor/v00000003")]
    (log.path / "checkpoints/other/actor/v00000003").mkdir(parents=True)
    gone = [kinds.CheckpointRemoved("actor", v, path, "w", "o", "x") for v, path in odd]
    _write(log, "strange", *gone)
    finish_removals(log, _history(log))
    assert _folders(log) == _names(*range(7))
    assert list((log.path / "lanes/train").iterdir())
    assert (log.path / "checkpoints/other/actor/v00000003").is_dir()
    with pytest.raises(OutsideError):
        finish_removals(log, History("..", "../lanes"))


def test_a_training_at_work(log: Store) -> None:
    """It removes them itself: nobody else does beside it."""
    with (
        log.claim("training policy actor of run demo", "wait"),
        pytest.raises(LaneLockedError, match=r"\[checkpoint\] keep_last"),
    ):
        remove_checkpoints(log, Keep(1), "demo", "actor")
    assert _folders(log) == _names(*range(7))


@pytest.fixture
def cli() -> Callable[..., tuple[int, str]]:
    """`rollbook store checkpoints` of a store: exit code and output."""

    def call(log: Store, *options: object) -> tuple[int, str]:
        command = ["store", "checkpoints", "--store", str(log.path), *map(str, options)]
        done = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
        if isinstance(done.exception, RollbookError):  # the program's last lines print it
            return 2, str(done.exception)
        return done.exit_code, done.output

    return call


def test_the_command(log: Store, cli: Callable[..., tuple[int, str]]) -> None:
    """It lists, says what would go, and with --yes removes it."""
    code, output = cli(log)
    assert (code, "nothing needs 4 of them" in output, "the reference of step 3" in output) == (0, True, True)
    code, output = cli(log, "--keep-every", 4)
    assert (code, output.count("would go")) == (0, 2)
    assert "would remove 2 of 7 checkpoints" in output
    assert _folders(log) == _names(*range(7))
    code, output = cli(log, "--keep-last", 1, "--yes", "--json")
    assert code == 0
    went = [row["policy_version"] for row in json.loads(output) if row["went"]]
    assert went == [1, 3, 4, 5]
    assert _folders(log) == _names(0, 2, 6)
    code, output = cli(log, "--run", "demo", "--policy", "actor")
    assert (code, output.count("removed (keep_last 1)")) == (0, 4)


def test_what_the_command_refuses(log: Store, cli: Callable[..., tuple[int, str]]) -> None:
    """Nothing to keep by, no such policy, no such run."""
    assert cli(log, "--yes")[0] == 2
    code, output = cli(log, "--policy", "critic")
    assert (code, "no checkpoint of critic of any run; there are: actor of demo" in output) == (2, True)
    code, output = cli(log, "--run", "other")
    assert (code, "no run 'other'" in output) == (2, True)
    with pytest.raises(UpkeepError, match="there are: actor of demo"):
        list_checkpoints(log, Keep(1), "other")
