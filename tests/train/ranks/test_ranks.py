"""Trainings over several ranks: that of one, to rounding, and replayed bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook.engines.weights.digests import read_weights
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import TrainError
from rollbook.store.events import CheckpointWritten, StepCommitted, StepPlanned

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("warm_ranks")]
Stores = Callable[..., Store]


def _weights(log: Store) -> dict[str, Any]:
    return read_weights(log.path / records_of(log, CheckpointWritten)[-1].path)


def _same(log: Store, other: Store) -> None:
    """Losses and gradient norms of the steps, and the weights at the end, to rounding."""
    for first, second in zip(records_of(log, StepCommitted), records_of(other, StepCommitted), strict=True):
        for metric in ("loss", "gradient_norm", "entropy", "trained_tokens", "reward"):
            ours, theirs = (record.metrics.get(metric) or 0.0 for record in (first, second))
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6), metric
    weights, expected = _weights(log), _weights(other)
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert float((tensor - expected[name]).abs().max()) < 1e-6, name


@pytest.fixture(scope="module")
def of_one(recorded_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    """Trainings of two steps on one rank, by name."""
    stores = {}
    for name, settings in _settings().items():
        stores[name] = _copy(recorded_path, tmp_path_factory.mktemp("one") / name)
        fabric.train(stores[name], settings)
    return stores


def _copy(path: Path, to: Path) -> Store:
    import shutil

    from rollbook import store as rb

    return rb.open(shutil.copytree(path, to))


SGD_LIKE = {"lr": 1e-4, "eps": 1.0, "clip_grad": 0.0}
"""Adam whose steps are proportional to gradients: of one that is near zero its sign does not matter."""


def _settings(parallel: dict[str, Any] | None = None) -> dict[str, Any]:
    changes: dict[str, Any] = {"steps": 2, "optimizer": SGD_LIKE, "parallel": parallel or {}}
    packed = {"micro_batch_size": None, "tokens_per_micro_batch": 24}
    return {
        "sft": fabric.config(fabric.SFT, **changes),
        "grpo packed": fabric.config(fabric.GRPO | packed, **changes),
    }


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data 2": (2, {}),
    "tensor 2": (2, {"tensor": 2}),
    "pipeline 2": (2, {"pipeline": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("training", ["sft", "grpo packed"])
def test_a_training_is_that_of_one_rank(
    recorded: Stores, of_one: dict[str, Store], training: str, layout: str
) -> None:
    """The manifest has the layout and every rank's part; the last step replays bit for bit, by as many
    ranks."""
    count, sizes = LAYOUTS[layout]
    log = recorded()
    fabric.train(log, _settings(sizes)[training], ranks=count)
    _same(log, of_one[training])
    plans = records_of(log, StepPlanned)
    copies = 2 if layout == "data 2" else 1
    parallel = {"data": copies, "tensor": sizes.get("tensor", 1), "pipeline": sizes.get("pipeline", 1)}
    assert all(plan.environment["parallel"] == parallel for plan in plans)
    assert all(len(plan.partition) == copies and all(plan.partition) for plan in plans)
    replayed = replay_step(log, 1)
    assert replayed.differs_in is None
    assert replayed.environment == []


NARROW = LAYOUTS | {
    "data 2, distributed optimizer": (2, {"distributed_optimizer": True}),
    "tensor 2, sequence": (2, {"tensor": 2, "sequence": True}),
}


@pytest.mark.parametrize("layout", NARROW)
def test_bfloat16(recorded: Stores, layout: str) -> None:
    """Near that of one rank, in whatever layout; one rank goes on from its checkpoint with the float32
    weights; every step replays."""
    count, sizes = NARROW[layout]
    logs = [recorded("one"), recorded("ranks")]
    settings = [
        fabric.config(
            fabric.SFT, steps=2, optimizer=SGD_LIKE, dtype="bfloat16", recompute=True, parallel=parallel
        )
        for parallel in ({}, sizes)
    ]
    fabric.train(logs[0], settings[0])
    fabric.train(logs[1], settings[1], ranks=count)
    for record, other in zip(*(records_of(log, StepCommitted) for log in logs), strict=True):
        for metric in ("loss", "gradient_norm"):
            assert other.metrics[metric] == pytest.approx(record.metrics[metric], rel=0.03), metric
    fabric.train(logs[1], fabric.config(fabric.SFT, steps=3, optimizer=SGD_LIKE, dtype="bfloat16"))
    assert [replay_step(logs[1], step).differs_in for step in (1, 2)] == [None, None]
    states = [
        load_file(logs[1].path / record.path / "optimizer.safetensors")
        for record in records_of(logs[1], CheckpointWritten)[1:]
    ]
    mains = [{key: state[key] for key in state if key.endswith(".main")} for state in states]
    assert len(mains) == 2
    assert mains[0].keys() == mains[1].keys()
    for name, main in mains[0].items():
        assert 0 < float((mains[1][name] - main).abs().max()) < 2e-4, name


@pytest.mark.parametrize("sizes", [{}, {"distributed_optimizer": True}, {"tensor": 2, "sequence": True}])
def test_ppo_with_its_critic(recorded: Stores, sizes: dict[str, Any]) -> None:
    """On two ranks, with mini-batches and a reference; replayed."""
    logs = []
    for ranks in (1, 2):
        log = recorded(f"ranks-{ranks}")
        algorithm = {"name": "ppo", "groups": 8, "mini_batches": 2, "kl": 0.1}
        changes = {"algorithm": algorithm, "steps": 2, "optimizer": SGD_LIKE, "critic": SGD_LIKE}
        parallel = {} if ranks == 1 else sizes
        fabric.train(log, fabric.config(fabric.GRPO, **changes, parallel=parallel), ranks=ranks)
        logs.append(log)
    _same(*logs)
    values = [[step.metrics["value_loss"] for step in records_of(log, StepCommitted)] for log in logs]
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert replay_step(logs[1], 1).differs_in is None


def test_it_goes_on_in_another_layout(recorded: Stores, of_one: dict[str, Store]) -> None:
    """From the checkpoint of another one, with the optimizer's state."""
    log = recorded()
    fabric.train(log, fabric.config(fabric.SFT, steps=1, optimizer=SGD_LIKE), ranks=2)
    fabric.train(log, fabric.config(fabric.SFT, steps=2, optimizer=SGD_LIKE, parallel={"tensor": 2}), ranks=2)
    _same(log, of_one["sft"])
    assert [p.environment["parallel"]["data"] for p in records_of(log, StepPlanned)] == [2, 1]
    assert replay_step(log, 1).differs_in is None


def test_more_ranks_than_samples(recorded: Stores) -> None:
    """A rank without a sample takes part all the same."""
    logs = []
    for ranks in (1, 2):
        log = recorded(f"ranks-{ranks}")
        algorithm = {"name": "sft", "batch_size": 1}
        fabric.train(
            log, fabric.config(fabric.SFT, algorithm=algorithm, steps=1, optimizer=SGD_LIKE), ranks=ranks
        )
        logs.append(log)
    _same(*logs)
    assert [len(rank) for rank in records_of(logs[1], StepPlanned)[0].partition] == [1, 0]


def test_steps_between_are_of_another_layout(recorded: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that was cut off goes on only where its steps come out the same, and says what differs."""
    log = recorded()
    changes = {"steps": 3, "checkpoint_every": 9}
    with fabric.killed_at(1):
        fabric.train(log, fabric.config(fabric.SFT, **changes, parallel={"tensor": 2}), ranks=2)
    with pytest.raises(TrainError, match=r"parallel\.tensor: recorded 2, here 1\..*--abandon-after 0"):
        fabric.train(log, fabric.config(fabric.SFT, **changes), ranks=1)
