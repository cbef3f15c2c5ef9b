"""Fixtures that all tests share, and the guard that Rollbook has one import name only."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.testing
from hypothesis import settings
from sqlalchemy import URL, Engine, create_engine
from tests.fakes.processes.postgresql import postgres
from tests.fakes.stories.records import step_planned, turn_completed, turn_requested

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.catalog import database
from rollbook.store.fold.trajectory import prompt_sha256

__all__ = ["postgres"]
"""The server is one for all tests of a process: what a store may lead to is said once."""

ROOT = Path(__file__).parents[1]
pytest_plugins = [
    "tests.fixtures.lineages",
    "tests.fixtures.models",
    "tests.fixtures.proxies",
    "tests.fixtures.training",
]
BARE_NAMES = ("store", "ingest", "train", "replay")

# A first call imports; a busy machine pauses. Neither is what a property says. A run takes the examples of
# the last one, so that what fails is what was changed; `--hypothesis-profile search` looks for others.
# `make test` takes the first few of them.
FEW = settings(deadline=None, derandomize=True, max_examples=10)
settings.register_profile("search", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("few", FEW)
settings.load_profile("same")


KEPT = pytest.StashKey[dict[str, int]]()
"""Test marked `more_but` -> how many of its parameters `make test` runs."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark `more` what `more_but` does not name; under the profile of few examples, cap a property's own."""
    if not isinstance(item, pytest.Function):
        return
    if (but := item.get_closest_marker("more_but")) is not None:
        kept = any(fnmatchcase(item.callspec.id, pattern) for pattern in but.args)
        counts = item.config.stash.setdefault(KEPT, {})
        name = item.nodeid.partition("[")[0]
        counts[name] = counts.get(name, 0) + kept
        if not kept:
            item.add_marker("more")
    if item.config.getoption("--hypothesis-profile") != "few":
        return
    own = getattr(item.function, "_hypothesis_internal_use_settings", None)
    if own is not None and own.max_examples > FEW.max_examples:
        item.function._hypothesis_internal_use_settings = settings(own, max_examples=FEW.max_examples)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while modules are imported: all that they make stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session when a layer was imported under a second name (`store`, not `rollbook.store`)."""
    bare = [name for name in BARE_NAMES if name in sys.modules]
    if bare:
        print(f"\nimported under a bare name: {bare}; import rollbook.<layer> instead")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="module", autouse=True)
def what_is_imported_is_never_collected() -> None:
    """Collections pass over the modules that are loaded: with torch they are a million objects.

    An engine that is closed, and a server that starts, collect by themselves; each would take half a second.
    """
    if len(sys.modules) > _frozen["modules"] + 300:
        gc.collect()
        gc.freeze()
        if not _frozen["modules"]:
            atexit.register(_collect_all)
        _frozen["modules"] = len(sys.modules)


@pytest.fixture(scope="session")
def kept_parameters(pytestconfig: pytest.Config) -> dict[str, int]:
    """Of each collected test that is marked `more_but`, how many parameters stay."""
    return pytestconfig.stash.get(KEPT, {})


_frozen = {"modules": 0}


def _collect_all() -> None:
    """Libraries want it at the end; pytest would do it five times, if it were not frozen by then."""
    gc.unfreeze()
    gc.collect()


@pytest.fixture(scope="session", autouse=True)
def no_test_steps_back() -> Iterator[None]:
    """`rollbook store seal` lowers the priority of its process, and a process of tests would keep it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "nice", lambda by: by)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_test_waits_for_the_disk() -> Iterator[None]:
    """Nothing that a test of this process writes has to outlive the machine; a process that is killed loses
    none of it either. Tests of what is flushed, and when, put their own calls in the place of these."""
    with pytest.MonkeyPatch.context() as patch:
        for call in ("fsync", "fdatasync"):
            patch.setattr(os, call, os.fstat)
        prepare = database._prepare_sqlite

        def prepare_unsynced(connection: Any, record: Any) -> None:
            connection.execute("pragma synchronous = off")
            prepare(connection, record)

        patch.setattr(database, "_prepare_sqlite", prepare_unsynced)
        yield


@pytest.fixture(scope="session", autouse=True)
def _statements_of_catalogs_are_compiled_once() -> Iterator[None]:
    """Catalogs in files share what SQLAlchemy makes of their statements. Each new one would make it again, a
    third of what it takes to open a lane of a new store."""
    engine_of, first = database._sqlite_engine, create_engine("sqlite://")
    first.connect().close()  # its dialect knows then which SQLite this is

    def sharing(url: URL) -> Engine:
        engine = engine_of(url)
        engine.dialect, engine._compiled_cache = first.dialect, first._compiled_cache
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "_sqlite_engine", sharing)
        yield


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """Clients share the context of TLS that each would make: certificates take longer than most requests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def _commands_are_made_once() -> Iterator[None]:
    """Calls of the command line share the commands that each would make, with all their options."""
    with pytest.MonkeyPatch.context() as patch:
        made = functools.cache(typer.main.get_command)
        patch.setattr(typer.main, "get_command", made)
        patch.setattr(typer.testing, "_get_command", made)
        yield


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A new, empty store."""
    return rb.open(tmp_path / "store", create=True)


@pytest.fixture(scope="session")
def plain() -> Callable[[Event], dict[str, Any]]:
    """A function from an event to values that compare bit for bit, arrays as (dtype, shape, bytes)."""

    def to_plain(event: Event, *, place: bool = True) -> dict[str, Any]:
        envelope = ("run", "event_id", "time_us", *(("lane", "seq") if place else ()))
        values = {name: getattr(event, name) for name in envelope} | {"kind": event.kind}
        for f in fields(event.record):
            value = getattr(event.record, f.name)
            if isinstance(value, np.ndarray):
                value = (str(value.dtype), value.shape, value.tobytes())
            values[f"record.{f.name}"] = value
        return values

    return to_plain


@pytest.fixture(scope="session")
def notes() -> Callable[..., list[Event]]:
    """A factory of n small events, told apart by their error text."""

    def make(count: int, start: int = 0, text: str = "note") -> list[Event]:
        return [
            Event(kinds.TurnFailed("t", f"u{i}", f"{text} {i}"), "run") for i in range(start, start + count)
        ]

    return make


@pytest.fixture(scope="session")
def start_python() -> Callable[..., subprocess.Popen[str]]:
    """A function that starts Python code in another process, which imports Rollbook from this checkout."""

    def start(code: str, *args: object) -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, args)],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture(scope="session")
def run_python(start_python: Callable[..., subprocess.Popen[str]]) -> Callable[..., tuple[int, str, str]]:
    """A function that runs Python code in another process: its exit code, stdout and stderr."""

    def run(code: str, *args: object) -> tuple[int, str, str]:
        process = start_python(code, *args)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    return run


@pytest.fixture(scope="session")
def root() -> Path:
    """Root of the repository."""
    return ROOT


def _turns() -> list[Any]:
    """The turns of trajectory t1: a root, its child with two version spans, and a failed root."""
    first = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}]
    then = [{"role": "assistant", "content": "4"}, {"role": "user", "content": "sure? é✓"}]
    ask: dict[str, Any] = {"request": {"temperature": 1.0}, "requested_model": "gpt-x", "sampling": {"n": 1}}
    ask |= {"honoured": {"seed": False}, "context_key": "c"}
    done: dict[str, Any] = {
        "logprob_semantics": {"temperature": 1.0},
        "flags": [],
        "timings": {"total_ms": 5},
    }
    prompt_1, prompt_2 = [1, 2, 3], [1, 2, 3, 10, 11, 4, 5]
    f32, i32 = np.float32, np.int32
    return [
        turn_requested("t1", "u1", request_id="r1", root_reason="first", messages=first, **ask),
        turn_completed(
            "t1",
            "u1",
            policy_version=0,
            prompt_ids=np.array(prompt_1, i32),
            completion_ids=np.array([10, 11], i32),
            logprobs=np.array([-0.5, -0.25], f32),
            version_spans=(kinds.VersionSpan("actor", 0, 0, 2),),
            prompt_length=3,
            prompt_sha256=prompt_sha256(np.array(prompt_1, i32)),
            reply={"role": "assistant", "content": "4"},
            **done,
        ),
        kinds.TurnDelivered("t1", "u1", "sent"),
        turn_requested(
            "t1",
            "u2",
            request_id="r2",
            parent_turn_id="u1",
            base_turn_id="u1",
            shared_messages=2,
            messages=then,
            **ask,
        ),
        turn_completed(
            "t1",
            "u2",
            policy_version=1,
            prompt_ids=np.array([4, 5], i32),
            completion_ids=np.array([12, 13, 14], i32),
            logprobs=np.array([-1.0, -2.0, -4.0], f32),
            version_spans=(kinds.VersionSpan("actor", 0, 0, 1), kinds.VersionSpan("actor", 1, 1, 3)),
            prompt_length=7,
            prompt_sha256=prompt_sha256(np.array(prompt_2, i32)),
            finish_reason="length",
            reply={"role": "assistant", "content": "yes"},
            **done,
        ),
        kinds.TurnDelivered("t1", "u2", "echoed"),
        turn_requested("t1", "u3", request_id="r3", root_reason="history_changed", messages=first[1:], **ask),
        kinds.TurnFailed("t1", "u3", "the engine is gone"),
    ]


def _serve_records() -> list[Any]:
    """What a proxy's lane holds."""
    asked = [{"role": "user", "content": "hi"}]
    return [
        kinds.RunOpened("serve", {"port": 1}, "toy", "sha-tok", "sha-tpl", {"python": "3"}),
        kinds.TrajectoryOpened("t1", "alpha", "g", "task-7", "train", {"k": "v"}),
        *_turns(),
        kinds.RewardAssigned("t1", "u1", 0.25),
        kinds.RewardAssigned("t1", None, 0.5),
        kinds.RewardAssigned("t1", None, 1.0, "agent", "e-serve-11"),
        kinds.RewardAssigned("t1", None, 0.75, "judge"),
        kinds.TrajectoryFinished("t1", "completed", True),
        kinds.TrajectoryOpened("t2", "beta", None, None, "eval"),
        turn_requested("t2", "u4", request_id="r4", root_reason="first", messages=asked),
        kinds.PolicyActivated("actor", 1, "embedded", "w1", "checkpoints/1"),
    ]


def _train_records() -> list[Any]:
    """What a trainer's lane holds: a failed attempt, a committed one, and a planned step."""

    def planned(step: int, attempt: int, version: int, cut: str, samples: list[Any]) -> Any:
        return step_planned(
            step,
            attempt=attempt,
            policy_version=version,
            phase="train",
            cut=cut,
            recipe={"mask": "all"},
            recipe_digest="rd",
            samples=samples,
            partition=[[[0], [1]]],
            algorithm={"name": "grpo"},
            optimizer={"name": "adam"},
            learning_rate=0.001,
            seed=7,
            input_digests={"weights": "w0"},
        )

    u2, u1 = {"trajectory_id": "t1", "turn_id": "u2"}, {"trajectory_id": "t1", "turn_id": "u1"}
    return [
        kinds.PolicyPublished("actor", 1, 0, "checkpoints/1", "w1"),
        kinds.CheckpointWritten("actor", 1, "checkpoints/1", "w1", "o1", None, 4096),
        kinds.SampleDropped("t2", "u4", "split", "rd", 0, {"split": "eval"}),
        planned(0, 0, 0, "serve=13", [u1]),
        kinds.StepFailed(0, 0, "actor", "out of memory"),
        planned(0, 1, 0, "serve=14,train=2", [u2, u1]),
        kinds.StepCommitted(0, 1, "actor", 1, {"weights": "w1"}, {"loss": 0.125, "tokens": 5}),
        planned(1, 0, 1, "serve=18,train=7", []),
    ]


def _launch_records() -> list[Any]:
    """A launch that ended and left a process behind, and one that has not ended."""
    clocks = {"start": 60, "idle": 30.5, "total": None, "scoring": 10}
    output = {"stdout": {"path": "out/stdout.log", "bytes": 900, "kept": 512}}
    return [
        kinds.LaunchStarted(
            *("t1", "l1", "nightly", {"epoch": 0, "task": "task-7", "sample": 2}, 1, "subprocess"),
            *({"processes": "pidns"}, "host-17", clocks, "launching"),
        ),
        kinds.LaunchLeaked("t1", "l1", [{"pid": 4711, "command": "sleep 99"}], "end", "launching"),
        kinds.EvalStarted("actor", 1, "p1"),
        kinds.EvalSampled("actor", 1, "rollouts.eval.1", 8, "launching"),
        kinds.LaunchEnded(
            *("t1", "l1", "agent_error", "exit code 3", 3, None, 12.5, 1.25, 96.0, output),
            *({"exact": 0.5, "judged": {"error": "no reply"}}, "launching"),
        ),
        kinds.LaunchStarted(
            *("t2", "l2", "nightly", {"epoch": 1, "task": "task-8", "sample": 0}, 2, "python", {}, "host-17"),
            dict.fromkeys(clocks),
        ),
    ]


def _upkeep_records() -> list[Any]:
    """What a process that looks after the log writes: the kinds that the other lanes do not hold."""
    return [
        kinds.BodyStored("d1", {"type": "image", "data": ["x"]}),
        kinds.CursorMoved("dashboard", "serve=3,train=1"),
        kinds.TrajectoryAdopted("t2", "serve", "e-serve-16"),
        kinds.LabelAdded("t1", "u1", "quality", 0.5, "judge"),
        kinds.SyncStarted("actor", 1, "s1", "embedded", "disk"),
        kinds.SyncFinished("actor", 1, "s1", "embedded", 4096, 0.5),
        kinds.SyncFailed("actor", 2, "s2", "embedded", "timeout"),
        kinds.StepRetired(0, "actor", "no longer needed"),
        kinds.SegmentDropped("serve", 1, 2, 0, 10, "keep 1 d"),
        kinds.TrajectoryErased("t1", True, "a leaked key", 7),
        kinds.EngineControlled("embedded", "pause_generation", {"mode": "abort"}, None, "ops"),
        kinds.StepAbandoned(0, 1, "actor", 1, 0, 2),
        kinds.SegmentRepaired("serve", 3, "00000003-00000003.1", 10, 12, "checksum mismatch"),
        kinds.EventOrphaned("t1", "serve.a", 12, {"kind": "label.added", "name": "n", "value": "v"}),
        kinds.PreferenceAdded("t1", "t2", 0.5, "judge", "nightly-judge"),
        kinds.EvalFinished(
            *("actor", 1, "train", "serve=14", "serve=18", 2, 5, 1, 0, 1), {"loss": 0.5, "reward": 1.0}
        ),
        kinds.StopFired(
            "actor", 1, "train", {"metric": "loss", "below": 0.2}, [{"policy_version": 1, "value": 0.125}]
        ),
        kinds.StepVectors(0, 1, "actor", "logprobs", "AAAAvwAAAL8="),
        kinds.CheckpointRemoved("actor", 1, "checkpoints/1", "w1", "o1", "[checkpoint] keep_last 2"),
        *_launch_records(),
        *_service_records(),
    ]


def _service_records() -> list[Any]:
    named, settings = ("s1:train:0:0", "s1:train:0", 0), {"seed": 3, "lora": {"rank": 4}}
    failed = {"category": "user", "error": "no such base model"}
    return [
        kinds.SessionOpened("s1", "once", {"tags": ["try"], "sdk_version": "0.38.0"}, "alice"),
        kinds.OperationAccepted(*named, "create_model", {"base_model": "tiny"}, "sha-body", settings),
        kinds.OperationEnded(*named, None, failed, {}, None),
        kinds.OperationEnded(
            *named, {"metrics": {"loss:sum": 0.5}}, None, {"adapter": "a1"}, "checkpoints/s1/1"
        ),
        kinds.SamplerOpened("s1:sample:0", "s1", "tiny", "s1:train:0", None, 1, "a1", "checkpoints/s1/2"),
        kinds.SessionEnded("s1", {"reason": {"type": "success"}, "detail": None}),
        kinds.WeightsChanged(
            "s1:train:0", "tinker://s1:train:0/weights/a", "checkpoints/s1/1", "kept", 5, "b"
        ),
        kinds.WeightsCopied(
            *("s2:train:0", "tinker://s2:train:0/weights/a", "tinker://s1:train:0/weights/a", "s1:train:0"),
            *(1, 1, "checkpoints/s1/1", {"adapter": "a1"}, None, {"step": "1"}, "once", "alice"),
        ),
        kinds.WeightsFreed("s1:train:0", 1, "checkpoints/s1/1", 4096),
        kinds.LaneOrdered(7),
    ]


@pytest.fixture(scope="session")
def upkeep() -> list[Event]:
    """Events of the kinds that the story does not hold."""
    epoch = 1_700_000_100_000_000
    records = _upkeep_records()
    return [Event(r, "demo", f"e-upkeep-{i:02}", epoch + i * 1_000_000) for i, r in enumerate(records)]


@pytest.fixture(scope="session")
def story() -> dict[str, list[Event]]:
    """Lane -> events of a proxy and a trainer, with fixed ids and times (one per second)."""
    lanes = {"serve": _serve_records(), "train": _train_records()}
    epoch = 1_700_000_000_000_000
    return {
        lane: [Event(r, "demo", f"e-{lane}-{i:02}", epoch + i * 1_000_000) for i, r in enumerate(records)]
        for lane, records in lanes.items()
    }


@pytest.fixture
def story_store(store: Store, story: dict[str, list[Event]]) -> Store:
    """A store that holds the story."""
    for lane, events in story.items():
        with store.writer(lane) as writer:
            writer.append(events).result(30)
    return store


@pytest.fixture
def warm_ranks() -> Iterator[None]:
    """Ranks are forks of a process that has imported what they need. For tests of what they compute."""
    from tests.fakes.processes.warm_ranks import warm_ranks as starts

    with starts():
        yield
