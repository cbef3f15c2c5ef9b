"""A loop in a thread of its own ends with all that it runs, and nothing is said of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rollbook.store.medium.loop_thread import LoopThread

PROGRAM = """
import asyncio
from rollbook.store.medium.loop_thread import LoopThread

async def begin():
    tasks.append(asyncio.get_running_loop().create_task(asyncio.Event().wait()))

tasks = []
loop = LoopThread("test")
loop.run(begin(), 5)
{end}
"""


@pytest.mark.parametrize("end", ["loop.close()", "tasks.clear()", "raise SystemExit(0)"])
def test_what_it_still_runs_ends_in_silence(
    end: str, run_python: Callable[..., tuple[int, str, str]]
) -> None:
    """Where it is closed, and where the process ends before that."""
    assert run_python(PROGRAM.format(end=end)) == (0, "", "")


def test_it_waits_for_what_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not for ever; and is closed twice without harm."""
    monkeypatch.setattr("rollbook.store.medium.loop_thread.END_S", 0.1)
    ended: list[str] = []

    async def run(name: str, clean_up: Callable[[], object]) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            clean_up()
            await asyncio.sleep(0.01)
            ended.append(name)
            while name == "stubborn":
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    continue

    async def begin() -> None:
        tasks.extend(asyncio.ensure_future(run(name, list)) for name in ("neat", "stubborn"))
        await asyncio.sleep(0)

    tasks: list[asyncio.Future[None]] = []
    loop = LoopThread("test")
    loop.run(begin(), 5)
    loop.close()
    loop.close()
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own, for the stubborn one
    assert sorted(ended) == ["neat", "stubborn"]
