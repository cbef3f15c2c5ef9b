"""Trainings in bfloat16 with float32 main weights: what is kept of them, and the same bits again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of
from transformers import AutoModelForCausalLM

from rollbook.bench.scripted.job import Options
from rollbook.bench.scripted.sglang import ScriptedSGLang
from rollbook.engines.weights.digests import digest_tensors, read_weights
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import TrainError
from rollbook.store.events import CheckpointWritten, PolicyActivated, StepCommitted, StepPlanned
from rollbook.testing.asgi import serving
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.model.model import Build
from rollbook.train.model.shape import read_shape
from rollbook.train.ranks.backend import MAIN, TrainablePolicy

Stores = Callable[..., Store]
NARROW = {"dtype": "bfloat16"}
PACKED = {"micro_batch_size": None, "tokens_per_micro_batch": 24}
TRAININGS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo", "groups": 2, "group_size": 4, "kl": 0.1}},
    "packed": {"algorithm": {"name": "grpo", "groups": 2, "group_size": 4}} | PACKED,
    "muon": {"optimizer": {"name": "muon", "lr": 1e-3}},
    "ppo": {"algorithm": {"name": "ppo", "groups": 8, "mini_batches": 2}, "critic": {"lr": 0.01}, "steps": 4},
    "reward_model": {
        "algorithm": {"name": "reward_model", "pairs": "rewards", "group_size": 4, "batch_size": 3},
        "policy": "reward",
        "micro_batch_size": 4,
    },
}


class Killed(Exception):
    """The process ends here."""


def _files(log: Store, record: CheckpointWritten) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    folder = log.path / record.path
    return load_file(folder / "model.safetensors"), load_file(folder / "optimizer.safetensors")


@pytest.mark.more_but("grpo")
@pytest.mark.parametrize("name", TRAININGS)
def test_steps_are_near_those_of_float32_and_replay(recorded: Stores, name: str) -> None:
    """Losses differ by rounding alone; checkpoints hold bfloat16 weights, and beside Adam's moments the
    float32 weights that they are rounded from."""
    changes: dict[str, Any] = {"steps": 3, "checkpoint_every": 2} | TRAININGS[name]
    logs = [recorded("wide"), recorded("narrow")]
    fabric.train(logs[0], fabric.config(fabric.GRPO, **changes))
    fabric.train(logs[1], fabric.config(fabric.GRPO, **changes, **NARROW))
    wide, narrow = (records_of(log, StepCommitted) for log in logs)
    assert [plan.environment["dtype"] for plan in records_of(logs[1], StepPlanned)] == ["bfloat16"] * len(
        narrow
    )
    assert narrow[0].metrics["loss"] == pytest.approx(wide[0].metrics["loss"], rel=0.05, abs=0.02)
    assert narrow[0].metrics["gradient_norm"] == pytest.approx(wide[0].metrics["gradient_norm"], rel=0.1)
    assert narrow[-1].digests["losses"] != wide[-1].digests["losses"]
    last = records_of(logs[1], CheckpointWritten)[-1]
    weights, state = _files(logs[1], last)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert '"dtype": "bfloat16"' in (logs[1].path / last.path / "config.json").read_text()
    mains = {key: tensor for key, tensor in state.items() if key.endswith(f".{MAIN}")}
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    norm = "decoder.final_layernorm.weight"
    assert torch.equal(mains[f"{norm}.{MAIN}"].bfloat16(), weights["model.norm.weight"])
    assert not torch.equal(mains[f"{norm}.{MAIN}"], weights["model.norm.weight"].float())
    assert digest_tensors(weights, tree=True) == last.weights_digest == narrow[-1].digests["weights"]
    for step in (0, len(narrow) - 1):
        result = replay_step(logs[1], step, policy=changes.get("policy", "actor"))
        assert result.bit_for_bit, result.differs_in


@pytest.mark.more
def test_a_kill_changes_nothing(recorded: Stores) -> None:
    """A restart has the float32 weights, and so the bits of a run that never stopped."""
    whole, broken = recorded("whole"), recorded("broken")
    settings = fabric.config(fabric.SFT, steps=6, **NARROW)
    fabric.train(whole, settings)
    with fabric.killed_at(5, Killed):
        fabric.train(broken, settings)
    fabric.train(broken, settings)
    assert [s.digests for s in records_of(broken, StepCommitted)] == [
        s.digests for s in records_of(whole, StepCommitted)
    ]


def test_small_steps_add_up() -> None:
    """Of steps that bfloat16 would round away none is lost: weights are those of plain AdamW in float32,
    rounded; and what stands in for them for a while leaves no trace."""
    folder = fabric.model_folder()
    how = Build(40, torch.device("cpu"), 0, 1, "bfloat16")
    policy = TrainablePolicy(read_shape(folder), OptimizerConfig(lr=1e-4, clip_grad=0.0), how)
    policy.load_weights(read_weights(folder))
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    plain = torch.nn.Parameter(policy.own_weights()[name].float())
    adam = torch.optim.AdamW([plain], lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    begun = plain.detach().clone()
    for step in range(20):
        for gradient in policy.gradients().values():
            gradient.fill_(0.5)
        plain.grad = torch.full_like(plain, 0.5)
        policy.optimizer_step(1e-4)
        adam.step()
        if step == 10:
            with policy.using(read_weights(folder)):
                assert torch.equal(policy.own_weights()[name], begun.bfloat16())
    assert torch.allclose(policy.optimizer_state()[f"{name}.{MAIN}"], plain, atol=1e-7)
    assert torch.equal(policy.own_weights()[name], policy.optimizer_state()[f"{name}.{MAIN}"].bfloat16())
    assert (plain - begun).abs().max() > 1e-3


def test_from_one_type_to_the_other(recorded: Stores) -> None:
    """bfloat16 weights can be trained on in float32; float32 ones are not rounded within a run."""
    log = recorded()
    fabric.train(log, fabric.config(fabric.SFT, steps=2, **NARROW))
    fabric.train(log, fabric.config(fabric.SFT, steps=2))
    commits = records_of(log, StepCommitted)
    assert records_of(log, StepPlanned)[2].input_digests["input_weights"] == commits[1].digests["weights"]
    assert [replay_step(log, step).differs_in for step in (1, 3)] == [None, None]
    before = log.head()
    message = (
        r"version 4 of run .* has float32 weights, which dtype = \"bfloat16\" would round: .*export model"
    )
    with pytest.raises(TrainError, match=message):
        fabric.train(log, fabric.config(fabric.GRPO, **NARROW))
    assert {lane: head for lane, head in log.head().items() if lane != "train"} == {
        lane: head for lane, head in before.items() if lane != "train"
    }


def test_transformers_reads_a_checkpoint(recorded: Stores, tmp_path: Path) -> None:
    """In the type that it is written in."""
    log = recorded()
    fabric.train(log, fabric.config(fabric.SFT, steps=2, **NARROW))
    folder = log.path / records_of(log, CheckpointWritten)[-1].path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16


@pytest.mark.more_but("tensor-bfloat16")
@pytest.mark.parametrize("held", ["float32", "bfloat16"])
@pytest.mark.parametrize("transport", ["tensor", "disk"])
def test_engines_of_either_type_get_them(recorded: Stores, held: str, transport: str) -> None:
    """Float32 holds what bfloat16 does, so engines of both are verified, under the digest of the step."""
    options = Options(model_path=str(fabric.model_folder()), weights=held)
    log = recorded()
    with serving(ScriptedSGLang(None, options)) as url:
        sync = {"engines": [url], "transport": transport}
        fabric.train(log, fabric.config(fabric.SFT, steps=2, sync=sync, **NARROW))
    served = records_of(log, PolicyActivated)
    assert [activation.policy_version for activation in served] == [0, 1, 2]
    assert [activation.weights_digest for activation in served][1:] == [
        s.digests["weights"] for s in records_of(log, StepCommitted)
    ]


@pytest.mark.more_but("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputed_activations_have_the_same_bits(recorded: Stores, dtype: str) -> None:
    """So a training may go on with or without them, and a replay needs not know."""
    logs = [recorded("kept"), recorded("recomputed")]
    settings = {"dtype": dtype, "steps": 3}
    fabric.train(logs[0], fabric.config(fabric.GRPO, **settings))
    fabric.train(logs[1], fabric.config(fabric.GRPO, **settings, recompute=True))
    kept, again = (records_of(log, StepCommitted) for log in logs)
    assert [step.digests for step in kept] == [step.digests for step in again]
    assert records_of(logs[0], StepPlanned)[0].phase == records_of(logs[1], StepPlanned)[0].phase
