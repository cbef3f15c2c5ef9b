"""kill -9 of trainer, proxy and engine while the loop runs: nothing is lost, nothing used twice."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from rollbook.bench.loop_agents import Habits
from rollbook.bench.loop_kills import KillPlan, kill_in_a_store
from rollbook.bench.loop_stage import Loop, Setting, loop_of, write_model
from rollbook.store.events import StepCommitted, SyncFinished
from rollbook.store.log.tail import Filter

pytestmark = [pytest.mark.torch, pytest.mark.crashes]
FIXED = 20
PLAN = KillPlan(gap_s=1.0, wait_s=2.0, agents=8)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fresh", [False, True], ids=["fixed seed", "fresh seed"])
def test_ten_kills_lose_and_double_nothing(tmp_path: Path, fresh: bool) -> None:
    """Five kills each, with a seed that is always the same and one that never is; failures name it."""
    seed = random.SystemRandom().getrandbits(24) if fresh else FIXED
    model = write_model(tmp_path / "model")
    killed = kill_in_a_store(tmp_path / "loop", model, seed, 5, PLAN, lambda: None)
    assert killed.wrong == []
    assert killed.kills == 5, f"seed {seed}"
    assert killed.steps > 0, f"seed {seed}"
    assert killed.samples > 0, f"seed {seed}"
    assert killed.answered >= killed.samples, f"seed {seed}"


def _await(loop: Loop, kind: str, seconds: float = 60.0) -> None:
    """Wait for an event of this kind.

    Raises:
        TimeoutError: none came.
    """
    deadline = time.monotonic() + seconds
    with loop.log.tail(loop.log.head(), Filter(frozenset([kind]))) as tail:
        while not tail.poll():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {kind} within {seconds:g} s")
            time.sleep(0.002)


@pytest.mark.timeout(300)
def test_an_only_engine_that_is_started_anew(tmp_path: Path) -> None:
    """On-policy, killed with requests under way: it gets the version again, or no step ever came."""
    setting = Setting("on-policy", 0, groups=2, steps=1_000_000, idle_timeout_s=120.0, hold_s=5.0)
    model = write_model(tmp_path / "model")
    with loop_of(tmp_path / "loop", model, setting, Habits("", agents=8)) as loop:
        loop.start()
        loop.await_weights(60.0)
        loop.agents.ask(do="begin")
        for kind in ("step.committed", "policy.activated", "turn.requested"):
            _await(loop, kind)
        time.sleep(0.02)
        loop.engines[0].kill()
        for kind in ("sync.finished", "step.committed"):
            _await(loop, kind)
        assert loop.trainer.running
        assert loop.trainer.ends == 0
        events = [e.record for e in loop.log.events()]
    steps = [r.policy_version for r in events if isinstance(r, StepCommitted)]
    versions = [r.policy_version for r in events if isinstance(r, SyncFinished)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(versions) > len(set(versions)), "a version was given twice"
