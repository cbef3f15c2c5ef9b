"""Curves for TensorBoard and Weights & Biases: those of the log, each step once, beside a training."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import struct
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.store import Store
from rollbook.train.curves import reporter
from rollbook.train.curves.reporter import HELD_OUT, OF_STEPS, EventFile, read_points

Stores = Callable[..., Store]
Curves = dict[str, list[tuple[int, float]]]
CLOCK = {"metrics/seconds", "metrics/tokens_s"}


def _read(folder: Path) -> Curves:
    """What TensorBoard itself reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(s.step, s.value) for s in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def _curves_of(log: Store, run: str = "demo") -> Curves:
    """What the log has, rounded as a file's float32 are."""
    curves: Curves = defaultdict(list)
    for point in read_points(log, log.head(), run, "actor"):
        for name, value in point.values.items():
            curves[name].append((point.step, value))
    return dict(curves)


def _check(log: Store, *, but: set[str] = frozenset()) -> Curves:  # type: ignore[assignment]
    held, wanted = _read(log.path / "tensorboard/demo/actor"), _curves_of(log)
    assert held.keys() == wanted.keys()
    for name in held.keys() - but:
        steps, values = zip(*wanted[name], strict=True)
        assert [step for step, _ in held[name]] == list(steps), name
        assert [value for _, value in held[name]] == pytest.approx(values, rel=1e-6, nan_ok=True), name
    return held


@pytest.fixture
def command(cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> Callable[..., Any]:
    """`rollbook train` of the teachers' conversations, evaluated every three steps."""

    def run(log: Store, *words: object, evaluate: bool = True) -> tuple[int, str, str]:
        text = fabric.toml(fabric.config(fabric.SFT, steps=6))
        (tmp_path / "train.toml").write_text(text + ("\n[evaluation]\nevery = 3\n" if evaluate else ""))
        result: tuple[int, str, str] = cli("train", tmp_path / "train.toml", "--store", log.path, *words)
        return result

    return run


@pytest.fixture
def log(recorded: Stores) -> Store:
    """A recorded store with conversations that are held out."""
    store = recorded()
    rows = [fabric.records(f"h{i}", [fabric.T(logprobs=None, version=None)], split="eval") for i in range(3)]
    fabric.append(store, [record for row in rows for record in row], lane="held")
    return store


def test_a_training_writes_what_the_log_has(log: Store, command: Callable[..., Any]) -> None:
    """Steps and evaluations, and after a resume no step twice, nor one that was abandoned."""
    code, _, err = command(log, "--set", "steps=4")
    assert code == 0, err
    held = _check(log, but=CLOCK)
    assert [step for step, _ in held["metrics/loss"]] == [0, 1, 2, 3]
    assert [step for step, _ in held["evaluations/loss"]] == [0, 3, 4]
    assert held["evaluations/policy_version"] == [(0, 0.0), (3, 3.0), (4, 4.0)]
    for name in CLOCK:
        assert all(math.isfinite(value) and value > 0 for _, value in held[name])
    code, _, err = command(log)
    assert code == 0, err
    held = _check(log, but=CLOCK)
    assert [step for step, _ in held["metrics/loss"]] == [0, 1, 2, 3, 4, 5]
    code, _, err = command(log, "--abandon-after", 4)
    assert code == 0, err
    held = _check(log, but=CLOCK)
    assert [step for step, _ in held["metrics/loss"]] == [0, 1, 2, 3, 6, 7]
    assert len(list((log.path / "tensorboard/demo/actor").iterdir())) == 1


def test_it_is_derived(
    log: Store, command: Callable[..., Any], cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """Deleted, it comes back with the next start; `plot --tensorboard` writes the same elsewhere."""
    assert command(log)[0] == 0
    before = _read(log.path / "tensorboard/demo/actor")
    shutil.rmtree(log.path / "tensorboard")
    assert command(log)[0] == 0
    after = _check(log)
    assert {k: v for k, v in after.items() if k not in CLOCK} == {
        k: v for k, v in before.items() if k not in CLOCK
    }
    for _ in range(2):
        code, output, _ = cli("plot", "--store", log.path, "--tensorboard", tmp_path / "curves")
        assert code == 0
    assert output == (
        f"{tmp_path}/curves: 9 points of demo; look with: tensorboard --logdir {tmp_path}/curves\n"
    )
    assert _read(tmp_path / "curves/demo/actor") == after
    code, output, _ = cli("plot", "--store", log.path, "--tensorboard", tmp_path / "curves", "--json")
    assert json.loads(output) == {"folder": f"{tmp_path}/curves", "points": {"demo": 9}}
    code, _, output = cli("plot", "--store", log.path, "--tensorboard", tmp_path / "c", "--policy", "none")
    assert (code, "policy 'none' has no committed step: train first" in output) == (2, True)


def test_the_columns_are_the_views() -> None:
    """Every number of the view of steps has its curve."""
    points = read_points(log := rb.open(fabric.trained_path()), log.head(), "demo", "actor")
    names = {name for point in points for name in point.values}
    assert {"metrics/loss", "metrics/learning_rate", "metrics/tokens_s", "metrics/reward"} <= names
    assert names <= {f"metrics/{name}" for name in OF_STEPS} | {f"{HELD_OUT}/{n}" for n in ("loss", "reward")}


class _FullFile:
    """A file on a disk that has no more room after so many writes."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: bytes) -> int:
        """As a file's."""
        self._room -= 1
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.more
@pytest.mark.parametrize("room", [0, 4])
def test_a_full_disk_is_a_warning(
    log: Store, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """At the beginning or later: said once, the training goes on, and the next start makes up for it."""
    with monkeypatch.context() as patch:
        opened = os.fdopen
        patch.setattr(reporter.os, "fdopen", lambda *a: _FullFile(opened(*a), room))
        code, _, err = command(log)
    assert code == 0, err
    assert (
        err.count("curves for TensorBoard are not written any more: OSError: [Errno 28] No space left") == 1
    )
    assert command(log, "--set", "steps=7")[0] == 0
    assert len(_check(log, but=CLOCK)["metrics/loss"]) == 7


def test_without_tensorboard(
    log: Store, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training runs, and the remedy is named."""
    import sys

    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    code, _, err = command(log, evaluate=False)
    assert code == 0
    assert "pip install 'rollbook[train]'" in err
    assert not (log.path / "tensorboard").exists()


def test_what_was_there_stays_until_the_new_is_written(tmp_path: Path) -> None:
    """A past that cannot be read leaves the earlier file, and files of others are never touched."""
    with EventFile(tmp_path, []):
        pass
    [kept] = tmp_path.iterdir()
    (tmp_path / "events.out.tfevents.1.other").write_bytes(b"")

    def broken() -> Any:
        raise ZeroDivisionError
        yield

    with pytest.raises(ZeroDivisionError):
        EventFile(tmp_path, broken())
    assert {path.name for path in tmp_path.iterdir()} == {kept.name, "events.out.tfevents.1.other"}


def test_a_sink_that_hangs_is_left(
    log: Store, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the training waits for a while, and says so."""
    import threading

    def hangs(*_: object) -> Any:
        threading.Event().wait()

    monkeypatch.setattr(reporter, "EventFile", hangs)
    monkeypatch.setattr(reporter, "PATIENCE_S", 0.1)
    code, _, err = command(log, evaluate=False)
    assert (code, "TensorBoard took no more for 0.1 s: some curves end early" in err) == (0, True)


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed: pip install wandb")
def test_weights_and_biases_offline(
    log: Store, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A real wandb keeps every point on disk, without a network; without its variables it is not asked."""
    monkeypatch.chdir(tmp_path)
    assert command(log, "--set", "steps=1", evaluate=False)[0] == 0
    assert not list(tmp_path.rglob("*.wandb"))
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_DIR", str(tmp_path)), ("WANDB_PROJECT", "p")):
        monkeypatch.setenv(name, value)
    code, _, err = command(log)
    assert code == 0, err
    assert "Weights & Biases" not in err
    [file] = tmp_path.rglob("*.wandb")
    history = _wandb_history(file)
    wanted = _curves_of(log)
    assert history["metrics/loss"] == pytest.approx(dict(wanted["metrics/loss"]))
    assert history["evaluations/loss"] == pytest.approx(dict(wanted["evaluations/loss"]))


def _wandb_history(file: Path) -> dict[str, dict[int, float]]:
    """The rows of a run's file: a log of LevelDB's, in blocks of 32 KiB, after seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), 7, b""
    history = defaultdict[str, dict[int, float]](dict)
    while at + 7 <= len(data):
        if (left := -at % 2**15) and left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (2, 3):  # the first of several parts, or one between
            continue
        record = wandb_internal_pb2.Record.FromString(whole)
        whole = b""
        items = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
        for name, value in items.items():
            if not name.startswith("_"):
                history[name][items["_step"]] = value
    return history
