"""What is outstanding: a count over events, whichever lane they are read from first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.stories.admission import Story
from tests.fakes.stories.training import RUN, answered, begins, committed, dropped, opened, planned

from rollbook.ingest.admission.outstanding import KINDS, Outstanding, training_of
from rollbook.store.events import (
    VOID,
    Event,
    Record,
    RunOpened,
    TrajectoryAdopted,
    TrajectoryFinished,
    TrajectoryOpened,
)
from rollbook.store.fold.staleness import StalenessPolicy


def folded(*records: Record, run: str = RUN) -> Outstanding:
    """The fold of the records."""
    outstanding = Outstanding(RUN)
    outstanding.add_all(Event(record, run) for record in records)
    return outstanding


# One kind of event after the other ----------------------------------------------------------------


def test_a_group_is_one_unit() -> None:
    """From its first trajectory on; a name that is used again once it is whole is another group."""
    fold = folded(begins(2), opened("a", "g"))
    assert (fold.count, fold.room("g"), fold.room("h"), fold.room(None)) == (1, 1, 0, 0)
    fold.add(Event(opened("b", "g"), RUN))
    assert (fold.count, fold.room("g")) == (1, 0)
    fold.add(Event(opened("c", "g"), RUN))
    assert (fold.count, fold.room("g")) == (2, 1)


def test_without_groups_each_trajectory_is_a_unit() -> None:
    """The groups that clients name say nothing to such a training."""
    fold = folded(begins(1), opened("a", "g"), opened("b", "g"))
    assert (fold.count, fold.room("g")) == (2, 0)


@pytest.mark.parametrize(
    "record", [opened("e", "g", "eval"), opened("q", "g", "quarantine"), opened("t", "g", "teacher")]
)
def test_what_is_not_trained_does_not_count(record: TrajectoryOpened) -> None:
    """Neither other splits, nor another run, nor what is in no group where groups are compared."""
    assert folded(begins(2), record).count == 0
    assert folded(begins(2), opened("alone")).count == 0
    assert folded(begins(1), opened("a"), run="other").count == 0


def test_what_a_step_used_gives_its_place_back() -> None:
    """When the step commits, not before; a group whole, though one of it had no sample."""
    fold = folded(begins(2), opened("a", "g"), opened("b", "g"), opened("c", "h"), planned(0, ["a"]))
    assert (fold.count, fold.version) == (2, 0)
    fold.add(Event(committed(0), RUN))
    assert (fold.count, fold.version, fold.room("h")) == (1, 1, 1)


def test_a_step_of_another_policy_uses_nothing() -> None:
    """Though it has the same number: nor does it change the version."""
    fold = folded(begins(1), opened("a"), planned(0, ["a"]), planned(0, ["a"], "critic", 7))
    fold.add(Event(committed(0, "critic", 8), RUN))
    assert (fold.count, fold.version) == (1, 0)
    fold.add(Event(committed(0), RUN))
    assert (fold.count, fold.version) == (0, 1)


def test_what_was_dropped_gives_its_place_back() -> None:
    """A unit is dropped as one."""
    assert folded(begins(2), opened("a", "g"), opened("b", "g"), dropped("b")).count == 0


@pytest.mark.parametrize(
    ("turn", "left"),
    [
        (answered("a"), 1),
        (answered("a", delivered=False), 0),
        (answered("a", None), 0),
        (answered("a", altered="grammar"), 0),
        ([], 0),
    ],
)
def test_what_ends_without_anything_to_train_on_gives_its_place_back(turn: list[Record], left: int) -> None:
    """A reply that nobody got, that no version made, or of altered logits is never trained."""
    assert folded(begins(1), opened("a"), *turn).count == 1
    assert folded(begins(1), opened("a"), *turn, TrajectoryFinished("a")).count == left


def test_a_barren_group_waits_for_the_last_of_it() -> None:
    """It gives its place back when all of it has ended."""
    group = [opened("a", "g"), opened("b", "g"), TrajectoryFinished("a")]
    assert folded(begins(2), *group).count == 1
    assert folded(begins(2), *group, TrajectoryFinished("b")).count == 0
    assert folded(begins(2), *group, *answered("b"), TrajectoryFinished("b")).count == 1


def test_what_ended_as_void_gives_its_place_to_another() -> None:
    """Whatever it had sampled; also where its end is read before its beginning."""
    group = [begins(2), opened("a", "g"), opened("b", "g"), *answered("b")]
    fold = folded(*group, TrajectoryFinished("b", VOID))
    assert (fold.count, fold.room("g")) == (1, 1)
    fold.add(Event(opened("c", "g"), RUN))
    assert (fold.count, fold.room("g")) == (1, 0)
    assert folded(*group, TrajectoryFinished("a", VOID), TrajectoryFinished("b", VOID)).count == 0
    adopted = [TrajectoryAdopted("d", "serve", "e"), TrajectoryFinished("d", VOID)]
    assert folded(begins(1), *adopted, opened("d")).count == 0


def test_a_group_that_was_given_up_gives_its_place_back() -> None:
    """Once nothing of it runs, and whoever ran it aborted; one that ended well is still to be completed."""
    part = [begins(3), opened("a", "g"), opened("b", "g"), *answered("a"), TrajectoryFinished("a")]
    assert folded(*part, TrajectoryFinished("b")).count == 1
    assert folded(*part, TrajectoryFinished("b", "aborted")).count == 0
    whole = [begins(2), opened("a", "g"), opened("b", "g"), *answered("a")]
    assert folded(*whole, TrajectoryFinished("a"), TrajectoryFinished("b", "aborted")).count == 1


def test_a_part_of_a_group_that_is_too_old_gives_its_place_back() -> None:
    """Nobody will complete it any more, and nothing of it could be used."""
    part = [begins(2, limit=1), opened("a", "g"), *answered("a"), TrajectoryFinished("a"), opened("r", "h")]
    steps = [r for i in range(2) for r in (planned(i, []), committed(i))]
    assert folded(*part, *steps[:2]).count == 2
    fold = folded(*part, *steps)
    assert (fold.count, fold.room("g"), fold.room("h")) == (1, 0, 1)


@pytest.mark.parametrize("begins_anew", [False, True])
def test_one_too_many_of_a_group_gives_its_place_back_once_it_is_too_old(begins_anew: bool) -> None:
    """It still ran as the steps committed, and ends after them; or as another training begins."""
    late = [begins(2, limit=1), opened("late", "g"), *answered("late")]
    end = TrajectoryFinished("late")
    steps = [r for i in range(2) for r in (planned(i, []), committed(i))]
    if begins_anew:
        assert folded(*late, end, *steps[:2]).count == 1
        assert folded(*late, end, *steps[:2], begins(2, limit=0)).count == 0
    else:
        assert folded(*late, *steps[:2], end).count == 1
        assert folded(*late, *steps).count == 1
        assert folded(*late, *steps, end).count == 0


def test_one_of_which_nothing_can_be_trained_keeps_no_place_for_others() -> None:
    """Nothing of its group runs: whoever goes on with that takes a place anew."""
    assert folded(begins(2), opened("a", "g"), TrajectoryFinished("a", "failed")).count == 0


def test_nothing_more_comes_by_itself() -> None:
    """Nothing outstanding runs, and too few units are whole for a step, whatever there is in part."""

    def ended(name: str, group: str) -> list[Record]:
        return [opened(name, group), *answered(name), TrajectoryFinished(name)]

    fold = folded(begins(2, batch=2), *ended("a0", "g"), *ended("b0", "h"), *ended("b1", "h"))
    assert (fold.count, fold.stalled) == (2, True)
    fold.add(Event(opened("a1", "g"), RUN))
    assert not fold.stalled, "it runs"
    fold.add_all(Event(record, RUN) for record in (*answered("a1"), TrajectoryFinished("a1")))
    assert not fold.stalled, "they make a step"
    fold.add(Event(dropped("b0"), RUN))
    assert fold.stalled
    fold.add(Event(planned(0, ["a0"]), RUN))
    assert not fold.stalled, "a step runs"
    fold.add(Event(committed(0), RUN))
    assert fold.stalled
    fold.add(Event(opened("c0", "i"), RUN))
    assert not fold.stalled, "it may still be joined"
    assert not folded().stalled


def test_whatever_begins_is_another_state() -> None:
    """A group's later members too: nobody takes the pauses between them for one that lasts."""
    fold = folded(begins(2), opened("a", "g"))
    before = fold.state
    fold.add(Event(opened("b", "g"), RUN))
    assert fold.state != before


def test_a_training_that_is_done_bounds_nothing() -> None:
    """With its last step nothing counts; one that goes on has what is left of its steps."""
    opening = begins(1, steps=5, steps_done=3)
    steps = [r for i in range(2) for r in (planned(i, []), committed(i))]
    fold = folded(opening, opened("a"), *steps[:2])
    assert fold.training is not None
    assert (fold.training.steps_left, fold.count) == (1, 1)
    fold = folded(opening, opened("a"), *steps)
    assert (fold.training, fold.count) == (None, 0)


def test_a_training_that_is_run_again_when_it_is_done_bounds_nothing() -> None:
    """All its steps are taken: no commit would end it. One of another policy goes on."""
    assert training_of(begins(2, steps=3, steps_done=3)) is None
    again = begins(2, steps=3, steps_done=3)
    fold = folded(begins(2, steps=4), opened("a", "g"), again)
    assert (fold.training, fold.count) == (None, 0)
    assert folded(begins(2, policy="critic"), again).training is not None


def test_another_training_groups_anew() -> None:
    """What is there when it begins counts in its way, and what is whole and barren by then does not."""
    there = [*(opened(f"a{i}", "g") for i in range(4)), opened("b0", "h"), opened("b1", "h"), opened("c")]
    ended = [TrajectoryFinished("b0"), TrajectoryFinished("b1")]
    assert folded(*there, *ended).count == 0
    assert folded(*there, *ended, begins(2)).count == 2
    assert folded(*there, *ended, begins(1)).count == 5
    assert folded(*there, begins(1), *ended, begins(2)).count == 2


@pytest.mark.parametrize(
    "change",
    [
        {"source": "cut"},
        {"recipe": {"max_staleness": None, "splits": ["train"]}},
        {"admission": {"hold": False, "order": "windowed"}},
        {"admission": None},
    ],
)
def test_which_trainings_hold_nothing(change: Any) -> None:
    """At a cut, with no limit, where it was told not to, or by a release that did not know how."""
    assert training_of(begins(2, **change)) is None
    assert folded(begins(2), begins(2, **change)).training is None
    assert folded(begins(2), begins(2, **change, policy="critic")).training is not None


def test_what_a_training_says_of_itself() -> None:
    """A group is a unit, and a batch is of groups."""
    training = training_of(begins(4, 3, 2))
    assert training is not None
    assert training.policy == StalenessPolicy(3, 2, "windowed")
    assert (training.name, training.group_size, training.steps_left) == ("actor", 4, 1000)
    alone = training_of(begins(1, 3, 2))
    assert alone is not None
    assert (alone.policy.batch, alone.group_size) == (3, 1)
    assert training_of(RunOpened("serve", begins().config)) is None


def test_an_adopted_trajectory_whose_beginning_is_read_last() -> None:
    """Its end is known by then: it is barren, or still counts."""
    ending = [TrajectoryAdopted("a", "serve", "e"), TrajectoryFinished("a")]
    assert folded(begins(1), *ending, opened("a")).count == 0
    more = [ending[0], *answered("a"), ending[1]]
    assert folded(begins(1), *more, opened("a")).count == 1
    assert folded(*ending, opened("a"), begins(1)).count == 0


def test_the_fold_hears_of_every_kind_it_knows() -> None:
    """Whoever follows other lanes asks for these."""
    kinds = {r.KIND for r in (opened("a"), *answered("a"), dropped("a"), planned(0, []), committed(0))}
    assert kinds | {"run.opened", "trajectory.finished", "trajectory.adopted"} == KINDS


# Any order of lanes -------------------------------------------------------------------------------


@given(data=st.data(), size=st.integers(1, 3))
@settings(max_examples=150)
def test_the_count_is_the_same_in_any_order_of_lanes(data: st.DataObject, size: int) -> None:
    """As it happens, and read lane by lane afterwards, the trainer's lane first, in the middle or last."""
    story = Story(size)
    story.tell("train", begins(size, limit=1000))
    live = folded(story.records[0][1])
    for _ in range(data.draw(st.integers(1, 40))):
        start = len(story.records)
        data.draw(st.sampled_from([story.begin, story.go_on, story.go_on, story.go_on, story.train]))(
            data.draw
        )
        live.add_all(Event(record, RUN) for _, record in story.records[start:])
    assert live.count == story.outstanding
    assert live.version == story.steps
    for lanes in (
        ["train", "a-proxy", "z-proxy"],
        ["a-proxy", "train", "z-proxy"],
        ["z-proxy", "a-proxy", "train"],
    ):
        again = folded(*(record for lane in lanes for where, record in story.records if where == lane))
        assert (again.count, again.version) == (live.count, live.version), lanes


@given(data=st.data(), size=st.integers(1, 3))
@settings(max_examples=50)
def test_nothing_is_kept_of_what_was_used(data: st.DataObject, size: int) -> None:
    """Once every unit was used or dropped the fold is empty again."""
    story = Story(size)
    story.tell("train", begins(size, limit=1000))
    for _ in range(20):
        story.go(data.draw)
    for name in list(story.running):
        story.tell(name.split()[1], *answered(name), TrajectoryFinished(name))
        story.productive.add(name)
        story.running.remove(name)
    while story.outstanding:
        story.train(data.draw)
    fold = folded(*(record for _, record in story.records))
    held = (fold._groups, fold._group_of, fold._latest, fold._trajectories, fold._planned, fold._closed)
    assert (fold.count, fold._spent, *map(len, held)) == (0,) * 8
