"""A cache that cannot be flushed: an engine goes on for moments until it can be, or the sync says why not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from tests.train.sync.conftest import World, running, said_version
from tests.train.sync.test_session import ACTIVATED, AFTER, DISOWNED, FAILED, FINISHED, STARTED, UPDATES

from rollbook.bench.scripted.job import Answer, in_turn
from rollbook.engines.weights.name import version_in
from rollbook.store.errors import EngineError
from rollbook.train.sync.control import EMBEDDED, UNVERIFIED


@pytest.mark.parametrize("transport", ["disk", "tensor"])
@pytest.mark.parametrize("pause", ["retract", "abort", "drain"])
def test_a_flush_that_is_refused_at_first(world: World, transport: str, pause: str) -> None:
    """It goes on with the weights that it has until it flushes; only then do any move."""
    engine = world.engine()
    syncer = world.syncer([engine.url], world.transport(transport), pause)
    assert world.sync(syncer, 1) == [engine.url]
    engine.fault("/flush_cache", "error", times=2)  # whose calls are not on the line
    start = len(world.line)
    assert world.sync(syncer, 2) == [engine.url]
    assert [entry for entry in world.line[start:] if entry != "/v1/loads"] == [
        "/server_info",
        STARTED,
        *["/pause_generation", "/continue_generation"] * 2,
        *["/pause_generation", "/flush_cache"],
        DISOWNED,
        *UPDATES[transport],
        *AFTER[:-1],
        ACTIVATED,
        AFTER[-1],
        FINISHED,
    ]
    assert (engine.version, engine.app.paused) == ("2", None)


def test_a_flush_that_is_refused_for_ever(world: World, timed: Callable[..., Any]) -> None:
    """It is told why, and the engine goes on as it was: none of its weights has moved."""
    engine = world.engine()
    syncer = world.syncer([engine.url], world.transport("tensor"), timeout_s=3.0)
    assert world.sync(syncer, 1) == [engine.url]
    flush = engine.app._routes["/flush_cache"]
    engine.app._routes["/flush_cache"] = lambda body: (400, b"Flush cache failed.\n")
    start, requested = len(world.records), len(engine.asked)
    text = r"/flush_cache answers 400: Flush cache failed\. \(for 3 s\)\. Constrained .* raise .* timeout_s"
    with timed(30.0), pytest.raises(EngineError, match=f"engine {engine.url}: {text}"):
        world.sync(syncer, 2)
    assert world.sync_kinds(engine.url, start) == [STARTED, FAILED]
    assert {r for r, _ in engine.asked[requested:]} == {
        "/server_info",
        "/pause_generation",
        "/continue_generation",
    }
    assert (engine.version, engine.app.paused) == ("1", None)
    engine.app._routes["/flush_cache"] = flush
    assert world.sync(syncer, 3) == [engine.url]
    assert engine.version == "3"


@pytest.mark.parametrize("anew", [False, True])
def test_a_flush_of_unknown_weights(world: World, anew: bool) -> None:
    """What is made while an engine with half a version's weights goes on counts to no version.

    A trainer that was started anew cannot tell whether it has.
    """
    engine = world.engine(in_turn([Answer(range(100, 160), token_s=0.01)]))
    wait = running(engine)
    engine.fault("/end_weight_update", "error")
    syncer = world.syncer([engine.url], world.transport("tensor"))
    with pytest.raises(EngineError, match="/end_weight_update"):
        world.sync(syncer, 1)
    if anew:
        syncer = world.syncer([engine.url], world.transport("tensor"))
    engine.fault("/flush_cache", "error", times=2)
    assert world.sync(syncer, 2) == [engine.url]
    versions = [said_version(span["version"]) for span in wait()["weight_versions"]]
    assert versions == ["0", UNVERIFIED, "2"]
    assert version_in(UNVERIFIED) is None


def test_unknown_weights_stand_still_in_the_end(world: World) -> None:
    """Where the cache cannot be flushed, they are not served under any name."""
    engine = world.engine()
    engine.fault("/flush_cache", "error", times=-1)
    syncer = world.syncer([engine.url], world.transport("tensor"), timeout_s=1.0)
    for version in (1, 2):
        with pytest.raises(EngineError, match="/flush_cache answers 500"):
            world.sync(syncer, version)
        assert (engine.version, engine.app.paused) == (UNVERIFIED, "retract")
    engine.app.faults.faults.clear()
    assert world.sync(syncer, 3) == [engine.url]
    assert (engine.version, engine.app.paused) == ("3", None)


@pytest.mark.more_but("drop")
@pytest.mark.parametrize("kind", ["drop", "hang"])
def test_a_flush_without_an_answer(world: World, timed: Callable[..., Any], kind: str) -> None:
    """It stays paused, and the next sync heals it."""
    engine = world.engine()
    engine.fault("/flush_cache", kind, seconds=4.8)
    syncer = world.syncer([engine.url], world.transport("tensor"), timeout_s=4.0)
    with timed(20.0), pytest.raises(EngineError, match="/flush_cache"):
        world.sync(syncer, 1)
    assert (engine.version, engine.app.paused) == ("0", "retract")
    assert world.sync(syncer, 2) == [engine.url]
    assert (engine.version, engine.app.paused) == ("2", None)


def test_the_embedded_engine_is_flushed_with_its_updates(world: World) -> None:
    """It compiles no grammars."""
    engine = world.engine()
    real = engine.app._routes["/server_info"]
    engine.app._routes["/server_info"] = lambda body: (200, real(body)[1] | {"engine": EMBEDDED})
    syncer = world.syncer([engine.url], world.transport("tensor"))
    with contextlib.suppress(EngineError):  # this one pads its embedding, as SGLang does
        world.sync(syncer, 1)
    assert "/flush_cache" not in engine.routes()
    assert "/update_weights_from_tensor" in engine.routes()
