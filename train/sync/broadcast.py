"""A process group of this process and an engine's ranks for broadcasts, with time-outs on every
wait.

Every engine has a group of its own. In a single group for all, an engine that dies in the middle
would take the others along: gloo does not report a closed connection to a receiver halfway
through a tensor, so it would wait for its own time-out, which SGLang sets to half an hour.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rollbook.store.errors import EngineError
from rollbook.store.ids import new_id
from rollbook.train.interface import INTERFACE, interface_towards
from rollbook.train.ranks.meeting import listening_at
from rollbook.train.sync.buckets import Bucket

POLL_S = 0.002
OUTLIVING_POLL_S = 0.05
OUTLIVING = "broadcast-end"
"""Name of the threads that wait for abandoned collectives."""

_ASKING = threading.Lock()
"""Held by a thread that asks or destroys abandoned collectives, and by nobody else until the process ends.

torch gives the GIL up in there. A thread that comes back for it while the interpreter ends is unwound
through C++ that allows no unwinding, and the whole process aborts. So the end waits for this lock.
"""
atexit.register(_ASKING.acquire)


class BroadcastGroup:
    """A group in which rank 0 is this process, followed by an engine's tensor-parallel ranks.

    Args:
        ranks: of the engine.
        device: of the tensors: nccl serves CUDA, gloo the CPU.
        address: of this host, as the engine reaches it.
    """

    def __init__(self, ranks: int, device: torch.device, address: str, timeout_s: float) -> None:
        self.name = f"rollbook-{new_id()[-12:]}"
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.size = 1 + ranks
        # It listens from here on, at that address alone: nobody else can take the port that is told.
        self._listener = listening_at(address)
        self.address, self.port = address, int(self._listener.getsockname()[1])
        self._timeout_s = timeout_s
        self._server: Any = None
        self._group: Any = None
        self._pending: list[Any] = []

    def join(self, joining: Future[None]) -> None:
        """Form the group with the engine, which was asked to join.

        Raises:
            Exception: the engine refused, which ends the wait, or did not join in time.
        """
        self._server = self._store(serve=True)
        with ThreadPoolExecutor(1) as pool:
            meeting = pool.submit(self._meet, self._store(serve=False))
            while not meeting.done():
                if joining.done() and joining.exception():
                    self._server = None  # closes the rendezvous, which ends the wait
                    break
                time.sleep(POLL_S)
            joining.result()
            meeting.result()

    def _meet(self, store: Any) -> None:
        timeout = timedelta(seconds=self._timeout_s)
        with gloo_at(self.address):
            self._group = _make_group(self.backend, store, self.size, self.name, timeout)

    def _store(self, *, serve: bool) -> Any:
        # Not waiting for workers here: this wait could not be ended, while creating the group can.
        timeout = timedelta(seconds=self._timeout_s)
        store_class = torch._C._distributed_c10d.TCPStore
        return store_class(
            self.address,
            self.port,
            self.size,
            is_master=serve,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=self._listener.detach() if serve else None,  # the store closes it
        )

    def broadcast(self, bucket: Bucket, receiving: Future[None]) -> None:
        """Broadcast a bucket while the engine receives it. After a failure, call `close`.

        Args:
            receiving: the running request that makes the engine receive.

        Raises:
            Exception: the engine's own, or why the broadcast failed.
        """
        work = dist.broadcast(bucket.flat, src=0, group=self._group, async_op=True)
        deadline = time.monotonic() + self._timeout_s
        late = False
        while not work.is_completed() and not late:
            late = time.monotonic() > deadline or (receiving.done() and receiving.exception() is not None)
            time.sleep(POLL_S)
        if late:
            # The memory must outlive a collective that may still read it.
            self._pending.append((work, bucket.flat))
            receiving.result()
            raise EngineError(f"the broadcast of {bucket.names[0]} took more than {self._timeout_s:g} s")
        try:
            work.wait()
        except RuntimeError as error:
            receiving.result()
            text = f"the broadcast of {bucket.names[0]} broke off: {str(error)[:200]}"
            raise EngineError(text) from error
        receiving.result()

    def close(self) -> None:
        """Leave the group. Collectives for which the other side waits fail there.

        Collectives on this side end by their own time-out, in a thread of their own.
        """
        self._listener.close()
        group, self._group, self._server = self._group, None, None
        pending, self._pending = self._pending, []
        if group is None:
            return
        if pending:
            group.abort()
        dist.destroy_process_group(group)
        if pending:
            held = [group, pending]  # destroyed where it is emptied: nobody else keeps them
            threading.Thread(target=_outlive, args=(held,), name=OUTLIVING, daemon=True).start()


def _outlive(held: list[Any]) -> None:
    """Keep a group, its collectives and their memory alive until they end, or the process does."""
    while held:
        with _ASKING:
            if all(work.is_completed() for work, _ in held[1]):
                held.clear()
        time.sleep(OUTLIVING_POLL_S)


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


_FORMING = threading.Lock()
_forming: list[str | None] = []
"""Of each group that is being formed, the variable as it was before the first of them."""


@contextlib.contextmanager
def gloo_at(address: str) -> Iterator[None]:
    """A context in which groups are formed at the interface of an address, whatever interface
    others use. Several threads may be in it at once."""
    with _FORMING:
        _forming.append(_forming[0] if _forming else os.environ.get(INTERFACE))
        if name := interface_towards(address):
            os.environ[INTERFACE] = name
    try:
        yield
    finally:
        with _FORMING:
            before = _forming.pop()
            if not _forming and before is None:
                os.environ.pop(INTERFACE, None)
            elif not _forming:
                os.environ[INTERFACE] = str(before)
