"""The admission gate: holds new trajectories that would be too old by the time they are trained on,
until there is room."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollbook.ingest.admission.outstanding import Outstanding
from rollbook.store.errors import EndingError, RequestError
from rollbook.store.events import Event, TrajectoryOpened

STALLED_S = 10.0
"""After so long without any progress possible, one more trajectory is admitted than fits. The gaps between
members of a group that run one after the other are shorter."""
ANSWERED_S = 8.0
"""So long a process that ends waits for what others answer: an engine, or another process of the run."""
LOOKS = 5
"""How often progress is checked in that time."""


class Gate(Protocol):
    """What admits trajectories: `AdmissionGate`, or the one of another worker of the proxy."""

    async def enter(
        self, name: str, group: str | None, split: str, gone: Callable[[], Awaitable[Any]]
    ) -> bool:
        """Wait until the trajectory may begin: see `AdmissionGate`."""

    def stop(self) -> None:
        """Hold no trajectory any more: those that wait or come from now on are refused."""

    def leave(self, name: str) -> None:
        """Release the room that was kept for it."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A trajectory that waits to begin."""

    name: str
    group: str | None
    admitted: asyncio.Future[bool]
    """False: the proxy ends."""


@dataclass(slots=True, eq=False)
class _Reservation:
    """Room kept for a trajectory that was admitted and is not in the log yet.

    Attributes:
        asked: how many requests share it.
        begun: the trajectory is in the log, and counts there.
        reported: how many of its requests reported its beginning before the log was read that far.
    """

    group: str | None
    asked: int = 1
    begun: bool = False
    reported: int = 0


@dataclass(slots=True, eq=False)
class AdmissionGate:
    """Lets trajectories begin, first come first served; the rest of a group follows its first member at once.

    Not thread-safe: it belongs to the proxy's event loop.

    Attributes:
        outstanding: what was admitted so far.
        served: tells the version that the engines serve.
        hold_s: how long a trajectory waits.
    """

    outstanding: Outstanding
    served: Callable[[], int | None]
    hold_s: float
    held: int = 0
    """Trajectories that were not admitted at once."""
    _waiting: deque[_Waiting] = field(default_factory=deque)
    _reserved: dict[str, _Reservation] = field(default_factory=dict)
    _seen: tuple[object, ...] = ()
    """The state at the last check of the waiting trajectories."""
    _stalled: tuple[tuple[object, ...], float] | None = None
    """The state in which no progress is possible, and since when it holds."""
    _timer: asyncio.TimerHandle | None = None
    """The next check for progress, while trajectories wait."""
    _stopped: bool = False
    """Whether its proxy ends."""

    async def enter(
        self, name: str, group: str | None, split: str, gone: Callable[[], Awaitable[Any]]
    ) -> bool:
        """Wait until the trajectory may begin; returns whether room is reserved for it, until `leave`.

        Args:
            gone: returns when nobody waits for it any more.

        Raises:
            RequestError: 503, there is no room for it within `hold_s`; 499, nobody waits for it any more.
            EndingError: there is no room for it now, and the proxy ends.
        """
        training = self.outstanding.training
        if training is None or not training.uses(split, group):
            return False
        if name in self._reserved or self._joins(group) or (not self._waiting and self._has_room()):
            self._keep(name, group)
            return True
        if self._stopped:
            raise EndingError
        await self._hold(self._queue(name, group), gone)
        return True

    async def _hold(self, waiter: _Waiting, gone: Callable[[], Awaitable[Any]]) -> None:
        """Wait until a trajectory is admitted, as `enter` does."""
        left = asyncio.ensure_future(gone())
        try:
            both: set[asyncio.Future[Any]] = {waiter.admitted, left}
            await asyncio.wait(both, timeout=self.hold_s, return_when=asyncio.FIRST_COMPLETED)
            if left.done():
                text = f"trajectory {waiter.name!r} was held, and its client left"
                raise RequestError(499, "client_left", text)
            if not waiter.admitted.done():
                raise RequestError(503, "trajectory_held", self._why())
            if not waiter.admitted.result():
                raise EndingError
        except BaseException:
            if waiter.admitted.done() and waiter.admitted.result():
                self.leave(waiter.name)  # it was admitted, and its request is gone
            raise
        finally:
            left.cancel()
            if not waiter.admitted.done():
                self._waiting.remove(waiter)
            self._rest()

    def stop(self) -> None:
        """Hold no trajectory any more: those that wait or come from now on are refused."""
        self._stopped = True
        while self._waiting:
            self._waiting.popleft().admitted.set_result(False)
        self._rest()

    def _queue(self, name: str, group: str | None) -> _Waiting:
        self.held += 1
        waiter = _Waiting(name, group, asyncio.get_running_loop().create_future())
        if not self._waiting:
            self._seen = ()
        self._waiting.append(waiter)
        self.changed()  # engines may serve another version by now
        if self._timer is None:
            self._look()
        return waiter

    def _rest(self) -> None:
        """Stop checking while nothing waits."""
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def leave(self, name: str) -> None:
        """Release a reservation: the trajectory is in the log now, or never will be."""
        reservation = self._reserved[name]
        reservation.asked -= 1
        if not reservation.asked:
            del self._reserved[name]
            self._let_in()

    def began(self, name: str) -> None:
        """Release a reservation of a trajectory that another process wrote, once it was read from the log."""
        reservation = self._reserved[name]
        if reservation.begun:
            self.leave(name)
        else:
            reservation.reported += 1

    def keep(self, name: str, group: str | None) -> None:
        """Reserve room for a trajectory that was admitted before this gate began."""
        self._keep(name, group)

    def take(self, events: list[Event]) -> None:
        """Fold events, and admit the trajectories for which they make room."""
        self.outstanding.add_all(events)
        if self._reserved:
            for event in events:
                if isinstance(event.record, TrajectoryOpened) and event.record.name in self._reserved:
                    self._begun(event.record.name)
        self.changed()

    def _begun(self, name: str) -> None:
        reservation = self._reserved[name]
        reservation.begun = True
        count, reservation.reported = reservation.reported, 0
        for _ in range(count):
            self.leave(name)

    def unopened(self, trajectory_id: str) -> None:
        """Withdraw a trajectory that was taken for begun: its opening is not in the log."""
        self.outstanding.withdraw(trajectory_id)
        self.changed()

    @property
    def waiting(self) -> int:
        """How many trajectories are held now."""
        return len(self._waiting)

    def changed(self) -> None:
        """Admit what fits, if the log or the engines changed since the last check."""
        if self._waiting:
            now = (*self.outstanding.state, self.served())
            if now != self._seen:
                self._seen = now
                self._let_in()

    def _let_in(self) -> None:
        """Admit the rest of admitted groups, then others in the order in which they came."""
        room = True
        for waiter in list(self._waiting):
            joins = waiter.name in self._reserved or self._joins(waiter.group)
            room = room and (joins or self._has_room())  # without room it keeps its turn
            if joins or room:
                self._admit(waiter)

    def _admit(self, waiter: _Waiting) -> None:
        self._waiting.remove(waiter)
        self._keep(waiter.name, waiter.group)
        waiter.admitted.set_result(True)

    def _look(self) -> None:
        """Admit one more than fits, if no progress has been possible for long."""
        loop = asyncio.get_running_loop()
        now, state = loop.time(), self.outstanding.state
        begins = any(not reservation.begun for reservation in self._reserved.values())
        if begins or not self.outstanding.stalled:
            self._stalled = None
        elif self._stalled is None or self._stalled[0] != state:
            self._stalled = state, now
        elif self._waiting and now - self._stalled[1] >= STALLED_S:
            self._stalled = None
            self._admit(self._waiting[0])
            self._let_in()  # the rest of its group
        self._timer = loop.call_later(STALLED_S / LOOKS, self._look) if self._waiting else None

    def _keep(self, name: str, group: str | None) -> None:
        """Reserve room for a trajectory; several requests of one new trajectory share it."""
        if name in self._reserved:
            self._reserved[name].asked += 1
        else:
            self._reserved[name] = _Reservation(group)

    def _joins(self, group: str | None) -> bool:
        """Whether a trajectory of this group belongs to a prompt group that was admitted."""
        training = self.outstanding.training
        if training is None:
            return True
        if group is None or training.group_size == 1:
            return False
        reserved = sum(
            reservation.group == group and not reservation.begun for reservation in self._reserved.values()
        )
        return (self.outstanding.room(group) - reserved) % training.group_size > 0

    def _has_room(self) -> bool:
        """Whether one more prompt group fits."""
        training, version = self.outstanding.training, self.outstanding.version
        if training is None:
            return True
        served = self.served()
        count = self.outstanding.count + self._reserved_groups(training.group_size)
        room = training.policy.capacity(count, version, version if served is None else served)
        return room is None or room > 0

    def _reserved_groups(self, size: int) -> int:
        """How many prompt groups the reservations will make."""
        reserved = Counter(
            reservation.group for reservation in self._reserved.values() if not reservation.begun
        )
        if size == 1:
            return reserved.total()
        beyond = [max(number - self.outstanding.room(group), 0) for group, number in reserved.items()]
        return sum(-(-number // size) for number in beyond)

    def _why(self) -> str:
        training, version = self.outstanding.training, self.outstanding.version
        limit = "" if training is None else f" of at most {training.policy.max_staleness} versions"
        if self.outstanding.stalled:
            more = f"none of them runs, and too few for a step are whole: in {STALLED_S:g} s one more begins"
        else:
            more = "if agents left trajectories unfinished, --abandon-s ends them"
        return (
            f"{self.outstanding.count} trajectories or groups wait for the trainer, which is at version "
            f"{version}; one more would exceed a staleness{limit}. Try again; {more}, and if nothing trains "
            "any more, start the proxy with --no-admission"
        )
