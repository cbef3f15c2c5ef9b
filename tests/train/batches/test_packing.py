"""Trainings whose micro-batches are packed: the numbers of padded ones, and the same bits again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ConfigError
from rollbook.store.events import EvalFinished, StepCommitted, StepPlanned
from rollbook.train.select.samples import all_samples

Stores = Callable[..., Store]
MOST = 24
"""Tokens of a micro-batch."""
PACKED = {"micro_batch_size": None, "tokens_per_micro_batch": MOST}
PAIRS = {"pairs": "rewards", "group_size": 4, "batch_size": 3}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo", "groups": 2, "group_size": 4}},
    "sequence_mean": {
        "algorithm": {
            "name": "grpo",
            "groups": 2,
            "group_size": 4,
            "normalizer": "sequence_mean",
            "entropy": 0.1,
        }
    },
    "gspo": {"algorithm": {"name": "gspo", "groups": 2, "group_size": 4, "kl": 0.1}},
    "decoupled_ppo": {
        "algorithm": {"name": "decoupled_ppo", "groups": 2, "group_size": 4, "mini_batches": 2}
    },
    "ppo": {"algorithm": {"name": "ppo", "groups": 8, "mini_batches": 2}, "critic": {"lr": 0.01}},
    "dpo": {"algorithm": {"name": "dpo"} | PAIRS},
    "reward_model": {
        "algorithm": {"name": "reward_model", "batch_sum_to_zero": 0.1} | PAIRS,
        "policy": "reward",
    },
}


class Killed(Exception):
    """The process ends here."""


def _lengths(log: Store) -> dict[str, int]:
    return {sample.leaf_turn_id: len(sample) for sample in all_samples(log.trajectories().values())}


@pytest.mark.more_but("grpo")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_numbers_are_those_of_padded_samples(recorded: Stores, name: str) -> None:
    """Every metric of every step is, but for the order of sums; micro-batches hold what they may; steps
    replay."""
    changes = {"steps": 4, "checkpoint_every": 4} | ALGORITHMS[name]
    logs = [recorded("padded"), recorded("packed")]
    fabric.train(logs[0], fabric.config(fabric.GRPO, **changes, micro_batch_size=None))
    fabric.train(logs[1], fabric.config(fabric.GRPO, **changes, **PACKED))
    plans = records_of(logs[1], StepPlanned)
    assert all(plan.packed for plan in plans)
    assert not any(plan.packed for plan in records_of(logs[0], StepPlanned))
    lengths, pairs = _lengths(logs[1]), "pairs" in ALGORITHMS[name]["algorithm"]
    for plan in plans:
        [parts] = plan.partition
        assert sorted(i for part in parts for i in part) == list(range(len(plan.samples)))
        assert len(parts) > 1
        for part in parts:
            tokens = sum(lengths[plan.samples[i]["turn_id"]] for i in part)
            assert tokens <= MOST or len(part) == (2 if pairs else 1)
            assert not pairs or all(b == a + 1 for a, b in zip(part[::2], part[1::2], strict=True))
    for padded, packed in zip(*(records_of(log, StepCommitted) for log in logs), strict=True):
        assert packed.metrics.keys() == padded.metrics.keys()
        for key, value in fabric.computed(padded.metrics).items():
            expected = value if value is None else pytest.approx(value, rel=2e-4, abs=2e-6)
            assert packed.metrics[key] == expected, key
    policy = changes.get("policy", "actor")
    for plan in plans[::3]:
        result = replay_step(logs[1], plan.step, policy=policy)
        assert result.bit_for_bit, result.differs_in


@pytest.mark.more
def test_a_kill_changes_nothing(recorded: Stores) -> None:
    """Steps since the checkpoint run again, packed as they were."""
    whole, broken = recorded("whole"), recorded("broken")
    settings = fabric.config(fabric.GRPO, **PACKED)
    fabric.train(whole, settings)
    with fabric.killed_at(1, Killed):
        fabric.train(broken, settings)
    fabric.train(broken, settings)
    assert [s.digests for s in records_of(broken, StepCommitted)] == [
        s.digests for s in records_of(whole, StepCommitted)
    ]


@pytest.mark.more
def test_samples_are_packed_from_a_step_on(recorded: Stores) -> None:
    """A training that goes on packed is another one, from the same weights; steps of both replay."""
    log = recorded()
    fabric.train(log, fabric.config(fabric.SFT, steps=2))
    fabric.train(log, fabric.config(fabric.SFT, steps=2, **PACKED))
    plans = records_of(log, StepPlanned)
    assert [plan.packed for plan in plans] == [False, False, True, True]
    assert plans[1].phase != plans[2].phase
    assert [replay_step(log, step).differs_in for step in (1, 3)] == [None, None]


@pytest.mark.more
def test_held_out_samples_are_packed_too(recorded: Stores) -> None:
    """Their loss is that of padded ones."""
    losses = []
    for changes in ({"micro_batch_size": None}, PACKED):
        log = recorded(f"store-{len(losses)}")
        fabric.append(log, [r for i in range(5) for r in _held_out(i)])
        settings = fabric.config(fabric.SFT, steps=2, evaluation={"every": 1}, **changes)
        fabric.train(log, settings)
        losses.append([record.metrics["loss"] for record in records_of(log, EvalFinished)])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def _held_out(i: int) -> list[Any]:
    turn = fabric.T([5, 6], [20 + i] * (1 + 3 * i), logprobs=None, version=None)
    records: list[Any] = fabric.records(f"held{i}", [turn], split="eval")
    return records


def test_one_of_the_two_sizes_is_named() -> None:
    """Samples are padded, or packed."""
    with pytest.raises(ConfigError, match="micro_batch_size pads samples, tokens_per_micro_batch packs them"):
        fabric.config(fabric.GRPO, tokens_per_micro_batch=100)
