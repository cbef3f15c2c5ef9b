"""A process group of this process and engines' ranks, in which it broadcasts; nothing here waits forever."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rollbook.store.errors import EngineError
from rollbook.store.ids import new_id
from rollbook.train.sync.buckets import Bucket

POLL_S = 0.002
OUTLIVING = "broadcast-end"
"""Name of threads that wait for collectives which nobody needs any more."""


class BroadcastGroup:
    """Rank 0 is this process; then come the engines' ranks, in the order of `members`.

    Args:
        members: (control URL, tensor-parallel ranks) of each engine.
        device: of the tensors: nccl serves CUDA, gloo the CPU.
        address: of this host, as engines reach it.
    """

    def __init__(
        self, members: tuple[tuple[str, int], ...], device: torch.device, address: str, timeout_s: float
    ) -> None:
        self.members = members
        self.name = f"rollbook-{new_id()[-12:]}"
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.size = 1 + sum(ranks for _, ranks in members)
        self.ranks = [1 + sum(ranks for _, ranks in members[:i]) for i in range(len(members))]
        self.port = _free_port(address)
        self._address, self._timeout_s = address, timeout_s
        self._server: Any = None
        self._group: Any = None
        self._pending: list[Any] = []

    def join(self, joining: Sequence[Future[None]]) -> Exception | None:
        """Meet the engines, which were asked to come; why that failed, or None.

        Whoever refuses ends the wait for all: they meet in a store that is closed once the others are in it.
        One that came later would look for it in vain, and SGLang does so for half an hour.
        """
        self._server = _store(self._address, self.port, self.size, self._timeout_s, serve=True)
        with ThreadPoolExecutor(1) as pool:
            meeting = pool.submit(self._meet)
            while not meeting.done():
                if _refusal(joining) is not None and self._all_came(joining):
                    self._server = None
                    break
                time.sleep(POLL_S)
            error = meeting.exception()
        return _refusal(joining) or (error if isinstance(error, Exception) else None)

    def _meet(self) -> None:
        store = _store(self._address, self.port, self.size, self._timeout_s, serve=False)
        timeout = timedelta(seconds=self._timeout_s)
        self._group = _make_group(self.backend, store, self.size, self.name, timeout)

    def _all_came(self, joining: Sequence[Future[None]]) -> bool:
        """Whether all ranks that still want to join are in the store, by the keys that hold addresses."""
        there = {key.rpartition("/")[2] for key in self._server.list_keys()}
        awaited = [0]
        for first, (_, ranks), task in zip(self.ranks, self.members, joining, strict=True):
            awaited += [] if task.done() else range(first, first + ranks)
        return all(str(rank) in there for rank in awaited)

    def broadcast(
        self, bucket: Bucket, tasks: Sequence[Future[None]], refused: Callable[[], None]
    ) -> Exception | None:
        """Send a bucket while the engines receive it; why that failed, or None.

        Args:
            tasks: of the engines that were asked to receive it.
            refused: called once when one of them fails; what waits for it then waits in vain.
        """
        work = dist.broadcast(bucket.flat, src=0, group=self._group, async_op=True)
        deadline = time.monotonic() + self._timeout_s
        problem: Exception | None = None
        while not work.is_completed():
            problem = _refusal(tasks)
            if problem is None and time.monotonic() > deadline:
                problem = EngineError(
                    f"the broadcast of {bucket.names[0]} took more than {self._timeout_s:g} s"
                )
            if problem is not None:
                self._pending.append((work, bucket.flat))  # the memory must outlive what may still read it
                refused()
                return problem
            time.sleep(POLL_S)
        try:
            work.wait()
        except RuntimeError as error:
            refused()
            return EngineError(f"the broadcast of {bucket.names[0]} broke off: {str(error)[:200]}")
        return None

    def close(self) -> None:
        """Leave. What waits in a collective on the other side fails there.

        What waits in one on this side does so until its own time-out, which nobody here waits for.
        """
        group, self._group, self._server = self._group, None, None
        pending, self._pending = self._pending, []
        if group is None:
            return
        if pending:
            group.abort()
        dist.destroy_process_group(group)
        if pending:
            threading.Thread(target=_outlive, args=(group, pending), name=OUTLIVING, daemon=True).start()


def _outlive(group: Any, pending: list[Any]) -> None:
    """Hold a group, whose end waits for its collectives, and their memory until they end."""
    for work, _ in pending:
        with contextlib.suppress(RuntimeError):
            work.wait()
    del group


def _refusal(tasks: Sequence[Future[None]]) -> Exception | None:
    errors = [task.exception() for task in tasks if task.done()]
    return next((error for error in errors if isinstance(error, Exception)), None)


def _store(address: str, port: int, size: int, timeout_s: float, *, serve: bool) -> Any:
    # That everybody is there shows in the group's making, which can be ended; this wait could not.
    timeout = timedelta(seconds=timeout_s)
    made = torch._C._distributed_c10d.TCPStore
    return made(address, port, size, is_master=serve, timeout=timeout, wait_for_workers=False)


def _make_group(backend: str, store: Any, size: int, name: str, timeout: timedelta) -> Any:
    """A group beside the default one, as SGLang makes its side of it: both must agree on the store's keys."""
    group, _ = c10d._new_process_group_helper(
        size,
        0,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
