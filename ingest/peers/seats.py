"""Who holds which seat. A seat is a share of the run's trajectories, by their names; each proxy has one.

A claim in the store's folder, a lock of the file system, says who holds a seat: so two can never do. While
the proxy of a seat is gone, another one stands in for it: it takes the claim, adopts what the proxy that is
gone left open, and names that fall to the seat are its own. A proxy that begins again has its seat given
back; what its stand-in has open by then stays with that one, to which its requests are sent on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from rollbook.ingest.peers.wire import UnreachableError, Wire
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.restore import RunReader
from rollbook.ingest.workers.place import FIRST, Place
from rollbook.store import Store
from rollbook.store.errors import ConfigError, LaneLockedError, RequestError
from rollbook.store.events import Json

HOLDS, GIVE_BACK = "holds", "give-back"
LOOK_S = 1.0
"""Between two looks at the others."""
ABSENT_S = 15.0
"""A proxy that was never seen counts as gone so long after this one began: all begin at about one time."""
GIVEN_BACK_S = 20.0
"""So long a proxy that begins again waits for its seat."""

logger = logging.getLogger(__name__)


# Claims -----------------------------------------------------------------------------------------------


def claim_name(run: str, seat: int, seats: int) -> str:
    """What the holder of a seat claims."""
    return f"recording run {run}, proxy {seat} of {seats}"


@contextlib.contextmanager
def seat_claimed(log: Store, run: str, wire: Wire) -> Iterator[contextlib.ExitStack]:
    """Hold a proxy's own seat; whoever stands in for it is asked for it.

    Yields:
        What ends with the claim, for more of them.

    Raises:
        LaneLockedError: a proxy of that number runs, or one that records the run alone.
        ConfigError: a proxy that runs has another list of proxies.
    """
    seats = len(wire.addresses)
    with contextlib.ExitStack() as claims:
        remedy = "name another run with --run"
        claims.enter_context(log.claim(f"recording run {run}", remedy, shared=True))
        asyncio.run(_ask_for_seat(wire))
        name, remedy = claim_name(run, wire.number, seats), "give this one the --proxy that it is"
        claims.enter_context(log.claim(name, remedy, GIVEN_BACK_S))
        yield claims


async def _ask_for_seat(wire: Wire) -> None:
    """Have whoever stands in for this proxy give its seat back."""

    async def ask(number: int) -> None:
        with contextlib.suppress(UnreachableError):
            words = {"seat": wire.number, "proxies": list(wire.addresses)}
            await wire.post(number, GIVE_BACK, words, GIVEN_BACK_S)

    try:
        await asyncio.gather(*map(ask, wire.others))
    except RequestError as error:
        raise ConfigError(error.message) from error
    finally:
        await wire.close()


# Seats ------------------------------------------------------------------------------------------------

Gained = Callable[[int, RunReader], Awaitable[None]]
Lost = Callable[[int], Awaitable[None]]


@dataclass(slots=True, eq=False)
class Seats:
    """One proxy's view of them, and its hold on its own.

    Attributes:
        lanes: of all proxies, by number.
        claims: is closed with the process's own claim.
        on_gained: called with a seat that this proxy holds from now on, and what there is in the run.
        on_lost: called with a seat that it is about to give back.
        on_begun: called with the number of a proxy that is another process now, or is stood in for; and with
            that of the first seat, whenever another proxy holds it.
    """

    wire: Wire
    recorder: Recorder
    lanes: Sequence[str]
    claims: contextlib.ExitStack
    on_gained: list[Gained] = field(default_factory=list)
    on_lost: list[Lost] = field(default_factory=list)
    on_begun: list[Callable[[int], None]] = field(default_factory=list)
    _held: dict[int, frozenset[int]] = field(default_factory=dict)
    """Proxy that answers -> the seats that it holds."""
    _processes: dict[int, str] = field(default_factory=dict)
    """Which process each was that ever answered."""
    _holders: dict[int, int] = field(default_factory=dict)
    """Seat -> the proxy that was last heard to hold it."""
    _returning: dict[int, float] = field(default_factory=dict)
    """Proxy that begins -> until when its seat is left to it."""
    _own: dict[int, contextlib.ExitStack] = field(default_factory=dict)
    """The claims of seats that it holds for others."""
    _began: float = field(default_factory=time.monotonic)
    _taking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the next look is not to wait."""
    _looked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced, after each look."""

    @property
    def place(self) -> Place:
        """What this proxy holds."""
        return self.recorder.place

    def holder(self, seat: int) -> int | None:
        """The number of the proxy that holds a seat; None: it is not known now."""
        if seat in self.place.holds:
            return self.place.number
        if seat in self._held.get(seat, ()):
            return seat
        return next((number for number, held in self._held.items() if seat in held), None)

    def writer_of(self, lane: str) -> int | None:
        """The number of the proxy whose lane that is."""
        return self.lanes.index(lane) if lane in self.lanes else None

    def states(self) -> list[Json]:
        """What is known of each, for people."""
        found: list[Json] = []
        for number, address in enumerate(self.wire.addresses):
            own = number == self.place.number
            held = self.place.holds if own else self._held.get(number)
            status = "away" if held is None else "ok"
            found.append({"proxy": number, "url": address, "status": status, "holds": sorted(held or ())})
        return found

    # Looking -------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Look at the others for as long as this proxy runs, and stand in for those that are gone."""
        while True:
            try:
                await self.look()
            except Exception:
                logger.exception("rollbook: looking at the other proxies failed, and is tried again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wanted.wait()
            self._wanted.clear()

    async def look(self) -> None:
        """Ask the others how they are, and take the seats of those that are gone."""
        await asyncio.gather(*map(self._look_at, self.wire.others))
        await self._take_free()
        looked, self._looked = self._looked, asyncio.Event()
        looked.set()

    async def looked(self, number: int | None = None, patience_s: float = LOOK_S) -> None:
        """Return after the next look, which begins at once.

        Args:
            number: a proxy that was found away.
        """
        if number is not None:
            self._held.pop(number, None)
        self._wanted.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._looked.wait()

    async def _look_at(self, number: int) -> None:
        words = {"holds": sorted(self.place.holds), "proxies": list(self.wire.addresses)}
        try:
            said = await self.wire.post(number, HOLDS, words)
        except UnreachableError:
            self._held.pop(number, None)
        except RequestError as error:
            self._held.pop(number, None)
            logger.error("proxy %s: %s", number, error.message)
        else:
            self.met(number, said["process"])
            self._heard(number, said["holds"])

    def met(self, number: int, process: str) -> None:
        """A proxy has said something. What one said that is gone now counts no more."""
        known = self._processes.get(number)
        self._processes[number] = process
        self._holders.setdefault(number, number)
        if known not in (None, process):
            self._begun(number)

    def _heard(self, number: int, holds: Sequence[int]) -> None:
        self._held[number] = frozenset(holds)
        self._returning.pop(number, None)
        for seat in holds:
            self._holds(seat, number)

    def _holds(self, seat: int, number: int) -> None:
        known = self._holders.get(seat)
        self._holders[seat] = number
        if known not in (None, number) and (seat == FIRST or seat != number):
            self._begun(seat)

    def _begun(self, number: int) -> None:
        for callback in self.on_begun:
            callback(number)

    # Standing in ----------------------------------------------------------------------------------

    async def _take_free(self) -> None:
        """Take the seats that nobody holds, and what is left open in this proxy's own."""
        async with self._taking:
            gained = [seat for seat in range(len(self.wire.addresses)) if self._is_free(seat)]
            gained = [seat for seat in gained if self._claimed(seat)]
            if not gained and not self._orphans():
                return
            place = replace(self.place, stands_in_for=self.place.stands_in_for | frozenset(gained))
            try:
                runs = await self.recorder.take_place(place)
            except BaseException:
                for seat in gained:
                    self._own.pop(seat).close()  # whoever can is to have it
                raise
            for seat in gained:
                logger.warning("proxy %s is gone: this one stands in for it", seat)
                for gain in self.on_gained:
                    await gain(seat, runs)
                self._holders.setdefault(seat, seat)
                self._holds(seat, self.place.number)

    def _is_free(self, seat: int) -> bool:
        """Whether a seat may be tried: nobody is known to hold it, and its proxy had time to begin."""
        now = time.monotonic()
        had_time = seat in self._holders or now > self._began + ABSENT_S
        return self.holder(seat) is None and had_time and now > self._returning.get(seat, 0.0)

    def _claimed(self, seat: int) -> bool:
        """Whether this process has the claim of a seat now."""
        store, claim = self.recorder.store, contextlib.ExitStack()
        name = claim_name(self.recorder.run, seat, len(self.wire.addresses))
        try:
            claim.enter_context(store.claim(name, "wait"))
        except LaneLockedError:
            return False  # its proxy runs, and does not answer; or another one was first
        self._own[seat] = self.claims.enter_context(claim)
        return True

    def _orphans(self) -> bool:
        """Whether something of this proxy's own is open in the lane of a process that is gone.

        That can be seen by its seat: no other proxy holds one whose own process runs.
        """
        for live in self.recorder.trajectories.open():
            number = self.writer_of(live.lane)
            if number in (None, self.place.number) or not self.place.owns(live.opened.name):
                continue
            assert number is not None
            if self.holder(number) not in (None, number):
                return True
        return False

    # Answering ------------------------------------------------------------------------------------

    async def answer(self, kind: str, asked: Json) -> Json:
        """What this proxy says to another one.

        Raises:
            RequestError: 409, the two have different lists of proxies.
        """
        self._check_same(asked)
        number = asked["from"]
        if kind == GIVE_BACK:
            self._held.pop(number, None)  # it is only beginning
            self._returning[number] = time.monotonic() + GIVEN_BACK_S
            await self.give_back(asked["seat"])
        else:
            self._heard(number, asked["holds"])
        return {"holds": sorted(self.place.holds), "process": self.wire.process}

    def _check_same(self, asked: Json) -> None:
        if asked["proxies"] != list(self.wire.addresses):
            text = (
                f"the proxy at {self.wire.addresses[self.place.number]} has proxies = "
                f"{list(self.wire.addresses)}, and that of number {asked['from']} has {asked['proxies']}: "
                "all proxies of a run need the same list"
            )
            raise RequestError(409, "other_proxies", text)

    async def give_back(self, seat: int) -> None:
        """Let another proxy have the seat that this one holds for it. What is open here goes on here."""
        async with self._taking:
            if seat not in self._own:
                return
            for lose in self.on_lost:
                await lose(seat)
            # From here on none of its names is opened here; once those are in the log that were, it is free.
            self.recorder.place = replace(self.place, stands_in_for=self.place.stands_in_for - {seat})
            await self.recorder.settle()
            self._own.pop(seat).close()
            logger.warning("proxy %s is back, and has its trajectories again", seat)

    async def close(self) -> None:
        """Let go of what is held for others."""
        await self.wire.close()
