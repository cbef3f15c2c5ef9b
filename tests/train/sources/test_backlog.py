"""A training that begins behind a cut takes the same from references as it would from the log's events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.forests import SMALL, forest

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store import events as kinds
from rollbook.store.fold.history import CommittedStep, History
from rollbook.store.fold.trajectory import fold
from rollbook.store.upkeep.sealer import Sealer
from rollbook.train.select.samples import Sample, all_samples
from rollbook.train.sources.backlog import Backlog
from rollbook.train.sources.queue_source import QueueSource

GRPO = {"name": "grpo", "groups": 1, "group_size": 2}
SFT = {"name": "sft", "batch_size": 4}


@pytest.fixture(scope="module", params=[0, 1], ids=lambda seed: f"seed {seed}")
def seed(request: pytest.FixtureRequest) -> int:
    """Of the forests, and of what was used of them."""
    return int(request.param)


@pytest.fixture(scope="module", params=[True, False], ids=["sealed", "live"])
def filled(request: pytest.FixtureRequest, seed: int, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two lanes of forests, some of them open; half of them in sealed units, or none. Never write to it."""
    sealed, rng = request.param, np.random.default_rng(seed)
    log = rb.open(tmp_path_factory.mktemp("filled") / "store", create=True)
    for half in range(2):
        for lane in ("a", "b"):
            with log.writer(lane, SMALL) as writer:
                for i in range(15):
                    writer.append(fabric.events(forest(rng, f"{lane}-{half}-{i:02}"))).result(30)
        if sealed and not half:
            Sealer(log).run_once()
    return log


@pytest.fixture(scope="module")
def samples(filled: Store) -> list[list[Sample]]:
    """Those that may be trained on, of each finished trajectory of split train."""
    return [
        [s for s in all_samples([trajectory]) if s.trained or s.erased]
        for trajectory in fold(filled.events()).values()
        if trajectory.finished is not None and trajectory.opened.split == "train"
    ]


def _history(samples: list[list[Sample]], seed: int, *, grouped: bool) -> History:
    """A training that used a quarter of the samples, and dropped some of them."""
    rng, history = np.random.default_rng(seed), History(fabric.RUN, "actor")
    for trained in samples:
        all_or_none = rng.random()
        for sample in trained:
            draw = all_or_none if grouped else rng.random()
            if draw < 0.1:
                history.dropped.add(sample.leaf_turn_id)
                history.dropped_of.add(sample.trajectory_id)
            elif draw < 0.25:
                step = len(history.steps)
                planned = replace(fabric.planned(step, step), samples=[sample.reference])
                history.steps[step] = CommittedStep(planned, fabric.committed(step, step + 1))
    return history


def _taken(source: QueueSource, version: int) -> list[Any]:
    """What steps get until there is no more: samples by their content, what is dropped, and why."""
    batches: list[Any] = []
    drops: list[Any] = []
    while (selection := source.take(version, version, drops.extend)) is not None:
        batches.append([(s.name, s.leaf_turn_id, s.reward, s.digest()) for s in selection.samples])
        drops += selection.drops
    drops += source.unfilled(version)
    return [*batches, sorted((d.sample.leaf_turn_id, d.rule, repr(d.detail)) for d in drops)]


@pytest.mark.more_but("sealed-seed 0-windowed-groups", "live-seed 1-fifo-samples")
@pytest.mark.parametrize("algorithm", [GRPO, SFT], ids=["groups", "samples"])
@pytest.mark.parametrize("order", ["windowed", "fifo"])
def test_the_same_as_from_events(
    filled: Store, samples: list[list[Sample]], algorithm: dict[str, Any], order: str, seed: int
) -> None:
    """Whatever was used before: the same samples in the same steps, and the same drops."""
    grouped = "groups" in algorithm
    history = _history(samples, seed, grouped=grouped)
    values = {"algorithm": algorithm, "recipe": {"max_staleness": 8}, "admission": {"order": order}}
    config = fabric.config(fabric.GRPO if grouped else fabric.SFT, **values)
    head = filled.head()
    polls = iter([list(filled.events(head))])
    polled = QueueSource(config, history, lambda: next(polls, None), lambda: head, live=False)
    backlog = Backlog(filled, head, config, history)
    loaded = QueueSource(config, history, lambda: None, lambda: head, backlog, live=False)
    taken = _taken(loaded, 9)
    assert taken == _taken(polled, 9)
    assert len(taken) > 1, "a test of nothing"


def test_what_comes_later_to_what_was_there(store: Store) -> None:
    """A reward, an end and a further member reach what began before, and only what runs is read as events."""
    by_name = {
        "a0": fabric.records("a0", group="a", reward=1.0),
        "a1": fabric.records("a1", group="a", reward=None),
        "b0": fabric.records("b0", group="b", reward=1.0, finished=False),
        "c0": fabric.records("c0", group="c", reward=0.0),
        "u0": fabric.records("u0", group="u", reward=0.0),
    }
    fabric.append(store, [record for records in by_name.values() for record in records])
    history, head = History(fabric.RUN, "actor"), store.head()
    planned = replace(fabric.planned(0, 0), samples=[{"trajectory_id": "u0", "turn_id": "u0.0"}])
    history.steps[0] = CommittedStep(planned, fabric.committed(0, 1))
    config = fabric.config(fabric.GRPO, algorithm=GRPO, idle_timeout_s=0.05)
    backlog = Backlog(store, head, config, history)
    assert (len(backlog), list(backlog.opened)) == (4, ["b0"])
    later = [
        [kinds.RewardAssigned("u0", None, 1.0), kinds.RewardAssigned("a1", None, 0.0)],
        [kinds.TrajectoryFinished("b0"), *fabric.records("b1", group="b", reward=0.0)],
        fabric.records("c1", group="c", reward=1.0),
    ]
    polls = [fabric.events(records) for records in later]
    source = QueueSource(config, history, lambda: polls.pop(0) if polls else [], dict, backlog)
    taken = [source.take(0, 0, lambda drops: None) for _ in range(3)]
    names = [[sample.name for sample in selection.samples] for selection in taken if selection is not None]
    assert names == [["a0", "a1"], ["b0", "b1"], ["c0", "c1"]]
    rewards = [sample.reward for selection in taken if selection for sample in selection.samples]
    assert rewards == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert (len(source._ended), list(source._folding)) == (0, [])
