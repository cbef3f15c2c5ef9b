"""Agents on the nodes of a Ray cluster: on each one launcher, an actor; each agent is a process beside it.

An agent's folder is to be on a file system that all nodes share, and the proxy's address one that all reach.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollbook.rollouts.launchers.isolation import Files
from rollbook.rollouts.launchers.launching import Exit, Launch, Leak, Running
from rollbook.rollouts.launchers.subprocess_launcher import SubprocessLauncher
from rollbook.rollouts.proxy import FAILURES, Http, failure
from rollbook.rollouts.ray_cluster import LostError, Node, answered, connected, nodes_with, on, quietly
from rollbook.store.errors import LaunchError, RolloutError
from rollbook.store.events import Json

START_S, SWEEP_S = 60.0, 60.0
"""How long a launcher may take to start an agent, or to sweep its node."""
REACH_S = 10.0
"""How long a proxy may take to answer from a node."""
LOOK_S = 5.0
"""Between two looks which nodes there are."""
PAUSE_S = 0.5


class NodeLauncher:
    """The launcher of a node, as an actor.

    Args:
        files: as of `SubprocessLauncher`.
    """

    def __init__(self, files: Files) -> None:
        self._launcher = SubprocessLauncher(files)
        self._running: dict[str, Running] = {}

    async def reaches(self, url: str) -> str | None:
        """Why the proxy cannot be reached from here; None: it can."""
        http = Http()
        try:
            async with asyncio.timeout(REACH_S):
                await http.send("GET", f"{url}/healthz")
        except FAILURES as error:
            return failure(error)
        finally:
            await http.close()
        return None

    async def start(self, launch: Launch) -> Json:
        """Start an agent; returns the isolation that it really has."""
        running = self._running[launch.launch_id] = await self._launcher.start(launch)
        return running.isolation

    async def wait(self, launch_id: str) -> Exit:
        """Wait for its end."""
        return await self._running[launch_id].wait()

    async def stop(self, launch_id: str, grace_s: float) -> Exit:
        """End it."""
        return await self._running[launch_id].stop(grace_s)

    async def forget(self, launch_id: str) -> None:
        """Nobody asks of it any more."""
        self._running.pop(launch_id, None)

    async def sweep(self, alive: frozenset[str], dead: frozenset[str]) -> list[Leak]:
        """As `Launcher`, on this node."""
        return await self._launcher.sweep(alive, dead)


@dataclass(slots=True, eq=False)
class _Place:
    """A node's launcher, and how many agents it has."""

    node: Node
    actor: Any
    running: int = 0


class RayLauncher:
    """Starts agents on the nodes of a Ray cluster, each on the one that has the fewest.

    Args:
        files: as of `SubprocessLauncher`.
        resources: that a node is to have.
        proxy: address that agents are to reach.
        within_s: how long the first sweep waits for a node.

    Raises:
        ConfigError: Ray is not installed.
        RolloutError: it does not answer.
    """

    def __init__(
        self, files: Files, resources: Mapping[str, float], proxy: str, within_s: float = 60.0
    ) -> None:
        self._files, self._resources, self._proxy = files, resources, proxy
        self._places: dict[str, _Place] = {}
        self._unreached: dict[str, str] = {}
        self._looked = -LOOK_S
        self._looking = asyncio.Lock()
        self._within_s, self._had_nodes = within_s, False
        connected()

    async def start(self, launch: Launch) -> Running:
        """As `Launcher`."""
        place = await self._chosen()
        place.running += 1
        try:
            isolation = await answered(place.actor.start.remote(launch), START_S)
        except LostError as error:
            place.running -= 1
            self.lost(place)
            raise LaunchError(f"node {place.node.address} was lost: {error}") from error
        except BaseException:
            place.running -= 1
            raise
        return _OnNode(self, place, launch.launch_id, isolation | place.node.described)

    async def sweep(self, alive: frozenset[str], dead: frozenset[str] = frozenset()) -> list[Leak]:
        """As `Launcher`, on every node; the first waits for one that has what is asked for.

        Raises:
            RolloutError: none comes in time. Later ones find nothing where there is no node any more.
        """
        leaks: list[Leak] = []
        await self._awaited()
        for place in list(self._places.values()):
            try:
                leaks += await answered(place.actor.sweep.remote(alive, dead), SWEEP_S)
            except LostError:
                self.lost(place)
        return leaks

    async def _awaited(self) -> None:
        """See which nodes there are, the first time until there are some."""
        by = time.monotonic() + self._within_s
        while True:
            try:
                await self._look()
                self._had_nodes = True
                return
            except RolloutError as error:
                if self._had_nodes:
                    return  # what ran on nodes that are gone is gone with them
                if time.monotonic() > by:
                    raise RolloutError(f"{error} (waited for {self._within_s:g} s)") from error
                await asyncio.sleep(PAUSE_S)

    async def _chosen(self) -> _Place:
        """The node with the fewest agents.

        Raises:
            LaunchError: there is none that reaches the proxy, or that has what is asked for.
        """
        try:
            await self._look()
        except RolloutError as error:
            raise LaunchError(str(error)) from error
        if not self._places:
            why = "; ".join(f"node {at}: {why}" for at, why in self._unreached.items())
            raise LaunchError(
                f"no node reaches the proxy at {self._proxy} ({why}): name it by another `proxy`"
            )
        return min(self._places.values(), key=lambda place: place.running)

    async def _look(self) -> None:
        """See which nodes there are, and have a launcher on each."""
        async with self._looking:
            if time.monotonic() - self._looked < LOOK_S and self._places:
                return
            nodes = {node.node_id: node for node in await asyncio.to_thread(nodes_with, self._resources)}
            self._unreached.clear()
            for node_id in list(self._places):
                if node_id not in nodes:
                    self.lost(self._places[node_id])
            for node_id, node in nodes.items():
                if node_id not in self._places:
                    await self._begin(node)
            self._looked = time.monotonic()

    async def _begin(self, node: Node) -> None:
        """Have a launcher on a node that reaches the proxy."""
        actor = on(node, NodeLauncher, self._files)
        try:
            why = await answered(actor.reaches.remote(self._proxy), START_S)
        except LostError as error:
            why = str(error)
        if why is None:
            self._places[node.node_id] = _Place(node, actor)
        else:
            self._unreached[node.address] = why
            self._end(actor)

    def lost(self, place: _Place) -> None:
        """A node does not answer any more."""
        if self._places.get(place.node.node_id) is place:
            del self._places[place.node.node_id]
            self._looked = -LOOK_S
            self._end(place.actor)

    def _end(self, actor: Any) -> None:
        import ray

        quietly(ray.kill, actor)


class _OnNode:
    """An agent on a node."""

    def __init__(self, launcher: RayLauncher, place: _Place, launch_id: str, isolation: Json) -> None:
        self.isolation = isolation
        self._launcher, self._place, self._launch_id = launcher, place, launch_id
        self._over = False

    async def wait(self) -> Exit:
        try:
            return await self._ended(self._place.actor.wait.remote(self._launch_id), None)
        except asyncio.CancelledError:
            await self.stop(0)
            raise

    async def stop(self, grace_s: float) -> Exit:
        return await self._ended(self._place.actor.stop.remote(self._launch_id, grace_s), grace_s + START_S)

    async def _ended(self, reference: Any, within_s: float | None) -> Exit:
        """Its end; one whose node was lost did not fail at its task."""
        try:
            exit_: Exit = await answered(reference, within_s)
        except LostError as error:
            self._launcher.lost(self._place)
            return Exit(None, None, infrastructure=f"node {self._place.node.address} was lost: {error}")
        if not self._over:
            self._over = True
            self._place.running -= 1
            self._place.actor.forget.remote(self._launch_id)
        return exit_
