"""What a replay promises of trainings of every kind: each stage of each of their steps, in another process.

One store has them all, each a run of its own with trajectories of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.events import PreferenceAdded, TurnCompleted, VersionSpan

pytestmark = pytest.mark.more

PROVE = """
import sys, orjson
from rollbook import store
from rollbook.replay.stretch.stretch import prove_stretch
from rollbook.store.fold.history import KINDS, fold_histories
log, found = store.open(sys.argv[1]), {}
for (run, policy), history in fold_histories(log.events_of(KINDS)).items():
    proven = prove_stretch(log, history, 0, 99)
    found[f"{run}/{policy}"] = {
        "broken": len(proven.broken),
        "steps": [
            [s.step, s.why, s.replay and {n: [one.verdict, one.why] for n, one in s.replay.stages.items()}]
            for s in proven.steps
        ],
    }
print(orjson.dumps(found).decode())
"""
GROUPS = {"groups": 2, "group_size": 4}
PACKED = {"micro_batch_size": None, "tokens_per_micro_batch": 24}
NARROW = {"dtype": "bfloat16", "recompute": True}
PAIRS = {"pairs": "rewards", "group_size": 4, "batch_size": 3}


@dataclass(frozen=True)
class Kind:
    """A kind of training: steps that it takes, and its configuration beyond that of `GRPO`."""

    steps: int
    changes: dict[str, Any]
    source: str = "cut"


KINDS: dict[str, Kind] = {
    "grpo": Kind(2, {"algorithm": {"name": "grpo", "kl": 0.1} | GROUPS}),
    "best": Kind(
        2,
        {
            "algorithm": {"name": "rloo", "deviation": "biased"} | GROUPS,
            "recipe": {"top_fraction": 0.5, "group_statistics": "all", "min_group": 2, "age_decay": 0.9},
        },
        "tail",
    ),
    "chosen": Kind(
        1,
        {
            "algorithm": {"name": "grpo"} | GROUPS,
            "recipe": {"where": "reward >= 0.5", "refill": True, "paths": "last", "too_long": "cut"},
        },
    ),
    "packed": Kind(2, {"algorithm": {"name": "gspo"} | GROUPS} | PACKED),
    "epochs": Kind(
        4,
        {"algorithm": {"name": "decoupled_ppo", "mini_batches": 2, "epochs": 2} | GROUPS} | NARROW,
    ),
    "critic": Kind(
        4,
        {
            "algorithm": {"name": "ppo", "groups": 8, "mini_batches": 2},
            "critic": {"lr": 0.01, "alone_steps": 2},
        }
        | NARROW,
    ),
    "hybrid": Kind(
        2,
        {
            "algorithm": {"name": "grpo", "kl": 0.1, "old": "trainer"} | GROUPS,
            "mode": "hybrid",
            "num_iters_per_train_update": 2,
        },
        "tail",
    ),
    "pairs": Kind(2, {"algorithm": {"name": "dpo"} | PAIRS, "micro_batch_size": 2}),
}


def _run(name: str) -> int:
    return 10 * (1 + list(KINDS).index(name))


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store of these trainings, and of those below. Never write to it."""
    log = rb.open(tmp_path_factory.mktemp("holds") / "store", create=True)
    for name, kind in KINDS.items():
        fabric.append(log, fabric.rollout_records(6, 4, first=_run(name)), run=name)
        settings = fabric.config(fabric.GRPO, **{"run": name, "steps": kind.steps} | kind.changes)
        fabric.train(log, settings, kind.source, lane=f"train-{name}")
    _two_policies(log)
    _other_runs(log)
    _several_versions(log)
    _recorded_order(log)
    _preferences(log)
    _abandoned(log)
    _without_steps(log)
    _trained_paths(log)
    with pytest.MonkeyPatch.context() as patch:
        _not_finite(log, patch, "retake")
    with pytest.MonkeyPatch.context() as patch:
        _not_finite(log, patch, "skip")
    return log


def _two_policies(log: Store) -> None:
    """A reward model beside the policy of a run, in another configuration."""
    algorithm = {"name": "reward_model", "batch_sum_to_zero": 0.1} | PAIRS
    changes = {"run": "grpo", "policy": "reward", "steps": 2, "micro_batch_size": 2, "algorithm": algorithm}
    fabric.train(log, fabric.config(fabric.GRPO, **changes), lane="reward")


def _other_runs(log: Store) -> None:
    """A run that trains on what two others recorded, of whom one has groups of the other's names."""
    trajectories = [
        fabric.records(f"y{i}", [fabric.T()], group=f"g{_run('grpo')}", reward=float(i)) for i in range(4)
    ]
    fabric.append(log, [record for trajectory in trajectories for record in trajectory], run="other")
    recipe = {"source_runs": ["grpo", "other"], "max_staleness": 0}
    algorithm = {"name": "grpo", "groups": 7, "group_size": 4}
    fabric.train(
        log,
        fabric.config(fabric.GRPO, run="sweep", steps=1, algorithm=algorithm, recipe=recipe),
        lane="sweep",
    )


def _several_versions(log: Store) -> None:
    """Turns that two versions sampled, of which the older one's tokens are masked."""
    fabric.append(log, fabric.teacher_records(8, "spans"), run="spans")
    fabric.train(log, fabric.config(fabric.SFT, run="spans", steps=2), lane="spans")
    records = [_spanned(record) for record in fabric.rollout_records(3, 4, first=200, version=2)]
    fabric.append(log, records, run="spans")
    recipe = {"max_staleness": 1, "stale_tokens": "mask", "stale_share": 0.9}
    changes = {"run": "spans", "steps": 1, "algorithm": {"name": "grpo"} | GROUPS, "recipe": recipe}
    fabric.train(log, fabric.config(fabric.GRPO, **changes), lane="spans")


def _spanned(record: Any) -> Any:
    """A turn whose first token is of version 0."""
    if not isinstance(record, TurnCompleted):
        return record
    count = len(record.completion_ids)
    spans = VersionSpan("actor", 0, 0, 1), VersionSpan("actor", 2, 1, count)
    return replace(record, version_spans=spans)


def _recorded_order(log: Store) -> None:
    """Epochs in the order of recording, packed, some dropped."""
    records = fabric.teacher_records(8, "order") + fabric.records("long", [fabric.T(completion=[5] * 70)])
    fabric.append(log, records, run="order")
    recipe = {"splits": ["teacher", "train"], "order": "recorded"}
    changes = {"run": "order", "steps": 3, "recipe": recipe} | PACKED
    fabric.train(log, fabric.config(fabric.SFT, **changes), lane="order")


def _preferences(log: Store) -> None:
    """Pairs that were preferred, with margins, over more than an epoch."""
    for i in range(4):
        for side, token in (("good", 60), ("bad", 20)):
            records = fabric.records(f"{side}{i}", [fabric.T([5, 6 + i], [token, 21 + i])])
            fabric.append(log, records, run="preferred")
    fabric.append(
        log, [PreferenceAdded(f"good{i}", f"bad{i}", 0.5 * i or None) for i in range(4)], run="preferred"
    )
    algorithm = {"name": "dpo", "batch_size": 3}
    changes = {"run": "preferred", "steps": 3, "micro_batch_size": 2, "algorithm": algorithm}
    fabric.train(log, fabric.config(fabric.GRPO, **changes), lane="preferred")


def _abandoned(log: Store) -> None:
    """A run that went back to a checkpoint, and on from it."""
    fabric.append(log, fabric.teacher_records(8, "back"), run="back")
    settings = fabric.config(fabric.SFT, run="back", steps=4, checkpoint_every=2)
    fabric.train(log, settings, lane="back")
    fabric.train(log, settings, lane="back", abandon_after=2)


def _without_steps(log: Store) -> None:
    """A training that drops all but fills no step, before one that does, of an attempt that was killed."""
    fabric.append(log, fabric.rollout_records(2, 4, first=300), run="twice")
    changes = {"run": "twice", "steps": 1, "algorithm": {"name": "grpo"} | GROUPS}
    with pytest.raises(Exception, match="are dropped by the rule min_reward"):
        fabric.train(log, fabric.config(fabric.GRPO, **changes, recipe={"min_reward": 9.0}), lane="twice")
    with fabric.killed_at(0):
        fabric.train(log, fabric.config(fabric.GRPO, **changes), lane="twice")
    fabric.train(log, fabric.config(fabric.GRPO, **changes), lane="twice")


def _trained_paths(log: Store) -> None:
    """One path of each trajectory is asked for after a step trained another one."""
    for name in ("path-a", "path-b"):
        turns = [fabric.T([5], [20, 21]), fabric.T([9], [40], 0), fabric.T([8], [50], 0)]
        fabric.append(log, fabric.records(name, turns), run="path")
    for recipe in ({}, {"paths": "last"}):
        algorithm = {"name": "sft", "batch_size": 1}
        changes = {"run": "path", "steps": 1, "algorithm": algorithm, "recipe": recipe}
        fabric.train(log, fabric.config(fabric.SFT, **changes), "tail", lane="path")


def _not_finite(log: Store, patch: pytest.MonkeyPatch, way: str) -> None:
    """A step whose third sample has no number, of the best of groups."""
    from rollbook.train.loop import trainer

    right, spoilt = trainer.run_step, list[int]()

    def spoils(policy: Any, settings: Any, batch: Any, **options: Any) -> Any:
        if not spoilt:
            spoilt.append(settings.version)
            experience = batch.experience
            values = experience.advantages.values.astype(np.float64)
            values[2] = np.inf
            spoilt_of = replace(experience, advantages=replace(experience.advantages, values=values))
            return right(policy, settings, replace(batch, experience=spoilt_of), **options)
        return right(policy, settings, batch, **options)

    patch.setattr(trainer, "run_step", spoils)
    fabric.append(log, fabric.rollout_records(6, 4, first=400 if way == "skip" else 500), run=way)
    changes = {"run": way, "steps": 1, "on_not_finite": way, "algorithm": {"name": "grpo"} | GROUPS}
    settings = fabric.config(fabric.GRPO, **changes, recipe={"top_fraction": 0.5})
    fabric.train(log, settings, lane=way)
    assert spoilt == [0]


@pytest.fixture(scope="module")
def proven(held: Store, root: Path) -> dict[str, Any]:
    """What another process finds of each policy of each run."""
    env = os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", PROVE, str(held.path)], env=env, capture_output=True, text=True, timeout=220
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    results: dict[str, Any] = orjson.loads(ran.stdout.splitlines()[-1])
    return results


RUNS = {
    **{f"{name}/actor": kind.steps for name, kind in KINDS.items()},
    **{"grpo/reward": 2, "sweep/actor": 1, "spans/actor": 3, "order/actor": 3, "preferred/actor": 3},
    **{"back/actor": 4, "twice/actor": 1, "path/actor": 2, "retake/actor": 1, "skip/actor": 1},
}


@pytest.mark.parametrize("run", RUNS)
def test_every_stage_of_every_step(proven: dict[str, Any], run: str) -> None:
    """Is equal; selection and schedule, metrics and checkpoint among them."""
    result = proven[run]
    assert (result["broken"], len(result["steps"])) == (0, RUNS[run])
    odd = []
    for step, why, stages in result["steps"]:
        assert stages is not None, (step, why)
        assert {"selection", "schedule", "samples", "gradients", "weights", "metrics"} <= stages.keys()
        odd += [(step, stage, *values) for stage, values in stages.items() if values[0] != "equal"]
    assert odd == []
    assert "checkpoint" in result["steps"][-1][2]


def test_there_are_no_other_runs(proven: dict[str, Any]) -> None:
    """Each is looked at."""
    assert proven.keys() - {"other/actor"} == RUNS.keys()
