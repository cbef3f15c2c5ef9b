"""Which proxy holds which seat. A seat is a share of the run's trajectories, by name; each proxy has
one.

A claim in the store's folder, a lock of the file system, says who holds a seat, so two never can.
While the proxy of a seat is gone, another one stands in for it: it takes the claim, adopts what the
absent proxy left open, and owns the names that fall to the seat. A proxy that begins again gets its
seat back; what its stand-in has open by then stays there, and its requests are forwarded to that
one.

For the recorder: taking over from other processes while it runs, and rereading what they write.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from rollbook.ingest.cluster.messages import GIVE_BACK, HOLDS, UnreachableError, Wire
from rollbook.ingest.recording.recorder import Recorder, RunRecovery
from rollbook.ingest.recording.restore import RunReader
from rollbook.ingest.trajectories.place import FIRST, Place
from rollbook.ingest.trajectories.registry import Trajectories
from rollbook.store import Store
from rollbook.store.errors import ConfigError, LaneLockedError, MediumError, RequestError
from rollbook.store.events import Json

LOOK_S, LEAST_S = 1.0, 0.2
"""Between two looks at the others, and where one is wanted at once."""
ABSENT_S = 15.0
"""A proxy that was never seen counts as gone so long after this one began: all begin at about one time."""
GIVEN_BACK_S = 20.0
"""So long a proxy that begins again waits for its seat."""
SILENT_S = 20.0
"""What waits for a proxy that answers no look for so long is given up."""
TRIED_S, MOST_TRIED_S = 1.0, 5.0
"""Between the first two tries to adopt from a lane whose process may be there yet; then twice as long each
time, up to the other."""

logger = logging.getLogger(__name__)


# Claims -----------------------------------------------------------------------------------------------


def claim_name(run: str, seat: int) -> str:
    """What the holder of a seat claims."""
    return f"recording run {run}, proxy {seat}"


@contextlib.contextmanager
def seat_claimed(log: Store, run: str, wire: Wire) -> Iterator[contextlib.ExitStack]:
    """Hold a proxy's own seat; whoever stands in for it is asked for it.

    Yields:
        What ends with the claim, for more of them.

    Raises:
        LaneLockedError: a proxy of that number runs, or one that records the run alone.
        ConfigError: a proxy that runs has another list of proxies, or is another one than its address says.
    """
    with log.claim(f"recording run {run}", "name another run with --run", shared=True):
        asyncio.run(_ask_for_seat(wire))
        with contextlib.ExitStack() as claims:
            remedy = "give this one the --proxy that it is"
            claims.enter_context(log.claim(claim_name(run, wire.number), remedy, GIVEN_BACK_S))
            yield claims


async def _ask_for_seat(wire: Wire) -> None:
    """Have whoever stands in for this proxy give its seat back."""

    async def ask(number: int) -> None:
        with contextlib.suppress(UnreachableError):
            answer = await wire.post(number, GIVE_BACK, {"seat": wire.number, **wire.same}, GIVEN_BACK_S)
            if answer["number"] != number:
                raise ConfigError(
                    f"at {wire.addresses[number]}, which `proxies` has as number {number}, is number "
                    f"{answer['number']}: give each the --proxy that it is"
                )

    try:
        await asyncio.gather(*map(ask, wire.others))
    except RequestError as error:
        raise ConfigError(error.message) from error
    finally:
        await wire.disconnect()


# Seats ------------------------------------------------------------------------------------------------

Gained = Callable[[int, RunReader], Awaitable[None]]
Lost = Callable[[int], Awaitable[None]]


@dataclass(slots=True, eq=False)
class ShardLeases:
    """One proxy's view of them, and its hold on its own.

    Attributes:
        claims: those of the seats that it holds.
        on_gained: called with a seat that this proxy holds from now on, and what there is in the run.
        on_lost: called with a seat that it is about to give up.
        on_begun: called with the number of a proxy that is another process now, or is stood in for; and with
            that of the first seat, whenever another proxy holds it.
        stopping: whether this proxy is ending.
        left: set once it holds nothing more, and the others know.
    """

    wire: Wire
    recorder: Recorder
    claims: contextlib.ExitStack
    on_gained: list[Gained] = field(default_factory=list)
    on_lost: list[Lost] = field(default_factory=list)
    on_begun: list[Callable[[int], None]] = field(default_factory=list)
    stopping: Callable[[], bool] = lambda: False
    left: asyncio.Event = field(default_factory=asyncio.Event)
    _held: dict[int, frozenset[int]] = field(default_factory=dict)
    """Proxy that answers -> the seats that it holds."""
    _processes: dict[int, str] = field(default_factory=dict)
    """Which process each was that ever answered."""
    _heard: dict[int, float] = field(default_factory=dict)
    """When each was heard last."""
    _holders: dict[int, int] = field(default_factory=dict)
    """Seat -> the proxy that was last heard to hold it."""
    _returning: dict[int, float] = field(default_factory=dict)
    """Proxy that begins -> until when its seat is left to it."""
    _leaving: set[int] = field(default_factory=set)
    """Those that end in order: what they have under way they answer."""
    _trouble: dict[int, str] = field(default_factory=dict)
    """Why each is away, as it was told."""
    _tried: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Lane -> when it is next tried to adopt from it, and how long after that again."""
    _own: dict[int, contextlib.ExitStack] = field(default_factory=dict)
    """The claims of seats that it holds for others."""
    _began: float = field(default_factory=time.monotonic)
    _taking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the next look is not to wait."""
    _looked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced, after each look."""
    _waiting: dict[int, set[asyncio.Future[None]]] = field(default_factory=dict)
    """Of those who wait for something from a proxy: see `gone`."""

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

    def answers(self, number: int) -> bool:
        """Whether another proxy answered the last look."""
        return number in self._held

    def writer_of(self, lane: str) -> int | None:
        """The number of the proxy whose lane that is."""
        # Of a store of several hosts, each has its host's name behind it.
        lanes = enumerate(self.wire.lanes)
        return next((n for n, own in lanes if lane == own or lane.startswith(f"{own}.")), None)

    def states(self) -> list[Json]:
        """What is known of each, for people."""
        states: list[Json] = []
        for number, address in enumerate(self.wire.addresses):
            held = self.place.holds if number == self.place.number else self._held.get(number)
            status = "away" if held is None else "ok"
            states.append({"proxy": number, "url": address, "status": status, "holds": sorted(held or ())})
        return states

    # Looking -------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Look at the others for as long as this proxy runs, and stand in for those that are gone."""
        looked = 0.0
        while not self.stopping():
            if self._wanted.is_set() or time.monotonic() - looked >= LOOK_S:
                self._wanted.clear()
                try:
                    await self._look()
                except (MediumError, OSError) as error:
                    logger.warning("looking at the other proxies is tried again: %s", error)
                except Exception:
                    logger.exception("rollbook: looking at the other proxies failed, and is tried again")
                looked = time.monotonic()
            await asyncio.sleep(LEAST_S)
        await self._leave()

    async def _look(self) -> None:
        """Ask the others how they are, and take the seats of those that are gone."""
        await asyncio.gather(*map(self._look_at, self.wire.others))
        now = time.monotonic()
        for number in self.wire.others:
            if now - self._heard.get(number, self._began) > SILENT_S:
                self._let_go(number)
        await self._take_free()
        done, self._looked = self._looked, asyncio.Event()
        done.set()

    async def looked(self, number: int | None = None, patience_s: float = LOOK_S) -> None:
        """Return after the next look, which begins soon.

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
        words = {"holds": sorted(self.place.holds), **self.wire.same}
        try:
            answer = await self.wire.post(number, HOLDS, words)
            if answer["number"] != number:
                raise UnreachableError(f"{self.wire.addresses[number]} is proxy {answer['number']}")
        except (UnreachableError, RequestError) as error:
            self._held.pop(number, None)
            if self._trouble.get(number) != str(error):
                self._trouble[number] = str(error)
                logger.warning("proxy %s is away: %s", number, error)
        else:
            self._trouble.pop(number, None)
            self.met(number, answer["process"])
            self._hear(number, answer["holds"])

    def met(self, number: int, process: str) -> None:
        """Note that a proxy was heard from. What waits for an earlier process of its number is released."""
        known = self._processes.get(number)
        self._processes[number] = process
        self._holders.setdefault(number, number)
        if known not in (None, process):
            self._leaving.discard(number)
            self._begun(number)

    def _hear(self, number: int, holds: Sequence[int]) -> None:
        self._held[number] = frozenset(holds)
        self._heard[number] = time.monotonic()
        self._returning.pop(number, None)
        if not holds:
            self._leaving.add(number)
            self._wanted.set()
        for seat in holds:
            self._holds(seat, number)

    def _holds(self, seat: int, number: int) -> None:
        known = self._holders.get(seat)
        self._holders[seat] = number
        if known not in (None, number) and (seat == FIRST or seat != number):
            self._begun(seat)

    def _begun(self, number: int) -> None:
        self._let_go(number)
        for callback in list(self.on_begun):
            callback(number)

    @contextlib.contextmanager
    def gone(self, number: int) -> Iterator[asyncio.Future[None]]:
        """Context: a future that is done once nothing more can come of a proxy: it is another process, or is
        stood in for, or has not answered for long."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(number, set()).add(future)
        try:
            yield future
        finally:
            self._waiting[number].discard(future)
            future.cancel()

    def _let_go(self, number: int) -> None:
        if number in self._leaving:
            return
        for future in self._waiting.get(number, ()):
            if not future.done():
                future.set_result(None)

    # Standing in ----------------------------------------------------------------------------------

    async def _take_free(self) -> None:
        """Take the seats that nobody holds, and what is left open in this proxy's own."""
        async with self._taking:
            free = [seat for seat in range(len(self.wire.addresses)) if self._is_free(seat)]
            gained = [seat for seat in free if await asyncio.to_thread(self._claimed, seat)]
            if not gained and not self._orphans():
                return
            place = replace(self.place, stands_in_for=self.place.stands_in_for | frozenset(gained))
            try:
                runs = await take_place(self.recorder, place)
                for seat in gained:
                    logger.warning("proxy %s is gone: this one stands in for it", seat)
                    for gain in self.on_gained:
                        await gain(seat, runs)
            except BaseException:
                for seat in gained:
                    await self._give_up(seat)  # whoever can is to have it
                raise
            for seat in gained:
                self._holders.setdefault(seat, seat)
                self._holds(seat, self.place.number)

    def _is_free(self, seat: int) -> bool:
        """Whether a seat may be tried: nobody is known to hold it, and its proxy had time to begin."""
        now = time.monotonic()
        had_time = seat in self._holders or now > self._began + ABSENT_S
        return self.holder(seat) is None and had_time and now > self._returning.get(seat, 0.0)

    def _claimed(self, seat: int) -> bool:
        """Whether this process has the claim of a seat now."""
        claim = contextlib.ExitStack()
        try:
            what = claim_name(self.recorder.run, seat)
            claim.enter_context(self.recorder.store.claim(what, "wait", at_once=True))
        except LaneLockedError:
            return False  # its proxy runs, and does not answer; or another one was first
        self._own[seat] = self.claims.enter_context(claim)
        return True

    def _orphans(self) -> bool:
        """Whether something of this proxy's own is open in the lane of a process that is gone.

        That can be seen by its seat: no other proxy holds one whose own process runs. A lane of none of the
        proxies is that of a process from before there were several.
        """
        now, orphaned = time.monotonic(), False
        for live in self.recorder.trajectories.open():
            if live.lane == self.recorder.lane or not self.place.owns(live.opened.name):
                continue
            number = self.writer_of(live.lane)
            gone = number is None or self.holder(number) not in (None, number)
            due, pause = self._tried.get(live.lane, (now, TRIED_S))
            if gone and now >= due:
                self._tried[live.lane] = now + pause, min(2 * pause, MOST_TRIED_S)
                orphaned = True
        return orphaned

    async def _give_up(self, seat: int) -> None:
        """Hold a seat of another proxy no more. What is open here goes on here."""
        if seat not in self._own:
            return
        for lose in self.on_lost:
            await lose(seat)
        # From here on none of its names is opened here; once those are in the log that were, it is free.
        self.recorder.place = replace(self.place, stands_in_for=self.place.stands_in_for - {seat})
        await self.recorder.settle()
        await asyncio.to_thread(self._own.pop(seat).close)

    async def _leave(self) -> None:
        """Hold nothing more, as this proxy is ending: what is open here is adopted once it has ended."""
        async with self._taking:
            for seat in sorted(self.place.holds):
                for lose in self.on_lost:
                    await lose(seat)
            self.recorder.place = replace(self.place, leaves=True)
            # Before another one can hold what it held: whoever hears of that first takes it for gone.
            telling = asyncio.create_task(self._tell_it_leaves())
            await self.recorder.settle()
            await asyncio.wait({telling}, timeout=LOOK_S)
            self._own.clear()
            await asyncio.to_thread(self.claims.close)
        await self._tell_it_leaves()
        self.left.set()

    async def _tell_it_leaves(self) -> None:
        words = {"holds": [], **self.wire.same}
        posts = (self.wire.post(number, HOLDS, words) for number in self.wire.others)
        await asyncio.gather(*posts, return_exceptions=True)

    # Answering ------------------------------------------------------------------------------------

    async def answer(self, kind: str, question: Json) -> Json:
        """What this proxy says to another one.

        Raises:
            RequestError: 409, the two have different lists of proxies.
        """
        self.wire.check_same(question)
        number = question["from"]
        if kind == GIVE_BACK:
            self._held.pop(number, None)  # it is only beginning
            self._returning[number] = time.monotonic() + GIVEN_BACK_S
            async with self._taking:
                if question["seat"] in self._own:
                    await self._give_up(question["seat"])
                    logger.warning("proxy %s is back, and has its names again", question["seat"])
        else:
            self._hear(number, question["holds"])
        holds = sorted(self.place.holds)
        return {"holds": holds, "number": self.place.number, "process": self.wire.process}


async def take_place(recorder: Recorder, place: Place) -> RunReader:
    """Let a recorder have another place from now on, and adopt what processes that are gone left open in it.

    Returns:
        What there is in the run.
    """
    store, run, known = recorder.store, recorder.run, recorder.trajectories
    # Without a bound, as it is taken by the registry that has one: that also keeps who has which turn.
    begun = RunRecovery(store, recorder.writer, run, place, sys.maxsize, running=True)

    def read() -> tuple[RunReader, Trajectories]:
        runs = RunReader(store, run)
        return runs, begun.taken_over(runs)

    runs, recovered = await asyncio.to_thread(read)
    for live in list(known.open()):
        other = live.lane != recorder.lane and place.owns(live.opened.name)
        if other and recovered.by_id(live.opened.trajectory_id) is None:
            known.end(live)  # by another one, and it may be gone since
    for live in recovered.open():
        earlier = known.by_id(live.opened.trajectory_id)
        if earlier is None or earlier.lane != recorder.lane:
            known.add(live)
    recorder.place = place
    return runs


async def look_again(recorder: Recorder, name: str) -> None:
    """See in the log what has become of an open trajectory in the lane of another process."""
    live = recorder.trajectories.get(name)
    if live is None or live.finished or live.lane == recorder.lane:
        return
    trajectory = await asyncio.to_thread(recorder.store.trajectory, live.opened.trajectory_id)
    if not recorder.is_open(live) or live.lane == recorder.lane:
        return  # it was adopted meanwhile
    if trajectory is None or trajectory.finished is not None:
        recorder.trajectories.end(live)
    else:
        live.lane = trajectory.lane
