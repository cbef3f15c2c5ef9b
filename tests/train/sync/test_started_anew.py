"""An engine that is started anew comes with its first weights, and gets the policy's again."""

from __future__ import annotations

from tests.train.sync.conftest import World

from rollbook.engines.weights.digests import read_weights
from rollbook.store.events import SyncFinished, SyncStarted
from rollbook.train.sync.session import Release


def test_one_that_was_started_anew_is_found(world: World) -> None:
    """Only it: not one that serves what it was given, was given nothing, or cannot be reached."""
    kept, anew, away = world.engine(), world.engine(), world.process()
    syncer = world.syncer([kept.url, anew.url, away.ready()], world.transport("tensor"))
    assert syncer.lost() == [], "nobody was given anything"
    assert world.sync(syncer, 1) == [kept.url, anew.url, away.url]
    assert syncer.lost() == []
    away.stop()
    anew.app.weight_version = "default"
    assert syncer.lost() == [anew.url]


def test_a_sync_of_one_engine(world: World) -> None:
    """It alone is paused and given weights; the other is not asked anything, and nothing is lost then."""
    kept, anew = world.engine(), world.engine()
    syncer = world.syncer([kept.url, anew.url], world.transport("disk"))
    world.sync(syncer, 1)
    requested, recorded = len(kept.asked), len(world.records)
    anew.app.weight_version = "default"
    weights = read_weights(world.directory(1))
    release = Release("actor", 1, "w1", "", 4, "run")
    assert syncer.sync(release, lambda: iter(weights.items()), syncer.lost()) == [anew.url]
    assert [route for route, _ in kept.asked[requested:]] == ["/model_info"]
    assert anew.version == "1"
    assert syncer.lost() == []
    engines = [r.engine for r in world.records[recorded:] if isinstance(r, SyncStarted | SyncFinished)]
    assert engines == [anew.url, anew.url]
