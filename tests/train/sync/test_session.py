"""A sync is one sequence of calls; whatever breaks in it, the log says so and nobody waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.train.sync.conftest import World, running, said_version

from rollbook.bench.scripted.job import Answer, in_turn
from rollbook.engines.weights.name import MARK_LENGTH, NamedWeights, read_name
from rollbook.engines.weights.rank_checksums import ranks_digest
from rollbook.store.errors import EngineError
from rollbook.store.events import PolicyActivated, SyncFailed, SyncFinished
from rollbook.train.sync.control import UNVERIFIED, EngineControl

BEFORE = ["/server_info", "/model_info", "/weights_checker"]
UPDATES = {
    "disk": ["/update_weights_from_disk"],
    "tensor": ["/begin_weight_update", *7 * ["/update_weights_from_tensor"], "/end_weight_update"],
}
DISOWNED = "/update_weight_version"
AFTER = ["/weights_checker", "/update_weight_version", "/continue_generation"]
STARTED, FINISHED, FAILED = "sync.started", "sync.finished", "sync.failed"
ACTIVATED = "policy.activated"
BYTES = 4 * (70 * 8 + 16 * 8 + 2 * 8 * 8 + 8 * 16 + 3 * 12 * 8 + 8)
CALLS = [
    (transport, route)
    for transport, update in UPDATES.items()
    for route in dict.fromkeys(["/server_info", "/pause_generation", *update, *AFTER])
]


@pytest.mark.parametrize("transport", ["disk", "tensor"])
@pytest.mark.parametrize("pause", ["retract", "in_place", "abort", "drain"])
def test_the_order_of_calls(world: Any, transport: str, pause: str) -> None:
    """Paused, flushed but for in place, unnamed, changed, verified, named, in the log, only then resumed."""
    engine = world.engine()
    syncer = world.syncer([engine.url], world.transport(transport), pause)
    assert world.sync(syncer, 1) == [engine.url]
    halt = [*["/v1/loads"] * (pause == "drain"), "/pause_generation"]
    flush = ["/flush_cache"] * (pause != "in_place")
    wanted = [
        *BEFORE,
        STARTED,
        *halt,
        *flush,
        DISOWNED,
        *UPDATES[transport],
        *AFTER[:-1],
        ACTIVATED,
        AFTER[-1],
        FINISHED,
    ]
    assert world.line == wanted
    assert dict(engine.asked)["/pause_generation"] == {"mode": "retract" if pause == "drain" else pause}
    assert engine.version == "1"
    flushed = {body["flush_cache"] for _, body in engine.asked if "flush_cache" in body}
    assert flushed == {pause != "in_place"}
    assert dict(engine.asked)["/update_weight_version"]["abort_all_requests"] is False
    activated, finished = world.records[1:]
    name, held = engine.app.weight_version, ranks_digest(EngineControl(engine.url).checksums())
    assert activated == PolicyActivated("actor", 1, engine.url, "w1", "", name, held)
    assert read_name(name) == NamedWeights("run", "actor", 1, name[-MARK_LENGTH:])
    assert isinstance(finished, SyncFinished)
    assert (finished.sync_id, finished.bytes) == (world.records[0].sync_id, BYTES)
    assert 0 < finished.seconds < 30


def test_what_it_holds_is_asked_once(world: World) -> None:
    """An engine that was verified need not hash its weights to say what it holds."""
    engine = world.engine()
    syncer = world.syncer([engine.url], world.transport("tensor"))
    for version in (1, 2, 3):
        assert world.sync(syncer, version) == [engine.url]
    assert [route for route, _ in engine.asked].count("/weights_checker") == 4
    assert engine.version == "3"


@pytest.mark.more_but(
    "error-*",
    "drop-*",
    "hang-tensor-/continue_generation",
    "hang-disk-/update_weights_from_disk",
)
@pytest.mark.parametrize(("transport", "route"), CALLS)
@pytest.mark.parametrize("kind", ["error", "drop", "hang"])
def test_one_of_two_fails(
    world: World, timed: Callable[..., Any], transport: str, kind: str, route: str
) -> None:
    """At any call: the other is served, this one is named and stays paused, the next sync heals it."""
    bad, good = world.engine(), world.engine()
    after = 1 if route == "/weights_checker" else 0
    bad.fault(route, kind, after=after, seconds=4.8)
    syncer = world.syncer([bad.url, good.url], world.transport(transport), timeout_s=4.0)
    with timed(40.0):
        assert world.sync(syncer, 1) == [good.url]
    resumed = ["/continue_generation"] * (route == "/continue_generation" and kind == "hang")
    assert [r for r, _ in bad.asked if r == "/continue_generation"] in ([], resumed)
    assert world.sync_kinds(good.url) == [STARTED, ACTIVATED, FINISHED]
    kinds = [STARTED, *[ACTIVATED] * (route == "/continue_generation"), FAILED]
    assert world.sync_kinds(bad.url) == kinds
    (failed,) = [r for r in world.records if isinstance(r, SyncFailed)]
    assert bad.url in failed.error
    assert route in failed.error
    if kind == "hang":
        assert "did not answer within 4 s" in failed.error
        time.sleep(0.8)  # what hangs ends, late
    before = len(world.records)
    assert world.sync(syncer, 2) == [bad.url, good.url]
    assert world.sync_kinds(bad.url, before) == [STARTED, ACTIVATED, FINISHED]
    assert (bad.version, bad.app.paused) == ("2", None)


@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_a_wrong_value(world: World, transport: str) -> None:
    """An engine that took one bit wrong is never renamed nor resumed, until a right sync."""
    engine = world.engine()
    engine.fault(UPDATES[transport][len(UPDATES[transport]) // 2], "wrong")
    syncer = world.syncer([engine.url], world.transport(transport))
    with pytest.raises(EngineError, match=r"version 1 of actor is served nowhere: .* not those sent"):
        world.sync(syncer, 1)
    assert (engine.version, engine.app.paused) == (UNVERIFIED, "retract")
    assert world.sync_kinds(engine.url) == [STARTED, FAILED]
    assert world.sync(syncer, 2) == [engine.url]
    assert (engine.version, engine.app.paused) == ("2", None)


def test_no_engine_at_all(world: World, timed: Callable[..., Any]) -> None:
    """Dead at the start, or refusing: the error has every engine's reason, and so has the log."""
    refusing = world.engine()
    refusing.fault("/begin_weight_update", "error", times=-1)
    dead = "http://127.0.0.1:9"
    syncer = world.syncer([dead, refusing.url], world.transport("tensor"))
    with timed(40.0), pytest.raises(EngineError) as error:
        world.sync(syncer, 1)
    assert f"engine {dead}: /server_info" in str(error.value)
    assert f"engine {refusing.url}: /begin_weight_update answers 500" in str(error.value)
    assert [world.sync_kinds(url) for url in (dead, refusing.url)] == [[STARTED, FAILED], [STARTED, FAILED]]


@pytest.mark.more
def test_one_that_comes_back(world: World) -> None:
    """An engine that dies between two buckets, while the other goes on; a new one in its place is served."""
    good = world.engine()
    dying = world.process('{"route": "/update_weights_from_tensor", "kind": "die", "after": 2}')
    syncer = world.syncer([dying.ready(), good.url], world.transport("tensor"))
    assert world.sync(syncer, 1) == [good.url]
    assert world.sync_kinds(dying.url) == [STARTED, FAILED]
    assert world.sync(syncer, 2) == [good.url]
    again = world.process(port=dying.port)
    assert again.ready() == dying.url
    assert world.sync(syncer, 3) == [dying.url, good.url]
    assert again.version() == "3"


@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_the_policy_itself_fails(world: World, transport: str) -> None:
    """An error of the trainer's own ends every engine's sync in the log, and comes out unchanged."""
    engine = world.engine()
    syncer = world.syncer([engine.url], world.transport(transport))

    def weights() -> Any:
        yield "model.norm.weight", world.folder
        raise AssertionError("not reached")

    from rollbook.train.sync.session import Release

    with pytest.raises(AttributeError, match="numel"):
        syncer.sync(Release("actor", 1, "w1", "", 4, "run"), weights)
    assert world.sync_kinds(engine.url) == [STARTED, FAILED]
    assert engine.app.paused == "retract"
    assert world.sync(syncer, 2) == [engine.url]


def test_a_name_that_it_has_no_place_for(world: World) -> None:
    """Fused or another model's: the engine would take it without a word, so it is out."""
    engine = world.engine()
    syncer = world.syncer([engine.url], world.transport("tensor"))
    import torch

    from rollbook.train.sync.session import Release

    fused = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 4, 8)}
    with pytest.raises(
        EngineError, match=f"engine {engine.url}: holds no tensor that model.layers.0.mlp.exp"
    ):
        syncer.sync(Release("actor", 1, "w1", "", 4, "run"), lambda: iter(fused.items()))
    assert engine.app.paused == "retract"
    assert "/continue_generation" not in engine.routes()


def test_in_place_where_steps_overlap(world: World) -> None:
    """Such an engine counts a token of the old weights to the new ones: refused, and it goes on as it was."""
    engine = world.engine()
    real = engine.app._routes["/server_info"]
    for disabled, served in ((False, []), (True, [engine.url])):

        def info(body: Any, disabled: bool = disabled) -> tuple[int, Any]:
            return 200, real(body)[1] | {"disable_overlap_schedule": disabled}

        engine.app._routes["/server_info"] = info
        retracting = world.syncer([engine.url], world.transport("tensor"))
        assert world.sync(retracting, 1) == [engine.url]
        syncer = world.syncer([engine.url], world.transport("tensor"), "in_place")
        if served:
            assert world.sync(syncer, 2) == served
        else:
            with pytest.raises(EngineError, match="--disable-overlap-schedule, or pause by retract"):
                world.sync(syncer, 2)
        assert engine.app.paused is None


@pytest.mark.parametrize(
    ("version", "transport", "takes"),
    [
        ("0.5.20", "tensor", False),
        ("0.5.20", "disk", True),
        ("0.5.21", "tensor", True),
        ("a fork", "tensor", True),
    ],
)
def test_servers_without_sessions(world: World, version: str, transport: str, takes: bool) -> None:
    """One that is too old for a transport is told of by both versions, and is not touched."""
    engine = world.engine()
    real = engine.app._routes["/server_info"]
    engine.app._routes["/server_info"] = lambda body: (200, real(body)[1] | {"version": version})
    syncer = world.syncer([engine.url], world.transport(transport))
    if takes:
        assert world.sync(syncer, 1) == [engine.url]
        return
    with pytest.raises(EngineError, match=rf"SGLang 0\.5\.20 takes no weights by {transport}: use 0\.5\.21"):
        world.sync(syncer, 1)
    assert "/pause_generation" not in engine.routes()


# Requests that run ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pause", "versions", "finish"),
    [
        ("retract", ["0", "1"], "stop"),
        ("in_place", ["0", "1"], "stop"),
        ("abort", ["0"], "abort"),
        ("drain", ["0"], "stop"),
    ],
)
def test_a_request_that_runs(world: World, pause: str, versions: list[str], finish: str) -> None:
    """It goes on under the new version, ends early, or ends before: its spans say which."""
    engine = world.engine(in_turn([Answer(range(100, 160), token_s=0.01)]))
    wait = running(engine)
    syncer = world.syncer([engine.url], world.transport("tensor"), pause)
    assert world.sync(syncer, 1) == [engine.url]
    meta = wait()
    assert [said_version(span["version"]) for span in meta["weight_versions"]] == versions
    assert meta["finish_reason"]["type"] == finish
    assert meta["num_retractions"] == (pause == "retract")
    spans = meta["weight_versions"]
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]


def test_draining_takes_an_end(world: World, timed: Callable[..., Any]) -> None:
    """Requests that do not end within `drain_s` are retracted; in an engine that stands still, at once."""
    engine = world.engine(in_turn([Answer(range(100, 160), token_s=0.08)]))
    wait = running(engine)
    engine.fault("/end_weight_update", "error")
    syncer = world.syncer([engine.url], world.transport("tensor"), "drain")
    with timed(40.0), pytest.raises(EngineError, match="/end_weight_update"):
        world.sync(syncer, 1)
    looks = [route for route, _ in engine.asked].count("/v1/loads")
    assert looks > 1
    assert world.sync(syncer, 2) == [engine.url]
    assert [route for route, _ in engine.asked].count("/v1/loads") == looks
    assert [said_version(span["version"]) for span in wait()["weight_versions"]] == ["0", "2"]
