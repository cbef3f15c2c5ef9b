"""Proxies of one run that are killed at random while agents are at work: nothing is lost, nothing is double.

ROLLBOOK_KILLS=100 kills that often, and ROLLBOOK_SEED makes a failed run again.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable

import httpx
import openai
import pytest
from tests.fakes.proxies.several import Cluster, say

from rollbook.ingest.trajectories.place import owner_of
from rollbook.store.events import TrajectoryFinished, TrajectoryOpened
from rollbook.store.fold.trajectory import fold
from rollbook.testing.ledger import fold_ledger

pytestmark = pytest.mark.crashes
KILLS = int(os.environ.get("ROLLBOOK_KILLS", "8"))
SEED = int(os.environ.get("ROLLBOOK_SEED", random.SystemRandom().getrandbits(24)))
AGENTS, TURNS = 6, 5
PATIENCE_S = 90.0


class Agents:
    """Agents that ask any proxy, as behind a balancer, and ask again until they are answered."""

    def __init__(self, urls: list[str]) -> None:
        self.urls, self.over, self.done = urls, threading.Event(), list[str]()
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=self._work, args=[number]) for number in range(AGENTS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Let each end the trajectory that it is at."""
        self.over.set()
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        dice, count = random.Random(SEED + number), 0
        while not self.over.is_set():
            name, count = f"agent-{number}-{count}", count + 1
            try:
                self._converse(dice, name)
                self.done.append(name)
            except AssertionError as error:
                self.failed.append(f"{name}: {error}")
                return

    def _converse(self, dice: random.Random, name: str) -> None:
        messages: list[dict[str, str]] = []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"{name} {turn}"})
            reply = self._ask(dice, f"/t/{name}/v1/chat/completions", {"messages": messages}, {200})
            message = reply["choices"][0]["message"]
            assert message["content"] == f"{2 * turn + 1}: {name} {turn}"
            messages.append({"role": "assistant", "content": message["content"]})
        # Of an end that was recorded, and whose answer was lost, the next one is told.
        self._ask(dice, f"/v1/trajectories/{name}/finish", {"reward": 1.0}, {200, 409})

    def _ask(self, dice: random.Random, path: str, body: object, good: set[int]) -> dict[str, list[dict]]:
        until, answer = time.monotonic() + PATIENCE_S, "none"
        while time.monotonic() < until:
            try:
                reply = httpx.post(f"{dice.choice(self.urls)}{path}", json=body, timeout=60)
            except httpx.TransportError as error:
                answer = repr(error)
            else:
                if reply.status_code in good and "busy" not in reply.text:
                    return dict(reply.json())
                answer = f"{reply.status_code} {reply.text}"
                assert reply.status_code >= 500 or "busy" in answer, f"{path}: {answer}"
            time.sleep(dice.uniform(0.05, 0.3))
        raise AssertionError(f"{path}: {answer}")


def test_one_hangs(either_cluster: Callable[..., Cluster]) -> None:
    """On one host it keeps its trajectories: who asks for one is told to try again, in bounded time, and
    others go on. On hosts of their own its lease ends, and another one stands in for it; it begins again when
    it is back, as it was fenced."""
    two = either_cluster(2)
    names = [
        next(name for name in (f"t{n}" for n in range(9)) if owner_of(name, 2) == seat) for seat in (0, 1)
    ]
    assert say(two.agent(0, names[1]), "hi") == "1: hi"
    os.kill(two.served[1].process.pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        with pytest.raises(openai.InternalServerError, match="proxy 1 of this run does not answer now"):
            say(two.agent(0, names[1]), "hi", "1: hi", "two")
        assert time.monotonic() - begun < 45
        if two.folders:
            assert say(two.agent(0, names[1]), "hi", "1: hi", "two") == "3: two"
        assert say(two.agent(0, names[0]), "hi") == "1: hi"
        assert two.holds(0) == ([[0, 1], []] if two.folders else [[0], []])
    finally:
        os.kill(two.served[1].process.pid, signal.SIGCONT)
    two.until_holds(0, [0], [1])
    if not two.folders:
        assert say(two.agent(0, names[1]), "hi", "1: hi", "two") == "3: two"
    assert say(two.agent(1, names[1]), "hi", "1: hi", "two", "3: two", "four") == "5: four"


@pytest.mark.timeout(3600)
def test_nothing_is_lost_or_double(either_cluster: Callable[..., Cluster]) -> None:
    """Each proxy is killed, and begins again while others stand in for it, or before they notice."""
    three, dice = either_cluster(), random.Random(SEED)
    agents = Agents(three.urls)
    for _ in range(KILLS):
        time.sleep(dice.uniform(0.0, 3.0))
        gone = dice.sample(range(3), dice.choice((1, 1, 2)))
        for number in gone:
            three.served[number].kill()
        for number in gone:
            time.sleep(dice.choice((0.0, 0.3, 3.0)))
            three.start(number)
    agents.end()
    assert agents.failed == [], f"seed {SEED}"
    assert len(agents.done) >= AGENTS, f"seed {SEED}"
    for number in range(3):
        assert three.served[number].stop() in (0, 130), f"seed {SEED}"
    log = three.log()
    opened = Counter(e.record.name for e in log.events_of({TrajectoryOpened.KIND}))
    assert opened == Counter(agents.done), f"seed {SEED}"
    finished = Counter(e.record.trajectory_id for e in log.events_of({TrajectoryFinished.KIND}))
    assert set(finished.values()) == {1}, f"seed {SEED}"
    assert len(finished) == len(opened), f"seed {SEED}"
    for trajectory in fold(log.events()).values():
        name = trajectory.opened.name
        whole = [
            turn for turn in trajectory.turns.values() if len(trajectory.messages(turn)) == 2 * TURNS - 1
        ]
        [last] = [turn for turn in whole if turn.completed is not None][-1:]
        texts = [message["content"] for message in trajectory.messages(last)]
        assert texts[::2] == [f"{name} {turn}" for turn in range(TURNS)], f"seed {SEED}"
        length, turn = 1, last
        while turn.requested.parent_turn_id is not None:
            length, turn = length + 1, trajectory.turns[turn.requested.parent_turn_id]
        assert length == TURNS, f"seed {SEED}: {name}"
    assert not any(fold_ledger(log.events()).unaccounted().values()), f"seed {SEED}"
