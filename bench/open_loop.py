"""Agents' traffic as the log sees it: events arrive at their own times, each acknowledged separately.

Arrivals are a Poisson process that does not wait for answers. A latency counts from the moment
the event was due, so a producer that has fallen behind hides nothing.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from rollbook.bench.turns import RUN
from rollbook.store import Event
from rollbook.store.events import TurnCompleted

TICK_S = 0.005
Append = Callable[[list[Event]], "Future[int]"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """How much comes: `rate` events a second for `seconds`."""

    rate: float = 2000.0
    seconds: float = 3.0


@dataclass(frozen=True, slots=True)
class Served:
    """The measurements: milliseconds per event, how much longer than `TICK_S` sleeps took, and
    cores used."""

    ack_ms: Sequence[float]
    overshoot_ms: Sequence[float]
    cores: float
    events_per_s: float


def arrivals(traffic: Traffic, seed: int) -> list[float]:
    """Seconds from the start at which events are due, rising; at least one."""
    rng = np.random.default_rng(seed)
    count = max(int(traffic.rate * traffic.seconds), 1)
    due: list[float] = np.cumsum(rng.exponential(1 / traffic.rate, count)).tolist()
    return due


def produce(append: Append, turns: Sequence[TurnCompleted], due: Sequence[float]) -> Served:
    """Append one event at each due moment, awaiting every acknowledgement, from one asyncio loop."""
    gc.collect()
    return asyncio.run(_produce(append, turns, due))


async def _produce(append: Append, turns: Sequence[TurnCompleted], due: Sequence[float]) -> Served:
    overshoot: list[float] = []
    ack: list[float] = []

    async def one(turn: TurnCompleted, at: float) -> None:
        await asyncio.wrap_future(append([Event(turn, RUN)]))
        ack.append(1e3 * (time.perf_counter() - at))

    sleeper = asyncio.create_task(_watch_sleep(overshoot))
    cpu, begun = time.process_time(), time.perf_counter()
    async with asyncio.TaskGroup() as pending:
        for i, offset in enumerate(due):
            wait = begun + offset - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            pending.create_task(one(turns[i % len(turns)], begun + offset))
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    sleeper.cancel()
    return Served(ack, overshoot, cpu / seconds, len(due) / seconds)


async def _watch_sleep(overshoot: list[float]) -> None:
    """The control: how late this loop wakes up in any case."""
    while True:
        begun = time.perf_counter()
        await asyncio.sleep(TICK_S)
        overshoot.append(1e3 * (time.perf_counter() - begun - TICK_S))


def answer_at_once(events: list[Event]) -> Future[int]:
    """An append that does nothing: with it the producer runs alone."""
    future: Future[int] = Future()
    future.set_result(len(events))
    return future
