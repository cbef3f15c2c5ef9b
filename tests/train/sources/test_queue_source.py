"""What the trainer takes next, what it waits for, and what it gives up at once, as the policy says."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.stories import fabric

from rollbook.ingest.admission.outstanding import Outstanding
from rollbook.store.errors import TrainError
from rollbook.store.events import (
    Event,
    RewardAssigned,
    RunOpened,
    SampleDropped,
    TrajectoryErased,
    TrajectoryFinished,
    TrajectoryOpened,
)
from rollbook.store.fold.history import CommittedStep, History
from rollbook.store.fold.staleness import StalenessPolicy
from rollbook.train.select.recipe import Drop
from rollbook.train.sources.queue_source import QueueSource


class Stream:
    """A source over events that a test gives it, a portion for each time that it asks for more."""

    def __init__(
        self,
        order: str = "windowed",
        *,
        wait_s: float = 300.0,
        stall_s: float = 60.0,
        history: History | None = None,
        **changes: Any,
    ) -> None:
        values = {
            "algorithm": {"name": "grpo", "groups": 1, "group_size": 2},
            "recipe": {"max_staleness": 1},
            "admission": {"order": order, "wait_s": wait_s, "stall_s": stall_s},
            "idle_timeout_s": 0.05,
        }
        config = fabric.config(fabric.GRPO, **(values | changes))
        self.portions: list[list[Event]] = []
        self.evicted: list[Drop] = []
        self.said: list[str] = []
        history = history or History(fabric.RUN, "actor")
        self.source = QueueSource(config, history, self._more, dict, say=self.said.append)

    def _more(self) -> list[Event]:
        return self.portions.pop(0) if self.portions else []

    def add(self, *records: Any) -> None:
        """One more portion."""
        self.portions.append(fabric.events(records))

    def group(self, name: str, version: int = 0, rewards: Any = (0.0, 1.0), *, finished: bool = True) -> None:
        """A portion with a group, whole."""
        self.add(
            *(
                record
                for i, reward in enumerate(rewards)
                for record in fabric.records(
                    *(f"{name}{i}", [fabric.T(version=version)]),
                    group=name,
                    reward=reward,
                    finished=finished,
                )
            )
        )

    def take(self, version: int, served: int | None = None) -> list[str]:
        """Names of what a step of this version gets."""
        selection = self.source.take(version, version if served is None else served, self.evicted.extend)
        assert selection is not None
        return [sample.name for sample in selection.samples]

    def gone(self) -> list[tuple[str, str]]:
        """What was dropped between the steps so far, and by which rule."""
        dropped, self.evicted[:] = [(drop.sample.name, drop.rule) for drop in self.evicted], []
        return dropped


def test_windowed_takes_what_would_be_too_old_next() -> None:
    """Though it completed last; else whatever completed first."""
    stream = Stream()
    for name, version in (("b", 5), ("c", 5), ("a", 4)):
        stream.group(name, version)
    stream.portions = [[event for portion in stream.portions for event in portion]]
    assert [stream.take(5) for _ in range(2)] == [["a0", "a1"], ["b0", "b1"]]


def test_windowed_waits_for_what_runs_and_would_be_too_old() -> None:
    """A whole group that runs since the version before; and takes it, once it ends."""
    stream = Stream()
    stream.group("slow", 4, finished=False)
    stream.group("quick", 5)
    with pytest.raises(TrainError):
        stream.take(5)
    stream.add(TrajectoryFinished("slow0"), TrajectoryFinished("slow1"))
    assert [stream.take(5), stream.take(6)] == [["slow0", "slow1"], ["quick0", "quick1"]]


@pytest.mark.parametrize("flat", [True, False])
def test_a_judge_rewards_one_after_the_other(flat: bool) -> None:
    """A group is used once it has all its rewards, each of which may come by itself."""
    stream = Stream(recipe={"max_staleness": 1, "drop_zero_variance": flat})
    stream.group("g", 0, (None, None))
    stream.add(RewardAssigned("g0", None, 1.0))
    stream.add()
    stream.add(RewardAssigned("g1", None, 0.0))
    assert (stream.take(0), stream.gone()) == (["g0", "g1"], [])


def test_the_last_reward_comes_after_the_end() -> None:
    """The others are not used without it, and those that are due are waited for."""
    stream = Stream()
    stream.group("g", 4, (0.0, None))
    stream.group("quick", 5)
    with pytest.raises(TrainError):
        stream.take(5)
    stream.add(RewardAssigned("g1", None, 1.0))
    assert [stream.take(5), stream.take(5)] == [["g0", "g1"], ["quick0", "quick1"]]


def test_a_reward_that_does_not_come() -> None:
    """After a while the others are used without it; at once, where its trajectory was aborted."""
    stream = Stream(
        wait_s=0.05, idle_timeout_s=30.0, algorithm={"name": "grpo", "groups": 1, "group_size": 3}
    )
    stream.group("g", 0, (0.0, 1.0, None))
    assert stream.take(0) == ["g0", "g1"]
    stream = Stream(algorithm={"name": "grpo", "groups": 1, "group_size": 3})
    stream.group("g", 0, (0.0, 1.0, None), finished=False)
    ends = [TrajectoryFinished("g0"), TrajectoryFinished("g1"), TrajectoryFinished("g2", status="aborted")]
    stream.add(*ends)
    assert stream.take(0) == ["g0", "g1"]


@pytest.mark.parametrize("kept", [True, False])
def test_erased_while_it_waits(kept: bool) -> None:
    """Nothing is trained on tokens that were erased since they were read."""
    stream = Stream(algorithm={"name": "grpo", "groups": 1, "group_size": 3})
    stream.group("g", 0, (None, None, 1.0))
    with pytest.raises(TrainError):
        stream.take(0)
    stream.add(
        TrajectoryErased("g0", kept, "asked", 3),
        RewardAssigned("g0", None, 0.0),
        RewardAssigned("g1", None, 0.0),
    )
    selection = stream.source.take(0, 0, stream.evicted.extend)
    assert selection is not None
    assert [sample.name for sample in selection.samples] == [*["g0"] * kept, "g1", "g2"]
    assert [(drop.sample.name, drop.rule) for drop in selection.drops] == [("g0", "erased")] * (not kept)


@pytest.mark.parametrize("first", [True, False])
def test_a_groups_name_that_is_used_again(first: bool) -> None:
    """After a restart as before: a member without a sample is not counted into the group that comes next."""
    history = History(fabric.RUN, "actor")
    planned = fabric.planned(0, 0, turns=["g0.0", "g1.0"])
    history.steps[0] = CommittedStep(planned, fabric.committed(0, 1))
    stream = Stream(history=history, algorithm={"name": "grpo", "groups": 1, "group_size": 3})
    undelivered = fabric.records("g2", [fabric.T(delivered=False)], group="g", reward=0.0)
    used = [r for i in (0, 1) for r in fabric.records(f"g{i}", group="g", reward=float(i))]
    stream.add(*(undelivered + used if first else used + undelivered))
    again = [r for i in (3, 4, 5) for r in fabric.records(f"g{i}", group="g", reward=float(i))]
    stream.add(*again)
    assert stream.take(1) == ["g3", "g4", "g5"]


def test_it_waits_no_longer_than_it_was_told() -> None:
    """What it waited for is too old then, and never used."""
    stream = Stream(wait_s=0.03, idle_timeout_s=30.0)
    stream.group("slow", 4, finished=False)
    stream.group("quick", 5)
    begun = time.monotonic()
    assert stream.take(5) == ["quick0", "quick1"]
    assert 0.03 <= time.monotonic() - begun < 30
    stream.add(TrajectoryFinished("slow0"), TrajectoryFinished("slow1"))
    stream.group("next", 6)
    assert stream.take(6) == ["next0", "next1"]
    assert stream.gone() == [("slow0", "staleness"), ("slow1", "staleness")]


def test_it_does_not_wait_for_a_group_that_is_not_all_there() -> None:
    """One of it runs, and nobody knows whether the other will ever begin."""
    stream = Stream()
    stream.group("part", 4, rewards=(0.0,), finished=False)
    stream.group("quick", 5)
    assert stream.take(5) == ["quick0", "quick1"]


def test_what_has_begun_without_a_token_is_as_old_as_what_was_served() -> None:
    """Under the version before, if it came while the last step was taken."""
    stream = Stream(wait_s=0.03, idle_timeout_s=30.0)
    stream.group("first", 4)
    assert stream.take(4) == ["first0", "first1"]
    stream.add(*(r for i in range(2) for r in fabric.records(f"slow{i}", [], group="s", finished=False)))
    stream.group("quick", 5)
    begun = time.monotonic()
    assert stream.take(5) == ["quick0", "quick1"]
    assert time.monotonic() - begun >= 0.03, "the slow ones may have begun at version 4"


def test_fifo_takes_what_began_first() -> None:
    """Though another completed before; and waits for it."""
    stream = Stream("fifo")
    stream.group("a", 5, finished=False)
    stream.group("b", 5)
    with pytest.raises(TrainError):
        stream.take(5)
    stream.add(TrajectoryFinished("a0"), TrajectoryFinished("a1"))
    assert [stream.take(5), stream.take(5)] == [["a0", "a1"], ["b0", "b1"]]


def test_age_takes_the_oldest_that_is_there() -> None:
    """And waits for none, so that what was slow is lost."""
    stream = Stream("age")
    stream.group("slow", 4, finished=False)
    stream.group("new", 5)
    stream.group("old", 4)
    stream.portions = [[event for portion in stream.portions for event in portion]]
    assert [stream.take(5), stream.take(6)] == [["old0", "old1"], ["new0", "new1"]]
    stream.add(TrajectoryFinished("slow0"), TrajectoryFinished("slow1"))
    with pytest.raises(TrainError):
        stream.take(6)
    assert stream.gone() == [("slow0", "staleness"), ("slow1", "staleness")]


def test_what_is_too_old_is_given_up_while_it_waits() -> None:
    """Others may begin in its place; before a step is filled, and not with it."""
    stream = Stream()
    stream.group("old", 3)
    with pytest.raises(TrainError):
        stream.take(5)
    assert stream.gone() == [("old0", "staleness"), ("old1", "staleness")]


def test_flat_groups_that_make_a_whole_step_are_given_up() -> None:
    """There may be no room for others before: with as many of them as may begin nothing would ever move."""
    stream = Stream(algorithm={"name": "grpo", "groups": 2, "group_size": 2})
    stream.group("flat", 5, rewards=(1.0, 1.0))
    stream.group("even", 5, rewards=(0.0, 0.0))
    with pytest.raises(TrainError):
        stream.take(5)
    assert stream.gone() == [(f"{name}{i}", "zero_variance") for name in ("flat", "even") for i in range(2)]
    stream.group("a", 5)
    stream.group("b", 5, rewards=(1.0, 1.0))
    assert stream.take(5) == ["a0", "a1"]
    assert stream.gone() == []


def test_a_group_without_rewards_is_waited_for() -> None:
    """A judge may be slow; not longer than it was told to wait."""
    stream = Stream(wait_s=2.0, idle_timeout_s=0.02)
    stream.group("a", 5, rewards=(None, None))
    with pytest.raises(TrainError):
        stream.take(5)
    assert stream.gone() == []
    stream.add(RewardAssigned("a0", None, 1.0), RewardAssigned("a1", None, 0.0))
    assert stream.take(5) == ["a0", "a1"]
    stream.group("b", 5, rewards=(None, None))
    stream.group("c", 5)
    assert stream.take(5) == ["c0", "c1"]
    time.sleep(2.0)
    with pytest.raises(TrainError):
        stream.take(5)
    assert stream.gone() == [("b0", "no_reward"), ("b1", "no_reward")]


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(0, 2), st.sampled_from([0.1, 0.5, 0.9]))
@settings(max_examples=30)
def test_a_loop_under_admission_never_stands_still(seed: int, batch: int, limit: int, flat: float) -> None:
    """Agents begin as many groups as the proxy would admit; whatever their rewards, step follows on step.

    Each group ends whenever it likes, and some teach nothing. Nothing is ever too old.
    """
    config = fabric.config(
        fabric.GRPO,
        algorithm={"name": "grpo", "groups": batch, "group_size": 2},
        recipe={"max_staleness": limit},
        idle_timeout_s=0.05,
    )
    fold = Outstanding(fabric.RUN)
    running: list[tuple[str, int]] = []
    begun, rng = itertools.count(), random.Random(seed)

    def fold_in(*records: Any) -> list[Event]:
        folded: list[Event] = fabric.events(records)
        fold.add_all(folded)
        return folded

    def dropped(drops: list[Drop]) -> None:
        assert {drop.rule for drop in drops} == {"zero_variance"}
        fold_in(*(SampleDropped(d.sample.trajectory_id, "", d.rule, "r", 0, {}) for d in drops))

    def more() -> list[Event]:
        events: list[Event] = []
        room = StalenessPolicy(batch, limit).capacity(fold.count, fold.version, fold.version)
        for _ in range(room or 0):
            name = f"g{next(begun)}"
            running.append((name, fold.version))
            events += fold_in(*(TrajectoryOpened(f"{name}-{i}", f"{name}-{i}", name) for i in range(2)))
        if running:
            name, version = running.pop(rng.randrange(len(running)))
            rewards = (0.0, 0.0 if rng.random() < flat else 1.0)
            for i, reward in enumerate(rewards):
                whole = fabric.records(f"{name}-{i}", [fabric.T(version=version)], group=name, reward=reward)
                events += fold_in(*whole[1:])
        return events

    fold_in(RunOpened("train", config.as_json() | {"source": "tail", "steps": 1000, "steps_done": 0}))
    source = QueueSource(config, History(fabric.RUN, "actor"), more, dict)
    for step in range(6):
        selection = source.take(step, step, dropped)
        assert selection is not None
        assert {drop.rule for drop in selection.drops} <= {"zero_variance"}
        used = [*selection.samples, *(drop.sample for drop in selection.drops)]
        assert len({sample.group for sample in used}) == batch
        fold_in(fabric.planned(step, step, turns=[s.leaf_turn_id for s in selection.samples]))
        # As the trainer writes them: what a step drops stands with its plan.
        fold_in(*(SampleDropped(d.sample.trajectory_id, "", d.rule, "r", 0, {}) for d in selection.drops))
        fold_in(fabric.committed(step, step + 1))


# Parts that are held ------------------------------------------------------------------------------


def _three(**changes: Any) -> Stream:
    """A source whose steps take three groups of two."""
    return Stream(algorithm={"name": "grpo", "groups": 3, "group_size": 2}, **changes)


def _held(stream: Stream, version: int, count: int) -> list[str]:
    samples = stream.source.hold(version, version, stream.evicted.extend, count)
    assert samples is not None
    return [sample.name for sample in samples]


def test_parts_are_held_as_they_come() -> None:
    """Each once; the step has them in the order in which they were held, then what else it takes."""
    stream = _three()
    for name in ("a", "b", "c", "d"):
        stream.group(name)
    assert _held(stream, 0, 1) == ["a0", "a1"]
    assert _held(stream, 0, 2) == ["b0", "b1"]
    assert stream.take(0) == ["a0", "a1", "b0", "b1", "c0", "c1"]
    with pytest.raises(TrainError):
        stream.take(0)  # d is alone


def test_places_of_what_is_due_are_not_held() -> None:
    """A running group of the version before must be in this step: there are two places for others."""
    stream = _three()
    stream.group("slow", 4, finished=False)
    for name in ("a", "b", "c"):
        stream.group(name, 5)
    assert _held(stream, 5, 2) == ["a0", "a1", "b0", "b1"]
    with pytest.raises(TrainError):
        _held(stream, 5, 3)
    stream.add(TrajectoryFinished("slow0"), TrajectoryFinished("slow1"))
    assert stream.take(5) == ["a0", "a1", "b0", "b1", "slow0", "slow1"]


def test_what_was_held_may_still_be_given_up() -> None:
    """An erased trajectory, or a reward that leaves no difference: another group has its place."""
    stream = _three(recipe={"max_staleness": 1, "refill": True})
    for name in ("a", "b"):
        stream.group(name)
    assert _held(stream, 0, 2) == ["a0", "a1", "b0", "b1"]
    stream.add(RewardAssigned("a0", None, 1.0, supersedes=None))
    for name in ("c", "d"):
        stream.group(name)
    assert stream.take(0) == ["b0", "b1", "c0", "c1", "d0", "d1"]
    assert stream.gone() == [("a0", "zero_variance"), ("a1", "zero_variance")]


def test_what_is_waited_for_is_said() -> None:
    """Again and again, with numbers; and once more as it ends."""
    stream = _three(stall_s=0.1, idle_timeout_s=0.35)
    stream.group("whole")
    stream.group("unrewarded", rewards=(None, 1.0))
    stream.add(*fabric.records("lone", group="half", reward=1.0))
    stream.add(*fabric.records("runs", group="other", finished=False))
    with pytest.raises(TrainError, match=r"no complete batch for 0\.35 s: .*1 trajectories run\)"):
        stream.take(0)
    assert len(stream.said) == 3
    assert stream.said[0].startswith(
        "no new group for 0 s: 2 of 3 groups are complete; 1 of these lack a reward"
    )
    assert "; 1 groups are incomplete and lack 1 trajectories; 1 trajectories run" in stream.said[-1]
    silent = _three(stall_s=0.1, idle_timeout_s=0.15)
    with pytest.raises(TrainError):
        silent.take(0)
    assert silent.said[0].endswith(" at most (idle_timeout_s)")
    assert "agents have ended, or proxies hold new trajectories (max_staleness, or" in silent.said[0]
