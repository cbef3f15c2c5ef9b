"""Versions are compared within a policy: tokens of another one, or newer ones, are dropped by rules of their
own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.ingest.admission.outstanding import Outstanding
from rollbook.store import Store
from rollbook.store.events import RunOpened, TurnCompleted, VersionSpan
from rollbook.store.fold.trajectory import fold
from rollbook.train.algorithms.policy_gradient import Grpo
from rollbook.train.algorithms.reward_models import RewardModel
from rollbook.train.algorithms.sft import Sft
from rollbook.train.batches.materialize import Materializer
from rollbook.train.batches.units import apply_recipe
from rollbook.train.config.recipe import RecipeConfig, recorded_recipe
from rollbook.train.select.references import find_references
from rollbook.train.select.samples import OF_ANOTHER, Sample, samples_of
from rollbook.train.select.sorting import select

SFT, GRPO = Sft(name="sft"), Grpo(name="grpo", group_size=2)
OWN, TEACHER, OTHER = ("actor", 2), ("teacher", 7), ("critic", 7)
STRICT = RecipeConfig(max_staleness=0, drop_zero_variance=False)
AGELESS = STRICT.model_copy(update={"max_staleness": None})
NAMED = STRICT.model_copy(update={"other_policies": ("teacher",)})
BEFORE = recorded_recipe({"max_staleness": 0, "drop_zero_variance": False})
"""As recipes were recorded before they told policies apart."""
TRAJECTORIES = {
    "own": [OWN],
    "teacher": [TEACHER],
    "both": [OWN, TEACHER],
    "three": [OWN, OTHER, TEACHER],
    "newer": [("actor", 3)],
    "unknown": [None],
}


def _made(name: str, sampled: list[tuple[str, int] | None]) -> list[Any]:
    """A trajectory of a first turn of version 2, and a second whose tokens are of each of these."""
    turns = [fabric.T([1], [2, 2], version=2), fabric.T([5], [6] * 2 * len(sampled), 0)]
    records = fabric.records(name, turns, reward=1.0, group=name)
    spans = tuple(
        VersionSpan(*version, 2 * i, 2 * i + 2) for i, version in enumerate(sampled) if version is not None
    )
    last = sampled[-1] or (None, None)
    return [
        replace(record, version_spans=spans, policy=last[0], policy_version=last[1])
        if isinstance(record, TurnCompleted) and record.turn_id.endswith(".1")
        else record
        for record in records
    ]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with a trajectory of each kind."""
    log = rb.open(tmp_path_factory.mktemp("policies") / "store", create=True)
    fabric.append(log, [r for name, sampled in TRAJECTORIES.items() for r in _made(name, sampled)])
    return log


@pytest.mark.parametrize(
    ("recipe", "algorithm", "dropped"),
    [
        (STRICT, SFT, {"teacher": "other_policy", "both": "other_policy", "three": "other_policy"}),
        (NAMED, SFT, {"three": "other_policy"}),
        (NAMED, GRPO, {"three": "other_policy", "unknown": "no_version"}),
        (STRICT, RewardModel(name="reward_model", group_size=2), {}),
        (AGELESS, SFT, {"teacher": "other_policy", "both": "other_policy", "three": "other_policy"}),
        (BEFORE, SFT, {}),
    ],
)
def test_which_rule_drops_what(log: Store, recipe: RecipeConfig, algorithm: Any, dropped: Any) -> None:
    """At version 2, with nothing stale: alike by reference and by folded samples."""
    newer = {"newer": "newer_version"} if recipe in (STRICT, NAMED) and not algorithm.head_width else {}
    applied = apply_recipe(log, log.head(), "demo", "actor", recipe, algorithm, 2)
    assert {drop.sample.trajectory_id: drop.rule for drop in applied.drops} == dropped | newer
    _, drops = select(list(_folded(log, recipe).values()), recipe, algorithm, 2)
    assert [(d.sample.leaf_turn_id, d.rule, d.detail) for d in drops] == [
        (d.sample.leaf_turn_id, d.rule, d.detail) for d in applied.drops
    ]


def _folded(log: Store, recipe: RecipeConfig) -> dict[str, Sample]:
    own, others = recipe.own("actor"), recipe.other_policies or ()
    samples = (s for t in log.trajectories().values() for s in samples_of(t, policy=own, others=others))
    return dict(sorted((sample.trajectory_id, sample) for sample in samples))


@pytest.mark.parametrize("share", [None, 0.5, 1.0])
@pytest.mark.parametrize("recipe", [STRICT, NAMED, BEFORE], ids=["strict", "named", "before"])
def test_references_are_the_folded_samples(log: Store, recipe: RecipeConfig, share: float | None) -> None:
    """In their tokens' versions, in their strangers, and in what decides on their age."""
    recipe = recipe.model_copy(update={"stale_share": share})
    references = find_references(log, log.head(), "demo", recipe, policy="actor")
    folded, read = _folded(log, recipe), Materializer(log, log.head(), references, "demo")
    for ref, sample in zip(
        references.refs(range(len(references))), read.samples(range(len(references))), strict=True
    ):
        same = folded[ref.trajectory_id]
        assert sample.digest() == same.digest()
        assert (
            (ref.stranger, ref.unknown) == (sample.stranger, sample.unknown) == (same.stranger, same.unknown)
        )
        for value in ("oldest_version", "newest_version"):
            assert getattr(ref, value) == getattr(same, value)
        assert ref.deciding == same.deciding_version(recipe.deciding_share)


def test_tokens_of_another_policy_have_no_age() -> None:
    """They are told from those of which no version is known."""
    [trajectory] = fold(fabric.events(_made("three", [OWN, TEACHER, None]))).values()
    [sample] = samples_of(trajectory, policy="actor", others=("teacher",))
    assert sample.versions[sample.loss_mask].tolist() == [2, 2, 2, 2, OF_ANOTHER, OF_ANOTHER, -1, -1]
    assert (sample.unknown, sample.oldest_version, sample.newest_version) == (2, 2, 2)
    assert np.array_equal(sample.tokens, next(samples_of(trajectory)).tokens)


@pytest.mark.parametrize(("policy", "left"), [("actor", 0), ("critic", 1)])
def test_admission_compares_versions_within_a_policy(policy: str, left: int) -> None:
    """A group that lacks a trajectory is over once a token of the policy in it is too old; another's says
    nothing."""
    config = {
        "source": "tail",
        "policy": "actor",
        "steps": 9,
        "steps_done": 0,
        "demand": {"groups": 1, "group_size": 2, "epochs": 1, "mini_batches": 1},
        "recipe": {"max_staleness": 1, "splits": ["train"]},
        "admission": {"hold": True, "order": "windowed"},
    }
    outstanding = Outstanding("demo")
    turns = [replace(r, turn_id="a.1") for r in fabric.records("a") if getattr(r, "turn_id", "") == "a.0"]
    opened, finished = fabric.records("a", [], group="a")
    spans = (VersionSpan(policy, 0, 0, 2),)
    turns = [replace(r, version_spans=spans) if isinstance(r, TurnCompleted) else r for r in turns]
    outstanding.add_all(fabric.events([RunOpened("train", config), opened, *turns, finished]))
    for step in range(2):
        outstanding.add_all(fabric.events([fabric.planned(step, step + 2), fabric.committed(step, step + 3)]))
    assert outstanding.count == left
