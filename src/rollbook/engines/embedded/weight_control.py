"""Pauses the embedded engine's batch and changes its weights, in SGLang's terms.

Calls run one at a time, queued behind each other. A call whose client disconnects still runs to
its end.

The gate in front of the batch stays shut while there is a reason for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from rollbook.engines.embedded.batching import LiveRequest, SeededManager
from rollbook.engines.embedded.held_weights import HeldWeights, read_checkpoint
from rollbook.engines.embedded.sent_tensors import read_sent
from rollbook.engines.engine import Activated
from rollbook.engines.weights.digests import checksums
from rollbook.store.errors import ModelError, VersionError

Mode = Literal["abort", "in_place", "retract"]
Result = TypeVar("Result")

BEFORE_CONTINUING = {"updating": "end_weight_update()", "unnamed": "update_weight_version()"}


class WeightControl:
    """Operations on a batch and its weights.

    Attributes:
        asleep: whether the memory of the KV cache is released.
        paused: how generation is paused, or None. `abort` ended the requests that had tokens,
            `retract` holds them outside the batch, `in_place` stops the batch with its KV cache.
    """

    def __init__(
        self, manager: SeededManager, weights: HeldWeights, gate: Gate, live: Mapping[str, LiveRequest]
    ) -> None:
        self.paused: Mode | None = None
        self.asleep = False
        self._manager, self._weights, self._gate, self._live = manager, weights, gate, live
        self._one_at_a_time = asyncio.Lock()
        # The thread that pauses the loop is the one that resumes it: always this one.
        self._thread = ThreadPoolExecutor(1, "weights")
        self._standing = False
        self.located: Callable[[Path], Path] = lambda path: path
        """The folder here of a checkpoint by the path that its trainer has for it."""

    async def start(self, activated: Activated) -> None:
        """Say which weights are served, and let requests in."""
        self._activated = activated
        await activated(self._weights.version, self._weights.digest, self._weights.path)
        self._gate.release("start")

    async def close(self) -> None:
        """Hold new requests; the loop may run to its end."""
        self._gate.shut("close")
        if self._standing:
            await self._stand(still=False)
        self._thread.shutdown(wait=False)
        for live in self._live.values():
            if live.running is None:
                live.abort()

    # The flow of requests ---------------------------------------------------------------------

    async def pause(self, mode: Mode = "abort") -> None:
        """Hold new requests, and stop the running ones in one of three ways.

        `abort` ends those that have tokens; one without any waits. `retract` takes them out of the batch,
        and they go on behind their own ids. `in_place` stops between two forward passes.
        """

        async def stop() -> None:
            self._gate.shut("pause")
            if mode == "in_place":
                if not self._standing:
                    await self._stand(still=True)
            else:
                async with self._still():
                    await self._take_out()
                if self._standing:
                    await self._stand(still=False)
            if mode == "abort":
                self.abort_all()
            self.paused = mode

        await self._alone(stop)

    async def resume(self) -> None:
        """Let requests go on.

        Raises:
            ModelError: a session has changed some of the weights and is not closed, or they have no name yet.
        """

        async def go_on() -> None:
            if self.asleep:
                raise ModelError(
                    "its memory is given away: resume_memory_occupation() comes before continuing"
                )
            missing = BEFORE_CONTINUING.get(self._weights.state)
            if missing is not None:
                raise ModelError(f"the weights are {self._weights.state}: {missing} comes before continuing")
            if self._standing:
                if self._weights.fault is not None:
                    await self._take_out()
                await self._stand(still=False)
            self.paused = None
            self._gate.release("pause")

        await self._alone(go_on)

    async def flush_cache(self) -> bool:
        """Forget every cached prefix; waits for running requests first.

        False, and nothing is done, where requests stand still in the batch: they need what is cached.
        """

        async def flush() -> bool:
            if self._standing and not self._gate.empty.is_set():
                return False
            async with self._changing():
                await self._call(self._manager.forget_prefixes)
            return True

        return await self._alone(flush)

    async def release_cache(self) -> None:
        """Give the memory of the KV cache back; more than once does no harm.

        Raises:
            ModelError: requests are in it, or may come.
        """

        async def release() -> None:
            if self.paused is None or not self._gate.empty.is_set():
                raise ModelError("requests use the KV cache: pause with mode retract before it is given away")
            if not self.asleep:
                async with self._still():
                    await self._call(self._manager.release_cache)
                self.asleep = True

        await self._alone(release)

    async def take_cache(self) -> None:
        """Take the memory of the KV cache again; nothing is done where it was not given away."""

        async def take() -> None:
            if self.asleep:
                async with self._still():
                    await self._call(self._manager.take_cache)
                self.asleep = False

        await self._alone(take)

    # Weights ----------------------------------------------------------------------------------

    async def update_from_disk(self, path: Path, version: int | None, *, flush: bool = True) -> str:
        """Load the weights of a checkpoint of the same architecture; the digest of the loaded tensors.

        Args:
            flush: also drop the KV cache of requests that stand still; refused if there are any.
                Prefixes that other weights made are dropped either way.

        Raises:
            ModelError: the checkpoint is of another architecture, damaged, or does not match its
                manifest, and the old weights stay in place; or the tensors in memory now differ
                from the checkpoint.
        """

        async def update() -> str:
            self._check_flush(flush)
            folder = await asyncio.to_thread(self.located, path)
            checkpoint = await asyncio.to_thread(read_checkpoint, folder, version, self._weights.own)
            self._weights.check_fits(checkpoint)
            if checkpoint.version is None and self.paused is None:
                raise ModelError(f"{path} is no version of this run by itself: send weight_version")
            async with self._changing():
                await self._call(lambda: self._weights.load(checkpoint))
                await self._changed()
            return self._weights.digest

        return await self._alone(update)

    async def begin_update(self) -> None:
        """Open a session. Where generation is not paused, requests are held until it ends.

        Raises:
            ModelError: one is open.
        """

        async def begin() -> None:
            self._weights.begin()
            if self.paused is None:
                self._gate.shut("session")
                await self._gate.empty.wait()

        await self._alone(begin)

    async def update_from_tensors(
        self, payloads: list[str], version: int | None, *, flush: bool = True
    ) -> None:
        """Take some of the tensors of a version, inside a session.

        Raises:
            ModelError: no session is open, or they cannot be read, or do not fit.
        """

        def take() -> None:
            self._weights.check_session()
            self._weights.take(read_sent(payloads), version)

        async def update() -> None:
            self._check_flush(flush)
            async with self._changing():
                try:
                    await self._call(take)
                finally:
                    if self._weights.fault is not None:
                        self._gate.release("session")  # so that it gets that error

        await self._alone(update)

    async def end_update(self) -> None:
        """Close the session, which must have brought all tensors, or none.

        Raises:
            ModelError: no session is open, or the weights are mixed now.
        """

        async def end() -> None:
            async with self._changing():
                try:
                    changed = await self._call(self._weights.end)
                finally:
                    if self._weights.update is None:
                        self._gate.release("session")
                if changed:
                    await self._changed()

        await self._alone(end)

    async def name(self, version: int, label: str | None = None) -> None:
        """Say which version the weights in memory are, as their sender does once they are verified.

        Args:
            label: what the sender calls them.

        Raises:
            ModelError: they are not whole.
        """

        async def name() -> None:
            if self._weights.state == "whole" and self._weights.version == version:
                self._weights.name(version, label)
                return
            async with self._changing():
                self._weights.name(version, label)
                await self._changed()

        await self._alone(name)

    async def _changed(self) -> None:
        """Handle that other weights are in memory, or that they have another name."""
        await self._call(self._manager.forget_prefixes)
        if not self._weights.named:
            self._gate.shut("name")
            return
        try:
            await self._activated(self._weights.version, self._weights.digest, self._weights.source)
        except VersionError as error:
            # What is in memory now may not be sampled from under that name.
            self._weights.fault = str(error)
            raise ModelError(str(error)) from error
        finally:
            self._gate.release("name")

    def abort_all(self) -> None:
        """End every request that has tokens, with what it has."""
        for live in list(self._live.values()):
            if live.ids:
                live.abort()

    async def checksums(self) -> dict[str, str]:
        """SGLang's checksum of every tensor in memory."""

        return await self._alone(lambda: asyncio.to_thread(checksums, self._weights.tensors))

    def _check_flush(self, flush: bool) -> None:
        if flush and self._standing and not self._gate.empty.is_set():
            raise ModelError(
                "requests stand still in the batch, whose KV cache cannot be flushed: send flush_cache "
                "false, or pause with mode retract"
            )

    # One thing at a time ----------------------------------------------------------------------

    async def _alone(self, act: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        async def alone() -> Result:
            async with self._one_at_a_time:
                return await act()

        # A client that leaves in the middle must not leave the engine in the middle.
        return await asyncio.shield(asyncio.ensure_future(alone()))

    async def _call(self, act: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, act)

    async def _stand(self, *, still: bool) -> None:
        await self._call(self._manager.stand_still if still else self._manager.go_on)
        self._standing = still

    @asynccontextmanager
    async def _still(self) -> AsyncIterator[None]:
        """Context: no forward pass runs, and all tokens sampled before it have been delivered."""
        await self._call(self._manager.stand_still)
        try:
            yield
        finally:
            await self._call(self._manager.go_on)

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """Context: weights may change. Requests that are not paused have ended; new ones wait."""
        self._gate.shut("change")
        try:
            if self.paused is None:
                await self._gate.empty.wait()
            async with self._still():
                for live in self._live.values():
                    live.weights_change(self._weights.version)
                yield
        finally:
            self._gate.release("change")

    async def _take_out(self) -> None:
        """Take every request out of the batch; the loop must be paused."""
        inside = [request for request in self._live.values() if request.running is not None]
        names = [request.running for request in inside if request.running is not None]
        await self._call(lambda: self._manager.remove(names))
        for live in inside:
            live.leave()
        await self._gate.empty.wait()


class Gate:
    """Lets requests in, or holds them. `open` and `empty` are set accordingly; it starts shut.

    Attributes:
        shut_for: the reasons why it is shut.
    """

    def __init__(self) -> None:
        self.open, self.empty = asyncio.Event(), asyncio.Event()
        self.empty.set()
        self.shut_for: set[str] = {"start"}
        self._inside = 0

    def shut(self, reason: str) -> None:
        """Hold new requests."""
        self.shut_for.add(reason)
        self.open.clear()

    def release(self, reason: str) -> None:
        """Take a reason back; without any left, new requests are let in."""
        self.shut_for.discard(reason)
        if not self.shut_for:
            self.open.set()

    async def passed(self) -> None:
        """Return once it is open."""
        while not self.open.is_set():  # it may have shut again before this task woke
            await self.open.wait()

    def enter(self) -> None:
        """Note a request that enters."""
        self._inside += 1
        self.empty.clear()

    def leave(self) -> None:
        """Note a request that leaves."""
        self._inside -= 1
        if not self._inside:
            self.empty.set()
