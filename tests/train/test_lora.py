"""Trainings of low-rank factors: what is trained and what is left as it is, resumed and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from safetensors.torch import load_file

from rollbook.replay.step import replay_step
from rollbook.store import Store
from rollbook.store.events import CheckpointWritten, StepCommitted, StepPlanned

Stores = Callable[..., Store]
LORA = {"lora": {"rank": 4, "alpha": 8.0}}
PACKED = {"micro_batch_size": None, "tokens_per_micro_batch": 24}
TRAININGS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo", "groups": 2, "group_size": 4, "kl": 0.1}},
    "packed": {"algorithm": {"name": "grpo", "groups": 2, "group_size": 4}} | PACKED,
    "bfloat16": {"dtype": "bfloat16"},
    "recomputed": {"recompute": True},
    "some": {"lora": {"rank": 3, "targets": ["q_proj", "v_proj", "up_proj"]}},
    "ppo": {"algorithm": {"name": "ppo", "groups": 8, "mini_batches": 2}, "critic": {"lr": 0.01}, "steps": 4},
}


class Killed(Exception):
    """The process ends here."""


def _of(log: Store, kind: Any) -> list[Any]:
    return [event.record for event in log.events() if isinstance(event.record, kind)]


@pytest.mark.parametrize("name", TRAININGS)
def test_steps_replay(fabric: Any, recorded: Stores, name: str) -> None:
    """Weights change, by the factors alone; each step is replayed bit for bit."""
    changes: dict[str, Any] = {"steps": 3, "checkpoint_every": 2} | LORA | TRAININGS[name]
    log = recorded()
    fabric.train(log, fabric.config(fabric.GRPO, **changes))
    commits, plans = _of(log, StepCommitted), _of(log, StepPlanned)
    assert commits[0].metrics["gradient_norm"] > 0
    first, *_, last = _of(log, CheckpointWritten)
    assert first.weights_digest == plans[0].input_digests["input_weights"]
    assert last.weights_digest == commits[-1].digests["weights"] != first.weights_digest
    state = load_file(log.path / last.path / "optimizer.safetensors")
    assert all(".adapter." in key for key in state)
    assert plans[0].lora["base_version"] == 0
    for step in range(len(commits)):
        result = replay_step(log, step)
        assert result.bit_for_bit, result.differs_in
