"""How weights get to engines: from a directory, from this host's memory, or by broadcast.

A transport is given engines that are paused and sends all of a policy's tensors to each; whether an engine
then holds them is for its `Expected` to say. Whoever fails is out, and the others go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from rollbook.store.errors import EngineError
from rollbook.train.sync.broadcast import BroadcastGroup
from rollbook.train.sync.buckets import Bucket, Buffers, NamedTensor, buckets
from rollbook.train.sync.control import EngineControl
from rollbook.train.sync.layout import Expected
from rollbook.train.sync.shared_memory import payload

Weights = Callable[[], Iterator[NamedTensor]]
"""Gives a policy's tensors by Hugging Face names, one at a time."""


@dataclass(slots=True, eq=False)
class Receiver:
    """An engine that gets weights, and what has come of it.

    Attributes:
        ranks: its tensor-parallel ranks.
        expected: what it must hold in the end; engines of one layout share it.
        flush: have it forget prefixes that the old weights made.
        error: why it is out, or None.
    """

    control: EngineControl
    ranks: int
    expected: Expected
    flush: bool = True
    error: Exception | None = None

    def failed(self, error: Exception) -> None:
        """It takes no part any more."""
        self.error = self.error or error


class Transport(Protocol):
    """A way for weights."""

    name: str

    def send(self, weights: Weights, receivers: Sequence[Receiver]) -> int:
        """Give every receiver all tensors, and tell its expectation of them; the bytes sent to each."""

    def close(self) -> None:
        """Give back what it holds."""


class FromDisk:
    """Engines load a checkpoint's directory, which they can see under the same path."""

    name = "disk"

    def __init__(self, path: Path) -> None:
        self.path = path

    def send(self, weights: Weights, receivers: Sequence[Receiver]) -> int:
        """Have all load at once; what they must hold is computed here from the policy itself meanwhile."""
        with ThreadPoolExecutor(max(len(receivers), 1)) as pool:
            loading = [
                pool.submit(r.control.update_from_disk, str(self.path), flush=r.flush) for r in receivers
            ]
            sent = _expected(weights(), receivers)
            _settled(receivers, loading)
        return sent

    def close(self) -> None:
        """Nothing is held."""


class FromTensors:
    """Engines of this host map buckets in shared memory."""

    name = "tensor"

    def __init__(self, bucket_bytes: int) -> None:
        self._buffers = Buffers(bucket_bytes, torch.device("cpu"), shared=True)

    def send(self, weights: Weights, receivers: Sequence[Receiver]) -> int:
        """A bucket at a time to all; the next is packed while they load it."""

        def give(receiver: Receiver, bucket: Bucket) -> None:
            named = bucket.tensors()
            payloads = [payload(named) for _ in range(receiver.ranks)]
            receiver.control.update_from_tensors(payloads, flush=receiver.flush)

        return _in_buckets(weights, receivers, self._buffers, give)

    def close(self) -> None:
        """The memory goes with the buffers."""
        self._buffers = Buffers(0, torch.device("cpu"))


class ByBroadcast:
    """Engines anywhere receive what this process broadcasts, each of their ranks once.

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
        self._group: BroadcastGroup | None = None
        self._members: list[EngineControl] = []

    def send(self, weights: Weights, receivers: Sequence[Receiver]) -> int:
        """Broadcast bucket after bucket. Who fails takes the others along: a broadcast is everybody's."""
        group = self._joined(receivers)
        if group is None:
            return 0

        def give(receiver: Receiver, bucket: Bucket) -> None:
            receiver.control.update_from_broadcast(bucket.described(), group.name, flush=receiver.flush)

        def broadcast(bucket: Bucket, tasks: Sequence[Future[None]]) -> Exception | None:
            return group.broadcast(bucket, tasks, lambda: self._part(receivers, tasks))

        try:
            return _in_buckets(weights, receivers, self._buffers, give, broadcast)
        finally:
            if any(receiver.error for receiver in receivers):
                for receiver in receivers:
                    receiver.failed(EngineError("another engine of the broadcast failed"))
                self._leave([receiver.control for receiver in receivers])

    def _joined(self, receivers: Sequence[Receiver]) -> BroadcastGroup | None:
        """The group of these engines: the last sync's, if it was of the same ones."""
        members = tuple((receiver.control.url, receiver.ranks) for receiver in receivers)
        if self._group is not None and self._group.members == members:
            return self._group
        self._leave(self._members)
        group = BroadcastGroup(members, self._device, self._address, self._timeout_s)
        with ThreadPoolExecutor(len(receivers)) as pool:
            joining = [
                pool.submit(
                    receiver.control.join_group,
                    self._address,
                    group.port,
                    rank,
                    group.size,
                    group.name,
                    group.backend,
                )
                for receiver, rank in zip(receivers, group.ranks, strict=True)
            ]
            error = group.join(joining)
            _settled(receivers, joining)
        if error is not None or any(receiver.error for receiver in receivers):
            group.close()
            for receiver in receivers:
                receiver.failed(error or EngineError("another engine did not join the broadcast"))
            return None
        self._group, self._members = group, [receiver.control for receiver in receivers]
        return group

    def _part(self, receivers: Sequence[Receiver], tasks: Sequence[Future[None]]) -> None:
        """Part with engines that failed, so that no collective waits for them any longer."""
        failed = [
            r.control for r, task in zip(receivers, tasks, strict=True) if task.done() and task.exception()
        ]
        group = self._group
        if group is not None:
            _all_leave(failed, group.name)
            group.close()

    def _leave(self, engines: Sequence[EngineControl]) -> None:
        """End the group here and in the engines, which would keep its remains."""
        group, self._group, self._members = self._group, None, []
        if group is not None:
            group.close()
            _all_leave(engines, group.name)

    def close(self) -> None:
        """Leave the group."""
        self._leave(self._members)


def _all_leave(engines: Sequence[EngineControl], group: str) -> None:
    def leave(engine: EngineControl) -> None:
        with contextlib.suppress(EngineError):  # gone, or not in it
            engine.leave_group(group)

    with ThreadPoolExecutor(max(len(engines), 1)) as pool:
        wait([pool.submit(leave, engine) for engine in engines])


def _in_buckets(
    weights: Weights,
    receivers: Sequence[Receiver],
    buffers: Buffers,
    give: Callable[[Receiver, Bucket], None],
    meanwhile: Callable[[Bucket, Sequence[Future[None]]], Exception | None] | None = None,
) -> int:
    """Send buckets through sessions; the bytes of all.

    Args:
        give: asks an engine to take a bucket; it returns once the engine has it.
        meanwhile: what this process has to do for it, such as the broadcast itself; all take part in that.
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
            if not present or (meanwhile is not None and len(present) < len(receivers)):
                return sent
            running = [(receiver, pool.submit(give, receiver, bucket)) for receiver in present]
            hashing = pool.submit(_expected, bucket.tensors(), present)
            problem = None if meanwhile is None else meanwhile(bucket, [task for _, task in running])
            if problem is not None:
                _collect(running)  # whose own reason says more
                for receiver in present:
                    receiver.failed(problem)
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
    """Tell the expectations of these tensors; their bytes."""
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
