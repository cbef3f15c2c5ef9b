"""Agents that are programs, under any launcher, and agents that are coroutines of this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path

from rollbook.rollouts.agents.agentic import LLM, AgenticRollout, rollout_class
from rollbook.rollouts.agents.harbor import places_of
from rollbook.rollouts.config import AgentConfig, ClocksConfig, ContainerConfig, RolloutConfig
from rollbook.rollouts.jobs import Agents, Job, Started, until
from rollbook.rollouts.launchers.agent_environment import (
    address_in,
    command_of,
    files_of,
    needed_by,
    network_of,
    placed,
    variables,
)
from rollbook.rollouts.launchers.cgroups import controllers
from rollbook.rollouts.launchers.container_launcher import ContainerLauncher
from rollbook.rollouts.launchers.isolation import Files
from rollbook.rollouts.launchers.launching import Exit, Launch, Launcher, Leak, Running
from rollbook.rollouts.launchers.subprocess_launcher import SubprocessLauncher
from rollbook.rollouts.outcome import Ended, Outcome
from rollbook.rollouts.proxy import Proxy
from rollbook.store.errors import LaunchError, RequestError, RolloutError
from rollbook.store.events import Json


class Programs:
    """Agents that are programs.

    Args:
        inside: what each sees as its own folder (None: as it is here), and as the proxy's URL; None: both as
            they are here.
    """

    def __init__(
        self,
        agent: AgentConfig,
        clocks: ClocksConfig,
        launcher: Launcher,
        inside: tuple[Path | None, str] | None = None,
    ) -> None:
        self._agent, self._clocks, self._launcher, self._inside = agent, clocks, launcher, inside
        self._here = inside is None or inside[0] is None
        self._command = placed(agent.command) if self._here else agent.command

    async def start(self, job: Job) -> Started:
        """As `Agents`."""
        agent, folder, address = self._agent, job.folder, job.address
        if self._inside is not None:
            folder, address = self._inside[0] or folder, address.at(self._inside[1])
        launch = Launch(
            launch_id=job.launch_id,
            command=command_of(self._command, job.task),
            environment=variables(agent, address, job.group, job.task, folder, os.environ),
            folder=job.folder,
            output=job.folder,
            isolation=agent.isolation,
            require=agent.require,
            limits=agent.limits,
            labels=job.labels,
            places=await asyncio.to_thread(places_of, job.task, job.folder) if self._here else {},
            user=agent.user,
        )
        return _Program(await self._launcher.start(launch), job, self._clocks)

    async def sweep(self, alive: frozenset[str], dead: frozenset[str] = frozenset()) -> list[Leak]:
        """As `Agents`."""
        return await self._launcher.sweep(alive, dead)

    async def close(self) -> None:
        """Nothing is held."""


def launcher_of(config: RolloutConfig) -> SubprocessLauncher:
    """The launcher of a CONFIG's programs on this host: its agents, where they are programs, and its
    scorers.

    Those with files of their own see the files that commands name, with what lies beside them, and no
    launch but their own.
    """
    return SubprocessLauncher(_files_for(config))


def _files_for(config: RolloutConfig) -> Files:
    agents = config.agent.command if config.agent.launcher in ("subprocess", "ray", "verifiers") else ()
    words = [*agents, *(word for component in config.score for word in component.command)]
    beside = {folder for path in files_of(words).values() for folder in needed_by(path)}
    if config.agent.launcher == "verifiers":
        beside.add(Path(__file__).resolve().parents[1] / "agents")
    readable = tuple(Path(os.path.abspath(path)) for path in (*config.agent.readable, *sorted(beside)))
    return Files(readable, hidden=(config.folder.resolve(),))


def _in_containers(config: RolloutConfig, container: ContainerConfig) -> Programs:
    network = network_of(container.network, config.proxy)
    launcher = ContainerLauncher(container, network)
    inside = Path(container.folder), address_in(network, config.agent, config.proxy)
    return Programs(config.agent, config.clocks, launcher, inside)


def _on_nodes(config: RolloutConfig) -> Programs:
    from rollbook.rollouts.launchers.ray_launcher import RayLauncher

    address, nodes = config.agent.address or config.proxy, config.agent.nodes
    launcher = RayLauncher(_files_for(config), nodes.resources, address, nodes.within_s)
    return Programs(config.agent, config.clocks, launcher, (None, address))


def agents_of(config: RolloutConfig, proxy: Proxy, launcher: Launcher) -> Agents:
    """What starts the agents of a CONFIG.

    Raises:
        ConfigError: there is no such class, no token for a service, or no Ray.
        RolloutError: Ray does not answer.
        LaunchError: a limit cannot be kept here.
    """
    if config.agent.launcher == "python":
        return Coroutines(config.agent, config.clocks, proxy)
    if config.agent.service is not None and config.agent.launcher == "http":
        from rollbook.rollouts.agents.service import ServiceAgents

        address = config.agent.address or config.proxy
        return ServiceAgents(config.agent, config.agent.service, config.clocks, address)
    if config.agent.container is not None and config.agent.launcher == "docker":
        return _in_containers(config, config.agent.container)
    if config.agent.launcher == "ray":
        return _on_nodes(config)
    controllers(config.agent.limits)
    if config.agent.launcher == "verifiers":
        from rollbook.rollouts.agents.verifiers import Verifiers

        return Verifiers(config.agent, config.clocks, launcher, config.folder)
    return Programs(config.agent, config.clocks, launcher)


class _Program:
    def __init__(self, running: Running, job: Job, clocks: ClocksConfig) -> None:
        self.isolation = running.isolation
        self._running, self._job, self._clocks = running, job, clocks

    async def end(self) -> tuple[Ended, Exit | None]:
        waiting = asyncio.ensure_future(self._running.wait())
        try:
            stopped = await until(waiting, self._job, self._clocks)
            if stopped is None:
                exit_ = waiting.result()
                return Ended(exit_.code, exit_.signal, exit_.error, exit_.infrastructure), exit_
            exit_ = await self._running.stop(self._clocks.grace_s)
            return Ended(exit_.code, exit_.signal, stopped=stopped), exit_
        finally:
            waiting.cancel()  # which ends at once whatever runs yet
            await asyncio.wait([waiting])


class Coroutines:
    """Agents that are classes, in this process."""

    def __init__(self, agent: AgentConfig, clocks: ClocksConfig, proxy: Proxy) -> None:
        assert agent.rollout is not None
        self._class, self._options = rollout_class(agent.rollout), agent.options
        self._clocks, self._proxy = clocks, proxy

    async def start(self, job: Job) -> Started:
        """As `Agents`."""
        try:
            rollout = self._class(**self._options)
        except Exception as error:
            raise LaunchError(
                f"{self._class.__name__} cannot be made with {self._options}: {error!r}"
            ) from error
        llm = LLM(self._proxy.http, job.address.openai, job.address.key, job.address.trajectory)
        return _Coroutine(rollout, llm, job, self._clocks)

    async def sweep(self, alive: frozenset[str], dead: frozenset[str] = frozenset()) -> list[Leak]:
        """A coroutine leaves no process behind."""
        return []

    async def close(self) -> None:
        """Nothing is held."""


class _Coroutine:
    def __init__(self, rollout: AgenticRollout, llm: LLM, job: Job, clocks: ClocksConfig) -> None:
        self.isolation: Json = {"level": "none"}
        self._made, self._llm, self._job, self._clocks = rollout, llm, job, clocks

    async def end(self) -> tuple[Ended, Exit | None]:
        running = asyncio.ensure_future(self._made.run(self._job.task, self._llm))
        try:
            stopped = await until(running, self._job, self._clocks)
            if stopped is not None:
                running.cancel()
                await asyncio.wait([running], timeout=self._clocks.grace_s)
            ended = Ended(stopped=stopped) if stopped else _end_of(running)
            return replace(ended, answered=bool(self._llm.replies)), None
        finally:
            running.cancel()
            with contextlib.suppress(Exception):
                await self._made.close()


def _end_of(running: asyncio.Future[Outcome | float | None]) -> Ended:
    """How an agent in this process ended."""
    error = running.exception()
    if isinstance(error, RolloutError):
        return Ended(code=1, infrastructure=str(error))
    if isinstance(error, RequestError):
        return Ended(code=1, error=f"the proxy refused its request: {error}")
    if error is not None:
        return Ended(code=1, error=repr(error))
    result = running.result()
    return Ended(outcome=result if isinstance(result, Outcome | None) else Outcome(float(result)))
