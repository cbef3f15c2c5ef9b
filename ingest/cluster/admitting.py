"""Admission across the workers of a proxy: the first worker holds the gate, and the others ask it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from rollbook.ingest.admission.gate import ANSWERED_S, AdmissionGate
from rollbook.ingest.cluster.bus import Asks
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.trajectories.place import FIRST
from rollbook.store.errors import EndingError, RequestError
from rollbook.store.events import Json

ENTER, KEPT, BEGAN, LEFT = "enter", "kept", "began", "left"
MARGIN_S = 10.0
"""How much longer than the gate holds a trajectory its answer may take."""


@dataclass(slots=True, eq=False)
class GateServer:
    """Answers the other workers for a gate. Room that one keeps is given up when it dies.

    Attributes:
        caught_up: returns once the gate has what is in the log by now.
    """

    gate: AdmissionGate
    bus: Asks
    caught_up: Callable[[], Awaitable[None]]
    _entering: dict[tuple[int, int], asyncio.Task[bool]] = field(default_factory=dict)
    """By worker and token: who waits, or was let in and has not left."""
    _names: dict[tuple[int, int], str] = field(default_factory=dict)
    """Of those for whom room is kept."""
    _leaving: dict[tuple[int, int], asyncio.Event] = field(default_factory=dict)
    """Of those who wait: set once nobody waits for them any more."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    _late: set[tuple[int, int]] = field(default_factory=set)
    """Of those whose room a gate before this one gave: they may be in the log that this one began with."""
    _ends: list[Callable[[], object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for kind, handler in (
            (ENTER, self._enter),
            (KEPT, self._kept),
            (BEGAN, self._began),
            (LEFT, self._left),
        ):
            self._ends.append(self.bus.on(kind, handler))
        self._ends.append(self.bus.on_begun(self._died))

    def close(self) -> None:
        """Stop answering: another one keeps the gate from now on, and those who wait ask it again."""
        for end in self._ends:
            end()
        for task in (*self._entering.values(), *self._tasks):
            task.cancel()

    async def _enter(self, worker: int, _: int, request: Json) -> tuple[Json, bytes]:
        key = (worker, request["token"])
        task = self._entering.get(key)
        if task is None:  # else it is asked again
            task = self._entering[key] = asyncio.create_task(self._entered(key, request))
            # Who asked may have left; else the event loop would print that nobody took the error.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return {"reserved": await asyncio.shield(task)}, b""

    async def _entered(self, key: tuple[int, int], request: Json) -> bool:
        left = self._leaving[key] = asyncio.Event()
        reserved = False
        try:
            name = request["name"]
            reserved = await self.gate.enter(name, request["group"], request["split"], left.wait)
            if reserved:
                self._names[key] = name
        finally:
            del self._leaving[key]
            if not reserved:
                self._entering.pop(key, None)
        return reserved

    async def _kept(self, worker: int, _: int, request: Json) -> tuple[Json, bytes]:
        """A worker keeps room that a gate before this one gave it."""
        key = (worker, request["token"])
        if key not in self._names:
            self._names[key] = request["name"]
            self._late.add(key)
            self.gate.keep(request["name"], request["group"])
        return {}, b""

    async def _began(self, worker: int, _: int, request: Json) -> tuple[Json, bytes]:
        key = (worker, request["token"])
        if key in self._late:  # its opening may have been read before its room was kept
            await self.caught_up()
            self._let_go(key, self.gate.leave)
        else:
            self._let_go(key, self.gate.began)
        return {}, b""

    async def _left(self, worker: int, _: int, request: Json) -> tuple[Json, bytes]:
        """A trajectory for which a worker asked did not begin: its client has left, or it was refused."""
        key = (worker, request["token"])
        if key in self._leaving:
            self._leaving[key].set()
        else:
            self._let_go(key, self.gate.leave)
        return {}, b""

    def _let_go(self, key: tuple[int, int], release: Callable[[str], None]) -> None:
        self._entering.pop(key, None)
        self._late.discard(key)
        name = self._names.pop(key, None)
        if name is not None:
            release(name)

    def _died(self, worker: int) -> None:
        """Another process is that worker now: what its predecessor began is in the log, or never will be."""
        for key, left in self._leaving.items():
            if key[0] == worker:
                left.set()
        keys = [key for key in self._names if key[0] == worker]
        if keys:
            task = asyncio.get_running_loop().create_task(self._give_up(keys))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _give_up(self, keys: list[tuple[int, int]]) -> None:
        await self.caught_up()
        for key in keys:
            self._let_go(key, self.gate.leave)


@dataclass(slots=True, eq=False)
class RemoteGate:
    """The gate of the first worker, as another one sees it.

    Attributes:
        find: the trajectory of a name, once its opening is recorded or on its way to be.
        hold_s: how long a trajectory waits there.
    """

    bus: Asks
    find: Callable[[str], LiveTrajectory | None]
    hold_s: float
    waiting: int = 0
    """How many trajectories of this worker are held now."""
    _kept: dict[str, list[tuple[int, str | None]]] = field(default_factory=dict)
    """Name -> token and group of each request for which room is kept."""
    _tokens: Any = field(default_factory=lambda: itertools.count(os.getpid() << 32))
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _telling: WeakValueDictionary[int, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    _stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once this worker ends, and waits no more."""

    def __post_init__(self) -> None:
        self.bus.on_begun(self._keep_again)

    async def enter(
        self, name: str, group: str | None, split: str, gone: Callable[[], Awaitable[Any]]
    ) -> bool:
        """Wait until the trajectory may begin: see `AdmissionGate`.

        Raises:
            RequestError: 503, there is no room for it, or the first worker is away; 499, nobody waits for it.
            EndingError: there is no room for it now, and this worker ends.
        """
        token = next(self._tokens)
        words = {"token": token, "name": name, "group": group, "split": split}
        asking = asyncio.ensure_future(self.bus.ask(FIRST, ENTER, words, self.hold_s + MARGIN_S))
        left, stopped = asyncio.ensure_future(gone()), asyncio.ensure_future(self._stopped.wait())
        self.waiting += 1
        try:
            ends: set[asyncio.Future[Any]] = {asking, left, stopped}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() and stopped.done():
                raise EndingError
            if not asking.done():
                raise RequestError(499, "client_left", f"trajectory {name!r} was held, and its client left")
            reserved = bool(asking.result()[0]["reserved"])
        except BaseException:
            self._tell(LEFT, token)
            raise
        finally:
            self.waiting -= 1
            for future in ends:
                future.cancel()
        if reserved:
            self._kept.setdefault(name, []).append((token, group))
        return reserved

    def stop(self) -> None:
        """Stop waiting for answers in a while: a first worker that ends as well refuses those it holds."""
        asyncio.get_running_loop().call_later(ANSWERED_S, self._stopped.set)

    def leave(self, name: str) -> None:
        """Release the room that was kept for it, once it is in the log or will not be."""
        tokens = self._kept[name]
        token, _ = tokens.pop(0)
        if not tokens:
            del self._kept[name]
        live = self.find(name)
        if live is None or live.opening is None:
            self._tell(LEFT if live is None else BEGAN, token)
            return
        loop = asyncio.get_running_loop()

        def ended(opening: Future[int]) -> None:
            what = BEGAN if opening.exception() is None else LEFT
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._tell, what, token)

        live.opening.add_done_callback(ended)

    def _tell(self, what: str, token: int, **more: Any) -> None:
        """Tell the first worker, and again if it dies before it has answered."""
        task = asyncio.get_running_loop().create_task(self._tell_first(what, {"token": token, **more}))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell_first(self, what: str, words: Json) -> None:
        lock = self._telling.setdefault(words["token"], asyncio.Lock())  # what is said later comes later
        with contextlib.suppress(RequestError):
            async with lock:
                await self.bus.ask(FIRST, what, words, None)

    def _keep_again(self, worker: int) -> None:
        """The first worker begins anew: it does not know for whom room is kept."""
        if worker == FIRST:
            for name, tokens in self._kept.items():
                for token, group in tokens:
                    self._tell(KEPT, token, name=name, group=group)
