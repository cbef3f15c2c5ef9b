"""The transports of weights to engines: from a directory, from this host's memory, or by broadcast.

A transport sends all of a policy's tensors to each of several paused engines; `Expected` then verifies what
an engine holds. An engine that fails is left out, and the others continue.

A process group of this process and an engine's ranks for broadcasts, with time-outs on every
wait.

Every engine has a group of its own. In a single group for all, an engine that dies in the middle
would take the others along: gloo does not report a closed connection to a receiver halfway
through a tensor, so it would wait for its own time-out, which SGLang sets to half an hour.

Packs weights into buckets: many tensors in one buffer, so that one call sends them.

Two buffers are enough: one is filled while an engine takes what is in the other.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rollbook.engines.weights.compare import Expected
from rollbook.store.errors import EngineError
from rollbook.store.events import Json
from rollbook.store.ids import new_id
from rollbook.train.config.config import SyncConfig
from rollbook.train.interface import INTERFACE, interface_towards
from rollbook.train.ranks.meeting import listening_at
from rollbook.train.sync.control import EMBEDDED, EngineControl
from rollbook.train.sync.presence import await_one
from rollbook.train.sync.shared_memory import payload, shared_bytes

NamedTensor = tuple[str, torch.Tensor]
Weights = Callable[[], Iterator[NamedTensor]]
"""Gives a policy's tensors by Hugging Face names, one at a time."""


@dataclass(slots=True, eq=False)
class Receiver:
    """An engine that receives weights, and its state.

    Attributes:
        ranks: its tensor-parallel ranks.
        expected: the checksums that it must have in the end; engines of one layout share them.
        flush: whether its prefix cache is flushed with the update.
        error: why it failed, or None.
    """

    control: EngineControl
    ranks: int
    expected: Expected
    flush: bool = True
    error: Exception | None = None

    def failed(self, error: Exception) -> None:
        """Note its failure; it is left out from now on."""
        self.error = self.error or error


class Transport(Protocol):
    """A transport of weights."""

    name: str

    def send(self, weights: Weights, receivers: Sequence[Receiver]) -> int:
        """Give every receiver all tensors, and add them to its expected checksums; returns the
        bytes sent to each."""

    def close(self) -> None:
        """Release its resources."""


class FromDisk:
    """Engines load a checkpoint's directory, which they can see under the same path."""

    name = "disk"

    def __init__(self, path: Path) -> None:
        self.path = path

    def send(self, weights: Weights, receivers: Sequence[Receiver]) -> int:
        """Make all engines load at once; meanwhile the expected checksums are computed from the policy."""
        with ThreadPoolExecutor(max(len(receivers), 1)) as pool:
            loading = [
                pool.submit(r.control.update_from_disk, str(self.path), flush=r.flush) for r in receivers
            ]
            sent = _expected(weights(), receivers)
            _settled(receivers, loading)
        return sent

    def close(self) -> None:
        """Do nothing: no resource is held."""


class FromTensors:
    """Engines of this host map buckets in shared memory."""

    name = "tensor"

    def __init__(self, bucket_bytes: int) -> None:
        self._buffers = Buffers(bucket_bytes, torch.device("cpu"), shared=True)

    def send(self, weights: Weights, receivers: Sequence[Receiver]) -> int:
        """Send one bucket at a time to all engines; the next is packed while they load it."""

        def give(receiver: Receiver, bucket: Bucket) -> None:
            named = bucket.tensors()
            payloads = [payload(named) for _ in range(receiver.ranks)]
            receiver.control.update_from_tensors(payloads, flush=receiver.flush)

        return _in_buckets(weights, receivers, self._buffers, give)

    def close(self) -> None:
        """Do nothing: the memory is freed with the buffers."""
        self._buffers = Buffers(0, torch.device("cpu"))


class ByBroadcast:
    """Engines anywhere receive what this process broadcasts to each.

    Args:
        bucket_bytes: size of a bucket.
        address: of this host, as engines reach it.
        timeout_s: longest wait for a collective.
    """

    name = "distributed"

    def __init__(self, bucket_bytes: int, address: str, timeout_s: float) -> None:
        # nccl serves tensors on a GPU, gloo those on the CPU.
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._buffers = Buffers(bucket_bytes, self._device)
        self._address, self._timeout_s = address, timeout_s
        self._groups: dict[EngineControl, BroadcastGroup] = {}

    def send(self, weights: Weights, receivers: Sequence[Receiver]) -> int:
        """Broadcast one bucket after another, to all engines in parallel."""
        with ThreadPoolExecutor(max(len(receivers), 1)) as asking:

            def give(receiver: Receiver, bucket: Bucket) -> None:
                control, group = receiver.control, self._groups[receiver.control]
                described = bucket.described()
                task = asking.submit(
                    control.update_from_broadcast, described, group.name, flush=receiver.flush
                )
                group.broadcast(bucket, task)

            with ThreadPoolExecutor(max(len(receivers), 1)) as pool:
                _each(pool, receivers, lambda receiver: self._join(receiver, asking))
            try:
                return _in_buckets(weights, receivers, self._buffers, give)
            finally:
                for receiver in receivers:
                    if receiver.error is not None:
                        self._leave(receiver.control)

    def _join(self, receiver: Receiver, asking: ThreadPoolExecutor) -> None:
        """Form a group with the engine, or reuse that of the last successful sync."""
        control = receiver.control
        if control in self._groups:
            return
        group = BroadcastGroup(receiver.ranks, self._device, self._address, self._timeout_s)
        place = (group.address, group.port, 1, group.size, group.name, group.backend)
        try:
            group.join(asking.submit(control.join_group, *place))
        except Exception:
            group.close()
            raise
        self._groups[control] = group

    def _leave(self, engine: EngineControl) -> None:
        """End the group here and in the engine, which would otherwise keep it."""
        group = self._groups.pop(engine, None)
        if group is not None:
            with contextlib.suppress(EngineError):  # unreachable, or not in the group
                engine.leave_group(group.name)
            group.close()

    def close(self) -> None:
        """Leave all groups."""
        for engine in list(self._groups):
            self._leave(engine)


def _in_buckets(
    weights: Weights,
    receivers: Sequence[Receiver],
    buffers: Buffers,
    give: Callable[[Receiver, Bucket], None],
) -> int:
    """Send buckets through sessions; returns the bytes of all.

    Args:
        give: sends a bucket to an engine, and returns once the engine has it.
    """
    sent = 0
    with ThreadPoolExecutor(len(receivers) + 1) as pool:
        _each(pool, receivers, lambda receiver: receiver.control.begin_update())
        running: list[tuple[Receiver, Future[None]]] = []
        hashing: Future[int] | None = None
        for bucket in buckets(weights(), buffers):
            _collect(running)
            sent += hashing.result() if hashing is not None else 0
            present = [receiver for receiver in receivers if receiver.error is None]
            if not present:
                return sent
            running = [(receiver, pool.submit(give, receiver, bucket)) for receiver in present]
            hashing = pool.submit(_expected, bucket.tensors(), present)
        _collect(running)
        _each(pool, receivers, lambda receiver: receiver.control.end_update())
        sent += hashing.result() if hashing is not None else 0
    return sent


def _each(pool: ThreadPoolExecutor, receivers: Sequence[Receiver], call: Callable[[Receiver], None]) -> None:
    present = [receiver for receiver in receivers if receiver.error is None]
    _collect([(receiver, pool.submit(call, receiver)) for receiver in present])


def _settled(receivers: Sequence[Receiver], tasks: Sequence[Future[None]]) -> None:
    _collect(list(zip(receivers, tasks, strict=True)))


def _collect(running: list[tuple[Receiver, Future[None]]]) -> None:
    wait([task for _, task in running])
    for receiver, task in running:
        error = task.exception()
        if isinstance(error, Exception):
            receiver.failed(error)


def _expected(tensors: Iterable[NamedTensor], receivers: Sequence[Receiver]) -> int:
    """Add these tensors to the expected checksums; returns their bytes."""
    size = 0
    shared = {id(receiver.expected): receiver.expected for receiver in receivers}
    for name, tensor in tensors:
        size += tensor.numel() * tensor.element_size()
        for key, expected in list(shared.items()):
            try:
                expected.add(name, tensor)
            except EngineError as error:
                del shared[key]
                for receiver in receivers:
                    if receiver.expected is expected:
                        receiver.failed(EngineError(f"engine {receiver.control.url}: {error}"))
    return size


def transport_for(sync: SyncConfig, engines: list[EngineControl]) -> Transport:
    """The configured transport; for `auto`, the one that fits the location of the engines.

    Raises:
        EngineLostError: none of them can be reached for `wait_s`.
    """
    size = sync.bucket_mb * 2**20
    name = _fitting(engines, sync.wait_s) if sync.transport == "auto" else sync.transport
    if name == "disk":
        return FromDisk(Path())
    if name == "tensor":
        return FromTensors(size)
    return ByBroadcast(size, sync.address, sync.timeout_s)


def _fitting(engines: list[EngineControl], wait_s: float) -> str:
    """The transport that suits the engines: embedded ones load from disk, engines of this host from
    its memory, others by broadcast."""
    if any(info.kind == EMBEDDED for info in await_one(engines, wait_s)):
        return "disk"
    hosts = {urlsplit(engine.url).hostname for engine in engines}
    return "tensor" if hosts <= {"127.0.0.1", "localhost", "::1"} else "distributed"


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


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Tensors of one type side by side in `flat`, uint8 [bytes]."""

    flat: torch.Tensor
    names: tuple[str, ...]
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]

    def tensors(self) -> list[NamedTensor]:
        """The tensors, as views of `flat`."""
        views: list[NamedTensor] = []
        start = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            size = torch.Size(shape).numel() * self.dtype.itemsize
            views.append((name, self.flat[start : start + size].view(self.dtype).view(shape)))
            start += size
        return views

    def described(self) -> Json:
        """Names, types and shapes, as `/update_weights_from_distributed` takes them."""
        dtype = str(self.dtype).removeprefix("torch.")
        shapes = [list(shape) for shape in self.shapes]
        return {"names": list(self.names), "dtypes": [dtype] * len(self.names), "shapes": shapes}


class Buffers:
    """Two buffers, used alternately.

    Args:
        size: bytes of each; a tensor that is larger gets a buffer of its own.
        device: where they are.
        shared: whether other processes of this host map them.
    """

    def __init__(self, size: int, device: torch.device, *, shared: bool = False) -> None:
        self.size, self._device, self._shared = size, device, shared
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._turn = 0

    def take(self, size: int) -> torch.Tensor:
        """A buffer of at least `size` bytes. It overwrites the contents of the buffer before the last."""
        self._turn = 1 - self._turn
        held = self._buffers[self._turn]
        if held is None or held.numel() < size:
            held = (
                shared_bytes(size)
                if self._shared
                else torch.empty(size, dtype=torch.uint8, device=self._device)
            )
            self._buffers[self._turn] = held
        return held


def buckets(tensors: Iterable[NamedTensor], buffers: Buffers) -> Iterator[Bucket]:
    """Pack tensors, in order. A bucket ends where it is full, and where another type begins.

    A bucket's buffer is filled again when the bucket after the next is asked for.
    """
    waiting: list[NamedTensor] = []
    filled = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if waiting and (filled + size > buffers.size or tensor.dtype != waiting[0][1].dtype):
            yield _packed(waiting, filled, buffers)
            waiting, filled = [], 0
        waiting.append((name, tensor))
        filled += size
    if waiting:
        yield _packed(waiting, filled, buffers)


def _packed(tensors: list[NamedTensor], size: int, buffers: Buffers) -> Bucket:
    names = tuple(name for name, _ in tensors)
    shapes = tuple(tuple(tensor.shape) for _, tensor in tensors)
    bucket = Bucket(buffers.take(size)[:size], names, tensors[0][1].dtype, shapes)
    for (_, view), (_, tensor) in zip(bucket.tensors(), tensors, strict=True):
        view.copy_(tensor)
    return bucket
