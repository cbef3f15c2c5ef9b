"""Trainings over several ranks: that of one, to rounding; replayed bit for bit; and ranks that fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rollbook.ingest.engines.weights.digests import read_weights
from rollbook.replay.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ConfigError, RankError, TrainError
from rollbook.store.events import CheckpointWritten, StepCommitted, StepFailed, StepPlanned
from rollbook.train.megatron.launch import Launched
from rollbook.train.megatron.ranks import Place, place_in

pytestmark = pytest.mark.ranks
Stores = Callable[..., Store]


def _of(log: Store, kind: type[Any]) -> list[Any]:
    return [e.record for e in log.events() if isinstance(e.record, kind)]


def _weights(log: Store) -> dict[str, Any]:
    return read_weights(log.path / _of(log, CheckpointWritten)[-1].path)


def _same(log: Store, other: Store) -> None:
    """Losses and gradient norms of the steps, and the weights at the end, to rounding."""
    for one, two in zip(_of(log, StepCommitted), _of(other, StepCommitted), strict=True):
        for metric in ("loss", "gradient_norm", "entropy", "trained_tokens", "reward"):
            ours, theirs = (of.metrics.get(metric) or 0.0 for of in (one, two))
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6), metric
    found, expected = _weights(log), _weights(other)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert float((tensor - expected[name]).abs().max()) < 1e-6, name


@pytest.fixture(scope="module")
def of_one(fabric: Any, recorded_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    """Trainings of two steps on one rank, by name."""
    found = {}
    for name, settings in _settings(fabric).items():
        found[name] = _copy(recorded_path, tmp_path_factory.mktemp("one") / name)
        fabric.train(found[name], settings)
    return found


def _copy(path: Path, to: Path) -> Store:
    import shutil

    from rollbook import store as rb

    return rb.open(shutil.copytree(path, to))


SGD_LIKE = {"lr": 1e-4, "eps": 1.0, "clip_grad": 0.0}
"""Adam whose steps are proportional to gradients: of one that is near zero its sign does not matter."""


def _settings(fabric: Any, parallel: dict[str, Any] | None = None) -> dict[str, Any]:
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
    fabric: Any, recorded: Stores, of_one: dict[str, Store], training: str, layout: str
) -> None:
    """The manifest has the layout and every rank's part; the last step replays bit for bit, by as many
    ranks."""
    count, sizes = LAYOUTS[layout]
    log = recorded()
    fabric.train(log, _settings(fabric, sizes)[training], ranks=count)
    _same(log, of_one[training])
    plans = _of(log, StepPlanned)
    copies = 2 if layout == "data 2" else 1
    said = {"data": copies, "tensor": sizes.get("tensor", 1), "pipeline": sizes.get("pipeline", 1)}
    assert all(plan.environment["parallel"] == said for plan in plans)
    assert all(len(plan.partition) == copies and all(plan.partition) for plan in plans)
    replayed = replay_step(log, 1)
    assert replayed.differs_in is None
    assert replayed.environment == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16(fabric: Any, recorded: Stores, layout: str) -> None:
    """Near that of one rank, in whatever layout; one rank goes on from its checkpoint with the float32
    weights; every step replays."""
    count, sizes = LAYOUTS[layout]
    logs = [recorded("one"), recorded("ranks")]
    settings = [
        fabric.config(
            fabric.SFT, steps=2, optimizer=SGD_LIKE, dtype="bfloat16", recompute=True, parallel=parallel
        )
        for parallel in ({}, sizes)
    ]
    fabric.train(logs[0], settings[0])
    fabric.train(logs[1], settings[1], ranks=count)
    for one, two in zip(*(_of(log, StepCommitted) for log in logs), strict=True):
        for metric in ("loss", "gradient_norm"):
            assert two.metrics[metric] == pytest.approx(one.metrics[metric], rel=0.03), metric
    fabric.train(logs[1], fabric.config(fabric.SFT, steps=3, optimizer=SGD_LIKE, dtype="bfloat16"))
    assert [replay_step(logs[1], step).differs_in for step in (1, 2)] == [None, None]
    kept = [
        load_file(logs[1].path / one.path / "optimizer.safetensors")
        for one in _of(logs[1], CheckpointWritten)[1:]
    ]
    mains = [{key: state[key] for key in state if key.endswith(".main")} for state in kept]
    assert len(mains) == 2
    assert mains[0].keys() == mains[1].keys()
    for name, main in mains[0].items():
        assert 0 < float((mains[1][name] - main).abs().max()) < 2e-4, name


def test_ppo_with_its_critic(fabric: Any, recorded: Stores) -> None:
    """On two data-parallel ranks, with mini-batches and a reference; replayed."""
    logs = []
    for ranks in (1, 2):
        log = recorded(f"ranks-{ranks}")
        algorithm = {"name": "ppo", "groups": 8, "mini_batches": 2, "kl": 0.1}
        changes = {"algorithm": algorithm, "steps": 2, "optimizer": SGD_LIKE, "critic": SGD_LIKE}
        fabric.train(log, fabric.config(fabric.GRPO, **changes), ranks=ranks)
        logs.append(log)
    _same(*logs)
    values = [[step.metrics["value_loss"] for step in _of(log, StepCommitted)] for log in logs]
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert replay_step(logs[1], 1).differs_in is None


def test_it_goes_on_in_another_layout(fabric: Any, recorded: Stores, of_one: dict[str, Store]) -> None:
    """From the checkpoint of another one, with the optimizer's state."""
    log = recorded()
    fabric.train(log, fabric.config(fabric.SFT, steps=1, optimizer=SGD_LIKE), ranks=2)
    fabric.train(log, fabric.config(fabric.SFT, steps=2, optimizer=SGD_LIKE, parallel={"tensor": 2}), ranks=2)
    _same(log, of_one["sft"])
    assert [p.environment["parallel"]["data"] for p in _of(log, StepPlanned)] == [2, 1]
    assert replay_step(log, 1).differs_in is None


def test_more_ranks_than_samples(fabric: Any, recorded: Stores) -> None:
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
    assert [len(rank) for rank in _of(logs[1], StepPlanned)[0].partition] == [1, 0]


# Ranks that fail ----------------------------------------------------------------------------------


def _children() -> list[int]:
    """The processes that follow this one."""
    found = subprocess.run(
        ["pgrep", "-f", f"rollbook.train.megatron.follow .* {os.getpid()}$"],
        capture_output=True,
        text=True,
        check=False,
    )
    return [int(line) for line in found.stdout.split()]


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs(
    fabric: Any, recorded: Stores, monkeypatch: pytest.MonkeyPatch, ending: signal.Signals
) -> None:
    """The step fails and names it, no process is left behind, and the same training goes on."""
    log = recorded()
    settings = fabric.config(fabric.SFT, steps=2, checkpoint_every=1, parallel={"timeout_s": 8.0})
    from rollbook.train.loop import trainer

    run = trainer.run_step

    def ends(policy: Any, plan: Any, *given: Any, **options: Any) -> Any:
        if plan.step == 1:
            (child,) = _children()
            os.kill(child, ending)
        return run(policy, plan, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "run_step", ends)
        said = "rank 1 was ended by SIGKILL" if ending == signal.SIGKILL else "rank 1 does not answer"
        with pytest.raises(RankError, match=said):
            fabric.train(log, settings, ranks=2)
    assert _children() == []
    (failed,) = _of(log, StepFailed)
    assert failed.step == 1
    assert "rank 1" in failed.error
    fabric.train(log, settings, ranks=2)
    assert [step.step for step in _of(log, StepCommitted)] == [0, 1]
    assert replay_step(log, 1).differs_in is None


def test_a_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch, fabric: Any, recorded: Stores) -> None:
    """Its last words are told; nothing was planned."""
    monkeypatch.setenv("PYTHONSTARTUP", "")
    monkeypatch.setattr("rollbook.train.megatron.launch.FOLLOW", ("-c", "raise SystemExit('no such GPU')"))
    log = recorded()
    with pytest.raises(RankError, match=r"rank 1 ended with exit code 1; its last words:\n  no such GPU"):
        fabric.train(log, fabric.config(fabric.SFT, steps=1), ranks=2)
    assert _of(log, StepPlanned) == []


def test_ranks_end_with_the_first(tmp_path: Path) -> None:
    """However that ends."""
    program = (
        "import sys, time\n"
        "from rollbook.train.config.parallel import ParallelConfig\n"
        "from rollbook.train.megatron.ranks import Ranks\n"
        "ranks = Ranks(ParallelConfig(), 2)\n"
        "ranks._await_others()\n"
        "print(ranks._launched._processes[1].pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        follower = int(first.stdout.readline())
        first.kill()
    until = time.monotonic() + 30
    while Path(f"/proc/{follower}").exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not Path(f"/proc/{follower}").exists()


# What is asked for --------------------------------------------------------------------------------


def test_torchrun_starts_them_too(fabric: Any, recorded: Stores, tmp_path: Path) -> None:
    """The same command, under a launcher: rank 0 trains, the others follow."""
    log = recorded()
    file = tmp_path / "config.toml"
    file.write_text(fabric.toml(fabric.config(fabric.SFT, steps=1)))
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "rollbook", "train", file, "--store", log.path],
        env=os.environ | {"PYTHONPATH": str(root / "src"), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert _of(log, StepPlanned)[0].environment["parallel"]["data"] == 2
    assert len(_of(log, StepCommitted)) == 1


def test_ranks_that_cannot_be(fabric: Any, recorded: Stores) -> None:
    """Sizes that do not divide the ranks are refused before anything starts."""
    with pytest.raises(ConfigError, match=r"3 ranks cannot be shared by tensor = 2 times pipeline = 1"):
        fabric.train(recorded(), fabric.config(fabric.SFT, parallel={"tensor": 2}), ranks=3)
    with pytest.raises(ConfigError, match=r"context 2: attention without TransformerEngine"):
        fabric.config(fabric.SFT, parallel={"context": 2})


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "9"},
            Place(3, 4, 1, "a", 9),
        ),
        (
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "MASTER_PORT": "9"}
            | {"SLURM_LAUNCH_NODE_IPADDR": "b"},
            Place(1, 2, 0, "b", 9),
        ),
    ],
)
def test_a_launchers_environment(environment: dict[str, str], place: Place | None) -> None:
    """The place of a rank by the variables of torchrun and Slurm."""
    assert place_in(environment) == place


def test_where_ranks_meet_is_not_said() -> None:
    """It is asked for by name."""
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT do not say where they meet"):
        place_in({"RANK": "0", "WORLD_SIZE": "2"})


def test_steps_between_are_of_another_layout(fabric: Any, recorded: Stores, monkeypatch: Any) -> None:
    """A training that was cut off goes on only where its steps come out the same, and says what differs."""
    log = recorded()
    changes = {"steps": 3, "checkpoint_every": 9}
    with fabric.killed_at(1):
        fabric.train(log, fabric.config(fabric.SFT, **changes, parallel={"tensor": 2}), ranks=2)
    with pytest.raises(TrainError, match=r"parallel: recorded \{'data': 1, 'tensor': 2.*--abandon-after 0"):
        fabric.train(log, fabric.config(fabric.SFT, **changes), ranks=1)


def test_nobody_is_left(tmp_path: Path) -> None:
    """Closing ends ranks that never came."""
    launched = Launched(3, ("127.0.0.1", 1))
    assert launched.ended() is None or "ended" in str(launched.ended())
    launched.close()
    assert _children() == []
