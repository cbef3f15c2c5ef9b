"""A Ray cluster, as rollouts use it: connected to, its nodes, actors whose answers are awaited within bounds.

Needs `rollbook[ray]`; nothing but `ray_launcher` and `ray_manager` imports it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rollbook.store.errors import RolloutError
from rollbook.store.events import Json
from rollbook.store.ray_connection import connect, imported

NAMESPACE = "rollbook"
MOST_CALLS = 1000
"""Of an actor at once: each agent that it waits for is one."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is alive: its id, address, and all that it has."""

    node_id: str
    address: str
    resources: Mapping[str, float]

    @property
    def described(self) -> Json:
        """As the log has it."""
        return {"node": self.address, "node_id": self.node_id}


def connected() -> Any:
    """Ray, connected as `connect` does it.

    Raises:
        ConfigError: it is not installed.
        RolloutError: it does not answer.
    """
    try:
        connect(NAMESPACE)
    except ConnectionError as error:
        raise RolloutError(str(error)) from error
    return imported()


def nodes_with(resources: Mapping[str, float]) -> list[Node]:
    """The nodes that are alive and have these resources, in all.

    Raises:
        RolloutError: none has them; it says what there is.
    """
    import ray

    alive = [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    ]
    fitting = [n for n in alive if all(n.resources.get(k, 0.0) >= v for k, v in resources.items())]
    if fitting:
        return fitting
    there = "; ".join(f"{n.address}: {_shown(n.resources)}" for n in alive) or "no node"
    raise RolloutError(
        f"no node of the Ray cluster has {_shown(resources)}, which agents are to be on; there is {there}. "
        "Start a node with them (ray start --resources), or change agent.nodes.resources"
    )


def on(node: Node, kind: type, *given: Any) -> Any:
    """An actor on a node, which is never started again, and whose methods never run twice.

    It takes no CPU of Ray's count: what runs agents is beside the trainer's ranks, not in place of them.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options = ray.remote(kind).options(
        num_cpus=0,
        max_restarts=0,
        max_task_retries=0,
        max_concurrency=MOST_CALLS,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
    )
    return options.remote(*given)


async def answered(reference: Awaitable[T], within_s: float | None) -> T:
    """What an actor answers.

    Raises:
        LostError: it is gone, or its node; or it took longer.
        RollbookError: what the actor raised.
    """
    import ray

    try:
        return await asyncio.wait_for(_awaited(reference), within_s)
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else LostError(error_line(error)) from error
    except ray.exceptions.RayError as error:
        raise LostError(error_line(error)) from error
    except TimeoutError as error:
        raise LostError(f"no answer within {within_s:g} s") from error


async def _awaited(reference: Awaitable[T]) -> T:
    return await reference


class LostError(Exception):
    """An actor is gone, or its node, or it does not answer."""


def quietly(undo: Callable[..., Any], *what: Any) -> None:
    """Undo, ignoring errors: where the cluster is gone, so is what was in it."""
    import ray

    with contextlib.suppress(ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError):
        undo(*what)


def error_line(error: Exception) -> str:
    """An error's first line that says something; Ray's errors are pages long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:500] if lines else repr(error)


def _shown(resources: Mapping[str, float]) -> str:
    return (
        ", ".join(f"{v:g} {k}" for k, v in sorted(resources.items()) if not k.startswith("node:"))
        or "nothing"
    )
