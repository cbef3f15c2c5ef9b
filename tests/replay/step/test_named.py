"""Changes of one number or name, all checksums made to fit: which stage differs, and the place named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.stories import fabric
from tests.replay.conftest import Tamper

from rollbook.engines.weights.digests import digest_like
from rollbook.replay.step.step import replay_step
from rollbook.replay.verdict import Place
from rollbook.store import Store
from rollbook.store.digest import digest_json
from rollbook.store.events import RewardAssigned, StepPlanned
from rollbook.train.ranks.backend import TrainablePolicy

Stores = Callable[..., Store]
STEP = 11
"""The last step of GRPO, which starts from a checkpoint."""


def _place(log: Store, stage: str, step: int = STEP) -> Place:
    result = replay_step(log, step)
    assert result.differs_in == stage, result.first_difference
    place = result.stages[stage].place
    assert place is not None
    return place


def test_one_ulp_of_a_reward(trained: Stores, tamper: Tamper) -> None:
    """Its sample is named."""
    log = trained()
    plan = fabric.steps_of(log).steps[STEP].planned
    rewards = {t: log.trajectories()[t].reward() for t in {r["trajectory_id"] for r in plan.samples}}
    name = next(r["trajectory_id"] for r in plan.samples if rewards[r["trajectory_id"]])

    def change(record: Any) -> Any:
        return replace(record, reward=float(np.nextafter(record.reward, 9.0)))

    tamper.event(log, "reward.assigned", change, trajectory_id=name)
    place = _place(log, "rewards")
    first = [r["trajectory_id"] for r in plan.samples].index(name)
    assert (place.sample, place.trajectory_id) == (first, name)


@pytest.mark.more_but("model-*")
@pytest.mark.parametrize(("file", "stage"), [("model", "weights"), ("optimizer", "optimizer")])
def test_one_ulp_of_the_checkpoint_that_a_step_starts_from(
    trained: Stores, tamper: Tamper, file: str, stage: str
) -> None:
    """The tensor is named by what the step before recorded of its own; in no other stage before it."""
    log = trained()
    folder = log.path / "checkpoints/demo/actor/v00000011"
    tensors = load_file(folder / f"{file}.safetensors")
    name = next(n for n in sorted(tensors) if tensors[n].dim() == 2 and "embed" not in n)
    flat = tensors[name].view(-1)
    flat[5] = torch.nextafter(flat[5], torch.tensor(9.0))
    save_file(tensors, folder / f"{file}.safetensors", metadata={"format": "pt"})
    manifest = orjson.loads((folder / "rollbook.json").read_bytes())
    manifest[f"{stage}_digest"] = digest_like(tensors, manifest[f"{stage}_digest"])
    (folder / "rollbook.json").write_bytes(orjson.dumps(manifest))
    assert _place(log, f"input_{stage}").tensor == name
    # The step that made it says which number of it.
    result = replay_step(log, STEP - 1)
    assert result.differs_in == "checkpoint"
    assert stage in result.stages["checkpoint"].why


@pytest.mark.more_but("False")
@pytest.mark.parametrize("sharded", [False, True])
def test_the_element_of_a_tensor_that_a_step_made(trained: Stores, sharded: bool) -> None:
    """Its place, both values and how far apart they are, by the checkpoint of what the step made."""
    log = trained()
    fabric.append(log, fabric.rollout_records(2, 4, first=6, version=12))
    right, value = TrainablePolicy.optimizer_step, torch.zeros(())

    def wrong(self: TrainablePolicy, learning_rate: float) -> float:
        norm = right(self, learning_rate)
        weight = self.weights()["model.norm.weight"]
        value.copy_(weight[3])
        with torch.no_grad():
            weight[3:5] = torch.nextafter(torch.nextafter(weight[3:5], torch.tensor(9.0)), torch.tensor(9.0))
        return norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainablePolicy, "optimizer_step", wrong)
        fabric.train(log, fabric.config(fabric.GRPO, steps=1, seed=5, checkpoint={"sharded": sharded}))
    place = _place(log, "weights", STEP + 1)
    assert (place.tensor, place.element, place.ulps) == ("model.norm.weight", (3,), 2)
    assert place.replayed == float(value)
    assert place.recorded == float(np.nextafter(np.nextafter(value.numpy(), np.float32(9)), np.float32(9)))


def test_samples_and_their_choice(trained: Stores, tamper: Tamper) -> None:
    """Two samples swapped; a recipe that the training was not opened with, under its right digest; a
    trajectory that is held out, or that never finished."""
    name = fabric.steps_of(trained()).steps[STEP].planned.samples[0]["trajectory_id"]

    def swapped(plan: Any) -> Any:
        return replace(plan, samples=[*plan.samples[4:], *plan.samples[:4]])

    def forged(plan: Any) -> Any:
        recipe = plan.recipe | {"max_staleness": 90}
        return replace(plan, recipe=recipe, recipe_digest=digest_json(recipe))

    for at, (kind, change, where, key) in enumerate(
        [
            ("step.planned", swapped, {"step": STEP}, "samples"),
            ("step.planned", forged, {"step": STEP}, "recipe"),
            ("trajectory.opened", lambda r: replace(r, split="eval"), {"trajectory_id": name}, "samples"),
            (
                "trajectory.finished",
                lambda r: replace(r, trajectory_id="nothing"),
                {"trajectory_id": name},
                "samples",
            ),
        ]
    ):
        log = trained(f"store-{at}")
        tamper.event(log, kind, change, **where)
        place = _place(log, "selection")
        assert str(place.key).startswith(key), (at, place)


def test_a_recorded_metric(trained: Stores, tamper: Tamper) -> None:
    """With both values."""
    log = trained()
    tamper.event(log, "step.committed", lambda r: replace(r, metrics=r.metrics | {"loss": 99.0}), step=STEP)
    place = _place(log, "metrics")
    assert (place.key, place.recorded) == ("loss", 99.0)


def test_the_last_checkpoint(trained: Stores, tamper: Tamper) -> None:
    """That nothing starts from, with a manifest that fits it."""
    log = trained()
    tamper.checkpoint(log, 12, "weights")
    result = replay_step(log, STEP)
    assert (result.differs_in, result.stages["weights"].verdict) == ("checkpoint", "equal")


def test_a_late_reward_is_shown(trained: Stores, cli: Callable[..., tuple[int, str, str]]) -> None:
    """It changes nothing; text and JSON say which it is."""
    log = trained()
    name = fabric.steps_of(log).steps[STEP].planned.samples[0]["trajectory_id"]
    fabric.append(log, [RewardAssigned(name, None, 77.0, "judge")])
    code, out, _ = cli("replay", "step", STEP, "--store", log.path, "--json")
    values = orjson.loads(out)
    late = {"trajectory_id": name, "turn_id": None, "reward": 77.0, "source": "judge"}
    assert (code, values["bit_for_bit"], values["late"]) == (0, True, [late])
    code, out, _ = cli("replay", "step", STEP, "--store", log.path)
    printed = " ".join(out.split())
    assert code == 0
    assert f"reward 77 of {name}, by 'judge', came after the step was planned" in printed


def test_a_step_of_a_gpu(trained: Stores, tamper: Tamper) -> None:
    """Where there is none its random state is not proven, for a GPU has generators of its own; of a step of a
    CPU another one differs."""
    log = trained()
    tamper.event(log, "step.planned", _other_random_state, step=STEP)
    assert replay_step(log, STEP).differs_in == "rng"
    tamper.environment(log, device="cuda:0")
    result = replay_step(log, STEP)
    assert (result.equal, result.promised, result.stages["rng"].verdict) == (True, False, "not proven")
    assert result.stages["rng"].why == "another kind of device draws from other generators"


def _other_random_state(plan: StepPlanned) -> StepPlanned:
    return replace(plan, input_digests=plan.input_digests | {"rng": "0" * 64})


@pytest.mark.more
def test_other_instructions(trained: Stores, tamper: Tamper, root: Path) -> None:
    """Bits are not promised then, numbers are near, and a changed reward is found all the same. It is said
    what was compared, and what was not."""
    log = trained()
    env = os.environ | {"PYTHONPATH": str(root / "src"), "ATEN_CPU_CAPABILITY": "default"}

    def replayed() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rollbook", "replay", "step", str(STEP), "--store", str(log.path)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)

    ran = replayed()
    assert ran.returncode == 3, ran.stdout + ran.stderr
    assert "bits are not promised here" in ran.stderr
    assert "equal within" in ran.stdout
    printed = " ".join(ran.stdout.split())
    assert "step 11: equal in part: bit for bit in training to advantages" in printed
    assert "not compared: logprobs" in printed
    name = fabric.steps_of(log).steps[STEP].planned.samples[0]["trajectory_id"]
    tamper.event(log, "reward.assigned", lambda r: replace(r, reward=r.reward + 0.25), trajectory_id=name)
    ran = replayed()
    assert ran.returncode == 1
    assert "in stage rewards" in " ".join(ran.stdout.split())
