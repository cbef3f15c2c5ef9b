"""Training on a log in which a trajectory was erased: never on its tokens, and the drop says why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.fakes.stories import fabric

from rollbook.store import Store
from rollbook.store.fold.history import History
from rollbook.store.upkeep.erase import erase_trajectory
from rollbook.train.select.recipe import is_candidate
from rollbook.train.select.samples import samples_of
from rollbook.train.select.sorting import select
from rollbook.train.sources.source import make_source


def test_samples_of_an_erased_trajectory(recorded: Callable[..., Store]) -> None:
    """Arrays keep their length and versions; ids are -1, nothing has loss, and the sample says so."""
    log = recorded()
    before = list(samples_of(log.trajectories()["g0.0"]))
    erase_trajectory(log, "g0.0", "x")
    after = list(samples_of(log.trajectories()["g0.0"]))
    assert [len(s) for s in after] == [len(s) for s in before]
    assert [s.reference for s in after] == [s.reference for s in before]
    for was, now in zip(before, after, strict=True):
        assert was.loss_mask.any()
        assert not was.erased
        assert (now.erased, now.loss_mask.any(), now.logprobs.any()) == (True, False, False)
        assert (now.tokens == -1).all()
        assert now.versions.tolist() == was.versions.tolist()
        assert (now.reward, now.as_json()["erased"]) == (was.reward, True)


def test_what_was_never_trained_is_not_dropped(store: Store) -> None:
    """A turn that nobody got had no loss before: its erasure takes nothing from training."""
    fabric.append(store, fabric.records("lost", [fabric.T(delivered=False)]))
    erase_trajectory(store, "lost", "x")
    [sample] = samples_of(store.trajectories()["lost"])
    assert not sample.erased
    assert not is_candidate(sample, fabric.config(fabric.GRPO).recipe)


def test_the_recipe_drops_it_by_name(recorded: Callable[..., Store]) -> None:
    """Whatever else holds of it, an erased candidate is dropped by the rule `erased`."""
    log = recorded()
    erase_trajectory(log, "g0.1", "x")
    config = fabric.config(fabric.GRPO)
    samples = list(samples_of(log.trajectories()["g0.1"]))
    assert all(is_candidate(s, config.recipe) for s in samples)
    kept, drops = select(samples, config.recipe, config.algorithm, version=99)
    assert (kept, {d.rule for d in drops}) == ([], {"erased"})


@pytest.mark.parametrize(("values", "name"), [("SFT", "teach3"), ("GRPO", "g0.1")])
def test_no_step_gets_it(recorded: Callable[..., Store], values: str, name: str) -> None:
    """Neither source hands out its samples; the drops of the first step name them."""
    log = recorded()
    erase_trajectory(log, name, "x")
    config = fabric.config(getattr(fabric, values))
    source = make_source(config, log, History("demo", "actor"), "cut", log.head(), "family", 0)
    drops, used = [], set()
    for _ in range(3):
        selection = source.take(0, 0, lambda drops: None)
        assert selection is not None
        drops += selection.drops
        used |= {s.trajectory_id for s in selection.samples}
    assert name not in used
    assert {(d.sample.trajectory_id, d.rule) for d in drops} == {(name, "erased")}
