"""Broadcasts: whoever takes no part in one must hold up nobody, here and on the other side."""

from __future__ import annotations

import itertools
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.train.sync.conftest import World

from rollbook.store.errors import EngineError
from rollbook.store.events import SyncFailed
from rollbook.train.sync.session import Release
from rollbook.train.sync.transports import OUTLIVING, ByBroadcast

pytestmark = pytest.mark.crashes

UPDATE, JOIN = "/update_weights_from_distributed", "/init_weights_update_group"
LEAVE = "/destroy_weights_update_group"
TIMEOUT_S = 12.0


fresh = itertools.count(1)
"""Versions that no engine has yet: tests share the engines."""


@pytest.fixture
def pair(crew: Callable[[], list[Any]]) -> list[Any]:
    """Two engines in processes of their own."""
    return crew()


def _syncer(world: Any, *engines: Any) -> Any:
    transport = ByBroadcast(600, "127.0.0.1", TIMEOUT_S)
    return world.syncer([engine.ready() for engine in engines], transport, timeout_s=TIMEOUT_S)


def test_two_engines_sync_over_the_same_groups(world: World, pair: list[Any]) -> None:
    """Sync after sync over the same groups, also once one of the engines is gone."""
    syncer = _syncer(world, *pair)
    urls = [engine.url for engine in pair]
    for _ in range(2):
        assert world.sync(syncer, next(fresh)) == urls
    groups = dict(syncer._transport._groups)
    assert len(groups) == 2
    assert world.sync(syncer, next(fresh)) == urls
    assert syncer._transport._groups == groups
    pair[1].stop()
    version = next(fresh)
    assert world.sync(syncer, version) == urls[:1]
    assert pair[0].version() == str(version)


@pytest.mark.parametrize(
    ("route", "after"), [(UPDATE, 0), (UPDATE, 2), (JOIN, 0), ("/begin_weight_update", 0)]
)
@pytest.mark.parametrize("kind", ["error", "die", "drop"])
def test_an_engine_that_rejects_is_out_until_the_next_sync(
    world: World, pair: list[Any], timed: Callable[..., Any], route: str, after: int, kind: str
) -> None:
    """At once it is out and the other served; the next sync heals it, over a new group."""
    bad, good = pair
    bad.fault(route=route, kind=kind, after=after)
    syncer = _syncer(world, bad, good)
    with timed(TIMEOUT_S):
        assert world.sync(syncer, next(fresh)) == [good.url]
    (failed,) = [record for record in world.records if isinstance(record, SyncFailed)]
    assert (failed.engine, route in failed.error) == (bad.url, True)
    assert world.sync_kinds(bad.url) == ["sync.started", "sync.failed"]
    assert world.sync_kinds(good.url) == ["sync.started", "policy.activated", "sync.finished"]
    version = next(fresh)
    with timed(TIMEOUT_S):
        assert world.sync(syncer, version) == ([good.url] if kind == "die" else [bad.url, good.url])
    assert good.version() == str(version)


@pytest.mark.parametrize("route", [UPDATE, JOIN])
def test_an_engine_that_hangs_ends_with_the_time_out(
    world: World, pair: list[Any], timed: Callable[..., Any], route: str
) -> None:
    """The wait for it ends with the time-out, and the other is served."""
    bad, good = pair
    bad.fault(route=route, kind="hang", seconds=600)
    syncer = _syncer(world, bad, good)
    with timed(3 * TIMEOUT_S):
        assert world.sync(syncer, next(fresh)) == [good.url]
    bad.stop()
    with timed(TIMEOUT_S):
        assert world.sync(syncer, next(fresh)) == [good.url]


@pytest.mark.parametrize("kind", ["error", "die"])
def test_a_bucket_larger_than_the_sockets_reaches_the_other_engine(
    world: World, pair: list[Any], timed: Callable[..., Any], kind: str
) -> None:
    """More than sockets hold: what an engine did not take is not waited for, and the other has all of it."""
    bad, good = pair
    bad.fault(route=UPDATE, kind=kind)
    syncer = _syncer(world, bad, good)
    large = [("model.norm.weight", torch.zeros(10_000_000))]
    release = Release("actor", next(fresh), "w", "", 4, "run")
    with timed(TIMEOUT_S), pytest.raises(EngineError) as error:
        syncer.sync(release, lambda: iter(large))
    assert f"engine {bad.url}: {UPDATE}" in str(error.value)
    assert f"engine {good.url}, rank 0: verification failed: 5 tensors were not sent whole" in str(
        error.value
    )
    deadline = time.monotonic() + TIMEOUT_S / 2
    while any(thread.name == OUTLIVING for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "a collective still waits"
        time.sleep(0.02)


TRAINER = """
import sys, time
import torch
from rollbook.store.errors import EngineError
from rollbook.store.events import SyncFailed
from rollbook.train.sync.control import EngineControl
from rollbook.train.sync.session import SyncOptions, Release, Syncer
from rollbook.train.sync.transports import OUTLIVING
from rollbook.train.sync.transports import ByBroadcast

engines = [EngineControl(url, 12.0) for url in sys.argv[1:]]
syncer = Syncer(engines, ByBroadcast(600, "127.0.0.1", 12.0), lambda *records: None, SyncOptions())
weights = {"model.norm.weight": torch.zeros(8), "model.embed_tokens.weight": torch.zeros(70, 8)}
try:
    syncer.sync(Release("actor", 1, "w", "", 4, "run"), lambda: iter(weights.items()))
except EngineError as error:
    print("failed:", error, flush=True)
if "close" in sys.argv:
    syncer.close()
print(time.time(), flush=True)
"""


@pytest.mark.parametrize("kind", ["error", "hang"])
def test_a_trainer_ends_after_a_failed_broadcast(
    world: World, pair: list[Any], run_python: Callable[..., tuple[int, str, str]], kind: str
) -> None:
    """Nothing of it keeps the process alive or breaks its end, though the group was never closed."""
    bad, good = pair
    bad.fault(route=UPDATE, kind=kind, seconds=600)
    code, out, err = run_python(TRAINER, bad.url, good.url)
    assert code == 0, err
    bad.stop()
    failure, ended = out.splitlines()
    assert failure.startswith(f"failed: version 1 of actor is served nowhere: engine {bad.url}: {UPDATE}")
    assert time.time() - float(ended) < TIMEOUT_S + 2


ENDING = """
import os
class Ending:
    def __del__(self, write=os.write, sleep=time.sleep):
        write(1, b"ending\\n")
        sleep(3)
ending = Ending()
"""


def test_a_collective_that_ends_while_the_trainer_does(
    pair: list[Any], start_python: Callable[..., subprocess.Popen[str]]
) -> None:
    """The thread that waits for it must not touch torch any more: the process would abort."""
    bad, good = pair
    for route in (UPDATE, LEAVE):
        bad.fault(route=route, kind="error")
    trainer = start_python(TRAINER + ENDING, bad.url, good.url)
    assert trainer.stdout is not None
    while (line := trainer.stdout.readline()) != "ending\n":
        assert line, trainer.communicate()
    bad.stop()
    _, err = trainer.communicate(timeout=60)
    assert trainer.returncode == 0, err
