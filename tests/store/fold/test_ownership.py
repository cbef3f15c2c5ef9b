"""An adopted trajectory folds in the order it was written, whatever order its lanes are read in."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.stories.records import turn_completed, turn_requested

from rollbook.store import Event
from rollbook.store.events import (
    Record,
    RewardAssigned,
    TrajectoryAdopted,
    TrajectoryFinished,
    TrajectoryOpened,
    token_ids,
)
from rollbook.store.fold.ownership import OwnershipChain
from rollbook.store.fold.trajectory import Trajectory, TrajectoryFold, fold, prompt_sha256

LANES = "zam"
"""Neither the order of their names nor its reverse is the order in which they write."""


def _turn(number: int) -> list[Record]:
    """Turn `number` of a chain: each adds one prompt token to the one before, and samples one."""
    parent = f"u{number - 1}" if number else None
    sent = token_ids([i for n in range(number) for i in (n, 100 + n)] + [number])
    requested = turn_requested("t", f"u{number}", parent_turn_id=parent, base_turn_id=parent)
    done = turn_completed(
        "t",
        f"u{number}",
        policy_version=0,
        prompt_ids=token_ids([number]),
        completion_ids=token_ids([100 + number]),
        logprobs=np.zeros(1, np.float32),
        prompt_length=len(sent),
        prompt_sha256=prompt_sha256(sent),
    )
    return [requested, done, RewardAssigned("t", None, float(number))]


def _written(ownership: list[tuple[int, int]]) -> list[Event]:
    """Events, in the order they were written, of (which lane, how many turns) after each other."""
    events: list[Event] = []
    counts = dict.fromkeys(LANES, 0)
    number = 0

    def write(lane: str, record: Record) -> None:
        events.append(Event(record, "run", f"e{len(events)}", 0, lane, counts[lane]))
        counts[lane] += 1

    before = None
    for index, turns in ownership:
        lane = LANES[index]
        if before is None:
            write(lane, TrajectoryOpened("t", "t"))
        elif lane != before:
            last = next(e for e in reversed(events) if e.lane == before)
            write(lane, TrajectoryAdopted("t", before, last.event_id))
        before = lane
        for _ in range(turns):
            for record in _turn(number):
                write(lane, record)
            number += 1
    write(str(before), TrajectoryFinished("t"))
    return events


def _told(trajectory: Trajectory) -> object:
    turns = [(t.turn_id, t.position, trajectory.prompt_ids(t).tolist()) for t in trajectory.turns.values()]
    return turns, trajectory.rewards, trajectory.finished, trajectory.reward()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=7))
@settings(max_examples=150)
def test_reading_order_does_not_matter(ownership: list[tuple[int, int]]) -> None:
    """Every order of the lanes gives what one lane alone would: turns, prompts, rewards, the last writer."""
    events = _written(ownership)
    one_lane = [replace(e, lane="only", seq=i) for i, e in enumerate(events)]
    expected = _told(fold(e for e in one_lane if not isinstance(e.record, TrajectoryAdopted))["t"])
    for order in permutations(LANES):
        (trajectory,) = fold(sorted(events, key=lambda e: (order.index(e.lane), e.seq))).values()
        assert _told(trajectory) == expected
        assert (trajectory.lane, trajectory.last_event_id) == (events[-1].lane, events[-1].event_id)


def test_a_judges_rewards_stay_where_their_lanes_name_is() -> None:
    """A lane that never wrote the trajectory orders by its name against the lane that opened it."""
    events = _written([(0, 1), (1, 1)])
    places = {}
    for lane in ("judge", "zz"):
        event = Event(RewardAssigned("t", None, 9.0), "run", f"{lane}-reward", 0, lane, 5)
        (trajectory,) = fold([event, *events]).values()
        places[lane] = [event_id for event_id, _ in trajectory.rewards].index(f"{lane}-reward")
    assert places == {"judge": 0, "zz": 2}


def test_a_fold_says_when_it_has_a_trajectory() -> None:
    """What comes before the opening is kept, and the trajectory is there from its opening on."""
    events = _written([(0, 1), (1, 1)])
    folding = TrajectoryFold()
    for event in (e for e in events if e.lane == "a"):
        assert folding.add(event) is None
    assert "t" not in folding
    for event in (e for e in events if e.lane == "z"):
        assert folding.add(event) == "t"
    assert "t" in folding
    assert list(folding["t"].turns) == ["u0", "u1"]


@pytest.mark.parametrize("last", ["missing", "itself"])
def test_chains_that_no_closed_cut_holds(last: str) -> None:
    """An adoption whose earlier event is missing, or that goes in circles, still folds, after the opening."""
    ownership = OwnershipChain(("z", 0), {("a", 3): last}, {"e": ("z", 0), "itself": ("a", 3)})
    assert ownership.rank(("a", 4)) is not None
    assert ownership.rank(("a", 2)) is None
    assert ownership.key(("z", 5)) < ownership.key(("a", 3)) < ownership.key(("a", 4))
