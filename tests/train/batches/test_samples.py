"""Trajectories become samples: each sampled token is trained once, in arrays that line up."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.stories import fabric

from rollbook.store.events import RewardAssigned, VersionSpan
from rollbook.store.fold.trajectory import Trajectory, fold
from rollbook.train.select.samples import Sample, all_samples, samples_of

IDS = st.lists(st.integers(0, 99), min_size=1, max_size=3)
# parent among the completed turns, prompt delta, completion, version, delivered, failed, has logprobs
TURN = st.tuples(
    st.integers(-1, 5),
    IDS,
    st.lists(st.integers(0, 99), max_size=4),
    st.none() | st.integers(0, 3),
    st.booleans(),
    st.sampled_from([False, False, False, True]),
    st.booleans(),
)


def _fold(records: list[Any]) -> Trajectory:
    (trajectory,) = fold(fabric.events(records)).values()
    return trajectory


def _forest(drawn: Any) -> tuple[list[Any], Trajectory]:
    """Turns with valid parents, and the trajectory of them."""
    turns: list[Any] = []
    for wanted, prompt, completion, version, delivered, failed, has_logprobs in drawn:
        done = [i for i, t in enumerate(turns) if not t.failed]
        parent = done[wanted] if 0 <= wanted < len(done) else None
        logprobs = -0.5 * np.arange(1, len(completion) + 1, dtype=np.float32) if has_logprobs else None
        turns.append(
            fabric.T(prompt, completion, parent, logprobs, version, 0.5, delivered and not failed, failed)
        )
    return turns, _fold(fabric.records("t", turns))


@given(st.lists(TURN, min_size=1, max_size=7))
@settings(max_examples=200)
def test_each_sampled_token_is_trained_in_exactly_one_sample(drawn: Any) -> None:
    """In any forest, a delivered turn's tokens have the mask in one sample, every other token in none."""
    turns, trajectory = _forest(drawn)
    samples = list(samples_of(trajectory))
    trained: Counter[str] = Counter()
    for sample in samples:
        at = 0
        for turn_id in sample.turn_ids:
            turn = turns[int(turn_id.split(".")[1])]
            start, stop = at + len(turn.prompt), at + len(turn.prompt) + len(turn.completion)
            assert sample.tokens[at:start].tolist() == list(turn.prompt)
            assert sample.tokens[start:stop].tolist() == list(turn.completion)
            assert not sample.loss_mask[at:start].any()
            masks = set(sample.loss_mask[start:stop].tolist())
            assert len(masks) <= 1, "a turn is trained whole or not at all"
            if masks == {True}:
                trained[turn_id] += 1
                assert turn.delivered
                _same_as_sampled(sample, slice(start, stop), turn)
            at = stop
        assert at == len(sample)
    expected = {f"t.{i}" for i, t in enumerate(turns) if t.delivered and not t.failed and t.completion}
    assert trained == dict.fromkeys(expected, 1)
    total = sum(len(turns[int(t.split(".")[1])].completion) for t in expected)
    assert sum(int(s.loss_mask.sum()) for s in samples) == total


def _same_as_sampled(sample: Sample, place: slice, turn: Any) -> None:
    """The trained tokens carry their turn's logprobs, version and temperature."""
    expected = np.full(len(turn.completion), np.nan) if turn.logprobs is None else turn.logprobs
    assert np.array_equal(sample.logprobs[place], expected, equal_nan=True)
    assert set(sample.versions[place].tolist()) == {-1 if turn.version is None else turn.version}
    assert set(sample.temperatures[place].tolist()) == {0.5}


@given(st.lists(TURN, min_size=1, max_size=7))
@settings(max_examples=100)
def test_arrays_line_up(drawn: Any) -> None:
    """All arrays of a sample have one length and their types, and are neutral where nothing is trained."""
    _, trajectory = _forest(drawn)
    for sample in samples_of(trajectory):
        arrays = (sample.tokens, sample.loss_mask, sample.logprobs, sample.versions, sample.temperatures)
        assert {a.shape for a in arrays} == {(len(sample),)}
        assert [str(a.dtype) for a in arrays] == ["int32", "bool", "float32", "int64", "float32"]
        rest = ~sample.loss_mask
        assert (sample.logprobs[rest] == 0).all()
        assert (sample.versions[rest] == -1).all()
        assert (sample.temperatures[rest] == 1).all()
        leaf = trajectory.turns[sample.leaf_turn_id]
        assert leaf.completed is not None
        whole = [*trajectory.prompt_ids(leaf).tolist(), *leaf.completed.completion_ids.tolist()]
        assert sample.tokens.tolist() == whole
        assert sample.turn_ids[-1] == sample.leaf_turn_id


def test_the_first_leaf_owns_a_shared_prefix() -> None:
    """Two leaves over one root: the first trains the root's tokens, the second has them as context."""
    turns = [fabric.T([1, 2], [3], None), fabric.T([4], [5, 6], 0), fabric.T([7], [8], 0)]
    first, second = samples_of(_fold(fabric.records("t", turns)))
    assert first.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert first.loss_mask.tolist() == [False, False, True, False, True, True]
    assert second.tokens.tolist() == [1, 2, 3, 7, 8]
    assert second.loss_mask.tolist() == [False, False, False, False, True]


@given(st.lists(TURN, min_size=1, max_size=7), st.sampled_from(["last", "longest"]))
@settings(max_examples=150)
def test_one_path_of_each_trajectory(drawn: Any, rule: Any) -> None:
    """It trains all that can be trained on it, the others the rest, and nothing is trained twice."""
    turns, trajectory = _forest(drawn)
    every, samples = list(samples_of(trajectory)), list(samples_of(trajectory, paths=rule))
    assert [s.leaf_turn_id for s in samples] == [s.leaf_turn_id for s in every]
    assert sum(s.preferred for s in samples) == (len(samples) > 0)
    trainable = {
        f"t.{i}": len(t.completion) if t.delivered and not t.failed else 0 for i, t in enumerate(turns)
    }
    totals = [sum(trainable[turn_id] for turn_id in s.turn_ids) for s in samples]
    for place, sample in enumerate(samples):
        if sample.preferred:
            assert sample.trained == totals[place]
            later = [(s.turn_ids[-1], totals[i]) for i, s in enumerate(samples) if i > place]
            if rule == "longest":
                assert totals[place] == max(totals)
                assert all(total < totals[place] for _, total in later)
            else:
                had = [turns[int(s.leaf_turn_id.split(".")[1])].delivered for s in samples]
                assert place == (max(i for i, h in enumerate(had) if h) if any(had) else len(had) - 1)
    assert sum(s.trained for s in samples) == sum(s.trained for s in every)


def test_the_last_leaf_owns_its_path() -> None:
    """By hand: the root's token goes to the last leaf, the longest path is the first."""
    turns = [fabric.T([1, 2], [3], None), fabric.T([4], [5, 6], 0), fabric.T([7], [8], 0)]
    trajectory = _fold(fabric.records("t", turns))
    owned = {
        rule: [(s.preferred, s.tokens[s.loss_mask].tolist()) for s in samples_of(trajectory, paths=rule)]
        for rule in ("all", "last", "longest")
    }
    assert owned == {
        "all": [(True, [3, 5, 6]), (True, [8])],
        "last": [(False, [5, 6]), (True, [3, 8])],
        "longest": [(True, [3, 5, 6]), (False, [8])],
    }


@pytest.mark.parametrize("kind", ["undelivered", "failed"])
def test_what_the_client_did_not_get_is_not_trained(kind: str) -> None:
    """An undelivered turn is context without loss; a failed one leaves no token at all."""
    bad = fabric.T([4], [5, 6], 0, delivered=False, failed=kind == "failed")
    samples = list(samples_of(_fold(fabric.records("t", [fabric.T([1, 2], [3]), bad]))))
    assert len(samples) == 1
    masked = [False, False, True]
    expected = [1, 2, 3] if kind == "failed" else [1, 2, 3, 4, 5, 6]
    assert samples[0].tokens.tolist() == expected
    assert samples[0].loss_mask.tolist() == masked + [False] * (len(expected) - 3)


def test_an_undelivered_turn_under_a_delivered_one_is_masked() -> None:
    """The loss of a path leaves out the one turn in its middle that was not delivered."""
    turns = [fabric.T([1], [2]), fabric.T([3], [4], 0, delivered=False), fabric.T([5], [6], 1)]
    (sample,) = samples_of(_fold(fabric.records("t", turns)))
    assert sample.tokens[sample.loss_mask].tolist() == [2, 6]


def test_a_teachers_tokens_have_no_logprob() -> None:
    """Without logprobs the trained positions are NaN, which JSON shows as null, and versions too."""
    (sample,) = samples_of(_fold(fabric.records("t", [fabric.T(logprobs=None, version=None)])))
    assert np.isnan(sample.logprobs).tolist() == [False, False, True, True]
    shown = orjson.loads(orjson.dumps(sample.as_json()))
    assert shown["logprobs"] == [0.0, 0.0, None, None]
    assert shown["policy_versions"] == [None] * 4
    assert shown["loss_mask"] == [0, 0, 1, 1]
    assert sample.oldest_version is None


@pytest.mark.parametrize(("recorded", "used"), [(0.7, 0.7), (1.0, 1.0), (0.0, 1.0)])
def test_trained_positions_have_their_turns_temperature(recorded: float, used: float) -> None:
    """Trained positions have the temperature of their turn; greedy ones the distribution's own, 1."""
    (sample,) = samples_of(_fold(fabric.records("t", [fabric.T(temperature=recorded)])))
    assert sample.temperatures.tolist() == np.array([1, 1, used, used], np.float32).tolist()


def test_versions_follow_the_spans() -> None:
    """Weights that changed within a completion show in its tokens' versions; the oldest is the stalest."""
    records = fabric.records("t", [fabric.T([1], [2, 3, 4])])
    spans = (VersionSpan("actor", 7, 0, 1), VersionSpan("actor", 5, 1, 3))
    changed = [replace(r, version_spans=spans) if r.KIND == "turn.completed" else r for r in records]
    (sample,) = samples_of(_fold(changed))
    assert sample.versions.tolist() == [-1, 7, 5, 5]
    assert sample.oldest_version == 5


def test_rewards_are_those_of_the_source() -> None:
    """A sample has its source's reward in force, of the trajectory and of its turns."""
    given_rewards = [
        RewardAssigned("t", None, 0.25),
        RewardAssigned("t", None, 0.75, "judge"),
        RewardAssigned("t", "t.0", 2.0),
        RewardAssigned("t", None, 0.5),
    ]
    trajectory = _fold([*fabric.records("t"), *given_rewards])
    by_source = {s: next(samples_of(trajectory, s)) for s in ("agent", "judge", "nobody")}
    assert {s: x.reward for s, x in by_source.items()} == {"agent": 0.5, "judge": 0.75, "nobody": None}
    assert {s: x.rewards for s, x in by_source.items()} == {"agent": {"t.0": 2.0}, "judge": {}, "nobody": {}}


def test_digest_covers_every_array() -> None:
    """Another value anywhere in a sample is another digest; the same sample has the same one."""
    trajectory = _fold(fabric.records("t"))
    (sample,), (again,) = samples_of(trajectory), samples_of(trajectory)
    assert sample.digest() == again.digest()
    for name in ("tokens", "loss_mask", "logprobs", "versions", "temperatures"):
        array = getattr(sample, name).copy()
        array[-1] = not array[-1] if array.dtype == bool else array[-1] + 1
        assert replace(sample, **{name: array}).digest() != sample.digest(), name


def test_samples_come_in_the_order_of_trajectories() -> None:
    """All samples of several trajectories, as their leaves follow each other."""
    records = [*fabric.records("b", [fabric.T(), fabric.T()]), *fabric.records("a", finished=False)]
    samples = all_samples(fold(fabric.events(records)).values())
    assert [s.leaf_turn_id for s in samples] == ["b.0", "b.1", "a.0"]
    assert samples[0].reference["turn_id"] == "b.0"
    assert samples[0].reference["trajectory_id"] == "b"


@pytest.mark.parametrize("altered", [[], ["constraint"], ["frequency_penalty", "logit_bias"]])
def test_logprobs_of_altered_logits_are_not_trained(altered: list[str]) -> None:
    """Under a constraint or a penalty nobody can compute the same logprob again: such a turn is context."""
    turns = [fabric.T([1], [2, 3], None, np.array([-1, -2], np.float32), 0, 0.5, True, False)]
    turns.append(fabric.T([4], [5], 0, np.array([-3], np.float32), 0, 0.5, True, False))
    records = fabric.records("t", turns)
    changed = [
        replace(r, logprob_semantics=r.logprob_semantics | {"altered": altered})
        if getattr(r, "completion_ids", None) is not None and len(r.completion_ids) == 2
        else r
        for r in records
    ]
    (sample,) = samples_of(_fold(changed))
    assert sample.tokens.tolist() == [1, 2, 3, 4, 5]
    first = not altered
    assert sample.loss_mask.tolist() == [False, first, first, False, True]
    assert sample.logprobs.tolist() == [0, -1, -2, 0, -3] if first else [0, 0, 0, 0, -3]
