"""A reference in a process of its own: the bits of one in the policy's, whose weights stay in place."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ConfigError, ModelError, RankLostError
from rollbook.store.events import CheckpointWritten, StepCommitted, StepFailed, StepPlanned
from rollbook.train.config.parallel import ParallelConfig
from rollbook.train.loop import trainer
from rollbook.train.ranks import launch
from rollbook.train.ranks.backend import TrainablePolicy
from rollbook.train.ranks.ranks import Place, Ranks
from rollbook.train.step import reference
from rollbook.train.step.reference import spare_gpus

Stores = Callable[..., Store]
HELD = {"name": "grpo", "groups": 1, "group_size": 4, "kl": 0.5, "old": "trainer", "ref_update_interval": 2}
PACKED = {"micro_batch_size": None, "tokens_per_micro_batch": 24}
TRAININGS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": HELD},
    "packed bfloat16": {"algorithm": HELD, "dtype": "bfloat16", "recompute": True} | PACKED,
}


@pytest.fixture(autouse=True)
def started(warm_ranks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The references that were started. However a training ends, so does its reference."""
    begun: list[Any] = []
    start = launch.subprocess.Popen

    def starts(command: Any, **options: Any) -> Any:
        process = start(command, **options)
        begun.extend([process] * (tuple(command[1:3]) == reference.PROGRAM))
        return process

    monkeypatch.setattr(launch.subprocess, "Popen", starts)
    yield begun
    assert [process for process in begun if process.poll() is None] == []


@pytest.mark.more_but("grpo")
@pytest.mark.parametrize("name", TRAININGS)
def test_the_same_bits(recorded: Stores, name: str) -> None:
    """Of every stage, the reference's logprobs among them, which a replay computes in its own process."""
    here, apart = recorded("here"), recorded("apart")
    settings = fabric.config(fabric.GRPO, **{"steps": 4, "checkpoint_every": 4} | TRAININGS[name])
    fabric.train(here, settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainablePolicy, "using", None)
        fabric.train(apart, settings.model_copy(update={"reference_apart": True}))
    digests = [step.digests for step in records_of(here, StepCommitted)]
    assert "reference_logprobs" in digests[0]
    assert [step.digests for step in records_of(apart, StepCommitted)] == digests
    assert [replay_step(apart, step).differs_in for step in (0, 3)] == [None, None]


@pytest.mark.more
def test_parts_of_a_batch_that_come(recorded: Stores) -> None:
    """With mode = "hybrid" it computes each part while the rest is awaited."""
    algorithm = {"name": "grpo", "groups": 3, "group_size": 4, "kl": 0.1, "old": "trainer"}
    changes = {"algorithm": algorithm, "steps": 2, "mode": "hybrid", "num_iters_per_train_update": 3}
    here, apart = recorded("here"), recorded("apart")
    fabric.train(here, fabric.config(fabric.GRPO, **changes), "tail")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainablePolicy, "using", None)
        fabric.train(apart, fabric.config(fabric.GRPO, **changes, reference_apart=True), "tail")
    assert len(records_of(apart, StepPlanned)[0].rollout_batch["iterations"]) == 3
    digests = [step.digests for step in records_of(here, StepCommitted)]
    assert [step.digests for step in records_of(apart, StepCommitted)] == digests
    assert replay_step(apart, 1).differs_in is None


@pytest.mark.ranks
def test_over_ranks(recorded: Stores) -> None:
    """It is laid out as the policy is: two ranks share its tensors, of which the policy has two copies."""
    changes = {"algorithm": HELD, "steps": 3, "parallel": {"tensor": 2}} | PACKED
    here, apart = recorded("here"), recorded("apart")
    fabric.train(here, fabric.config(fabric.GRPO, **changes), ranks=4)
    fabric.train(apart, fabric.config(fabric.GRPO, **changes, reference_apart=True), ranks=4)
    digests = [step.digests for step in records_of(here, StepCommitted)]
    assert [step.digests for step in records_of(apart, StepCommitted)] == digests


# Where it fails -----------------------------------------------------------------------------------


@pytest.mark.more_but("9")
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_it_ends_or_hangs(
    recorded: Stores,
    started: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    ending: signal.Signals,
) -> None:
    """The step fails and says so, torch says nothing of the wait, and the training goes on all the same."""
    log = recorded()
    changes = {"algorithm": HELD, "steps": 2, "parallel": ParallelConfig(timeout_s=2.0).model_dump()}
    settings = fabric.config(fabric.GRPO, **changes, reference_apart=True)
    plan = trainer.Trainer._plan

    def ends(self: Any, *given: Any) -> Any:
        if self.step == 1:
            (process,) = started
            process.send_signal(ending)
        return plan(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_plan", ends)
        reason = "was ended by SIGKILL" if ending == signal.SIGKILL else "hangs; it is in"
        with pytest.raises(RankLostError, match=f"the reference's process {reason}"):
            fabric.train(log, settings)
    (failed,) = records_of(log, StepFailed)
    assert (failed.step, "the reference's process" in failed.error) == (1, True)
    assert "waitForInput" not in capfd.readouterr().err
    fabric.train(log, settings.model_copy(update={"reference_apart": False}))
    assert [step.step for step in records_of(log, StepCommitted)] == [0, 1]


def test_its_weights_are_damaged(recorded: Stores) -> None:
    """Those of version 0, from which a later version is trained on."""
    log = recorded()
    algorithm = HELD | {"ref_update_interval": None}
    settings = fabric.config(fabric.GRPO, algorithm=algorithm, steps=2)
    fabric.train(log, settings)
    file = log.path / records_of(log, CheckpointWritten)[0].path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(ModelError, match="v00000000: weights damaged"):
        fabric.train(log, settings.model_copy(update={"steps": 3, "reference_apart": True}))


def test_it_ends_with_its_training() -> None:
    """However that does."""
    program = (
        "import sys, time, torch\n"
        "from pathlib import Path\n"
        "from rollbook.train.config.parallel import ParallelConfig\n"
        "from rollbook.train.step.reference import ReferenceProcess\n"
        "from rollbook.train.model.model import Build\n"
        "from rollbook.train.model.shape import read_shape\n"
        "how = Build(1, torch.device('cpu'), 0, 1, trains=False)\n"
        "process = ReferenceProcess(read_shape(Path(sys.argv[1])), how, ParallelConfig(), 1)\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    words = [sys.executable, "-c", program, str(fabric.model_folder())]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        process = psutil.Process(int(training.stdout.readline()))
        training.kill()
    process.wait(120)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"algorithm": {"name": "grpo"}}, "algorithm grpo asks for no reference"),
        ({"algorithm": HELD, "mode": "colocate"}, "take turns on the same devices"),
        ({"algorithm": HELD, "parallel": {"expert": 2}}, "whose experts are not spread"),
    ],
)
def test_where_it_cannot_be(changes: dict[str, Any], reason: str) -> None:
    """The configuration is refused, with the reason."""
    sync = {"engines": ["http://127.0.0.1:1"]}
    with pytest.raises(ConfigError, match=reason):
        fabric.config(fabric.GRPO, **changes, reference_apart=True, sync=sync)


def test_under_a_launcher(recorded: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose devices are not this command's to give."""
    monkeypatch.setattr("rollbook.train.ranks.ranks.place_in", lambda _: Place(0, 1, 0, "", 0))
    log, settings = recorded(), fabric.config(fabric.GRPO, algorithm=HELD, steps=1, reference_apart=True)
    monkeypatch.setattr(Ranks, "on_this_host", False, raising=False)
    monkeypatch.setattr(Ranks, "__setattr__", _all_but("on_this_host"))
    with pytest.raises(ConfigError, match="goes with ranks that this command starts on its own host"):
        fabric.train(log, settings)
    assert records_of(log, StepPlanned) == []


def _all_but(name: str) -> Callable[[Any, str, Any], None]:
    def put(self: Any, key: str, value: Any) -> None:
        if key != name:
            object.__setattr__(self, key, value)

    return put


@pytest.mark.parametrize(
    ("visible", "taken", "wanted", "left"),
    [("0,1,2,3", 2, 1, "2"), ("4,5,6", 1, 2, "5,6"), ("GPU-a,GPU-b", 1, 1, "GPU-b")],
)
def test_the_gpus_that_are_left(visible: str, taken: int, wanted: int, left: str) -> None:
    """After those of the ranks."""
    assert spare_gpus({"CUDA_VISIBLE_DEVICES": visible}, taken, wanted) == left


def test_no_gpu_is_left() -> None:
    """The error says who has them."""
    with pytest.raises(ConfigError, match="takes 2 of this host's 2 GPUs, and its reference wants 1"):
        spare_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, 2, 1)


def test_it_has_no_gradients() -> None:
    """A policy that is not trained has weights alone."""
    import torch

    from rollbook.train.config.config import OptimizerConfig
    from rollbook.train.model.model import Build
    from rollbook.train.model.shape import read_shape

    shape = read_shape(fabric.model_folder())
    policy = TrainablePolicy(shape, OptimizerConfig(), Build(1, torch.device("cpu"), 0, 1, trains=False))
    assert all(not hasattr(p, "main_grad") for p in policy._parts.module.parameters())
    assert policy.pieces("state") == {}
