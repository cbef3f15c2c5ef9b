"""What a replay promises of trainings over two ranks: each stage of each step, by as many ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories import fabric

from rollbook.replay.stretch.stretch import history_of, prove_stretch

PACKED = {"micro_batch_size": None, "tokens_per_micro_batch": 24}
BEST = {"recipe": {"top_fraction": 0.75, "group_statistics": "all"}} | PACKED
PPO = {"name": "ppo", "groups": 2, "kl": 0.1}
GROUPS = {"name": "grpo", "old": "trainer", "kl": 0.1, "groups": 2, "group_size": 4}
HYBRID = {"mode": "hybrid", "num_iters_per_train_update": 2, "algorithm": GROUPS}
TRAININGS: dict[str, dict[str, Any]] = {
    "data": BEST,
    "tensor": BEST | {"parallel": {"tensor": 2}},
    "critic": {"algorithm": PPO, "critic": {"lr": 0.01}},
    "hybrid": HYBRID,
}


@pytest.mark.ranks
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("name", TRAININGS)
def test_every_stage_of_every_step(tmp_path: Path, name: str) -> None:
    """Packed, of the best of groups, with the layout's own micro-batches, with a critic and a reference, or
    as rollouts come: selection and schedule too."""
    log = fabric.record_store(tmp_path / "store")
    source = "tail" if name == "hybrid" else "cut"
    fabric.train(log, fabric.config(fabric.GRPO, steps=2, **TRAININGS[name]), source, ranks=2)
    result = prove_stretch(log, history_of(log, None, "actor"), 0, 1)
    assert result.broken == []
    odd = [
        (step.step, step.why or [(s.stage, s.verdict, s.why) for s in step.replay.stages.values()])
        for step in result.steps
        if step.replay is None or {str(s.verdict) for s in step.replay.stages.values()} != {"equal"}
    ]
    assert odd == []
    wanted = {"selection", "schedule"} | ({"values", "critic_weights"} if name == "critic" else set())
    assert all(wanted <= step.replay.stages.keys() for step in result.steps if step.replay)
