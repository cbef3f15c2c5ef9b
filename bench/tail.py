"""`tail.*`: how long after its append an event is seen in another process.

One process appends about 2,000 events a second, each separately and without waiting; an event's
time is the moment it was made, just before its append. This process calls `Store.tail().poll()`
again and again, and sleeps in between. How much too long those sleeps take is the control:
nobody can see an event while asleep.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from rollbook import store
from rollbook.bench.figure import Figure, Outcome, quantile, spread
from rollbook.bench.open_loop import Traffic, arrivals
from rollbook.bench.sinks import ACK_TIMEOUT_S, in_envelopes
from rollbook.bench.turns import make_turns
from rollbook.store.ids import now_us

PATIENCE_S = 60.0
"""How long nothing may come before the measurement is given up."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure: `passes` times this traffic, polled every `interval_s` seconds."""

    traffic: Traffic = field(default_factory=lambda: Traffic(seconds=5.0))
    passes: int = 3
    interval_s: float = 0.005
    turns: int = 160

    @property
    def steps(self) -> int:
        """How often `on_round` will be called, unless time runs out."""
        return self.passes


@dataclass(frozen=True, slots=True)
class Seen:
    """One pass: milliseconds from append to sight per event, sleep overshoot, and cores of each process."""

    visible_ms: Sequence[float]
    overshoot_ms: Sequence[float]
    reader_cores: float
    writer_cores: float
    events_per_s: float


def write(folder: Path, lane: str, traffic: Traffic, turns: int, seed: int, ready: Connection) -> None:
    """Append the traffic to the lane; sends through `ready` a message when it begins, then (cores,
    events per second)."""
    payload = make_turns(turns)
    due = arrivals(traffic, seed)
    with store.open(folder).writer(lane) as writer:
        gc.collect()  # what starting left is not collected while events wait
        ready.send(None)
        # What is acknowledged is let go: thousands of futures would be walked through by each collection.
        pending: deque[Future[int]] = deque()
        cpu, begun = time.process_time(), time.perf_counter()
        for i, offset in enumerate(due):
            wait = begun + offset - time.perf_counter()
            if wait > 0:
                time.sleep(wait)
            pending.append(writer.append(in_envelopes([payload[i % turns]])))
            while pending[0].done() and len(pending) > 1:
                pending.popleft().result()
        for future in pending:
            future.result(ACK_TIMEOUT_S)
        seconds = time.perf_counter() - begun
        ready.send(((time.process_time() - cpu) / seconds, len(due) / seconds))


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> list[Seen]:
    """Run the passes, each with a lane and a writer of its own. Calls `on_round` after each.

    Raises:
        TimeoutError: the writer stopped before all its events were seen.
    """
    log = store.open(folder / "store", create=True)
    passes: list[Seen] = []
    # A fresh interpreter: a fork would share this one's threads' locks.
    spawn = multiprocessing.get_context("spawn")
    for number in range(plan.passes):
        mine, theirs = spawn.Pipe()
        args = (log.path, f"writer-{number}", plan.traffic, plan.turns, number, theirs)
        process = spawn.Process(target=write, args=args, daemon=True)
        start = log.head()
        gc.collect()
        process.start()
        theirs.close()
        try:
            mine.recv()
            visible, overshoot, cores = _read(log, plan, len(arrivals(plan.traffic, number)), start)
            writer_cores, rate = mine.recv()
            passes.append(Seen(visible, overshoot, cores, writer_cores, rate))
        finally:
            process.kill()
            process.join()
            mine.close()
        on_round()
    return passes


def _read(
    log: store.Store, plan: Plan, count: int, start: dict[str, int]
) -> tuple[list[float], list[float], float]:
    """Milliseconds to sight of `count` events after `start`, overshoot of the sleeps, and cores used."""
    visible: list[float] = []
    overshoot: list[float] = []
    cpu, begun = time.process_time(), time.perf_counter()
    last = begun
    with log.tail(start) as tail:
        while len(visible) < count:
            asleep = time.perf_counter()
            time.sleep(plan.interval_s)
            awake = time.perf_counter()
            overshoot.append(1e3 * (awake - asleep - plan.interval_s))
            events = tail.poll()
            now = now_us()
            visible += [(now - event.time_us) / 1e3 for event in events]
            last = awake if events else last
            if awake - last > PATIENCE_S:
                raise TimeoutError(
                    f"{count - len(visible)} of {count} events were not seen in {PATIENCE_S:.0f} s"
                )
    return visible, overshoot, (time.process_time() - cpu) / (time.perf_counter() - begun)


def outcome(passes: Sequence[Seen]) -> Outcome:
    """The figures and spreads of the passes."""

    def each(metric: Callable[[Seen], float]) -> list[float]:
        return [metric(result) for result in passes]

    control = each(lambda s: quantile(s.overshoot_ms, 99))
    against = f"sleep overshoot between polls in the same run, p99: {median(control):.2f} ms"
    by_quantile = {q: each(lambda s, q=q: quantile(s.visible_ms, q)) for q in (50, 99, 100)}  # type: ignore[misc]
    reader, writer = each(lambda s: s.reader_cores), each(lambda s: s.writer_cores)
    runs = len(passes)
    figures = (
        *(
            Figure(f"tail.visible_p{q}_ms", median(by_quantile[q]), "ms", against, None, runs)
            for q in (50, 99)
        ),
        Figure(
            *("tail.reader_cores", median(reader), "cores"),
            *(f"the writer: {median(writer):.2f} cores", None, runs),
        ),
    )
    spreads = (
        *(spread(f"append to sight p{q}", "ms", values) for q, values in by_quantile.items()),
        spread("sleep overshoot p99", "ms", control),
        spread("sleep overshoot, longest", "ms", each(lambda s: max(s.overshoot_ms))),
        spread("events appended", "events/s", each(lambda s: s.events_per_s)),
        spread("cores of the reader", "cores", reader),
        spread("cores of the writer", "cores", writer),
    )
    return Outcome(figures, spreads)
