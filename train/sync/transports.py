"""The transports of weights to engines: from a directory, from this host's memory, or by broadcast.

A transport sends all of a policy's tensors to each of several paused engines; `Expected` then verifies what
an engine holds. An engine that fails is left out, and the others continue.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import torch

from rollbook.engines.weights.expected import Expected
from rollbook.store.errors import EngineError
from rollbook.train.config.sync import SyncConfig
from rollbook.train.sync.broadcast import BroadcastGroup
from rollbook.train.sync.buckets import Bucket, Buffers, NamedTensor, buckets
from rollbook.train.sync.control import EMBEDDED, EngineControl
from rollbook.train.sync.presence import await_one
from rollbook.train.sync.shared_memory import payload

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
