"""Keys of a recipe, each over a log made for it: what is trained, and by which rule the rest is dropped."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.digest import digest_arrays
from rollbook.store.errors import ConfigError
from rollbook.store.events import PreferenceAdded, SampleDropped, StepCommitted, StepPlanned
from rollbook.testing.ledger import fold_ledger
from rollbook.train.batches.experience import age_weights, trained_masks
from rollbook.train.select.samples import all_samples


@pytest.fixture(scope="module")
def groups_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three groups of four trajectories: rewards 0 to 3 in two of them, all 1 in the third.

    Trajectories with an even number succeeded; those of group b carry the label level=hard; the first turn of
    each is of version 0 and the second of version 2. Copy it; never write.
    """
    log = rb.open(tmp_path_factory.mktemp("groups") / "store", create=True)
    records: list[Any] = []
    for group, rewards in (("a", range(4)), ("b", range(4)), ("c", [1] * 4)):
        for i, reward in enumerate(rewards):
            turns = [fabric.T([5, 6 + i], [20, 21], version=0), fabric.T([9], [40 + i], 0, version=2)]
            labels = {"level": "hard"} if group == "b" else {}
            records += fabric.records(
                f"{group}{i}", turns, group=group, reward=float(reward), success=i % 2 == 0, labels=labels
            )
    fabric.append(log, records + fabric.teacher_records(18))
    return log.path


@pytest.fixture
def log(groups_path: Path, tmp_path: Path) -> Store:
    """A copy of the three groups."""
    return rb.open(shutil.copytree(groups_path, tmp_path / "store"))


@pytest.fixture(scope="module")
def version_2_path(groups_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three groups, and a policy that two supervised steps made. Copy it; never write."""
    log = rb.open(shutil.copytree(groups_path, tmp_path_factory.mktemp("version-2") / "store"))
    fabric.train(log, fabric.config(fabric.SFT, steps=2))
    return log.path


@pytest.fixture
def at_version_2(version_2_path: Path, tmp_path: Path) -> Store:
    """A copy of the three groups with a policy of version 2."""
    return rb.open(shutil.copytree(version_2_path, tmp_path / "version-2"))


def _train(log: Store, recipe: dict[str, Any], steps: int = 1, **changes: Any) -> Any:
    """One step of three groups of four, or of `groups`; (the trajectories that it used, rule -> how many were
    dropped)."""
    algorithm = {"name": "grpo", "groups": 3, "group_size": 4} | changes
    fabric.train(log, fabric.config(fabric.GRPO, steps=steps, algorithm=algorithm, recipe=recipe))
    events = [event.record for event in log.events()]
    used = [ref["trajectory_id"] for e in events if isinstance(e, StepPlanned) for ref in e.samples]
    return sorted(used), Counter(e.rule for e in events if isinstance(e, SampleDropped))


def _named(groups: str, members: str = "0123") -> list[str]:
    return [f"{group}{i}" for group in groups for i in members]


@pytest.mark.more_but("---zero_variance", "min_reward*")
@pytest.mark.parametrize(
    ("recipe", "groups", "used", "dropped"),
    [
        ({}, 3, _named("ab"), {"zero_variance": 4}),
        ({"drop_zero_variance": False}, 3, _named("abc"), {}),
        ({"success": True}, 2, _named("ab", "02"), {"success": 6, "zero_variance": 2}),
        ({"success": False}, 2, _named("ab", "13"), {"success": 6, "zero_variance": 2}),
        ({"min_reward": 2.0}, 2, _named("ab", "23"), {"min_reward": 8}),
        ({"top_fraction": 0.5}, 2, _named("ab", "23"), {"top_fraction": 6, "zero_variance": 2}),
        ({"where": "\"group\" = 'a' AND reward > 0"}, 1, _named("a", "123"), {"not_chosen": 9}),
        ({"labels": ["level=hard"]}, 1, _named("b"), {"not_chosen": 8}),
        ({"labels": ["level=easy"], "drop_zero_variance": False}, 1, [], {"not_chosen": 12}),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_is_used_and_what_is_dropped(
    log: Store, recipe: dict[str, Any], groups: int, used: list[str], dropped: dict[str, int]
) -> None:
    """Each drop is an event with its rule, and the step replays."""
    if not used:
        with pytest.raises(Exception, match="are dropped by the rule not_chosen"):
            _train(log, recipe, groups=groups)
        return
    assert _train(log, recipe, groups=groups) == (used, dropped)
    assert replay_step(log, 0).bit_for_bit


def test_models(log: Store) -> None:
    """Turns that asked for no model by name are of none of these."""
    with pytest.raises(Exception, match="are dropped by the rule not_chosen"):
        _train(log, {"models": ["other"]})


def test_refilled_steps_are_whole(log: Store) -> None:
    """A group without a difference in reward makes no step smaller: two steps of one group each are taken."""
    used, dropped = _train(log, {"refill": True}, steps=2, groups=1)
    assert (used, dropped) == (_named("ab"), {"zero_variance": 4})
    plans = [e.record for e in log.events() if isinstance(e.record, StepPlanned)]
    assert [len(plan.samples) for plan in plans] == [4, 4]


def test_stale_tokens_are_masked(at_version_2: Store) -> None:
    """At version 2 and a limit of 1, tokens of version 0 have no loss, those of version 2 have; it
    replays."""
    log = at_version_2
    recipe = {"max_staleness": 1, "stale_tokens": "mask"}
    _train(log, recipe)
    steps = [e.record for e in log.events() if isinstance(e.record, StepCommitted)]
    assert (steps[-1].metrics["samples"], steps[-1].metrics["trained_tokens"]) == (8, 8)
    assert steps[-1].metrics["staleness_max"] == 0
    assert replay_step(log, 2).bit_for_bit


@pytest.mark.more
def test_a_share_of_stale_tokens(at_version_2: Store) -> None:
    """At version 2 and a limit of 1, tokens of version 0 are too old: two of three of each sample."""
    log = at_version_2
    with pytest.raises(Exception, match="are dropped by the rule staleness"):
        _train(log, {"max_staleness": 1, "stale_tokens": "mask", "stale_share": 0.66})
    _train(log, {"max_staleness": 1, "stale_share": 0.67})
    steps = [e.record for e in log.events() if isinstance(e.record, StepCommitted)]
    assert (steps[-1].metrics["samples"], steps[-1].metrics["trained_tokens"]) == (8, 24)
    assert steps[-1].metrics["staleness_max"] == 2
    assert replay_step(log, 2).bit_for_bit


@pytest.mark.more
def test_all_stale_is_dropped(log: Store) -> None:
    """At version 4, even the newest token is too old."""
    fabric.train(log, fabric.config(fabric.SFT, steps=4))
    with pytest.raises(Exception, match="are dropped by the rule staleness"):
        _train(log, {"max_staleness": 1, "stale_tokens": "mask"})


def test_what_is_wrong_with_a_condition_is_said(log: Store) -> None:
    """A column that is not there, a text that is no SQL, a tail, a label without a value."""
    with pytest.raises(ConfigError, match=r"recipe.where 'rewart > 1': .*rewart"):
        _train(log, {"where": "rewart > 1"})
    with pytest.raises(ConfigError, match=r"recipe\.where 'reward >': "):
        _train(log, {"where": "reward >"})
    with pytest.raises(ConfigError, match="go with --source cut"):
        fabric.train(log, fabric.config(fabric.GRPO, recipe={"where": "reward > 1"}), "tail")
    with pytest.raises(ConfigError, match=r"recipe.labels.0: "):
        fabric.config(fabric.GRPO, recipe={"labels": ["hard"]})


@pytest.mark.more
def test_several_runs_train_on_one_recording(log: Store, cli: Callable[..., tuple[int, str, str]]) -> None:
    """Another run, with weights of its own, uses what this run recorded, which stays this run's to use."""
    fabric.append(log, fabric.records("x0", [fabric.T([5, 6], [20, 21])], group="a", reward=9.0), run="other")
    recipe = {"source_runs": [fabric.RUN]}
    for run in ("sweep-1", "sweep-2"):
        config = fabric.config(
            fabric.GRPO,
            run=run,
            steps=1,
            algorithm={"name": "grpo", "groups": 3, "group_size": 4, "clip_high": 0.3},
            recipe=recipe,
        )
        fabric.train(log, config, lane=run)
        result = replay_step(log, 0, run)
        assert result.bit_for_bit, result.differs_in
        assert result.metrics["samples"] == 8
        assert result.metrics["staleness_max"] is None, "versions of another run say nothing"
        assert result.metrics["engine_logprob_gap"] is None
    used, _ = _train(log, {})
    assert len(used) == 3 * 8
    with rb.connect(log.path) as connection:
        assert connection.execute("select sum(tokens) from ledger where term = 'trained'").fetchone() == (24,)
    assert cli("ledger", "--store", log.path)[0] == 0, "each token counts once, whoever trains on it"


def test_groups_of_two_runs_are_two(log: Store) -> None:
    """A group of the same name in another run is another group."""
    for i in range(4):
        records = fabric.records(f"y{i}", [fabric.T([5, 6 + i], [20, 21])], group="a", reward=float(i))
        fabric.append(log, records, run="other")
    recipe = {"source_runs": [fabric.RUN, "other"]}
    config = fabric.config(
        fabric.GRPO, steps=1, algorithm={"name": "grpo", "groups": 3, "group_size": 4}, recipe=recipe
    )
    fabric.train(log, config)
    plan = next(e.record for e in log.events() if isinstance(e.record, StepPlanned))
    assert len(plan.samples) == 8
    assert replay_step(log, 0, fabric.RUN).bit_for_bit


def test_old_tokens_count_less(log: Store) -> None:
    """A token's loss is multiplied by the decay for each version of its age; the step replays. A token of a
    version that is still to come has none, and would count for more than a new one: it is not trained on."""
    fabric.append(log, fabric.rollout_records(2, 4, first=60))
    _train(log, {"age_decay": 0.5}, groups=2)
    [plan] = [e.record for e in log.events() if isinstance(e.record, StepPlanned)]
    [done] = [e.record for e in log.events() if isinstance(e.record, StepCommitted)]
    assert plan.recipe["age_decay"] == 0.5
    assert {e.record.rule for e in log.events() if isinstance(e.record, SampleDropped)} == {"newer_version"}
    assert "importance_weights" in done.digests
    result = replay_step(log, 0)
    assert (result.bit_for_bit, "importance_weights" in result.stages) == (True, True)


def test_weights_of_ages(log: Store) -> None:
    """By hand: ages 3 and 1, and tokens of no known version; none without a decay."""
    samples = [s for s in all_samples(log.trajectories().values()) if s.trajectory_id in ("a0", "teach0")]
    masks = trained_masks(samples)
    assert age_weights(samples, masks, 3, 1.0) is None
    weights = age_weights(samples, masks, 3, 0.5)
    assert weights is not None
    expected = [
        0.5 ** (3 - v) if v >= 0 else 1.0 for s, m in zip(samples, masks, strict=True) for v in s.versions[m]
    ]
    assert weights.tolist() == expected
    assert {0.125, 0.5, 1.0} == set(expected)


def test_a_decay_needs_versions() -> None:
    """Beside an algorithm that knows none it is refused."""
    with pytest.raises(
        ConfigError, match="age_decay weighs the tokens of policy gradients: sft has no versions"
    ):
        fabric.config(fabric.SFT, recipe={"splits": ["teacher"], "age_decay": 0.9})


@pytest.mark.more_but("all-*-tail")
@pytest.mark.parametrize("source", ["cut", "tail"])
@pytest.mark.parametrize(
    ("statistics", "mean", "deviation"), [("kept", 2.5, 0.5**0.5), ("all", 1.5, 1.25**0.5)]
)
def test_group_statistics(log: Store, source: str, statistics: str, mean: float, deviation: float) -> None:
    """The best two of rewards 0 to 3: by how much they are better than the two, or than all four."""
    biased = "biased" if statistics == "all" else "unbiased"
    config = fabric.config(
        fabric.GRPO,
        steps=1,
        algorithm={
            "name": "rloo",
            "baseline": "group_mean",
            "groups": 2,
            "group_size": 4,
            "deviation": biased,
        },
        recipe={"top_fraction": 0.5, "group_statistics": statistics},
    )
    fabric.train(log, config, source)
    [plan] = [e.record for e in log.events() if isinstance(e.record, StepPlanned)]
    [done] = [e.record for e in log.events() if isinstance(e.record, StepCommitted)]
    rewards = np.array([float(ref["trajectory_id"][1]) for ref in plan.samples])
    assert sorted(rewards.tolist()) == [2.0, 2.0, 3.0, 3.0]
    expected = (rewards - mean) / (deviation + 1e-6)
    assert done.digests["advantages"] == digest_arrays({"advantages": expected})
    named = [(other["trajectory_id"], other["reward"], other["tokens"]) for other in plan.others or ()]
    assert sorted(named) == (
        [("a0", 0.0, 3), ("a1", 1.0, 3), ("b0", 0.0, 3), ("b1", 1.0, 3)] if biased == "biased" else []
    )
    assert replay_step(log, 0).bit_for_bit


def test_equal_rewards_in_a_group_of_which_some_differ(log: Store) -> None:
    """What is left of it has an advantage, where the others count: it is no group of equal rewards."""
    recipe = {"where": "reward >= 3 OR \"group\" = 'c'"}
    with pytest.raises(Exception, match=r"rewards are all equal|are dropped by the rule"):
        _train(log, recipe, groups=2)
    used, dropped = _train(log, recipe | {"group_statistics": "all"}, groups=3)
    assert (used, dropped) == (["a3", "b3"], {"not_chosen": 6, "zero_variance": 4})
    assert replay_step(log, 0).bit_for_bit


@pytest.mark.more
def test_group_statistics_of_several_steps(log: Store) -> None:
    """The first manifest of a rollout batch names the others; an interrupted training goes on with them."""
    recipe = {"top_fraction": 0.5, "group_statistics": "all"}
    algorithm = {
        "name": "decoupled_ppo",
        "groups": 2,
        "group_size": 4,
        "epochs": 2,
        "reward_clip": [0.5, 9.0],
    }
    config = fabric.config(fabric.GRPO, steps=2, algorithm=algorithm, recipe=recipe)
    with fabric.killed_at(1):
        fabric.train(log, config)
    fabric.train(log, config)
    plans = [e.record for e in log.events() if isinstance(e.record, StepPlanned)]
    assert [len(plan.others or ()) for plan in plans] == [4, 0, 0]
    done = [e.record.digests["advantages"] for e in log.events() if isinstance(e.record, StepCommitted)]
    assert len(done) == 2
    assert [replay_step(log, step).bit_for_bit for step in (0, 1)] == [True, True]


def test_group_statistics_need_groups() -> None:
    """Where no group is compared, nothing could be meant."""
    for algorithm in ({"name": "sft"}, {"name": "ppo"}):
        with pytest.raises(ConfigError, match=r'group_statistics = "all" is about the baselines of groups'):
            fabric.config(fabric.GRPO, algorithm=algorithm, recipe={"group_statistics": "all"})


@pytest.mark.more_but("cut")
@pytest.mark.parametrize("source", ["cut", "tail"])
def test_incomplete_groups_and_statuses(log: Store, source: str) -> None:
    """A member that was cut short is not trained on, and with three members left its group is not either."""
    records: list[Any] = []
    for i, status in enumerate(("completed", "truncated", "completed", "completed")):
        turns = [fabric.T([5, 6 + i], [20, 21], version=0)]
        records += fabric.records(f"d{i}", turns, group="d", reward=float(i), status=status)
    fabric.append(log, records)
    recipe = {"statuses": ["completed"], "min_group": 4}
    algorithm = {"name": "grpo", "groups": 2, "group_size": 4}
    fabric.train(log, fabric.config(fabric.GRPO, steps=1, algorithm=algorithm, recipe=recipe), source)
    events = [event.record for event in log.events()]
    [plan] = [e for e in events if isinstance(e, StepPlanned)]
    assert sorted(ref["trajectory_id"] for ref in plan.samples) == _named("ab")
    drops = {e.trajectory_id: (e.rule, e.detail) for e in events if isinstance(e, SampleDropped)}
    incomplete = ("group_incomplete", {"members": 3, "min_group": 4})
    status = ("status", {"status": "truncated", "statuses": ["completed"]})
    assert {name: drops[name] for name in _named("d")} == {
        "d0": incomplete,
        "d1": status,
        "d2": incomplete,
        "d3": incomplete,
    }
    assert replay_step(log, 0).bit_for_bit


def test_incomplete_groups_are_counted_where_no_step_is_filled(log: Store) -> None:
    """By the key that says so."""
    recipe = {"where": "reward <> 2", "min_group": 4}
    with pytest.raises(
        Exception, match=r"6 are in groups of which fewer than 4 are kept \(recipe.min_group\)"
    ):
        _train(log, recipe)


def test_what_min_group_cannot_mean(log: Store) -> None:
    """More members than a group has; groups where samples are taken one by one; a status that is none."""
    with pytest.raises(ConfigError, match=r"min_group 5 is more than a group has"):
        fabric.config(fabric.GRPO, recipe={"min_group": 5})
    with pytest.raises(ConfigError, match="ppo takes samples one by one here"):
        fabric.config(fabric.GRPO, algorithm={"name": "ppo"}, recipe={"min_group": 2})
    with pytest.raises(ConfigError, match="min_group goes with --source cut: sft takes samples"):
        fabric.train(log, fabric.config(fabric.SFT, recipe={"min_group": 2}), "tail")
    with pytest.raises(ConfigError, match=r"recipe.statuses.0: "):
        fabric.config(fabric.SFT, recipe={"statuses": ["done"]})


@pytest.mark.more_but("last-*-cut")
@pytest.mark.parametrize("source", ["cut", "tail"])
@pytest.mark.parametrize(
    ("paths", "terms"),
    [
        ("all", {("trained", None): 4 * 6}),
        ("last", {("trained", None): 4 * 3, ("dropped", "other_path"): 4 * 3}),
        ("longest", {("trained", None): 4 * 5, ("dropped", "other_path"): 4}),
    ],
)
def test_paths(tmp_path: Path, source: str, paths: str, terms: dict[Any, int]) -> None:
    """A root of two tokens, under it three and then one: each token has one term, and the step replays."""
    log = rb.open(tmp_path / "branches", create=True)
    for i in range(4):
        root = fabric.T([5, 6 + i], [20, 21], version=0)
        turns = [root, fabric.T([9], [40, 41, 42], 0, version=0), fabric.T([8], [50 + i], 0, version=0)]
        fabric.append(log, fabric.records(f"t{i}", turns, group="g", reward=float(i)))
    algorithm = {"name": "grpo", "groups": 1, "group_size": 4}
    config = fabric.config(fabric.GRPO, steps=1, algorithm=algorithm, recipe={"paths": paths})
    fabric.train(log, config, source)
    [done] = [e.record for e in log.events() if isinstance(e.record, StepCommitted)]
    assert done.metrics["trained_tokens"] == terms["trained", None]
    with rb.connect(log.path) as connection:
        rows = connection.execute("select term, rule, tokens from ledger").fetchall()
    assert {(term, rule): tokens for term, rule, tokens in rows} == terms
    ledger = fold_ledger(log.events())
    assert ledger.unaccounted() == {}
    assert {where: entry.tokens for (_, where), entry in ledger.entries.items()} == terms
    assert replay_step(log, 0).bit_for_bit


@pytest.mark.more
def test_one_path_is_a_side_of_a_pair(tmp_path: Path) -> None:
    """A trajectory of several paths is no longer ambiguous where one is taken."""
    log = rb.open(tmp_path / "pairs", create=True)
    for name in ("good", "bad"):
        root, then = fabric.T([5, 6], [20, 21], version=0), fabric.T([9], [40], 0, version=0)
        fabric.append(log, fabric.records(name, [root, then, then]))
    fabric.append(log, [PreferenceAdded("good", "bad", None, "judge")])
    dpo = {"name": "dpo", "batch_size": 1}
    with pytest.raises(Exception, match="several_paths"):
        fabric.train(log, fabric.config(fabric.SFT, steps=1, algorithm=dpo, recipe={}))
    fabric.train(log, fabric.config(fabric.SFT, steps=1, algorithm=dpo, recipe={"paths": "last"}))
    [plan] = [e.record for e in log.events() if isinstance(e.record, StepPlanned)]
    assert [ref["turn_id"] for ref in plan.samples] == ["good.2", "bad.2"]
    assert replay_step(log, 0).bit_for_bit


@pytest.mark.more_but("tail")
@pytest.mark.parametrize("source", ["cut", "tail"])
def test_numbers_that_are_none_are_dropped_before_a_step_is_planned(log: Store, source: str) -> None:
    """A logprob of the engine: the step is taken without its sample, and replays."""
    records: list[Any] = []
    for i in range(4):
        logprobs = (-1.0, -np.inf if i == 0 else -2.0)
        turns = [fabric.T([5, 6 + i], [20, 21], version=0, logprobs=logprobs)]
        records += fabric.records(f"d{i}", turns, group="d", reward=float(i))
    fabric.append(log, records)
    algorithm = {"name": "policy_gradient", "groups": 4, "group_size": 4}
    fabric.train(log, fabric.config(fabric.GRPO, steps=1, algorithm=algorithm), source)
    events = [event.record for event in log.events()]
    drops = {e.trajectory_id: (e.rule, e.detail) for e in events if isinstance(e, SampleDropped)}
    assert {name: rule for name, rule in drops.items() if name[0] == "d"} == {
        "d0": ("logprob_not_finite", {})
    }
    plans = [e for e in events if isinstance(e, StepPlanned)]
    assert len(plans) == 1
    assert {ref["trajectory_id"] for ref in plans[0].samples} >= {"d1", "d2", "d3"}
    assert replay_step(log, 0).bit_for_bit


def test_no_turn_is_trained_twice_when_one_path_is_asked_for(tmp_path: Path) -> None:
    """A first step trains the root in the first path of `a`; then one path of each trajectory is asked for,
    which would be the other one with the root in it: it is dropped, and `b` is trained."""
    log = rb.open(tmp_path / "branches", create=True)
    for name in "ab":
        turns = [fabric.T([5], [20, 21]), fabric.T([9], [40], 0), fabric.T([8], [50], 0)]
        fabric.append(log, fabric.records(name, turns))
    algorithm = {"name": "sft", "batch_size": 1}
    fabric.train(log, fabric.config(fabric.SFT, steps=1, algorithm=algorithm, recipe={}), "tail")
    fabric.train(
        log, fabric.config(fabric.SFT, steps=1, algorithm=algorithm, recipe={"paths": "last"}), "tail"
    )
    events = [event.record for event in log.events()]
    used = [ref["turn_id"] for e in events if isinstance(e, StepPlanned) for ref in e.samples]
    assert used == ["a.1", "b.2"]
    trained = [e.metrics["trained_tokens"] for e in events if isinstance(e, StepCommitted)]
    assert trained == [3, 3]
    drops = {e.turn_id: e.rule for e in events if isinstance(e, SampleDropped)}
    assert drops == {"a.2": "other_path", "b.1": "other_path"}
    with rb.connect(log.path) as connection:
        rows = connection.execute("select term, tokens from ledger order by term").fetchall()
    assert rows == [("dropped", 2), ("trained", 6)]
    assert fold_ledger(log.events()).unaccounted() == {}
    assert replay_step(log, 1).bit_for_bit


@pytest.mark.more_but("tail")
@pytest.mark.parametrize("source", ["cut", "tail"])
def test_labels_and_models_choose_on_the_tail_as_at_a_cut(log: Store, source: str) -> None:
    """Group b alone is labelled so, and nobody asked for a model by name."""
    grpo = {"name": "grpo", "groups": 1, "group_size": 4}
    config = fabric.config(fabric.GRPO, steps=1, algorithm=grpo, recipe={"labels": ["level=hard"]})
    fabric.train(log, config, source)
    events = [event.record for event in log.events()]
    [plan] = [e for e in events if isinstance(e, StepPlanned)]
    assert sorted(ref["trajectory_id"] for ref in plan.samples) == _named("b")
    drops = {e.trajectory_id: e.rule for e in events if isinstance(e, SampleDropped)}
    assert drops == (dict.fromkeys(_named("ac"), "not_chosen") if source == "cut" else drops)
    assert set(drops.values()) == {"not_chosen"}
    assert replay_step(log, 0).bit_for_bit
