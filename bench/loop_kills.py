"""`kill -9` of the loop's processes at any moment, and a check of its log at the end."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rollbook.bench.loop_agents import Habits
from rollbook.bench.loop_checks import Witness, samples_to_use, violations
from rollbook.bench.loop_processes import COMMAND, READY_S, Victim
from rollbook.bench.loop_stage import Loop, Setting, loop_of
from rollbook.store.events import StepCommitted
from rollbook.store.log.tail import Filter
from rollbook.store.upkeep.verify import verify_store
from rollbook.testing.ledger import IN_FLIGHT, WAITING, fold_ledger

TRAINER, PROXY, ENGINE = "trainer", "proxy", "engine"
AFTER: dict[str, tuple[str, ...]] = {
    TRAINER: (
        "step.planned",
        "step.committed",
        "checkpoint.written",
        "sync.started",
        "policy.activated",
        "sync.finished",
        "sample.dropped",
        "trajectory.finished",
    ),
    PROXY: (
        "turn.requested",
        "turn.completed",
        "trajectory.opened",
        "trajectory.finished",
        "sync.started",
        "policy.activated",
        "step.committed",
    ),
    ENGINE: ("turn.requested", "turn.completed", "sync.started", "policy.activated", "sync.finished"),
}
"""Who is killed, and the kinds of events that a kill may follow."""
POLL_S = 0.002

MANNERS = (("retract", True), ("abort", True), ("in_place", True), ("drain", False))
"""How running requests are treated by the syncs of a store, one after the other."""


@dataclass(frozen=True, slots=True)
class KillPlan:
    """How many kills, and at which intervals.

    Attributes:
        gap_s: longest time between two kills that come at any moment.
        wait_s: longest wait for the event that a kill is to follow.
        soon_s: a kill follows its event within this time.
        end_s: longest time for the remaining samples to be trained, once the kills are over.
        still_s: if none of them was used for so long, agents begin a further group, so that a
            step follows.
    """

    gap_s: float = 2.0
    wait_s: float = 4.0
    soon_s: float = 0.03
    end_s: float = 90.0
    still_s: float = 3.0
    agents: int = 16


@dataclass(slots=True)
class Killed:
    """The outcome of one store's kills.

    Attributes:
        when: (who, after what) -> kills.
        ends: processes that ended by themselves with an error, and were started again.
        wrong: every violation, each with the seed that shows it.
    """

    seed: int
    when: Counter[tuple[str, str]] = field(default_factory=Counter)
    ends: int = 0
    answered: int = 0
    samples: int = 0
    steps: int = 0
    repeats: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """How many."""
        return self.when.total()


def setting_of(seed: int) -> Setting:
    """The loop whose processes are killed: a group a step, so that every whole group can be used."""
    pause, partial = MANNERS[seed % len(MANNERS)]
    return Setting(
        f"kills-{pause}",
        max_staleness=4,
        partial=partial,
        pause=pause if partial else "retract",
        groups=1,
        steps=1_000_000,
        checkpoint_every=4,
        engines=1 + seed // len(MANNERS) % 2,
        hold_s=5.0,
        idle_timeout_s=6.0,
        segment_bytes=1 << 17,
    )


def kill_in_a_store(
    folder: Path, model: Path, seed: int, kills: int, plan: KillPlan, on_kill: Callable[[], None]
) -> Killed:
    """Run a loop, kill its processes, let it finish, and check what it wrote.

    Raises:
        BenchError: a process does not come up at all.
    """
    killed, begun = Killed(seed), time.monotonic()
    setting = setting_of(seed)
    with loop_of(folder, model, setting, Habits("", seed, plan.agents, pause_s=0.05)) as loop:
        loop.start()
        loop.await_weights(READY_S)
        loop.agents.ask(do="begin")
        killer = _Killer(loop, random.Random(seed), plan, killed)
        for _ in range(kills):
            killer.kill_one()
            on_kill()
        _end(loop, plan, killed)
        report = loop.agents.ask(do="report")
        loop.trainer.end()
        killed.ends = sum(victim.ends for victim in loop.all())
    killed.answered, killed.repeats = len(report["answered"]), report["repeats"]
    witness = Witness(report["answered"], report["finished"], loop.engine_urls, setting.group_size)
    events = list(loop.log.events())
    killed.wrong += [f"a client was told {text}" for text in report["strange"]]
    killed.wrong += violations(events, witness)
    killed.wrong += [f"lane {lane.lane}: {lane.fault}" for lane in verify_store(loop.log) if lane.fault]
    killed.samples = len(samples_to_use(events, setting.group_size))
    steps = [e.record.step for e in events if isinstance(e.record, StepCommitted)]
    killed.steps = len(steps)
    killed.wrong += _replayed(loop, random.Random(seed), steps)
    killed.wrong = [f"seed {seed}: {text}" for text in killed.wrong]
    killed.seconds = time.monotonic() - begun
    return killed


class _Killer:
    """Picks moments and victims."""

    def __init__(self, loop: Loop, rng: random.Random, plan: KillPlan, killed: Killed) -> None:
        self._loop, self._rng, self._plan, self._found = loop, rng, plan, killed

    def kill_one(self) -> None:
        """Every second kill comes at any moment, the others soon after an event."""
        who = self._rng.choice(list(AFTER))
        if self._found.kills % 2:
            kind = self._rng.choice(AFTER[who])
            after = kind if self._saw(kind) else f"no {kind}"
            time.sleep(self._rng.uniform(0.0, self._plan.soon_s))
        else:
            after = "any moment"
            self._sleep(self._rng.uniform(0.0, self._plan.gap_s))
        self._kill(who)
        self._found.when[who, after] += 1
        self._loop.tend()

    def _kill(self, who: str) -> None:
        loop = self._loop
        if who == PROXY and loop.sealer is not None:
            loop.sealer.kill()  # a proxy's sealer ends with it
        victims = {TRAINER: loop.trainer, PROXY: loop.proxy}
        (victims.get(who) or self._rng.choice(loop.engines)).kill()

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._loop.tend()
            time.sleep(min(left, 0.1))

    def _saw(self, kind: str) -> bool:
        """Wait for an event of this kind; whether one came."""
        log = self._loop.log
        deadline = time.monotonic() + self._plan.wait_s
        with log.tail(log.head(), Filter(frozenset([kind]))) as tail:
            while time.monotonic() < deadline:
                if tail.poll():
                    return True
                self._loop.tend()
                time.sleep(POLL_S)
        return False


def _end(loop: Loop, plan: KillPlan, killed: Killed) -> None:
    """Let the agents finish what they began, and the trainer use it."""
    deadline = time.monotonic() + plan.end_s
    while time.monotonic() < deadline:
        if not loop.agents.ask(do="end", within_s=POLL_S)["over"]:
            loop.tend()
            continue
        left, until = _left(loop), time.monotonic() + plan.still_s
        while left and time.monotonic() < until:
            loop.tend()
            time.sleep(0.2)
            if (now := _left(loop)) != left:
                left, until = now, time.monotonic() + plan.still_s
        if not left:
            return
        # What is dropped is dropped by the next step: there has to be one.
        loop.agents.ask(do="begin", groups=1)
    killed.wrong.append(f"not all was finished and used {plan.end_s:g} s after the last kill")


def _left(loop: Loop) -> int:
    """Tokens that wait to be trained."""
    entries = fold_ledger(loop.log.events()).entries.items()
    return sum(entry.tokens for (_, (term, _)), entry in entries if term in (WAITING, IN_FLIGHT))


def _replayed(loop: Loop, rng: random.Random, steps: list[int]) -> list[str]:
    """A step run again from the log."""
    if not steps:
        return ["no step was committed"]
    step = rng.choice(steps)
    words = ["replay", "step", step, "--store", loop.log.path]
    replay = Victim("replay", COMMAND, words, loop.folder / "replay.log")
    replay.start()
    code = replay.wait(60.0)
    replay.end()
    return [] if code == 0 else [str(replay.failed(f"of step {step} ended with {code}"))]
