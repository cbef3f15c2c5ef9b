"""Rounds of faults: in each, something of a run over several hosts is killed, or one is lost with its disk.

Afterwards the hosts' logs are compared with each other, and with what clients were told.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollbook import store
from rollbook.bench.cluster_checks import Account, Seen, account
from rollbook.bench.cluster_stage import (
    FIRST,
    FOLLOWER,
    LATER,
    PROXIES,
    READY_S,
    SECOND,
    TRAINER,
    Kind,
    Stage,
    closed,
    stage_of,
)
from rollbook.bench.loop_agents import Habits
from rollbook.bench.loop_processes import COMMAND, Victim
from rollbook.bench.loop_stage import RUN
from rollbook.bench.processes import BenchError
from rollbook.store.events import Event, StepCommitted
from rollbook.store.upkeep.verify import verify_store
from rollbook.testing.ledger import fold_ledger

MEDIUM, PROXY, SEALER, FOLLOWS, TRAINS, HOST, CUT, PAUSED = (
    *("medium", "proxy", "sealer", "follower", "trainer"),
    *("host and its disk", "cut off", "paused"),
)
WITHIN_S = 2.0
"""A disk that is lost takes with it what was acknowledged within this time, at most, where that is by this
disk alone: the longest pace of the shipper, and a put on a busy machine."""
EQUAL_S = 90.0
LONGEST_S, STEP_S = 280.0, 3.0
"""How long a check may take, and the replay of a step."""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """How it is done.

    Attributes:
        gap_s: longest time before a kill; away_s: until what was killed begins again, one of these.
        more: replies that clients must have before the next round.
    """

    gap_s: float = 1.5
    away_s: tuple[float, ...] = (0.0, 0.0, 0.5, 6.5)
    more: int = 4
    wait_s: float = 90.0
    agents: int = 6


@dataclass(slots=True)
class Found:
    """What rounds have shown.

    Attributes:
        victims: what was killed -> how often.
        lost_disks: when a host's disk was removed; outages: (from, to) of the medium.
        notes: what did not work at first.
        worst_s: how long before its disk was lost the oldest event was acknowledged that is lost.
    """

    seed: int
    apart: bool
    victims: Counter[str] = field(default_factory=Counter)
    lost_disks: list[float] = field(default_factory=list)
    outages: list[tuple[float, float]] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    finished: int = 0
    events: int = 0
    steps: int = 0
    replayed: str = ""
    lost: list[str] = field(default_factory=list)
    lost_with_disks: int = 0
    worst_s: float = 0.0
    doubled: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    orphaned: int = 0
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


def rounds(
    folder: Path,
    model: Path,
    kind: Kind,
    seed: int,
    count: int,
    on_round: Callable[[str], None],
    plan: RoundPlan = RoundPlan(),
) -> Found:
    """Run, kill, and check.

    Raises:
        BenchError: what was killed does not come up again.
    """
    dice, begun = random.Random(seed), time.monotonic()
    habits = Habits("", seed, agents=plan.agents, group_size=2, pause_s=0.05, request_s=20.0)
    with stage_of(folder, model, kind, habits) as stage:
        found = Found(seed, stage.net.apart)
        stage.start()
        stage.agents.ask(do="begin")
        stage.await_replies(plan.more, READY_S)
        for number in range(count):
            what = _one(stage, dice, plan, found)
            try:
                stage.await_replies(plan.more, plan.wait_s)
            except BenchError as error:
                found.wrong.append(f"round {number + 1}, {what}: {error}")
                break
            on_round(f"{number + 1}/{count} {what}, {stage.replies()} replies")
        report = _ended(stage, plan, found)
        seen = Seen(
            [(*a, t) for a, t in zip(report["answered"], report["answered_s"], strict=True)],
            list(zip(report["finished"], report["finished_s"], strict=True)),
        )
        found.answered, found.finished = len(seen.answered), len(seen.finished)
        found.wrong += [f"a client was told {text}" for text in report["strange"]]
        _check(stage, seen, found)
    found.seconds = time.monotonic() - begun
    return found


def _one(stage: Stage, dice: random.Random, plan: RoundPlan, found: Found) -> str:
    choices = [MEDIUM, PROXY, PROXY, SEALER, FOLLOWS, HOST, PAUSED, *([CUT] if stage.net.apart else [])]
    what = dice.choice([*choices, TRAINS] if stage.kind.trains else choices)
    until = time.monotonic() + dice.uniform(0.0, plan.gap_s)
    while time.monotonic() < until:
        stage.tend()
        time.sleep(0.05)
    away = dice.choice(plan.away_s)
    if what == MEDIUM:
        what = _kill_medium(stage, dice, min(away, 3.0), found)
    elif what in (CUT, PAUSED):
        host = dice.choice(PROXIES)
        with stage.paused(host) if what == PAUSED else stage.cut_off(host):
            _pass(stage, away)
        what = f"{host} {what}"
    elif what == HOST:
        hosts = [*PROXIES, FOLLOWER, *([TRAINER] if stage.kind.trains else [])]
        host = dice.choice(hosts)
        _lose_host(stage, host, away, found)
        what = f"{host} and its disk"
    else:
        host = {FOLLOWS: FOLLOWER, TRAINS: TRAINER}.get(what) or dice.choice(PROXIES)
        victim = stage.victims[host, what]
        stage.down.add((host, what))
        victim.end()
        _pass(stage, away)
        victim.start()
        stage.down.discard((host, what))
    found.victims[what] += 1
    return f"{what}, away {away:g} s"


def _pass(stage: Stage, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        stage.tend()
        time.sleep(0.05)


def _kill_medium(stage: Stage, dice: random.Random, away: float, found: Found) -> str:
    brokers = stage.medium.brokers
    begun = time.time()
    if brokers is not None and dice.random() < 0.8:
        number = dice.randrange(3)
        brokers.kill(number)
        _pass(stage, away)
        brokers.start(number)
        # Of three, two must agree: the next round waits until this one is back.
        what = "broker"
    else:
        stage.medium.gate.end()
        _pass(stage, away)
        stage.medium.gate.start()
        stage.medium.gate.await_http(stage.medium.endpoint)
        what = "object storage"
    found.outages.append((begun, time.time()))
    return what


def _lose_host(stage: Stage, host: str, away: float, found: Found) -> None:
    """End all processes of a host, remove its disk, and have it join as a new host."""
    keys = stage.of(host)
    stage.down.update(keys)
    for key in keys:
        stage.victims[key].end()
    found.lost_disks.append(time.time())
    stage.machines[host].lose_disk()
    _pass(stage, away)
    until = time.monotonic() + READY_S
    while True:
        try:
            stage.join(host)
            break
        except store.errors.StoreError as error:
            found.notes.append(f"joining again failed at first: {error}")
            if time.monotonic() > until:
                raise
            time.sleep(0.5)
    for key in keys:
        stage.victims[key].start()
    stage.down.difference_update(keys)


# The end ----------------------------------------------------------------------------------------


def _ended(stage: Stage, plan: RoundPlan, found: Found) -> dict[str, Any]:
    """Let clients finish, and processes end in order; what clients saw."""
    deadline = time.monotonic() + plan.wait_s
    while not stage.agents.ask(do="end", within_s=0.1)["over"]:
        stage.tend()
        if time.monotonic() > deadline:
            found.wrong.append(f"clients were not answered within {plan.wait_s:.0f} s of the last round")
            break
    report: dict[str, Any] = stage.agents.ask(do="report")
    for key, victim in stage.victims.items():
        found.ends[f"{key[0]}'s {key[1]}"] = victim.ends
        victim.stop()
    found.ends = +found.ends
    return report


def _check(stage: Stage, seen: Seen, found: Found) -> None:
    stage.join(LATER)
    hosts = [FIRST, SECOND, TRAINER, FOLLOWER, LATER]
    logs = {host: stage.opened(host) for host in hosts}
    try:
        heads = _equal_heads(logs, found)
        whole = {host: list(log.events(heads[host])) for host, log in logs.items()}
        events = whole[FIRST]
        first = _prints(events)
        for host in hosts[1:]:
            other = _prints(whole[host])
            if other != first:
                differ = sorted(set(first.items()) ^ set(other.items()))[:3]
                found.wrong.append(f"the logs of {FIRST} and {host} differ: {differ}")
        for host, log in logs.items():
            found.wrong += [f"{host}, lane {v.lane}: {v.fault}" for v in verify_store(log) if v.fault]
        found.events = len(events)
        _account(account(events, seen), stage.kind, found)
        for maker, tokens in fold_ledger(events).unaccounted().items():
            if tokens:
                found.wrong.append(f"the ledger does not account for {tokens} tokens of {maker}")
        found.steps = sum(isinstance(e.record, StepCommitted) for e in events)
    finally:
        for log in logs.values():
            closed(log)
    _commands(stage, hosts, found)


def _equal_heads(logs: dict[str, store.Store], found: Found) -> dict[str, Any]:
    until = time.monotonic() + EQUAL_S
    while True:
        for log in logs.values():
            assert log.carrier is not None
            log.carrier.catch_up()
        heads = {host: log.head() for host, log in logs.items()}
        if all(head == heads[FIRST] for head in heads.values()):
            return heads
        if time.monotonic() > until:
            found.wrong.append(f"the hosts' heads are not equal after {EQUAL_S:.0f} s: {heads}")
            return heads
        time.sleep(0.5)


def _prints(events: list[Event]) -> dict[tuple[str, int], tuple[str, str]]:
    return {(e.lane, e.seq): (e.event_id, repr(e.record)) for e in events}


def _account(result: Account, kind: Kind, found: Found) -> None:
    found.doubled, found.changed, found.orphaned = result.doubled, result.changed, result.orphaned
    if kind.ack == "medium" and result.orphaned:
        found.wrong.append(f"{result.orphaned} acknowledged events are orphans")
    for what, when in result.lost:
        ages = [gone - when for gone in found.lost_disks if gone >= when - 0.05]
        age = min(ages, default=float("inf"))
        outage = sum(end - begin for begin, end in found.outages if end > when)
        if kind.ack == "local" and age <= WITHIN_S + min(outage, 6.0):
            found.lost_with_disks += 1
            found.worst_s = max(found.worst_s, age)
        else:
            found.lost.append(f"{what}, acknowledged {age:.2f} s before a disk was lost")


def _commands(stage: Stage, hosts: list[str], found: Found) -> None:
    """What a user would ask, in processes of the hosts."""
    asked: list[tuple[str, list[Any]]] = []
    asked += [(host, ["store", "verify"]) for host in hosts]
    if stage.kind.trains:
        asked.append((LATER, ["ledger", "--run", RUN]))
        asked.append((LATER, ["replay", "run", "--run", RUN]))
    for host, words in asked:
        machine = stage.machines[host]
        log = stage.folder / f"{host}-{'-'.join(words[:2])}.log"
        full = [*words, "--store", machine.disk / "store"]
        command = Victim(words[0], COMMAND, full, log, stage.environment, place=machine.place)
        command.start()
        code = command.wait(LONGEST_S + found.steps * STEP_S)
        command.end()
        said = log.read_text().splitlines()
        if words[0] == "replay":
            found.replayed = said[-1] if said else ""
        if code != 0:
            found.wrong.append(f"{host}: {' '.join(words)} ended with {code}: {' | '.join(said[-4:])}")


__all__ = ["BenchError", "Found", "Kind", "RoundPlan", "rounds"]
