"""One attack beside honest agents, and its effect on them."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollbook.bench.figure import quantile
from rollbook.bench.hostile.attack import Attack, Ground, Tally, carry_out
from rollbook.bench.hostile.stage import OPERATOR, Proxy
from rollbook.bench.processes import Process

TRACEBACK = re.compile(r"Traceback \(most recent call last\)|^\s*raise \w", re.M)


@dataclass(slots=True)
class Lap:
    """The honest agents' experience of a lap.

    Attributes:
        ms: latencies of the requests that were answered.
        refused: requests that were not answered with 200.
        told: the first of those.
    """

    ms: list[float]
    refused: int
    errors_500: int
    told: list[str]

    @property
    def p99(self) -> float:
        """Milliseconds."""
        return quantile(self.ms, 99)


@dataclass(slots=True)
class Fought:
    """One attack's lap.

    Attributes:
        peak, before: bytes of memory that the proxy had at most, and when it began.
        refuses: honest requests may be refused meanwhile.
        tracebacks: what it printed that looks like one.
    """

    name: str
    lap: Lap
    tally: Tally
    peak: int
    before: int = 0
    refuses: bool = False
    tracebacks: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Round:
    """Every attack on a kind of proxy once, with a quiet lap before each."""

    kind: str
    quiet: list[Lap] = field(default_factory=list)
    fought: list[Fought] = field(default_factory=list)


def lap(agents: Process, meanwhile: Callable[[], object]) -> Lap:
    """One lap of the agents, which lasts as long as `meanwhile` runs."""
    agents.ask(do="begin")
    meanwhile()
    report: dict[str, Any] = agents.ask(do="end")
    report.pop("wrong")
    return Lap(**report)


def fight(attack: Attack, proxy: Proxy, agents: Process, seconds: float, rng: random.Random) -> Fought:
    """Attack for so long.

    Raises:
        BenchError: the proxy ended by itself, or does not resume.
    """
    printed_before, memory_before = len(proxy.log()), proxy.memory("VmRSS")
    proxy.forget_peak()
    tally = Tally()

    def attacked() -> None:
        asyncio.run(
            carry_out(attack, Ground(proxy.url, OPERATOR, "", proxy, rng, proxy.kind, tally), seconds)
        )

    felt = lap(agents, attacked)
    if not proxy.victim.running:
        raise proxy.victim.failed(f"ended under {attack.name}")
    if attack.refuses:
        proxy.await_ready()  # it resumes by itself
    printed = proxy.log()[printed_before:]
    return Fought(
        attack.name, felt, tally, proxy.memory(), memory_before, attack.refuses, tracebacks(printed)
    )


def tracebacks(printed: str) -> list[str]:
    """The last lines of the tracebacks in what a process printed."""
    starts = [match.start() for match in TRACEBACK.finditer(printed)]
    return [printed[at : at + 2000] for at in starts]
