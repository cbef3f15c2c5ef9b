"""Training that gives its versions to engines: which ones, when, and what becomes of the log."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.models import mixtures
from tests.fakes.stories import fabric

from rollbook.bench.scripted.job import Options
from rollbook.bench.scripted.sglang import ScriptedSGLang
from rollbook.bench.scripted.weights import Fault
from rollbook.engines.weights.name import version_in
from rollbook.store import Store
from rollbook.store.errors import EngineError, EngineLostError
from rollbook.store.events import (
    CheckpointWritten,
    PolicyActivated,
    StepCommitted,
    SyncFailed,
    SyncFinished,
    SyncStarted,
)
from rollbook.testing.asgi import serving
from rollbook.train.config.config import CheckpointConfig
from rollbook.train.sync import presence
from rollbook.train.sync.session import Syncer

NOWHERE = "http://127.0.0.1:9"
Start = Callable[..., tuple[ScriptedSGLang, str]]
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "data 2": (2, {}),
    "tensor 2": (2, {"tensor": 2}),
    "pipeline 2": (2, {"pipeline": 2}),
    "expert 2": (2, {"expert": 2}),
    "data 2, tensor 2": (4, {"tensor": 2}),
}


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts engines that serve the tiny model and keep checksums of their weights."""
    with ExitStack() as stack:

        def make(model: Path | None = None) -> tuple[ScriptedSGLang, str]:
            options = Options(model_path=str(model or fabric.model_folder()), weights="float32")
            app = ScriptedSGLang(None, options)
            return app, stack.enter_context(serving(app))

        yield make


def _records(log: Store, *kinds: type) -> list[Any]:
    return [e.record for e in log.events() if isinstance(e.record, kinds)]


def _sft(steps: int, **sync: Any) -> Any:
    changes: dict[str, Any] = {"sync": sync} if sync else {}
    return fabric.config(fabric.SFT, steps=steps, checkpoint_every=2, optimizer={"lr": 1e-2}, **changes)


@pytest.mark.more_but("tensor-checkpoints0")
@pytest.mark.parametrize(("transport", "checkpoints"), [("tensor", [0, 2, 3]), ("disk", [0, 1, 2, 3])])
def test_every_version_goes_to_the_engine(
    recorded: Callable[..., Store], start: Start, transport: str, checkpoints: list[int]
) -> None:
    """The one that training starts from and each that it makes; only from disk need all be written there."""
    app, url = start()
    log = recorded()
    fabric.train(log, _sft(3, engines=[url + "/"], transport=transport))
    assert [r.policy_version for r in _records(log, PolicyActivated)] == [0, 1, 2, 3]
    assert [r.policy_version for r in _records(log, SyncFinished)] == [0, 1, 2, 3]
    assert {(r.engine, r.transport) for r in _records(log, SyncStarted)} == {(url, transport)}
    assert [r.policy_version for r in _records(log, CheckpointWritten)] == checkpoints
    committed = [r.digests["weights"] for r in _records(log, StepCommitted)]
    activated = _records(log, PolicyActivated)
    assert [r.weights_digest for r in activated][1:] == committed
    assert [r.policy_version for r in activated if r.path] == checkpoints
    assert app.paused is None
    assert version_in(app.weight_version) == 3


@pytest.mark.ranks
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("layout", "transport"), [*((layout, "tensor") for layout in LAYOUTS), ("tensor 2", "disk")]
)
def test_over_ranks(recorded: Callable[..., Store], start: Start, layout: str, transport: str) -> None:
    """Each version is gathered, sent, and verified by the engine's own checksums; also while training goes
    on, and with checkpoints of shards."""
    count, sizes = LAYOUTS[layout]
    model = mixtures.mixture("qwen3_moe")[0] if "expert" in sizes else fabric.model_folder()
    app, url = start(model)
    log = recorded()
    settings = _sft(3, engines=[url], transport=transport, overlap=True)
    changes = {"model": model, "parallel": settings.parallel.model_copy(update=sizes)}
    changes |= {"checkpoint": CheckpointConfig(overlap=True, sharded=True)}
    fabric.train(log, settings.model_copy(update=changes), ranks=count)
    activated = _records(log, PolicyActivated)
    assert [r.policy_version for r in activated] == [0, 1, 2, 3]
    committed = [r.digests["weights"] for r in _records(log, StepCommitted)]
    assert [r.weights_digest for r in activated][1:] == committed
    assert len({r.weights_digest for r in activated}) == 4
    assert (app.paused, version_in(app.weight_version)) == (None, 3)


def test_a_restart_goes_on(recorded: Callable[..., Store], start: Start) -> None:
    """The version that it begins with goes out again; giving weights away changes no bit of them."""
    _, url = start()
    log = recorded()
    fabric.train(log, _sft(3, engines=[url]))
    fabric.train(log, _sft(5, engines=[url]))
    assert [r.policy_version for r in _records(log, PolicyActivated)] == [0, 1, 2, 3, 3, 4, 5]
    alone = recorded("alone")
    fabric.train(alone, _sft(5))
    ends = [[r.digests for r in _records(store, StepCommitted)] for store in (log, alone)]
    assert len(ends[0]) == 5
    assert ends[0] == ends[1]


def test_only_some_versions(recorded: Callable[..., Store], start: Start) -> None:
    """`sync_every` leaves versions out, but not the last."""
    _, url = start()
    log = recorded()
    fabric.train(log, _sft(5, engines=[url], sync_every=2))
    versions = [r.policy_version for r in _records(log, PolicyActivated)]
    assert versions == [0, 2, 4, 5]


def test_one_engine_of_two_goes_away(recorded: Callable[..., Store], start: Start) -> None:
    """Training goes on with the other; when none is left, it ends with the reasons, and the log has them."""
    (first, url), (second, other) = start(), start()
    log = recorded()
    first.faults.add(Fault("/pause_generation", "error", after=2, times=-1))
    fabric.train(log, _sft(3, engines=[url, other]))
    failed = _records(log, SyncFailed)
    assert [(r.engine, r.policy_version) for r in failed] == [(url, 2), (url, 3)]
    assert "/pause_generation answers 500" in failed[0].error
    served = [(r.engine, r.policy_version) for r in _records(log, PolicyActivated)]
    assert sorted(served) == sorted([(url, 0), (url, 1), *((other, v) for v in range(4))])
    second.faults.add(Fault("/end_weight_update", "error", times=-1))
    with pytest.raises(EngineError, match=f"served nowhere: engine {url}.*; engine {other}.*/end_weight"):
        fabric.train(log, _sft(5, engines=[url, other]))


def test_the_only_engine_is_waited_for(recorded: Callable[..., Store], start: Start) -> None:
    """Until it is up, and when it goes away in the middle: it misses no version."""
    app, url = start()
    app.faults.add(Fault("/server_info", "drop", times=2))
    app.faults.add(Fault("/pause_generation", "drop", after=2))
    app.faults.add(Fault("/begin_weight_update", "drop", after=3, times=2))
    log = recorded()
    fabric.train(log, _sft(3, engines=[url]))
    assert [r.policy_version for r in _records(log, SyncStarted)] == [0, 1, 2, 2, 3, 3, 3]
    assert [r.policy_version for r in _records(log, SyncFailed)] == [2, 3, 3]
    assert [r.policy_version for r in _records(log, PolicyActivated)] == [0, 1, 2, 3]
    assert version_in(app.weight_version) == 3


def test_one_engine_of_two_was_never_there(recorded: Callable[..., Store], start: Start) -> None:
    """The other is enough, also to find out how weights get there."""
    _, url = start()
    log = recorded()
    fabric.train(log, _sft(1, engines=[NOWHERE, url]))
    assert [(r.engine, r.policy_version) for r in _records(log, SyncFailed)] == [(NOWHERE, 0), (NOWHERE, 1)]
    assert [(r.engine, r.policy_version) for r in _records(log, PolicyActivated)] == [(url, 0), (url, 1)]


@pytest.mark.more_but("tensor")
@pytest.mark.parametrize("transport", ["auto", "tensor"])
def test_an_engine_that_does_not_come(
    recorded: Callable[..., Store], caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    """Who waits says so, and the error has the remedy."""
    settings = _sft(1, engines=[NOWHERE], transport=transport, wait_s=0.6)
    wanted = rf"no engine could be reached within [\d.]+ s: engine {NOWHERE}: /server_info: .*is it running"
    with pytest.raises(EngineError, match=wanted):
        fabric.train(recorded(), settings)
    assert ["no engine can be reached: waiting" in r.getMessage() for r in caplog.records] == [True]


def test_a_signal_while_an_engine_is_waited_for(
    recorded: Callable[..., Store], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait ends at once; the version has its checkpoint, and the next start gives it to the engine."""
    _, url = start()
    log, sync, clock = recorded(), Syncer.sync, SimpleNamespace(monotonic=time.monotonic)

    def away(self: Syncer, release: Any, *more: Any) -> None:
        if release.version == 3:
            raise EngineLostError("it was killed")
        sync(self, release, *more)

    clock.sleep = lambda _: signal.raise_signal(signal.SIGINT)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with monkeypatch.context() as patch:
        patch.setattr(Syncer, "sync", away)
        patch.setattr(presence, "time", clock)
        patch.setattr(presence, "_look", lambda engines: ([], ["it was killed"]))
        with pytest.raises(KeyboardInterrupt):
            fabric.train(log, _sft(5, engines=[url], transport="tensor", wait_s=600.0))
    signal.signal(signal.SIGINT, before)
    assert [r.policy_version for r in _records(log, CheckpointWritten)] == [0, 2, 3]
    assert [r.policy_version for r in _records(log, PolicyActivated)] == [0, 1, 2]
    fabric.train(log, _sft(5, engines=[url], transport="tensor", wait_s=600.0))
    assert [r.policy_version for r in _records(log, PolicyActivated)] == [0, 1, 2, 3, 4, 5]


def test_an_engine_that_is_not_waited_for(recorded: Callable[..., Store]) -> None:
    """No connection is an error at once."""
    for transport in ("auto", "tensor"):
        settings = _sft(1, engines=[NOWHERE], transport=transport, wait_s=0.0)
        with pytest.raises(EngineError, match=rf"engine {NOWHERE}: /server_info: .*is it running"):
            fabric.train(recorded(transport), settings)


@pytest.mark.more_but("disk")
@pytest.mark.parametrize("transport", ["tensor", "disk"])
def test_training_goes_on_while_weights_travel(
    recorded: Callable[..., Store], start: Start, transport: str
) -> None:
    """The next step is planned and committed before the engine has the version of the last one; what travels
    is that version all the same, verified, and steps are those of a training that waits."""
    app, url = start()
    app.faults.add(Fault("/weights_checker", "hang", after=2, times=-1, seconds=0.7))
    log, alone = recorded(), recorded("alone")
    fabric.train(log, _sft(4, engines=[url], transport=transport, overlap=True))
    fabric.train(alone, _sft(4))
    ends = [[r.digests for r in _records(store, StepCommitted)] for store in (log, alone)]
    assert ends[0] == ends[1]
    order = [(type(r), r.policy_version) for r in _records(log, SyncFinished, StepCommitted)]
    assert order.index((StepCommitted, 2)) < order.index((SyncFinished, 1))
    assert [r.policy_version for r in _records(log, SyncFinished)] == [0, 1, 2, 3, 4]
    activated = {r.policy_version: r.weights_digest for r in _records(log, PolicyActivated)}
    committed = {r.policy_version: r.digests["weights"] for r in _records(log, StepCommitted)}
    assert activated.items() >= committed.items()
    assert (app.paused, version_in(app.weight_version)) == (None, 4)


@pytest.mark.more
@pytest.mark.parametrize("transport", ["tensor", "disk"])
def test_engines_beside_checkpoints_of_shards(
    recorded: Callable[..., Store], start: Start, transport: str
) -> None:
    """By disk an engine is given a directory of whole weights beside the shards, also where these were there
    before; from memory it needs none."""
    _, url = start()
    log, way = recorded(), {"sharded": True, "overlap": True}
    for steps in (1, 2, 3):
        engines = {"engines": [url], "transport": transport} if steps > 1 else {}
        settings = _sft(steps, **engines)
        fabric.train(log, settings.model_copy(update={"checkpoint": CheckpointConfig(**way)}))
    assert [r.policy_version for r in _records(log, SyncFinished)] == [1, 2, 2, 3]
    written = _records(log, CheckpointWritten)
    shards = [bool(list((log.path / r.path).glob("shard-*"))) for r in written]
    whole = [r.policy_version for r, sharded in zip(written, shards, strict=True) if not sharded]
    assert [r.policy_version for r, sharded in zip(written, shards, strict=True) if sharded] == [1, 2, 3]
    assert whole == ([0, 1, 2, 3] if transport == "disk" else [0])
    digests = {r.policy_version: r.weights_digest for r in written if r.policy_version}
    activated = {r.policy_version: r.weights_digest for r in _records(log, PolicyActivated)}
    assert activated == digests


def test_a_sync_on_the_way_fails(recorded: Callable[..., Store], start: Start) -> None:
    """The training ends at the next one with its error, and goes on from there once the engine is well."""
    app, url = start()
    log = recorded()
    app.faults.add(Fault("/end_weight_update", "error", after=1, times=1))
    settings = _sft(4, engines=[url], transport="tensor", overlap=True)
    with pytest.raises(
        EngineError, match=r"version 1 of actor is served nowhere: engine .*/end_weight_update"
    ):
        fabric.train(log, settings)
    assert [r.policy_version for r in _records(log, SyncFailed)] == [1]
    assert [r.policy_version for r in _records(log, StepCommitted)] == [1, 2]
    fabric.train(log, settings)
    assert [r.policy_version for r in _records(log, StepCommitted)] == [1, 2, 3, 4]
    assert version_in(app.weight_version) == 4
