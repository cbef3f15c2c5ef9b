"""Trajectories are a fold of events: prompts, paths, messages, rewards, whatever the interleaving."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.stories.records import turn_completed, turn_requested

from rollbook.store.errors import CorruptionError
from rollbook.store.events import (
    Event,
    Json,
    Record,
    RewardAssigned,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnCompleted,
    TurnDelivered,
    TurnFailed,
    TurnRequested,
    VersionSpan,
    token_ids,
)
from rollbook.store.fold.trajectory import Trajectory, TrajectoryFold, fold, prompt_sha256

IDS = st.lists(st.integers(0, 1000), max_size=4)
WORDS = st.lists(st.sampled_from("abc"), max_size=4)
# A turn: its parent (an index below its own, or -1 for a root), prompt delta, completion, messages.
TURNS = st.lists(st.tuples(st.integers(-1, 6), IDS, IDS, WORDS, st.booleans()), min_size=1, max_size=7)


def _requested(trajectory: str, turn: str, parent: str | None, shared: int, new: list[Json]) -> TurnRequested:
    return turn_requested(
        trajectory, turn, parent_turn_id=parent, base_turn_id=parent, shared_messages=shared, messages=new
    )


def _completed(
    trajectory: str, turn: str, delta: list[int], sent: list[int], sampled: list[int]
) -> TurnCompleted:
    spans = (VersionSpan("actor", 0, 0, len(sampled)),)
    logprobs = np.zeros(len(sampled), np.float32)
    return turn_completed(
        trajectory,
        turn,
        policy_version=0,
        prompt_ids=token_ids(delta),
        completion_ids=token_ids(sampled),
        logprobs=logprobs,
        version_spans=spans,
        prompt_length=len(sent),
        prompt_sha256=prompt_sha256(token_ids(sent)),
    )


def _build(name: str, turns: Any) -> tuple[list[Record], dict[str, Any]]:
    """The records of one trajectory, and what was sent: turn -> (prompt, messages, path)."""
    records: list[Record] = [TrajectoryOpened(name, name)]
    sent: dict[str, Any] = {}
    for i, (wanted, delta, sampled, words, completes) in enumerate(turns):
        turn = f"{name}.{i}"
        done = [t for t, value in sent.items() if value["ids"] is not None]
        parent = done[wanted] if 0 <= wanted < len(done) else None
        base = sent[parent] if parent else {"ids": [], "messages": [], "path": []}
        shared = min(len(words), len(base["messages"]))
        new = [{"role": "user", "content": w} for w in words]
        ids = base["ids"] + delta
        records.append(_requested(name, turn, parent, shared, new))
        sent[turn] = {
            "prompt": ids,
            "ids": ids + sampled if completes else None,
            "messages": base["messages"][:shared] + new,
            "path": [*base["path"], turn],
        }
        records.append(
            _completed(name, turn, delta, ids, sampled) if completes else TurnFailed(name, turn, "gone")
        )
    return records, sent


def _folded(records: list[Record]) -> Trajectory:
    (trajectory,) = fold([Event(r, "run", f"e{i}") for i, r in enumerate(records)]).values()
    return trajectory


@given(TURNS)
@settings(max_examples=150)
def test_forests_fold_to_what_was_sent(turns: Any) -> None:
    """Every turn's whole prompt, messages and path come back exactly, in any forest of turns."""
    records, sent = _build("t", turns)
    trajectory = _folded(records)
    assert list(trajectory.turns) == list(sent)
    completed = {t for t, value in sent.items() if value["ids"] is not None}
    for position, (turn_id, turn) in enumerate(trajectory.turns.items()):
        assert turn.position == position
        assert trajectory.messages(turn) == sent[turn_id]["messages"]
        if turn_id in completed:
            prompt = trajectory.prompt_ids(turn)
            assert prompt.dtype == np.int32
            assert prompt.tolist() == sent[turn_id]["prompt"]
    parents = {path[-2] for t in completed if len(path := sent[t]["path"]) > 1}
    leaves = [t for t in sent if t in completed and t not in parents]
    assert [[t.turn_id for t in path] for path in trajectory.paths()] == [sent[t]["path"] for t in leaves]


@given(TURNS, st.data())
@settings(max_examples=60)
def test_a_changed_delta_is_noticed(turns: Any, data: Any) -> None:
    """When a stored id of a path is another one, the prompts it belongs to raise CorruptionError."""
    records, _ = _build(
        "t", [(p, [7, *delta], sampled, words, True) for p, delta, sampled, words, _ in turns]
    )
    index = data.draw(st.sampled_from([i for i, r in enumerate(records) if isinstance(r, TurnCompleted)]))
    changed = records[index]
    assert isinstance(changed, TurnCompleted)
    ids = changed.prompt_ids.copy()
    ids[0] += 1
    records[index] = replace(changed, prompt_ids=ids)
    trajectory = _folded(records)
    for path in trajectory.paths():
        leaf = path[-1]
        if changed.turn_id in {t.turn_id for t in path}:
            with pytest.raises(CorruptionError, match=leaf.turn_id):
                trajectory.prompt_ids(leaf)
        else:
            trajectory.prompt_ids(leaf)


def _values(trajectory: Trajectory) -> Any:
    def plain(record: Any) -> Any:
        if record is None:
            return None
        values = [getattr(record, f.name) for f in fields(record)]
        return [v.tolist() if isinstance(v, np.ndarray) else v for v in values]

    turns = [
        (t.position, plain(t.requested), plain(t.completed), t.delivered) for t in trajectory.turns.values()
    ]
    return trajectory.run, trajectory.opened, turns, trajectory.finished, trajectory.rewards


@given(st.lists(TURNS, min_size=2, max_size=3), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_interleaving_does_not_matter(forests: Any, rng: Any) -> None:
    """Trajectories fold the same however their events are mixed, as long as each one's keep their order."""
    queues = []
    for i, turns in enumerate(forests):
        name = f"t{i}"
        records = [*_build(name, turns)[0], RewardAssigned(name, None, i), TrajectoryFinished(name)]
        queues.append([Event(r, "run", f"{name}-{j}") for j, r in enumerate(records)])
    alone = {t: _values(v) for events in queues for t, v in fold(events).items()}
    mixed = []
    waiting = [list(events) for events in queues]
    while any(waiting):
        mixed.append(rng.choice([q for q in waiting if q]).pop(0))
    assert {t: _values(v) for t, v in fold(mixed).items()} == alone


def test_rewards_in_force() -> None:
    """The last reward counts, per source and turn; a superseded one never does, wherever it stands."""

    def reward(*given: RewardAssigned) -> Trajectory:
        return _folded([TrajectoryOpened("t", "t"), *given])

    late = reward(RewardAssigned("t", None, 0.5), RewardAssigned("t", None, 1.0, supersedes="e1"))
    assert late.reward() == 1.0
    early = reward(RewardAssigned("t", None, 1.0, supersedes="e2"), RewardAssigned("t", None, 0.5))
    assert early.reward() == 1.0
    plain = reward(RewardAssigned("t", None, 0.5), RewardAssigned("t", None, 0.25))
    assert plain.reward() == 0.25
    both = reward(RewardAssigned("t", "u", 2.0), RewardAssigned("t", None, 3.0, "judge"))
    assert (both.reward(), both.reward(turn_id="u"), both.reward("judge")) == (None, 2.0, 3.0)
    # A judge's verdict may supersede the agent's own.
    other = reward(RewardAssigned("t", None, 0.5), RewardAssigned("t", None, 3.0, "judge", "e1"))
    assert (other.reward(), other.reward("judge")) == (None, 3.0)


def test_how_far_a_turn_got(story: Any) -> None:
    """Completion, failure, delivery and outcome of the story's trajectories."""
    first, second = fold(story["serve"]).values()
    got = [(t.completed is not None, t.failed is not None, t.delivered) for t in first.turns.values()]
    assert got == [(True, False, "sent"), (True, False, "echoed"), (False, True, None)]
    assert first.finished == TrajectoryFinished("t1", "completed", True)
    assert (first.reward(), first.reward("judge"), first.reward(turn_id="u1")) == (1.0, 0.75, 0.25)
    assert first.prompt_ids(first.turns["u2"]).tolist() == [1, 2, 3, 10, 11, 4, 5]
    assert [m["content"] for m in first.messages(first.turns["u2"])] == ["be brief", "2+2?", "4", "sure? é✓"]
    assert second.finished is None
    assert (second.opened.name, list(second.turns), list(second.paths())) == ("beta", ["u4"], [])


def test_messages_of_a_long_conversation() -> None:
    """A conversation of thousands of turns folds too: no recursion, each request exact."""
    count = 3000
    records: list[Record] = [TrajectoryOpened("t", "t")]
    for i in range(count):
        parent = f"u{i - 1}" if i else None
        records.append(_requested("t", f"u{i}", parent, i, [{"content": str(i)}]))
    trajectory = _folded(records)
    last = trajectory.turns[f"u{count - 1}"]
    assert trajectory.messages(last) == [{"content": str(i)} for i in range(count)]


def test_messages_do_not_share_the_log() -> None:
    """Changing the list that was given out changes nothing in the trajectory."""
    trajectory = _folded([TrajectoryOpened("t", "t"), _requested("t", "u", None, 0, [{"content": "x"}])])
    trajectory.messages(trajectory.turns["u"]).append({"content": "y"})
    assert trajectory.messages(trajectory.turns["u"]) == [{"content": "x"}]


def test_fold_as_it_goes() -> None:
    """`add` names the trajectory an event belongs to, once that is open; earlier events are kept."""
    folding = TrajectoryFold()
    assert folding.add(Event(RewardAssigned("t", None, 0.5, "judge"), "run", lane="a", seq=0)) is None
    assert folding.add(Event(TurnFailed("t", "u", "x"), "run")) is None
    assert folding.add(Event(TrajectoryOpened("t", "name"), "run")) == "t"
    assert folding.add(Event(_requested("t", "u", None, 0, []), "run")) == "t"
    assert folding.add(Event(TurnDelivered("t", "u", "echoed"), "run")) == "t"
    assert folding.add(Event(TurnDelivered("t", "u", "sent"), "run")) == "t"
    assert list(folding) == ["t"]
    assert folding["t"].turns["u"].delivered == "echoed"
    assert folding["t"].reward("judge") == 0.5
    folding.forget("t")
    assert folding.add(Event(TurnDelivered("t", "u", "sent"), "run")) is None
    assert list(folding) == []


def test_the_reward_in_force_does_not_depend_on_the_order_of_lanes() -> None:
    """Rewards are ordered by lane and place in it, whichever lane was read first."""
    opened = Event(TrajectoryOpened("t", "t"), "run", lane="b", seq=0)
    first = Event(RewardAssigned("t", None, 1.0), "run", lane="a", seq=7)
    second = Event(RewardAssigned("t", None, 2.0), "run", lane="b", seq=1)
    for order in ([opened, first, second], [first, opened, second], [opened, second, first]):
        assert fold(order)["t"].reward() == 2.0
