"""Starts the parts of a run in order, keeps them running, and stops them in the other order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from rollbook.online.part import Part, PartError, Spec

Waited = asyncio.Future[Any]
LINGER_S = 60.0
"""How long rollouts may take to notice that the training has ended."""


class Supervisor:
    """Runs the parts of a run.

    Args:
        stages: the parts, in the order in which they are started: those of one stage together, once those of
            the stage before are ready.
        say: told what somebody should know.
    """

    def __init__(self, stages: Sequence[Sequence[Spec]], say: Callable[[str], None]) -> None:
        self._say = say
        self.stages = [[Part(spec, say) for spec in stage] for stage in stages if stage]
        self._stop = asyncio.Event()
        self._running: dict[Part, asyncio.Task[None]] = {}

    @property
    def parts(self) -> list[Part]:
        """All of them."""
        return [part for stage in self.stages for part in stage]

    def stop(self) -> None:
        """Stop all of them in order; asked again, at once."""
        if self._stop.is_set():
            for part in self.parts:
                part.kill()
        self._stop.set()

    async def run(self) -> None:
        """Run until a part that ends by itself has ended, and with it all such, or until `stop`.

        Raises:
            PartError: a part ended for good. The others are stopped.
        """
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await self._start(stopping)
            await self._work(stopping)
        finally:
            stopping.cancel()
            await self._end()

    async def _start(self, stopping: Waited) -> None:
        """Start a stage once the one before is ready."""
        for stage in self.stages:
            if self._stop.is_set():
                return
            for part in stage:
                self._running[part] = asyncio.create_task(part.run())
            ready = asyncio.create_task(_all_ready(stage))
            await self._first(stopping, ready)
            ready.cancel()

    async def _work(self, stopping: Waited) -> None:
        """Wait until those that end by themselves have ended: rollouts soon after their training."""
        ends = {part: task for part, task in self._running.items() if part.spec.ends}
        for part, task in ends.items():
            if self._stop.is_set():
                return
            if not task.done():
                await self._first(stopping, task)
            if not self._stop.is_set():
                self._say(f"{part.spec.name} has ended")
                rest = [other for other in ends.values() if not other.done()]
                if rest:
                    await self._first(stopping, asyncio.ensure_future(asyncio.wait(rest, timeout=LINGER_S)))
                return
        await self._first(stopping)

    async def _first(self, *awaited: Waited) -> None:
        """Wait for one of these, or for a part that fails.

        Raises:
            PartError: one did.
        """
        while True:
            running = {task for task in self._running.values() if not task.done()}
            done, _ = await asyncio.wait({*awaited, *running}, return_when=asyncio.FIRST_COMPLETED)
            for task in self._running.values():
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    raise error
            if done & set(awaited):
                return

    async def _end(self) -> None:
        """Stop those that end by themselves, together, and then the stages that they need, the last first."""
        work = [part for part in self.parts if part.spec.ends]
        served = [[part for part in stage if not part.spec.ends] for stage in reversed(self.stages)]
        for parts in (work, *served):
            await asyncio.gather(*(part.stop() for part in parts))
            for part in parts:
                if part in self._running:
                    with contextlib.suppress(PartError):
                        await self._running[part]


async def _all_ready(stage: Sequence[Part]) -> None:
    for part in stage:
        await part.ready.wait()
