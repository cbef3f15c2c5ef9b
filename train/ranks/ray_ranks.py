"""Ranks that Ray places on the nodes of a cluster.

Rank 0 stays the process of the command. Each other rank is a process beside an actor, which
reports what becomes of it: Ray decides only where the ranks run. It retries nothing: a rank that
fails ends the step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rollbook.store.errors import ConfigError, RankError
from rollbook.store.ray_connection import ADDRESS, connect, imported
from rollbook.train.interface import choose_interface, given_environment
from rollbook.train.ranks.launch import DEATH_S, Follower, FollowerRanks
from rollbook.train.ranks.meeting import Meeting, MeetingPoint, meet, new_secret

VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCHDYNAMO_DISABLE",
)
"""Of the environment of the command, ranks get these variables..."""
FAMILIES = ("GLOO_", "NCCL_", "TORCH_NCCL_")
"""...and those that begin so."""
GPUS, THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
LOOK_S = 0.5
"""Longest wait for actors to say what became of their ranks, and between looks for room in the cluster."""
GONE = -int(signal.SIGKILL)
"""What stands for the exit code of a rank whose actor is gone."""
A_LITTLE = 0.001
"""Of the resource that each node has alone: whatever takes it is on that node."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a training asks of Ray.

    Args:
        strategy: how it spreads ranks over nodes.
        gpus: a rank takes a GPU; else a CPU.
        within_s: longest wait for it.
    """

    strategy: str = "PACK"
    gpus: bool = False
    within_s: float = 60.0

    @property
    def resource(self) -> str:
        """The resource that a rank takes one of."""
        return "GPU" if self.gpus else "CPU"


def launch_by_ray(room: Room, count: int) -> tuple[Meeting, FollowerRanks]:
    """Start the other ranks where Ray has room, one bundle of a placement group each; the first is rank 0's.

    Raises:
        ConfigError: Ray is not installed, or rank 0 would not be in its cluster.
        RankError: it does not answer, or has no room for so many in time.
    """
    with contextlib.ExitStack() as undo:
        ray = _connected(undo)
        host = ray.util.get_node_ip_address()
        group = _group(room, count, host, undo)
        if room.gpus:
            # Nothing of CUDA was called yet, so that this still counts.
            os.environ[GPUS] = ray.get(_actor(Holder, room, group, 0, undo).gpus.remote(), timeout=60)
        sent = sent_environment()
        choose_interface(host)
        meeting = meet(MeetingPoint(host, 0, new_secret()), leads=True)
        args = (meeting.point, count, sent)
        actors = {rank: _actor(RemoteFollower, room, group, rank, undo, *args) for rank in range(1, count)}
        return meeting, RayRanks(actors, undo.pop_all())


def sent_environment() -> dict[str, str]:
    """The variables of this process that are sent to others that compute the same, and how many threads it
    has."""
    return sent_variables(given_environment()) | {THREADS: str(torch.get_num_threads())}


def sent_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that are sent to other ranks."""
    return {
        name: value for name, value in environment.items() if name in VARIABLES or name.startswith(FAMILIES)
    }


class RemoteFollower(Follower):
    """A rank beside a Ray actor, which is an instance of this class. Its process has the
    environment of the node, and the variables sent from rank 0's."""

    def __init__(self, rank: int, point: MeetingPoint, count: int, sent: Mapping[str, str]) -> None:
        super().__init__(point, rank, count, os.environ | dict(sent))


class Holder:
    """Rank 0's actor: holds its GPU."""

    def gpus(self) -> str:
        """The GPU, as in CUDA_VISIBLE_DEVICES."""
        return os.environ[GPUS]


class RayRanks(FollowerRanks):
    """Ranks beside actors, by rank.

    Args:
        undo: ends the actors, removes the placement group, and leaves the cluster.
    """

    def __init__(self, actors: Mapping[int, Any], undo: contextlib.ExitStack) -> None:
        super().__init__(len(actors) + 1)
        self._actors, self._undo = actors, undo

    def _ask(self, method: str, *args: float, wait_s: float = LOOK_S) -> dict[int, Any]:
        import ray

        pending = {getattr(actor, method).remote(*args): rank for rank, actor in self._actors.items()}
        ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=wait_s)
        answers = {}
        for answer in ready:
            try:
                answers[pending[answer]] = ray.get(answer)
            except ray.exceptions.RayError as error:
                if method == "ended":
                    answers[pending[answer]] = (GONE, f"was lost with its actor; Ray says:\n{_words(error)}")
        return answers

    def close(self) -> None:
        """End all of them, by force those that do not end by themselves; nothing is left in the
        cluster."""
        with self._undo:
            self._ask("close", DEATH_S, wait_s=2 * DEATH_S)


# The cluster --------------------------------------------------------------------------------------


def _connected(undo: contextlib.ExitStack) -> Any:
    """Ray, once it is connected as by `connect`.

    Raises:
        ConfigError: it is not installed, or this process would be outside of the cluster.
        RankError: it does not answer.
    """
    if "://" in os.environ.get(ADDRESS, ""):
        raise ConfigError(
            f"{ADDRESS} {os.environ[ADDRESS]}: rank 0 must be on a node of the cluster: run the command there"
        )
    try:
        if leave := connect():
            undo.callback(leave)
    except ConnectionError as error:
        raise RankError(str(error)) from error
    return imported()


def _group(room: Room, count: int, here: str, undo: contextlib.ExitStack) -> Any:
    """A placement group that is ready.

    Raises:
        RankError: there is no room for it.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    bundles = [{room.resource: 1.0} for _ in range(count)]
    bundles[0][f"node:{here}"] = A_LITTLE
    until = time.monotonic() + room.within_s
    group = placement_group(bundles, strategy=room.strategy)
    undo.callback(_quietly, remove_placement_group, group)
    while not group.wait(LOOK_S):  # a longer wait would not hear Ctrl-C
        if time.monotonic() > until:
            raise RankError(_no_room(room, count, here))
    return group


def _no_room(room: Room, count: int, here: str) -> str:
    import ray

    nodes = sum(node["Alive"] for node in ray.nodes())
    total, free = (
        resources.get(room.resource, 0) for resources in (ray.cluster_resources(), ray.available_resources())
    )
    return (
        f"Ray had no room for {count} ranks within {room.within_s:g} s: asked for {count} x 1 "
        f"{room.resource} by {room.strategy}, rank 0's on this node ({here}); the cluster has {total:g} "
        f"{room.resource} on {nodes} node{'s' * (nodes != 1)}, {free:g} of them free. Take fewer ranks or "
        "another --strategy, add nodes, or wait longer with --place-within"
    )


def _actor(kind: type, room: Room, group: Any, bundle: int, undo: contextlib.ExitStack, *args: Any) -> Any:
    """An actor in a bundle, which is never restarted; a `RemoteFollower` is given its rank and
    arguments."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options = ray.remote(kind).options(
        num_cpus=0 if room.gpus else 1,
        num_gpus=1 if room.gpus else 0,
        max_restarts=0,
        max_task_retries=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
    )
    actor = options.remote(*((bundle, *args) if args else ()))
    undo.callback(_quietly, ray.kill, actor)
    return actor


def _quietly(undo: Any, what: Any) -> None:
    """Run a clean-up step; errors are ignored: if the cluster is gone, so is what was in it."""
    import ray

    with contextlib.suppress(ray.exceptions.RayError, ConnectionError, RuntimeError):
        undo(what)


def _words(error: Exception) -> str:
    return "\n".join(f"  {line.strip()}" for line in str(error).splitlines() if line.strip())
