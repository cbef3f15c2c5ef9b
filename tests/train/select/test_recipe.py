"""Recipes: what is a candidate, and which rule drops which sample."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.stories import fabric

from rollbook.store.events import RewardAssigned
from rollbook.store.fold.trajectory import fold
from rollbook.train.algorithms.policy_gradient import Grpo
from rollbook.train.algorithms.registry import PolicyGradient
from rollbook.train.algorithms.sft import Sft
from rollbook.train.config.recipe import RecipeConfig
from rollbook.train.select.recipe import ModelLimits, is_candidate
from rollbook.train.select.references import odd_rewards
from rollbook.train.select.sample_ref import SampleRef
from rollbook.train.select.samples import PathColumns, Sample, all_samples
from rollbook.train.select.sorting import select

GRPO = Grpo(name="grpo", group_size=2)
SFT = Sft(name="sft")


def _samples(*trajectories: Any) -> list[Sample]:
    records = [record for trajectory in trajectories for record in trajectory]
    return all_samples(fold(fabric.events(records)).values())


@pytest.mark.parametrize(
    ("splits", "expected"),
    [(("train",), ["a"]), (("teacher",), ["b"]), (("train", "teacher"), ["a", "b"]), ((), [])],
)
def test_candidates_are_of_the_recipes_splits(splits: Any, expected: list[str]) -> None:
    """A sample is a candidate if its split is named and it has a trainable token."""
    samples = _samples(
        fabric.records("a"),
        fabric.records("b", split="teacher"),
        fabric.records("c", split="eval"),
        fabric.records("d", [fabric.T(delivered=False)]),
    )
    recipe = RecipeConfig(splits=splits)
    assert [s.name for s in samples if is_candidate(s, recipe)] == expected


@pytest.mark.parametrize(("version", "dropped"), [(5, False), (6, True)])
def test_staleness_is_held_against_the_oldest_token(version: int, dropped: bool) -> None:
    """A sample is dropped when its oldest token is more than the limit behind, with the numbers."""
    turns = [fabric.T(version=3), fabric.T([5], [6], 0, version=5)]
    samples = _samples(fabric.records("a", turns))
    kept, drops = select(samples, RecipeConfig(max_staleness=2), SFT, version)
    assert (len(kept), len(drops)) == ((0, 1) if dropped else (1, 0))
    if dropped:
        assert drops[0].rule == "staleness"
        assert drops[0].detail == {"staleness": 3, "max_staleness": 2, "oldest_version": 3}
        assert drops[0].sample is samples[0]


@given(
    st.lists(st.integers(-1, 6), min_size=1, max_size=12),
    st.integers(0, 8),
    st.sampled_from([0.0, 0.1, 0.29, 0.5, 0.9, 1.0]),
)
def test_staleness_by_share(versions: list[int], version: int, share: float) -> None:
    """Dropped if more than this share of the tokens of known versions is too old, and with 1 if all are."""
    turn = fabric.T([1, 2], range(10, 10 + len(versions)))
    [sample] = _samples(fabric.records("a", [turn]))
    per_token = np.full(len(sample), -1)
    per_token[sample.loss_mask] = versions
    recipe = RecipeConfig(max_staleness=2, stale_share=share, other_policies=None)
    kept, _ = select([replace(sample, versions=per_token)], recipe, SFT, version)
    known = [v for v in versions if v >= 0]
    stale = sum(version - v > 2 for v in known)
    all_stale = bool(known) and stale == len(known)
    assert (not kept) == (all_stale if share == 1 else Fraction(stale) > Fraction(str(share)) * len(known))


def test_the_share_that_decides() -> None:
    """By default one token is enough, and where stale tokens are masked, all must be."""
    assert RecipeConfig().deciding_share == 0
    assert RecipeConfig(stale_tokens="mask").deciding_share == 1
    assert RecipeConfig(stale_tokens="mask", stale_share=0.25).deciding_share == 0.25


def test_without_a_limit_or_a_version_nothing_is_stale() -> None:
    """No limit keeps everything; a teacher's tokens, which no version sampled, never age."""
    samples = _samples(fabric.records("a", [fabric.T(version=None)]))
    assert len(select(samples, RecipeConfig(max_staleness=0), SFT, 1000)[0]) == 1
    old = _samples(fabric.records("b"))
    assert len(select(old, RecipeConfig(), SFT, 1000)[0]) == 1


@pytest.mark.parametrize("limit", [None, 9])
def test_grpo_trains_no_token_of_unknown_weights(limit: int | None) -> None:
    """One token without a version is enough, bound or not; to SFT the sample is a text like a teacher's."""
    half = [fabric.T(version=9), fabric.T([5], [6], 0, version=None)]
    samples = _samples(fabric.records("a", half, reward=1.0), fabric.records("b", reward=0.0))
    recipe = RecipeConfig(max_staleness=limit, drop_zero_variance=False)
    kept, drops = select(samples, recipe, GRPO, 9)
    dropped = [(d.sample.name, d.rule, d.detail) for d in drops]
    assert ([s.name for s in kept], dropped) == (["b"], [("a", "no_version", {"tokens": 1})])
    assert len(select(samples, recipe, SFT, 9)[0]) == 2


def test_grpo_needs_a_reward_and_logprobs() -> None:
    """GRPO drops what has no reward of the source, then what has no logprobs; SFT takes both."""
    samples = _samples(
        fabric.records("unrewarded", group="g"),
        fabric.records("unscored", [fabric.T(logprobs=None)], group="g", reward=1.0),
        fabric.records("x", group="g", reward=1.0),
        fabric.records("y", group="g", reward=0.0),
    )
    kept, drops = select(samples, RecipeConfig(), GRPO, 0)
    assert [s.name for s in kept] == ["x", "y"]
    assert [(d.sample.name, d.rule, d.detail) for d in drops] == [
        ("unrewarded", "no_reward", {"source": "agent"}),
        ("unscored", "no_logprobs", {}),
    ]
    assert [s.name for s in select(samples, RecipeConfig(), SFT, 0)[0]] == [s.name for s in samples]
    _, judged = select(samples, RecipeConfig(reward_source="judge"), GRPO, 0)
    assert [d.detail for d in judged if d.rule == "no_reward"] == [{"source": "judge"}]


@pytest.mark.parametrize("wanted", [True, False])
def test_groups_of_equal_rewards_are_dropped_if_asked(wanted: bool) -> None:
    """A group whose rewards are equal is dropped whole where the recipe says so, others are not."""
    rewards = {"flat": (0.5, 0.5), "steep": (0.5, 1.0)}
    samples = _samples(
        *(
            fabric.records(f"{group}{i}", group=group, reward=reward)
            for group, values in rewards.items()
            for i, reward in enumerate(values)
        ),
    )
    kept, drops = select(samples, RecipeConfig(drop_zero_variance=wanted), GRPO, 0)
    assert {s.group for s in kept} == ({"steep"} if wanted else {"flat", "steep"})
    assert [(d.sample.name, d.rule, d.detail) for d in drops] == (
        [(f"flat{i}", "zero_variance", {"reward": 0.5}) for i in (0, 1)] if wanted else []
    )


def test_each_candidate_is_kept_or_dropped_once() -> None:
    """Kept and dropped samples together are the candidates, each once, whatever the rules."""
    turns = {"stale": fabric.T(version=0), "fresh": fabric.T(version=9)}
    samples = _samples(
        *(
            fabric.records(f"{age}{i}", [turns[age]], group=f"g{i % 2}", reward=reward)
            for age in turns
            for i, reward in enumerate((1.0, 0.0, None, 1.0))
        ),
    )
    kept, drops = select(samples, RecipeConfig(max_staleness=1), GRPO, 9)
    assert sorted([s.name for s in kept] + [d.sample.name for d in drops]) == sorted(s.name for s in samples)
    assert {d.sample.name for d in drops if d.rule == "staleness"} == {f"stale{i}" for i in range(4)}


LIMITS = ModelLimits(vocabulary=10, context=4)


@pytest.mark.parametrize(
    ("turn", "rule", "detail"),
    [
        ({"completion": (3, 9)}, None, {}),
        ({"completion": (3, 10)}, "outside_vocabulary", {"token": 10, "vocabulary": 10}),
        ({"prompt": (-2, 2)}, "outside_vocabulary", {"token": -2, "vocabulary": 10}),
        ({"completion": (3, 4, 5)}, "too_long", {"tokens": 5, "context": 4}),
        ({"prompt": (), "completion": (3,)}, "nothing_trainable", {"tokens": 1}),
    ],
)
def test_what_the_model_cannot_be_given(turn: Any, rule: str | None, detail: Any) -> None:
    """Ids that it has no row for, more tokens than it has places, a first token alone: each by its rule."""
    samples = _samples(fabric.records("a", [fabric.T(**turn)], reward=1.0, group="g"))
    for algorithm in (SFT, GRPO):
        kept, drops = select(samples, RecipeConfig(drop_zero_variance=False), algorithm, 0, LIMITS)
        assert len(kept) == (rule is None)
        assert [(d.rule, d.detail) for d in drops] == ([] if rule is None else [(rule, detail)])


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_no_number(reward: float) -> None:
    """It is not compared with others: its sample is dropped, and the rest of its group is compared."""
    members = [fabric.records(f"t{i}", reward=r, group="g") for i, r in enumerate((0.0, reward, 1.0))]
    kept, drops = select(_samples(*members), RecipeConfig(), GRPO, 0)
    assert [s.name for s in kept] == ["t0", "t2"]
    assert [(d.sample.name, d.rule, d.detail) for d in drops] == [
        ("t1", "reward_not_finite", {"reward": str(reward)})
    ]
    assert len(select(_samples(*members), RecipeConfig(), SFT, 0)[0]) == 3, "it learns from none"


TURNS = PolicyGradient.model_validate({"name": "policy_gradient", "group_size": 2, "turn_rewards": True})


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_turns_reward_that_is_no_number(reward: float) -> None:
    """Where rewards of turns count, its sample is dropped; not for a turn that is not trained."""
    members = [*fabric.records("a", reward=0.0, group="g"), RewardAssigned("a", "a.0", reward)]
    unseen = fabric.records("b", [fabric.T(), fabric.T([5], [6], 0, delivered=False)], reward=1.0, group="g")
    unseen.append(RewardAssigned("b", "b.1", reward))
    samples = _samples(members, unseen)
    recipe = RecipeConfig(drop_zero_variance=False)
    kept, drops = select(samples, recipe, TURNS, 0)
    dropped = [(d.sample.name, d.rule, d.detail) for d in drops]
    assert dropped == [("a", "reward_not_finite", {"turn_reward": str(reward)})]
    assert [s.name for s in kept] == ["b"]
    assert len(select(samples, recipe, GRPO, 0)[0]) == 2


@pytest.mark.parametrize("value", [-math.inf, math.inf])
def test_a_logprob_that_is_infinite(value: float) -> None:
    """No ratio can be taken to it; an algorithm that takes none has its sample."""
    samples = _samples(
        fabric.records("a", [fabric.T(completion=(3, 4), logprobs=(-1.0, value))], reward=0.0, group="g"),
        fabric.records("b", reward=1.0, group="g"),
    )
    kept, drops = select(samples, RecipeConfig(drop_zero_variance=False), GRPO, 0)
    assert [s.name for s in kept] == ["b"]
    assert [(d.sample.name, d.rule, d.detail) for d in drops] == [("a", "logprob_not_finite", {})]
    assert len(select(samples, RecipeConfig(), SFT, 0)[0]) == 2


def test_a_turns_reward_in_columns() -> None:
    """The first that is no number on each path, of turns that have loss there."""
    turns = pa.table({"turn_id": ["a", "b", "c", "d"]})
    path, none = np.array([0, 1, 2, 3]), np.ones(3, np.bool_)
    paths = PathColumns(np.array([0, 2, 3, 4]), path, np.ones(4, np.bool_), none)
    rewards = {"a": 1.0, "b": math.inf, "c": -math.inf, "d": 2.0}
    assert odd_rewards(rewards, turns, paths, np.array([1, 1, 1, 1])).tolist() == [math.inf, -math.inf, 0.0]
    assert odd_rewards(rewards, turns, paths, np.array([1, 1, 0, 1])).tolist() == [math.inf, 0.0, 0.0]
    assert odd_rewards({"a": 1.0}, turns, paths, np.ones(4, np.int64)).tolist() == [0.0] * 3


MEMBER = st.tuples(st.sampled_from(["g", "h", None]), st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0]))


@given(st.lists(MEMBER, max_size=14), st.sampled_from([0.01, 0.25, 0.5, 0.75, 1.0]))
def test_the_best_of_groups_are_those_of_a_loop(members: list[Any], fraction: float) -> None:
    """Trajectories of several samples count once; those in no group are their own; the first of equals
    stay."""
    rewards = {(group, number): reward for group, number, reward in members}
    samples = [
        _candidate(f"{group}{number}", group, rewards[group, number], i)
        for i, (group, number, _) in enumerate(members)
    ]
    recipe = RecipeConfig(top_fraction=fraction, drop_zero_variance=False)
    kept, drops = select(samples, recipe, Sft(name="sft"), 0)
    expected = set()
    for group in {sample.group or sample.trajectory_id for sample in samples}:
        mine = {s.trajectory_id: s.reward for s in samples if (s.group or s.trajectory_id) == group}
        count = max(math.ceil(fraction * len(mine) - 1e-9), 1)
        expected |= set(sorted(mine, key=lambda name: -mine[name])[:count])
    assert [s for s in samples if s.trajectory_id in expected] == kept
    assert {drop.rule for drop in drops} <= {"top_fraction"}


@given(st.lists(MEMBER, max_size=14))
def test_flat_groups_are_those_of_a_loop(members: list[Any]) -> None:
    """Those in no group are one."""
    samples = [
        _candidate(f"{group}{number}", group, reward, i) for i, (group, number, reward) in enumerate(members)
    ]
    kept, drops = select(samples, RecipeConfig(), Grpo(name="grpo"), 0)
    values: dict[Any, set[float]] = {}
    for sample in samples:
        values.setdefault(sample.group, set()).add(sample.reward)
    assert kept == [sample for sample in samples if len(values[sample.group]) > 1]
    assert {drop.rule for drop in drops} <= {"zero_variance"}


@given(st.lists(MEMBER, max_size=14), st.integers(1, 5))
def test_small_groups_are_those_of_a_loop(members: list[Any], least: int) -> None:
    """Trajectories count once; one in no group is a group of one."""
    samples = [
        _candidate(f"{group}{number}", group, reward, i) for i, (group, number, reward) in enumerate(members)
    ]
    kept, drops = select(samples, RecipeConfig(min_group=least), Sft(name="sft"), 0)
    there: dict[str, set[str]] = {}
    for sample in samples:
        there.setdefault(sample.group or sample.trajectory_id, set()).add(sample.trajectory_id)
    counts = {name: len(ids) for name, ids in there.items()}
    assert kept == [s for s in samples if counts[s.group or s.trajectory_id] >= least]
    assert [(d.rule, d.detail) for d in drops] == [
        ("group_incomplete", {"members": counts[s.group or s.trajectory_id], "min_group": least})
        for s in samples
        if counts[s.group or s.trajectory_id] < least
    ]


def test_members_that_a_rule_drops_make_a_group_incomplete() -> None:
    """And it is that rule which is recorded of them; a group that is whole stays."""
    samples = _samples(
        *(
            fabric.records(f"{group}{i}", group=group, reward=reward)
            for group, rewards in {"g": (0.0, 1.0, None), "h": (0.0, 1.0, 2.0)}.items()
            for i, reward in enumerate(rewards)
        ),
    )
    kept, drops = select(samples, RecipeConfig(min_group=3), GRPO, 0)
    assert [s.name for s in kept] == ["h0", "h1", "h2"]
    incomplete = ("group_incomplete", {"members": 2, "min_group": 3})
    assert [(d.sample.name, d.rule, d.detail) for d in drops] == [
        ("g2", "no_reward", {"source": "agent"}),
        ("g0", *incomplete),
        ("g1", *incomplete),
    ]


@pytest.mark.parametrize("statuses", [None, ("completed",), ("truncated", "failed")])
def test_statuses(statuses: Any) -> None:
    """By default every final status is trained on; one that is not named is dropped, with what was named."""
    names = ("completed", "truncated", "aborted", "failed", "odd")
    samples = _samples(*(fabric.records(name, status=name) for name in names))
    kept, drops = select(samples, RecipeConfig(statuses=statuses), SFT, 0)
    assert [s.name for s in kept] == [name for name in names if statuses is None or name in statuses]
    assert [(d.sample.name, d.rule, d.detail) for d in drops] == [
        (s.name, "status", {"status": None if s.name == "odd" else s.name, "statuses": list(statuses)})
        for s in samples
        if statuses is not None and s.name not in statuses
    ]


def _candidate(trajectory: str, group: str | None, reward: float, leaf: int) -> SampleRef:
    """A reference that no other rule drops."""
    return SampleRef(
        run="r",
        trajectory_id=trajectory,
        leaf_turn_id=f"{leaf}",
        name=trajectory,
        group=group,
        split="train",
        reward=reward,
        trained=1,
        unknown=0,
        exact=True,
        oldest_version=0,
        newest_version=0,
        deciding=0,
        success=None,
        status="completed",
        preferred=True,
        infinite=False,
        turn_reward=0.0,
        truncated=False,
        chosen=True,
        erased=False,
        length=2,
        lowest_token=1,
        highest_token=2,
        learnable=1,
    )
