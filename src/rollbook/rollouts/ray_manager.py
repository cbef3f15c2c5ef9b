"""Rollouts that a Ray actor runs: the process that asks may go away, and Ray restarts a manager that
dies.

The actor is as thin as it can be: `RolloutManager` does the work, as in a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rollbook.rollouts.config import RolloutConfig
from rollbook.rollouts.manager import RolloutManager
from rollbook.rollouts.places import Progress
from rollbook.rollouts.ray_cluster import NAMESPACE, LostError, answered, connected, quietly
from rollbook.store.errors import RolloutError

ASK_S, LOOK_S = 30.0, 0.5
BACK_S, PAUSE_S = 120.0, 0.1
"""How long a manager that died may take to be there again, and between two looks whether it is."""


class AgenticRolloutManager:
    """The manager of the rollouts of a CONFIG, as a named actor.

    Args:
        folder: that the CONFIG's paths are relative to.
    """

    def __init__(self, config: RolloutConfig, key: str | None, follow: bool, folder: str) -> None:
        os.chdir(folder)
        self._progress, self._messages = Progress(None), list[str]()
        self._manager = RolloutManager(config, key, follow=follow, say=self._messages.append, tell=self._take)

    def _take(self, progress: Progress) -> None:
        self._progress = progress

    async def run(self) -> Progress:
        """As `RolloutManager.run`."""
        return await self._manager.run()

    async def state(self, skip: int) -> tuple[Progress, list[str]]:
        """Their progress, and the messages so far but for the first so many."""
        return self._progress, self._messages[skip:]

    async def stop(self) -> None:
        """As `RolloutManager.stop`."""
        self._manager.stop()

    async def pid(self) -> int:
        """Of its process."""
        return os.getpid()


class RayRollouts:
    """Has a Ray cluster run rollouts, and waits for their end.

    Args:
        resources: of the node that the manager is to be on.
        say: told what somebody should know; tell: told how far they are.

    Raises:
        ConfigError: Ray is not installed.
        RolloutError: it does not answer.
    """

    def __init__(
        self,
        config: RolloutConfig,
        key: str | None,
        *,
        follow: bool,
        resources: Mapping[str, float],
        say: Callable[[str], None],
        tell: Callable[[Progress], None],
    ) -> None:
        self._ray = connected()
        self._say, self._tell = say, tell
        self._stopped = False
        options = self._ray.remote(AgenticRolloutManager).options(
            name=f"rollouts-{config.name}",
            namespace=NAMESPACE,
            num_cpus=0,
            resources=dict(resources),
            max_restarts=-1,
            max_task_retries=0,  # what runs twice by itself would be told from nothing
            max_concurrency=100,
        )
        try:
            self.actor: Any = options.remote(config, key, follow, os.getcwd())
        except ValueError as error:
            text = f"the Ray cluster runs rollouts {config.name!r} already: wait for them"
            raise RolloutError(f"{text}, or give these another `name`") from error

    def stop(self) -> None:
        """Begin nothing more, and cancel what runs."""
        self._stopped = True
        self.actor.stop.remote()

    async def run(self) -> Progress:
        """Wait until they are run; a manager that dies goes on, once Ray has started it again.

        Raises:
            RolloutError: they cannot go on; or the cluster has no place for the manager.
        """
        try:
            while True:
                call: Awaitable[Progress] = answered(self.actor.run.remote(), None)
                running = asyncio.ensure_future(call)
                # Whichever question learns of a loss first, asyncio would complain of the other's error.
                running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
                try:
                    await self._watched(running)
                    return running.result()
                except LostError as error:
                    self._say(f"the manager of the rollouts was lost: {error}; it goes on once it is back")
                    await self._back()
        finally:
            quietly(self._ray.kill, self.actor)

    async def _watched(self, running: asyncio.Future[Progress]) -> None:
        """Tell how far they are, until they end."""
        count = 0
        while not running.done():
            await asyncio.wait([running], timeout=LOOK_S)
            progress, texts = await answered(self.actor.state.remote(count), ASK_S)
            count += len(texts)
            for text in texts:
                self._say(text)
            self._tell(progress)

    async def _back(self) -> None:
        """Return once the manager answers again.

        Raises:
            RolloutError: it does not.
        """
        by = time.monotonic() + BACK_S
        while True:
            try:
                await answered(self.actor.pid.remote(), ASK_S)
            except LostError as error:
                if time.monotonic() > by:
                    raise RolloutError(f"the manager of the rollouts is gone: {error}") from error
                await asyncio.sleep(PAUSE_S)
            else:
                if self._stopped:
                    self.actor.stop.remote()
                return
