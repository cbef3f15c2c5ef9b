"""Runs the rollouts of a CONFIG in one process: that of a command, or one of a cluster.

It holds nothing that the log does not: a manager that dies is replaced by another, which goes on
from the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from rollbook.rollouts.config import AgentConfig, RolloutConfig
from rollbook.rollouts.follow import Following
from rollbook.rollouts.launchers.agents import agents_of, launcher_of
from rollbook.rollouts.launchers.isolation import isolation_warning
from rollbook.rollouts.places import Progress
from rollbook.rollouts.proxy import Proxy
from rollbook.rollouts.rollouts import Rollouts
from rollbook.rollouts.tasks import read_tasks
from rollbook.store.errors import LaunchError, RolloutError, StoreError
from rollbook.store.ids import new_id
from rollbook.store.marker import read_marker
from rollbook.store.whose import WANTED, ProxyIdentity


class RolloutManager:
    """Runs rollouts.

    Args:
        key: an operator's, if the proxy asks for keys.
        follow: beside an online training, as long as it goes on.
        say: told what somebody should know; tell: told how far they are.
    """

    def __init__(
        self,
        config: RolloutConfig,
        key: str | None = None,
        *,
        follow: bool = False,
        say: Callable[[str], None] = lambda text: None,
        tell: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._config, self._key, self._follow = config, key, follow
        self._say, self._tell = say, tell
        self._work: Rollouts | Following | None = None
        self._stopped = False

    def stop(self) -> None:
        """Begin nothing more, and cancel what runs."""
        self._stopped = True
        if self._work is not None:
            self._work.stop()

    async def run(self) -> Progress:
        """Run them to their end, or until `stop`.

        Raises:
            ConfigError: tasks, agents or scorers cannot be used.
            RolloutError: another process runs them; the proxy is away; or too many launches failed by their
                infrastructure.
        """
        config = self._config
        with alone(config):
            async with Proxy(config.proxy, self._key, wanted(config)) as proxy:
                proxy.say = self._say
                launcher = launcher_of(config)
                agents = agents_of(config, proxy, launcher)
                if (warning := await asyncio.to_thread(_unkept, config.agent)) is not None:
                    self._say(warning)
                owner = f"{socket.gethostname()}-{os.getpid()}-{new_id()[-8:]}"
                names = dict[str, str]()

                async def make(run_config: RolloutConfig) -> Rollouts:
                    tasks = await asyncio.to_thread(read_tasks, run_config.tasks, run_config.limit)
                    # Of evaluations the trainer tells: what is told here are the rollouts beside them.
                    tell = self._tell if run_config is config else lambda progress: None
                    args = (run_config, tasks, proxy, agents, launcher, owner, self._say, tell)
                    return Rollouts(*args, endless=self._follow and run_config is config, names=names)

                if self._follow:
                    self._work = Following(config, proxy, make, self._say)
                else:
                    self._work = await make(config)
                if self._stopped:
                    self._work.stop()
                try:
                    return await self._work.run()
                finally:
                    await agents.close()


def _unkept(agent: AgentConfig) -> str | None:
    """What agents on this host are not kept from; where they cannot be started, that will say why."""
    if agent.launcher not in ("subprocess", "verifiers"):
        return None
    with contextlib.suppress(LaunchError):
        return isolation_warning(agent.isolation, agent.require, agent.user)
    return None


def wanted(config: RolloutConfig) -> ProxyIdentity:
    """The owner that the proxy of these rollouts is to have, as far as is known here."""
    store_id = ""
    if config.store is not None:
        with contextlib.suppress(StoreError):
            store_id = read_marker(config.store)
    return ProxyIdentity(store_id, config.run or "", os.environ.get(WANTED, ""))


@contextlib.contextmanager
def alone(config: RolloutConfig, what: str = "") -> Iterator[None]:
    """Context: no other process runs these rollouts from the same folder, or does `what` with them.

    Raises:
        RolloutError: one does.
    """
    config.folder.mkdir(parents=True, exist_ok=True)
    with lock_of(config, what).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            text = (
                f"another process runs rollouts {config.name!r} in {config.folder}: wait for it, or stop it"
            )
            raise RolloutError(text) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def lock_of(config: RolloutConfig, what: str = "") -> Path:
    """The file that the process running these rollouts from this folder has locked, with its pid in it."""
    return config.folder / (f"{config.name}.{what}.lock" if what else f"{config.name}.lock")
