"""Trajectories whose agents are not heard of any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.clients.streamed import PATHS, asked
from tests.fakes.proxies.in_process import InProcess
from tests.fakes.proxies.settings import settings_of

from rollbook.store.events import LabelAdded

CHAT = PATHS["chat"]


@pytest.fixture
def proxy(played: Callable[..., InProcess]) -> InProcess:
    """A proxy that gives agents up after 0.2 s."""
    return played(abandon_s=0.6)


def _labels(proxy: Any, name: str) -> list[Any]:
    trajectory_id = proxy.trajectories()[name].opened.trajectory_id
    records = [e.record for e in proxy.store.events()]
    labels = [r for r in records if isinstance(r, LabelAdded) and r.trajectory_id == trajectory_id]
    return [(r.name, r.value, r.source) for r in labels]


def test_who_is_silent_is_finished_as_aborted(proxy: Any) -> None:
    """With a label that says so; what is heard of, or still runs, goes on."""
    engine = proxy.engine

    async def scenario() -> None:
        await proxy.exchange(f"/t/silent{CHAT}", asked("chat")).end()
        engine.pace = asyncio.Semaphore(0)
        pace = engine.pace
        slow = proxy.exchange(f"/t/slow{CHAT}", asked("chat"))
        await asyncio.sleep(0.05)
        engine.pace = None
        for _ in range(20):
            await proxy.exchange(f"/t/busy{CHAT}", asked("chat")).end()
            await asyncio.sleep(0.1)
        for _ in range(50):
            pace.release()
        await slow.end()

    proxy.run(scenario())
    trajectories = proxy.trajectories()
    assert trajectories["silent"].finished.status == "aborted"
    assert trajectories["silent"].finished.success is None
    assert trajectories["silent"].rewards == ()
    assert _labels(proxy, "silent") == [("abandoned", True, "rollbook")]
    assert trajectories["busy"].finished is None
    assert trajectories["slow"].finished is None
    assert _labels(proxy, "busy") == _labels(proxy, "slow") == []
    late = proxy.ask(f"/t/silent{CHAT}", asked("chat"))
    assert (late.status, late.json["error"]["code"]) == (409, "trajectory_finished")
    assert late.headers["x-should-retry"] == "false"


def test_without_the_option_nobody_is_given_up(played: Callable[..., InProcess]) -> None:
    """The default: an agent may think for as long as it likes."""
    assert settings_of().abandon_s == 0
    proxy = played()
    proxy.ask(f"/t/silent{CHAT}", asked("chat"))
    proxy.run(asyncio.sleep(0.3))
    assert proxy.trajectories()["silent"].finished is None
