"""Who is let in when, and that no place is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.fakes.processes.virtual_time import run_virtually
from tests.fakes.stories.training import RUN, answered, begins, committed, opened, planned

from rollbook.ingest.admission.gate import STALLED_S, AdmissionGate
from rollbook.ingest.admission.outstanding import Outstanding
from rollbook.store.errors import RequestError
from rollbook.store.events import Event, Record, TrajectoryFinished

HOLD_S = 50 * STALLED_S


class Door:
    """A gate, and those who came to it."""

    def __init__(self, *records: Record, hold_s: float = HOLD_S) -> None:
        self.serves: int | None = None
        self.gate = AdmissionGate(Outstanding(RUN), lambda: self.serves, hold_s)
        self.tell(*records)
        self.tasks: dict[str, asyncio.Task[bool]] = {}
        self.left: dict[str, asyncio.Event] = {}

    def tell(self, *records: Record) -> None:
        """Something is in the log."""
        self.gate.take([Event(record, RUN) for record in records])

    async def come(self, name: str, group: str | None = None, split: str = "train", again: str = "") -> None:
        """A trajectory comes to the gate."""
        left = self.left[name + again] = asyncio.Event()
        entering = self.gate.enter(name, group, split, left.wait)
        self.tasks[name + again] = asyncio.create_task(entering)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def inside(self) -> list[str]:
        """Who was let in so far, in the order of coming."""
        await asyncio.sleep(0.001)
        done = [name for name, task in self.tasks.items() if task.done() and not task.cancelled()]
        return [name for name in done if not self.tasks[name].exception()]

    def opens(self, name: str, group: str | None = None) -> None:
        """It begins: what was kept for it is in the log."""
        self.tell(opened(name, group))
        self.gate.leave(name)


def run(scenario: Callable[[], Awaitable[Any]]) -> Any:
    """Run it, in a time of its own."""
    return run_virtually(scenario())  # type: ignore[arg-type]


def step(number: int, *names: str) -> list[Record]:
    """A step that uses them."""
    return [planned(number, list(names)), committed(number)]


def test_first_come_first_served() -> None:
    """Whoever waits keeps its turn, however many come later, until the trainer makes room for it."""

    async def scenario() -> None:
        door = Door(begins(1, 1, 1))
        for name in "abcde":
            await door.come(name)
        assert await door.inside() == ["a", "b"]
        assert door.gate.held == 3
        door.opens("a")
        door.opens("b")
        assert await door.inside() == ["a", "b"]
        door.tell(*step(0, "a"))
        assert await door.inside() == ["a", "b", "c"]
        await door.come("f")
        door.opens("c")
        door.tell(*step(1, "b"))
        assert await door.inside() == ["a", "b", "c", "d"]
        door.opens("d")
        door.tell(TrajectoryFinished("d"))
        assert await door.inside() == ["a", "b", "c", "d", "e"]
        door.left["f"].set()

    run(scenario)


def test_a_group_is_let_in_whole() -> None:
    """The rest follows its first member past those who wait; one more than the group has is another group."""

    async def scenario() -> None:
        door = Door(begins(3, 1, 0))
        for name, group in (("g0", "g"), ("h0", "h"), ("g1", "g")):
            await door.come(name, group)
        assert await door.inside() == ["g0", "g1"]
        door.opens("g0", "g")
        for name in ("g2", "g3"):
            await door.come(name, "g")
        assert await door.inside() == ["g0", "g1", "g2"]
        for name in ("g1", "g2"):
            door.opens(name, "g")
        assert await door.inside() == ["g0", "g1", "g2"]
        await door.come("h1", "h")
        door.tell(*step(0, "g0", "g2"))
        assert await door.inside() == ["g0", "h0", "g1", "g2", "h1"]
        door.left["g3"].set()

    run(scenario)


def test_what_no_training_uses_is_never_held() -> None:
    """Untrained splits, ungrouped trajectories of a grouped training, and all while nothing trains."""

    async def scenario() -> None:
        door = Door(begins(2, 1, 0), opened("a", "g"), opened("b", "g"))
        await door.come("held", "h")
        await door.come("eval", "h", "eval")
        await door.come("teacher", "h", "teacher")
        await door.come("alone")
        assert await door.inside() == ["eval", "teacher", "alone"]
        assert not any(door.tasks[name].result() for name in await door.inside()), "nothing is kept for them"
        door.tell(begins(2, 1, None))
        assert await door.inside() == ["held", "eval", "teacher", "alone"]
        await door.come("free", "i")
        assert not door.tasks["free"].result()

    run(scenario)


def test_the_served_version_decides_capacity() -> None:
    """Engines behind the trainer reduce the room by their lag; a sync makes the room at once."""

    async def scenario() -> None:
        door = Door(begins(1, 2, 1), *step(0), *step(1))
        door.serves = 0
        await door.come("a")
        assert await door.inside() == []
        door.gate.changed()
        assert await door.inside() == []
        door.serves = 1
        door.gate.changed()
        for name in "bc":
            await door.come(name)
        assert await door.inside() == ["a", "b"]
        door.left["c"].set()

    run(scenario)


def test_an_unannounced_version_change_keeps_the_queue_order() -> None:
    """After an unannounced version change, the next arrival admits those that wait, then waits."""

    async def scenario() -> None:
        door = Door(begins(1, 1, 1), *step(0), *step(1))
        door.serves = 0
        await door.come("a")
        door.serves = 1
        await door.come("b")
        assert await door.inside() == ["a"]
        door.left["b"].set()

    run(scenario)


def test_waiting_too_long_is_a_503() -> None:
    """The 503 says why there is no room and what to do; the queue goes on with the next."""

    async def scenario() -> None:
        door = Door(begins(1, 1, 0), opened("a"), hold_s=0.05)
        await door.come("b")
        with pytest.raises(RequestError) as held:
            await door.tasks["b"]
        assert (held.value.status, held.value.code) == (503, "trajectory_held")
        for part in ("1 trajectories or groups", "version 0", "at most 0", "--abandon-s", "--no-admission"):
            assert part in held.value.message
        await door.come("c")
        door.tell(*step(0, "a"))
        assert await door.inside() == ["c"]
        assert not door.gate._waiting

    run(scenario)


@pytest.mark.parametrize("how", ["leave", "cancel"])
@pytest.mark.parametrize("when", ["before", "with"])
def test_a_client_that_leaves_frees_its_reservation(how: str, when: str) -> None:
    """Before it is let in, or in the same moment: the next one gets its place."""

    async def scenario() -> None:
        door = Door(begins(1, 1, 0), opened("a"))
        for name in "bc":
            await door.come(name)
        end = door.left["b"].set if how == "leave" else door.tasks["b"].cancel
        if when == "with":
            door.tell(*step(0, "a"))
            end()
        else:
            end()
            await asyncio.sleep(0.001)
            door.tell(*step(0, "a"))
        assert await door.inside() == ["c"]
        if how == "leave":
            error = door.tasks["b"].exception()
            assert isinstance(error, RequestError)
            assert (error.status, error.code) == (499, "client_left")
        assert list(door.gate._reserved) == ["c"]

    run(scenario)


def ended(name: str, group: str) -> list[Record]:
    """A trajectory that ends with a turn to train on."""
    return [opened(name, group), *answered(name), TrajectoryFinished(name)]


def test_an_incomplete_group_does_not_block_admission_for_ever() -> None:
    """A group that cannot fill its room delays admission: after a stall one more group is admitted."""

    async def scenario() -> None:
        door = Door(begins(2, 1, 0), *ended("surplus", "g"))
        for name in ("b0", "c0", "b1"):
            await door.come(name, name[0])
        assert await door.inside() == []
        async with asyncio.timeout(2 * STALLED_S):
            await door.tasks["b0"]
        assert asyncio.get_running_loop().time() == STALLED_S
        assert await door.inside() == ["b0", "b1"]
        await asyncio.sleep(3 * STALLED_S)
        assert await door.inside() == ["b0", "b1"], "they are about to begin"
        for name in ("b0", "b1"):
            door.opens(name, "b")
        await asyncio.sleep(3 * STALLED_S)
        assert await door.inside() == ["b0", "b1"], "they run"
        door.tell(*answered("b0"), TrajectoryFinished("b0"), TrajectoryFinished("b1"))
        await asyncio.sleep(3 * STALLED_S)
        assert await door.inside() == ["b0", "b1"], "a step can be made of them"
        door.tell(*step(0, "b0"))
        async with asyncio.timeout(2 * STALLED_S):
            await door.tasks["c0"]
        assert door.gate._timer is None, "nobody waits"

    run(scenario)


def test_members_that_run_one_after_the_other_let_no_other_group_in() -> None:
    """Between them nothing runs, but never for long."""

    async def scenario() -> None:
        door = Door(begins(20, 1, 0), *ended("a", "g"))
        await door.come("other", "h")
        for number in range(8):
            await asyncio.sleep(0.8 * STALLED_S)
            door.tell(*ended(f"a{number}", "g"))
        assert await door.inside() == []
        door.left["other"].set()

    run(scenario)


def test_a_retrying_client_is_admitted_in_its_turn() -> None:
    """Tries shorter than the stall time add up: the stall is timed from the last progress."""

    async def scenario() -> None:
        door = Door(begins(2, 1, 0), *ended("surplus", "g"), hold_s=STALLED_S / 3)
        refused: list[str] = []
        async with asyncio.timeout(2 * STALLED_S):
            while True:
                await door.come("b", "h", again=f" {len(refused)}")
                (result,) = await asyncio.gather(door.tasks[f"b {len(refused)}"], return_exceptions=True)
                if result is True:
                    break
                assert isinstance(result, RequestError)
                refused.append(result.message)
                assert door.gate._timer is None, "nobody waits"
        assert len(refused) == 3
        assert all("one more begins" in why and "--abandon-s" not in why for why in refused)

    run(scenario)


def test_requests_of_one_new_trajectory_share_its_place() -> None:
    """Two at once wait as one, are let in together, and its place is kept until both are done."""

    async def scenario() -> None:
        door = Door(begins(1, 1, 0), opened("a"))
        await door.come("b")
        await door.come("b", again=" again")
        await door.come("c")
        door.tell(*step(0, "a"))
        assert await door.inside() == ["b", "b again"]
        door.gate.leave("b")
        assert await door.inside() == ["b", "b again"]
        await door.come("b", again=" later")
        assert await door.inside() == ["b", "b again", "b later"]
        for _ in range(2):
            door.gate.leave("b")
        assert await door.inside() == ["b", "b again", "c", "b later"]

    run(scenario)


def test_an_unused_reservation_admits_the_next() -> None:
    """A refused request has nothing in the log, so its reservation goes to the next trajectory."""

    async def scenario() -> None:
        door = Door(begins(2, 1, 0))
        await door.come("a", "g")
        await door.come("b", "h")
        assert await door.inside() == ["a"]
        door.gate.leave("a")
        assert await door.inside() == ["a", "b"]
        assert list(door.gate._reserved) == ["b"]

    run(scenario)
