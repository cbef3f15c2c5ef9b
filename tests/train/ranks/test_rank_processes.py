"""How ranks are started and how they end: one that fails is named, none is left, the training goes on."""

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
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ConfigError, RankError, RankLostError
from rollbook.store.events import StepCommitted, StepFailed, StepPlanned
from rollbook.train.ranks.launch import Launched
from rollbook.train.ranks.meeting import MeetingPoint
from rollbook.train.ranks.ranks import Place, place_in

pytestmark = pytest.mark.ranks
Stores = Callable[..., Store]


def _children() -> list[int]:
    """The processes that follow this one."""
    result = subprocess.run(
        ["pgrep", "-f", f"rollbook.train.ranks.follow .* {os.getpid()}$"],
        capture_output=True,
        text=True,
        check=False,
    )
    return [int(line) for line in result.stdout.split()]


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs(
    recorded: Stores, monkeypatch: pytest.MonkeyPatch, ending: signal.Signals
) -> None:
    """The step fails and names it, no process is left behind, and the same training goes on."""
    log = recorded()
    settings = fabric.config(fabric.SFT, steps=2, checkpoint_every=1, parallel={"timeout_s": 8.0})
    from rollbook.train.loop import trainer

    run = trainer.run_step

    def ends(policy: Any, settings: Any, *given: Any, **options: Any) -> Any:
        if settings.version == 1:
            (child,) = _children()
            os.kill(child, ending)
        return run(policy, settings, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "run_step", ends)
        message = "rank 1 was ended by SIGKILL" if ending == signal.SIGKILL else "rank 1 does not answer"
        with pytest.raises(RankLostError, match=message):
            fabric.train(log, settings, ranks=2)
    assert _children() == []
    (failed,) = records_of(log, StepFailed)
    assert failed.step == 1
    assert "rank 1" in failed.error
    fabric.train(log, settings, ranks=2)
    assert [step.step for step in records_of(log, StepCommitted)] == [0, 1]
    assert replay_step(log, 1).differs_in is None


def test_a_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch, recorded: Stores) -> None:
    """Its last words are told, and not what a binding says of itself behind them; nothing was planned."""
    leaks = [
        "nanobind: leaked 90 functions!",
        *[f' - leaked function "f{i}"' for i in range(9)],
        " - ... skipped",
    ]
    program = f"import sys; print('no such GPU', *{leaks!r}, sep='\\n', file=sys.stderr); sys.exit(1)"
    monkeypatch.setenv("PYTHONSTARTUP", "")
    monkeypatch.setattr("rollbook.train.ranks.launch.FOLLOW", ("-c", program))
    log = recorded()
    with pytest.raises(RankError, match=r"rank 1 ended with exit code 1; its last words:\n  no such GPU"):
        fabric.train(log, fabric.config(fabric.SFT, steps=1), ranks=2)
    assert records_of(log, StepPlanned) == []


def test_ranks_end_with_the_first(tmp_path: Path) -> None:
    """However that ends."""
    program = (
        "import sys, time\n"
        "from rollbook.train.config.parallel import ParallelConfig\n"
        "from rollbook.train.ranks.ranks import Ranks\n"
        "ranks = Ranks(ParallelConfig(), 2)\n"
        "ranks._await_others()\n"
        "print(ranks._launched._followers[1].pid, flush=True)\n"
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


def test_torchrun_starts_them_too(recorded: Stores, tmp_path: Path) -> None:
    """The same command, under a launcher: rank 0 trains, the others follow."""
    log = recorded()
    file = tmp_path / "config.toml"
    file.write_text(fabric.toml(fabric.config(fabric.SFT, steps=1)))
    root = Path(__file__).parents[3]
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
    assert records_of(log, StepPlanned)[0].environment["parallel"]["data"] == 2
    assert len(records_of(log, StepCommitted)) == 1


def test_ranks_that_cannot_be(recorded: Stores) -> None:
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


def test_nobody_is_left(tmp_path: Path) -> None:
    """Closing ends ranks that never came."""
    launched = Launched(3, MeetingPoint("127.0.0.1", 1, "secret"))
    assert launched.ended() is None or "ended" in str(launched.ended())
    launched.close()
    assert _children() == []
