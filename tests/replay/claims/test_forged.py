"""Each fact of a recorded step, forged or removed in a copy of its log with valid checksums: the stage and
the key that name it."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories import fabric
from tests.replay.conftest import Tamper

from rollbook import store as rb
from rollbook.replay.step.step import replay_step
from rollbook.store import Event, Store
from rollbook.store.events import Record, RewardAssigned, RunOpened, StepCommitted, StepPlanned, StepVectors

STEP = 2
"""Of the last rollout batch, which it begins: two steps are taken on each."""
VECTORS = ["logprobs", "losses", "proximal_logprobs", "values"]
Change = Callable[[Any], Record | None]


@dataclass(frozen=True)
class Forged:
    """A change of one record, and the stage and the beginning of the key that it is named by."""

    kind: type[Record]
    change: Change
    stage: str
    key: str = ""


def _with_keys(name: str, **changes: Any) -> Change:
    """The record with other keys in one of its values."""
    return lambda record: replace(record, **{name: getattr(record, name) | changes})


def _without(name: str, key: str) -> Change:
    """The record without a key of one of its values."""

    def change(record: Any) -> Any:
        return replace(record, **{name: {k: v for k, v in getattr(record, name).items() if k != key}})

    return change


def _within(name: str, table: str, **changes: Any) -> Change:
    """The same, of a table within that value."""

    def change(record: Any) -> Any:
        held = getattr(record, name)
        return replace(record, **{name: held | {table: held[table] | changes}})

    return change


def _less(cut: str) -> str:
    lane, _, end = cut.partition("=")
    return f"{lane}={int(end) - 1}"


def _vector(record: Any) -> Any:
    """The vectors of losses with another number, the second last bit of which is turned."""
    if record.stage != "losses":
        return None
    values = np.frombuffer(base64.b64decode(record.values), "<f4").copy()
    values.view(np.int32)[1] ^= 2
    return replace(record, values=base64.b64encode(values.tobytes()).decode())


def _no_vector(record: Any) -> Any:
    return replace(record, stage="value_losses") if record.stage == "losses" else None


def _without_hashes_of(stage: str) -> Change:
    def change(record: Any) -> Any:
        tensors = {name: data for name, data in record.hashes["tensors"].items() if name != stage}
        return replace(record, hashes=record.hashes | {"tensors": tensors})

    return change


def _other_hash(record: Any) -> Any:
    data = bytearray(base64.b64decode(record.hashes["samples"]))
    data[-1] ^= 1
    return replace(record, hashes=record.hashes | {"samples": base64.b64encode(data).decode()})


FORGED = {
    "warmup": Forged(
        StepPlanned, _with_keys("optimizer", warmup_steps=9), "training", "optimizer.warmup_steps"
    ),
    "decay": Forged(
        StepPlanned, _with_keys("optimizer", decay_steps=90), "training", "optimizer.decay_steps"
    ),
    "clip": Forged(StepPlanned, _with_keys("optimizer", clip_grad=7.0), "training", "optimizer.clip_grad"),
    "critic": Forged(
        StepPlanned, _within("critic", "optimizer", warmup_steps=9), "training", "critic.warmup_steps"
    ),
    "environment": Forged(
        StepPlanned, _with_keys("environment", processor="abacus"), "training", "environment.processor"
    ),
    "removed environment": Forged(
        StepPlanned, _without("environment", "libraries"), "training", "environment.libraries"
    ),
    "recipe": Forged(StepPlanned, _with_keys("recipe", age_decay=0.5), "selection", "recipe_digest"),
    "phase": Forged(StepPlanned, lambda p: replace(p, phase="0" * 64), "training", "phase"),
    "routing": Forged(StepPlanned, lambda p: replace(p, routing_replay=True), "training", "routing_replay"),
    "schedule": Forged(StepPlanned, _with_keys("schedule", micro_batch_size=6), "training", "schedule.micro"),
    "cut": Forged(StepPlanned, lambda p: replace(p, cut=_less(p.cut)), "training", "cut"),
    "batch": Forged(StepPlanned, _with_keys("rollout_batch", steps=3), "schedule", "rollout_batch.steps"),
    "commit": Forged(StepCommitted, lambda c: replace(c, policy_version=99), "training", "commit"),
    "metric": Forged(StepCommitted, _without("metrics", "loss"), "metrics", "loss"),
    "digest": Forged(StepCommitted, _without("digests", "gradients"), "gradients", "gradients"),
    "input": Forged(StepPlanned, _without("input_digests", "rng"), "rng", "rng"),
    "vector": Forged(StepVectors, _vector, "evidence", "vectors of losses"),
    "removed vector": Forged(StepVectors, _no_vector, "evidence", "vectors of losses"),
    "hash": Forged(StepCommitted, _other_hash, "evidence", "hashes of"),
    "removed hash": Forged(
        StepCommitted, _without_hashes_of("critic_weights"), "evidence", "hashes of critic_weights"
    ),
    "removed hashes": Forged(StepCommitted, lambda c: replace(c, hashes=None), "evidence", "hashes of"),
    "opened optimizer": Forged(RunOpened, _within("config", "optimizer", lr=7e-3), "training", "phase"),
    "opened demand": Forged(
        RunOpened, _within("config", "demand", groups=7), "training", "run.opened.demand"
    ),
    "opened steps": Forged(RunOpened, _with_keys("config", steps=40), "training", "schedule.steps"),
    "opened done": Forged(RunOpened, _with_keys("config", steps_done=1), "training", "run.opened.steps_done"),
    "opened record": Forged(
        RunOpened, _within("config", "record", vectors=["logprobs"]), "evidence", "vectors of"
    ),
    "opened environment": Forged(
        RunOpened, _with_keys("environment", processor="abacus"), "training", "environment.processor"
    ),
}


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Four steps of PPO, two on each rollout batch, with a critic and recorded vectors. Never write to it."""
    log = fabric.record_store(tmp_path_factory.mktemp("course") / "store", teachers=0)
    fabric.append(log, [RewardAssigned(f"g0.{i}", None, 1.0) for i in range(4)])
    algorithm = {"name": "ppo", "groups": 3, "mini_batches": 2}
    keys = {"algorithm": algorithm, "critic": {"lr": 0.01}, "record": {"vectors": VECTORS}}
    fabric.train(log, fabric.config(fabric.GRPO, steps=4, **keys))
    store: Store = log
    return store


@pytest.fixture
def copied(course: Store, tmp_path: Path) -> Store:
    """A copy of it."""
    store: Store = rb.open(shutil.copytree(course.path, tmp_path / "store"))
    return store


def test_untouched(course: Store) -> None:
    """Each step is bit for bit, and so is what the log alone proves of one."""
    for step in range(4):
        result = replay_step(course, step)
        assert result.bit_for_bit, result.first_difference
        assert not result.unproven
        assert not result.unrecorded


@pytest.mark.more_but(
    *("batch", "metric", "vector", "removed environment", "removed hashes"),
    *("opened optimizer", "opened steps", "opened environment"),
)
@pytest.mark.parametrize("name", FORGED)
def test_what_is_forged_is_named(copied: Store, tamper: Tamper, name: str) -> None:
    """By its stage and key, and by no stage before it."""
    forged = FORGED[name]

    def change(event: Event) -> Record | None:
        record = event.record
        of_step = not isinstance(record, StepPlanned | StepCommitted | StepVectors) or record.step == STEP
        of_training = not isinstance(record, RunOpened) or record.command == "train"
        fits = isinstance(record, forged.kind) and of_step and of_training
        return forged.change(record) if fits else None

    assert tamper.rewrite(copied, "train", change) == 1
    result = replay_step(copied, STEP)
    first = result.first_difference
    assert first is not None
    assert first.place is not None
    assert (first.stage, str(first.place.key)[: len(forged.key)]) == (forged.stage, forged.key), first
