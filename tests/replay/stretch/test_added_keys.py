"""Steps that a release took which had fewer keys than this one: each key that came with a default changes
nothing, and a recorded key that was changed differs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories import fabric
from tests.replay.conftest import Tamper

from rollbook import store as rb
from rollbook.replay.stretch.stretch import history_of, prove_stretch
from rollbook.store import Event, Store
from rollbook.store.config import Table
from rollbook.store.digest import digest_json
from rollbook.store.events import Record, RunOpened, SampleDropped, StepPlanned
from rollbook.train.algorithms.ppo import Ppo
from rollbook.train.algorithms.registry import ALGORITHMS
from rollbook.train.config.config import CriticConfig, OptimizerConfig
from rollbook.train.config.recipe import RecipeConfig

LATER: Mapping[str, tuple[str, ...]] = {
    "algorithm": ("value_clip", "kl_estimator", "count_rejected"),
    "recipe": ("age_decay", "preference_sources", "too_long", "top_fraction"),
    "optimizer": ("muon_steps", "decay_steps", "clip_grad"),
    "critic": ("name", "wsd_decay_steps"),
}
"""Keys that are taken for ones that came later."""


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two steps of PPO with a critic, and two on another batch. Never write to it."""
    log = fabric.record_store(tmp_path_factory.mktemp("course") / "store", teachers=0)
    keys = {"algorithm": {"name": "ppo", "groups": 3, "mini_batches": 2}, "critic": {"lr": 0.01}}
    fabric.train(log, fabric.config(fabric.GRPO, steps=4, **keys))
    store: Store = log
    return store


@pytest.fixture
def copied(course: Store, tmp_path: Path) -> Store:
    """A copy of it."""
    store: Store = rb.open(shutil.copytree(course.path, tmp_path / "store"))
    return store


class _LaterPpo(Ppo):
    next_key: float = 0.1


@pytest.fixture
def next_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release whose algorithm has one key more."""
    monkeypatch.setitem(ALGORITHMS, "ppo", _LaterPpo)


def _proven(log: Store) -> dict[int, str]:
    """Step -> what it comes to."""
    result = prove_stretch(log, history_of(log, None, "actor"), 0, 3)
    return {step.step: step.why if step.replay is None else str(step.replay.outcome) for step in result.steps}


def test_an_added_key_of_an_algorithm(copied: Store, next_key: None) -> None:
    """Each old step, the later ones of a training too, is as it was."""
    assert _proven(copied) == dict.fromkeys(range(4), "bit for bit")


def _earlier(event: Event, table: str) -> Record | None:
    """The record as a release wrote it that had not the later keys of a table."""
    record = event.record

    def less(values: Any) -> Any:
        return {key: value for key, value in values.items() if key not in LATER[table]}

    if isinstance(record, RunOpened) and record.command == "train":
        return replace(record, config=record.config | {table: less(record.config[table])})
    if isinstance(record, StepPlanned) and table == "critic":
        assert record.critic is not None
        return replace(record, critic=record.critic | {"optimizer": less(record.critic["optimizer"])})
    if isinstance(record, StepPlanned) and table == "recipe":
        recipe = less(record.recipe)
        return replace(record, recipe=recipe, recipe_digest=digest_json(recipe))
    if isinstance(record, StepPlanned):
        return replace(record, **{table: less(getattr(record, table))})
    assert not isinstance(record, SampleDropped), "none was dropped"
    return None


@pytest.mark.more_but("algorithm", "critic")
@pytest.mark.parametrize("table", LATER)
def test_keys_that_came_later(copied: Store, tamper: Tamper, table: str) -> None:
    """Of the algorithm, the recipe, the optimizer and the critic: recorded without them, each step is as it
    was."""
    kinds: dict[str, type[Table]] = {
        "algorithm": Ppo,
        "recipe": RecipeConfig,
        "optimizer": OptimizerConfig,
        "critic": CriticConfig,
    }
    assert set(LATER[table]) <= kinds[table].model_fields.keys()
    assert tamper.rewrite(copied, "train", lambda event: _earlier(event, table)) == 5
    assert _proven(copied) == dict.fromkeys(range(4), "bit for bit")


@pytest.mark.more_but("3-discount")
@pytest.mark.parametrize(("step", "key"), [(0, "clip_high"), (3, "clip_high"), (3, "discount")])
def test_a_changed_key_differs(copied: Store, tamper: Tamper, next_key: None, step: int, key: str) -> None:
    """At the first step of a training and at a later one, where a key came since, too."""
    change = {key: 0.75}
    tamper.event(
        copied, "step.planned", lambda plan: replace(plan, algorithm=plan.algorithm | change), step=step
    )
    result = prove_stretch(copied, history_of(copied, None, "actor"), 0, 3)
    differing = [
        verified.replay
        for verified in result.steps
        if verified.replay is not None and not verified.replay.equal
    ]
    assert [verified.step for verified in differing] == [step]
    assert differing[0].differs_in == "schedule"
    place = differing[0].stages["schedule"].place
    assert place is not None
    assert (place.key, place.recorded) == (f"algorithm.{key}", "0.75")
