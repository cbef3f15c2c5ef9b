"""Rewards of several sources: what a reward is, by columns as by the fold, and what rules make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.forests import forest

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.errors import ConfigError
from rollbook.store.events import RewardAssigned
from rollbook.store.fold.trajectory import fold
from rollbook.store.upkeep.sealer import Sealer
from rollbook.train.algorithms.gdpo import Gdpo
from rollbook.train.algorithms.policy_gradient import Grpo
from rollbook.train.batches.materialize import Materializer
from rollbook.train.batches.units import apply_recipe
from rollbook.train.config.config import parse_config
from rollbook.train.config.files import as_toml
from rollbook.train.config.recipe import RecipeConfig, recorded_rewards, weighted
from rollbook.train.select.references import find_references
from rollbook.train.select.samples import samples_of
from rollbook.train.sources.held_out import held_out_rewards

WEIGHTS = {"correct": 1.0, "brief": 0.3, "absent": 2.0}
RECIPE = RecipeConfig(reward_weights=WEIGHTS)
GDPO = Gdpo(name="gdpo", group_size=2, groups=1)
GRPO = Grpo(name="grpo", group_size=2, groups=1)


def test_a_weighted_sum() -> None:
    """Of what is there, in the order given; a single reward keeps its bits."""
    assert weighted([1.0, None, 4.0], [1.0, 9.0, 0.5]) == 3.0
    assert weighted([None, None], [1.0, 1.0]) is None
    assert str(weighted([-0.0], [1.0])) == "-0.0"
    assert weighted([0.1, 0.2, 0.3], [1, 1, 1]) == (0.1 + 0.2) + 0.3


def test_the_order_of_names_counts_not_that_of_a_file() -> None:
    """A record may have its keys in another order: sums have the same bits."""
    turned = RecipeConfig(reward_weights={"brief": 0.3, "correct": 1.0, "absent": 2.0})
    assert [*turned.rewards_of] == [*RECIPE.rewards_of] == ["absent", "brief", "correct"]
    recorded = recorded_rewards(turned.model_dump(mode="json"))
    assert [*recorded] == ["absent", "brief", "correct"]
    assert recorded_rewards({"reward_source": "judge"}) == "judge", "a recipe before there were weights"
    assert recorded_rewards(RecipeConfig().model_dump(mode="json")) == "agent"


def _events(rng: np.random.Generator, name: str) -> list[Any]:
    """A forest, with rewards of several sources for it and for its turns, some of them superseded, or given
    again."""
    records = forest(rng, name)
    if not records:
        return records
    trajectory, turn = records[0].trajectory_id, records[1].turn_id
    for source in ("correct", "brief", "unasked"):
        for about in (None, turn):
            for _ in range(int(rng.integers(0, 3))):
                records.append(RewardAssigned(trajectory, about, float(rng.normal()), source))
    return records


@pytest.mark.parametrize("kept", ["live", "sealed"])
def test_columns_give_what_the_fold_gives(tmp_path: Path, kept: str) -> None:
    """Every sample's reward, its parts and its turns' rewards, bit for bit, superseded ones apart."""
    rng = np.random.default_rng(5)
    log = rb.open(tmp_path / "store", create=True)
    fabric.append(log, [record for i in range(60) for record in _events(rng, f"t{i:02}")])
    asked = [[r for r in t.rewards if r[1].source in WEIGHTS] for t in log.trajectories().values()]
    last = [rewards[-1] for rewards in asked[::2] if rewards]
    instead = [RewardAssigned(r.trajectory_id, r.turn_id, -5.0, "unasked", event_id) for event_id, r in last]
    fabric.append(log, instead)
    if kept == "sealed":
        Sealer(log).run_once()
    references = find_references(log, log.head(), "demo", RECIPE)
    found = Materializer(log, log.head(), references, "demo").samples(range(len(references)))
    folded = [t for t in fold(log.events()).values() if t.finished is not None and t.split == "train"]
    expected = {s.leaf_turn_id: s for t in folded for s in samples_of(t, RECIPE.rewards_of)}
    assert {s.leaf_turn_id for s in found} == set(expected)
    for sample in found:
        other = expected[sample.leaf_turn_id]
        assert (sample.reward, sample.reward_parts) == (other.reward, other.reward_parts)
        assert sample.rewards == other.rewards
    parts = [sample.reward_parts for sample in found]
    assert all(len(part) == 3 and part[0] is None for part in parts)
    assert len({tuple(p is None for p in part) for part in parts}) == 4, "each gave some, and not all"
    assert any(sample.rewards for sample in found)


def _store(path: Path, given: dict[str, tuple[float | None, float | None]], split: str = "train") -> Store:
    log = rb.open(path, create=True)
    records: list[Any] = []
    for name, rewards in given.items():
        records += fabric.records(name, group=name[0], split=split)
        for source, reward in zip(("correct", "brief"), rewards, strict=True):
            records += [] if reward is None else [RewardAssigned(name, None, reward, source)]
    fabric.append(log, records)
    return log


def _applied(log: Store, recipe: RecipeConfig, algorithm: Any) -> tuple[list[str], dict[str, str]]:
    applied = apply_recipe(log, log.head(), "demo", "actor", recipe, algorithm)
    return [ref.name for ref in applied.kept], {
        drop.sample.trajectory_id: drop.rule for drop in applied.drops
    }


GIVEN = {
    "a0": (1.0, 0.0),
    "a1": (0.7, 1.0),
    "b0": (1.0, 1.0),
    "b1": (1.0, 1.0),
    "c0": (1.0, None),
    "c1": (1.0, 0.0),
}
"""The sums of a are equal with 0.3 for the second source, and so are those of c."""


def test_a_group_is_flat_if_each_source_is(tmp_path: Path) -> None:
    """For what takes sources apart; else by the sums. No reward is not the reward 0."""
    log = _store(tmp_path / "store", GIVEN)
    assert _applied(log, RECIPE, GDPO) == (
        ["a0", "a1", "c0", "c1"],
        {"b0": "zero_variance", "b1": "zero_variance"},
    )
    assert _applied(log, RECIPE, GRPO)[0] == []


def test_rules_go_by_the_sum(tmp_path: Path) -> None:
    """Its least value; and that there is one: what none of the sources rewarded is dropped, and they are
    named."""
    log = _store(
        tmp_path / "store", {"a0": (1.0, 0.0), "a1": (0.0, 2.0), "a2": (None, 4.0), "a3": (None, None)}
    )
    recipe = RECIPE.model_copy(update={"min_reward": 0.9})
    assert _applied(log, recipe, GDPO) == (["a0", "a2"], {"a1": "min_reward", "a3": "no_reward"})
    [drop] = [
        drop
        for drop in apply_recipe(log, log.head(), "demo", "actor", RECIPE, GDPO).drops
        if drop.rule == "no_reward"
    ]
    assert drop.detail == {"sources": ["absent", "brief", "correct"]}


def test_a_reward_that_is_no_number(tmp_path: Path) -> None:
    """A sum may overflow, though each that it is of is a number."""
    log = _store(tmp_path / "store", {"a0": (1.7e308, 1.7e308), "a1": (0.0, 1.0), "a2": (1.0, 0.0)})
    assert _applied(log, RECIPE, GDPO)[1] == {"a0": "reward_not_finite"}


def test_held_out_rewards_are_sums_too(tmp_path: Path) -> None:
    """Of what is there; those without any do not count."""
    log = _store(tmp_path / "store", {"a0": (1.0, 2.0), "a1": (None, 1.0), "a2": (None, None)}, "eval")
    rewards = held_out_rewards(log, log.head(), "demo", "actor", RECIPE.rewards_of, 0)
    assert {name: held.reward for name, held in rewards.items()} == {"a0": 1.6, "a1": 0.3}
    one = held_out_rewards(log, log.head(), "demo", "actor", "brief", 0)
    assert {name: held.reward for name, held in one.items()} == {"a0": 2.0, "a1": 1.0}


def test_a_configuration_is_written_as_it_is_read() -> None:
    """The weights as a table of the recipe; a rule of stopping may name a source, and no other."""
    import tomllib

    values: dict[str, Any] = {
        "model": "m",
        "steps": 1,
        "algorithm": {"name": "gdpo"},
        "recipe": {"reward_weights": {"correct": 1, "is brief": 0.5}},
        "stop": [{"metric": "reward.correct", "better": "higher"}],
    }
    config = parse_config(values, "test")
    written = tomllib.loads(as_toml(config))
    assert written["recipe"]["reward_weights"] == {"correct": 1.0, "is brief": 0.5}
    assert parse_config(written, "again") == config
    with pytest.raises(ConfigError, match=r"'reward\.other' is none of a step"):
        parse_config(values | {"stop": [{"metric": "reward.other", "better": "higher"}]}, "test")
