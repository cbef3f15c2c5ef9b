"""Replayed routing over several ranks: that of one, to rounding, and replayed bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.fakes.models import mixtures
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.events import StepCommitted
from rollbook.store.events.routed_experts import pack

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("warm_ranks")]
SGD_LIKE = {"lr": 1e-4, "eps": 1.0, "clip_grad": 0.0}
"""Adam whose steps are proportional to gradients: of one that is near zero its sign does not matter."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 2": {},
    "pipeline 2": {"pipeline": 2},
    "expert 2": {"expert": 2},
    "tensor 2, sequence": {"tensor": 2, "sequence": True},
}
HOW: dict[str, dict[str, Any]] = {
    "padded": {"micro_batch_size": 3},
    "packed, recomputed": {
        "micro_batch_size": None,
        "tokens_per_micro_batch": 25,
        "recompute": True,
    },
}


def _recorded(path: Path) -> Store:
    """Two groups whose tokens went to random experts, all but some, of lengths that no rank count divides."""
    log = rb.open(path, create=True)
    for at in range(8):
        experts = mixtures.other_choice([0] * 12, at)
        root = fabric.T((1, 2 + at), range(4, 7 + at % 2), experts=pack(experts[: 4 + at % 2], 0))
        child = fabric.T((9,), (8, 7 + at, 6), 0)
        turns = [root, child] if at % 3 else [root]
        fabric.append(log, fabric.records(f"t{at}", turns, group=f"g{at // 4}", reward=at % 4 / 2))
    return log


def _train(log: Store, how: str, sizes: dict[str, Any], ranks: int) -> list[Any]:
    algorithm = {"name": "grpo", "groups": 2, "group_size": 4, "kl": 0.1, "old": "trainer", "epochs": 2}
    options = {"model": str(mixtures.mixture("qwen3_moe")[0]), "routing_replay": True, "steps": 2}
    options |= {"optimizer": SGD_LIKE, "algorithm": algorithm, "parallel": sizes, **HOW[how]}
    fabric.train(log, fabric.config(fabric.GRPO, **options), ranks=ranks)
    return [event.record for event in log.events() if isinstance(event.record, StepCommitted)]


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The steps of one rank, padded and packed."""
    folder = tmp_path_factory.mktemp("one")
    logs = {how: _recorded(folder / f"{at}") for at, how in enumerate(HOW)}
    return {how: _train(log, how, {}, 1) for how, log in logs.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", HOW)
def test_a_step_is_that_of_one_rank(
    of_one: dict[str, list[Any]], tmp_path: Path, how: str, layout: str
) -> None:
    """Every rank replays its layers and its tokens; the last step replays bit for bit."""
    log = _recorded(tmp_path / "store")
    steps = _train(log, how, LAYOUTS[layout], 2)
    for ours, theirs in zip(steps, of_one[how], strict=True):
        for metric in ("loss", "gradient_norm", "entropy", "kl", "engine_logprob_gap"):
            value, expected = (step.metrics[metric] or 0.0 for step in (ours, theirs))
            assert value == pytest.approx(expected, rel=1e-4, abs=1e-6), metric
        assert ours.metrics["routing_replayed"] == theirs.metrics["routing_replayed"]
        assert 0.5 < ours.metrics["routing_replayed"] < 1
    assert replay_step(log, 1).differs_in is None
