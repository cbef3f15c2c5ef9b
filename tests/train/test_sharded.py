"""Checkpoints in every way of writing them: what is read back is the same bit for bit, and training goes on
from it in another layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollbook.ingest.engines.weights.digests import digest_tensors
from rollbook.replay.step import replay_step
from rollbook.store import Store
from rollbook.store.events import CheckpointWritten, StepCommitted
from rollbook.train.checkpoints.checkpoint import Checkpoint, read_checkpoint

Stores = Callable[..., Store]
SGD_LIKE = {"lr": 1e-4, "eps": 1.0, "clip_grad": 0.0}
"""Adam whose steps are proportional to gradients: of one that is near zero its sign does not matter."""
WAYS: dict[str, dict[str, Any]] = {
    "overlap": {"overlap": True},
    "sharded": {"sharded": True},
    "both": {"sharded": True, "overlap": True},
}
"""Beside the plain one, with which all are compared."""


def _trainings(fabric: Any) -> dict[str, dict[str, Any]]:
    packed = {"micro_batch_size": None, "tokens_per_micro_batch": 24}
    ppo = {"algorithm": {"name": "ppo", "groups": 2, "kl": 0.1}, "critic": SGD_LIKE}
    return {
        "sft": fabric.SFT,
        "grpo packed": fabric.GRPO | packed,
        "ppo": fabric.GRPO | ppo,
        "lora": fabric.SFT | {"lora": {"rank": 4}},
        "bfloat16": fabric.SFT | {"dtype": "bfloat16"},
    }


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "data 2": (2, {}),
    "tensor 2": (2, {"tensor": 2}),
    "distributed optimizer": (2, {"distributed_optimizer": True}),
    "tensor 2, pipeline 2": (4, {"tensor": 2, "pipeline": 2}),
}


def _of(log: Store, kind: type[Any]) -> list[Any]:
    return [e.record for e in log.events() if isinstance(e.record, kind)]


def _tensors(held: Checkpoint) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, by what and name."""
    found = {
        what: getattr(held, what) or {} for what in ("weights", "optimizer", "critic", "critic_optimizer")
    }
    found["adapter"] = {} if held.adapter is None else held.adapter.tensors
    return {f"{what} {name}": tensor for what, of in found.items() for name, tensor in of.items()}


def _same_bits(one: Checkpoint, two: Checkpoint) -> None:
    ours, theirs = _tensors(one), _tensors(two)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def _last(log: Store) -> Checkpoint:
    return read_checkpoint(log.path / _of(log, CheckpointWritten)[-1].path)


def _contract(
    fabric: Any, recorded: Stores, values: dict[str, Any], count: int, sizes: Any, way: str
) -> None:
    """The checkpoints of two trainings that differ in how they write them alone are the same; so is the next
    step, from either, on one rank; every step replays."""
    optimizer = values.get("optimizer", {}) if values.get("lora") else SGD_LIKE
    changes = {"steps": 2, "checkpoint_every": 1, "parallel": sizes, "optimizer": optimizer}
    plain, log = recorded("plain"), recorded("log")
    fabric.train(plain, fabric.config(values | changes), ranks=count)
    fabric.train(log, fabric.config(values | changes, checkpoint=WAYS[way]), ranks=count)
    assert [of.digests for of in _of(log, StepCommitted)] == [of.digests for of in _of(plain, StepCommitted)]
    ours, theirs = _of(log, CheckpointWritten), _of(plain, CheckpointWritten)
    for one, two in zip(ours, theirs, strict=True):
        assert (one.path, one.weights_digest, one.optimizer_digest, one.phase) == (
            *(two.path, two.weights_digest, two.optimizer_digest, two.phase),
        )
        held = read_checkpoint(log.path / one.path)
        _same_bits(held, read_checkpoint(plain.path / two.path))
        assert digest_tensors(held.weights) == one.weights_digest
    assert read_checkpoint(log.path / ours[-1].path).optimizer
    files = {file.name for file in (log.path / ours[-1].path).glob("shard-*")}
    sharded = {f"shard-{rank + 1:05d}-of-{count:05d}.safetensors" for rank in range(count)}
    assert files == (sharded if "sharded" in WAYS[way] else set())
    for of in (plain, log):
        fabric.train(of, fabric.config(values | changes | {"steps": 3, "parallel": {}}))
    assert _of(log, StepCommitted)[2].digests == _of(plain, StepCommitted)[2].digests
    assert [replay_step(log, step).differs_in for step in (1, 2)] == [None, None]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("training", ["sft", "grpo packed", "ppo", "lora", "bfloat16"])
def test_one_rank(fabric: Any, recorded: Stores, training: str, way: str) -> None:
    """Each training, written in each way."""
    _contract(fabric, recorded, _trainings(fabric)[training], 1, {}, way)


@pytest.mark.ranks
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("training", "layout"),
    [
        ("sft", "data 2"),
        ("grpo packed", "tensor 2"),
        ("ppo", "tensor 2"),
        ("ppo", "distributed optimizer"),
        ("lora", "tensor 2"),
        ("lora", "distributed optimizer"),
        ("bfloat16", "distributed optimizer"),
        ("sft", "tensor 2, pipeline 2"),
    ],
)
def test_ranks(fabric: Any, recorded: Stores, training: str, layout: str, way: str) -> None:
    """Each training over ranks, written in each way."""
    _contract(fabric, recorded, _trainings(fabric)[training], *LAYOUTS[layout], way)
