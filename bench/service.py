"""`service.*`: what training through the service costs, beside the trainer's own loop.

The real client, a program in an environment of its own, trains over HTTP on this host; the loop is a process
that trains the same factors beside the same base model with the same tokens, and they take turns. Further:
latencies of small operations, models that take turns, publishing to a sampler, waiting beside another tenant,
going on after `kill -9`, and bytes of the log.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import orjson

from rollbook import store as rb
from rollbook.bench.figure import Outcome
from rollbook.bench.processes import BenchError, Process
from rollbook.bench.rounds import order
from rollbook.bench.service_outcome import (
    EVEN,
    PASS,
    STEP,
    TAILED,
    Crowd,
    Latencies,
    LogBytes,
    Measured,
    Publishing,
    Restart,
    Speed,
    Switching,
    figures,
    spreads,
)
from rollbook.bench.service_stage import BASE, Size, Stage, ask, client_python, rows, write_model
from rollbook.engines.model_files import PEFT_WEIGHTS
from rollbook.service.order import LANE
from rollbook.store.events import OperationAccepted, OperationEnded
from rollbook.store.wal.files import lane_folder, read_watermark

SERVICE, LOOP, ONE, SEVERAL = "service", "loop", "one", "several"
FIRST, SMALL = "first", "small"
"""A tenant, and its model; another, beside whose small operations a third one waits."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        steps_each: optimizer steps of a side in a round.
        lengths: of a batch's sequences, in tokens that are learnt; rank: of the factors.
        small: of the sequence of a small operation; operations: such of a round.
        switched: of the sequence of a pass between which models are switched; models: so many.
        published: the rank of factors that are published.
        waits: passes of the second tenant beside each of the first's.
        again_steps, again_passes: optimizer steps before a kill, and passes of each.
        again: the base model of that, on which operations are short.
    """

    rounds: int = 5
    size: Size = field(default_factory=Size)
    steps_each: int = 4
    lengths: dict[str, Sequence[int]] = field(
        default_factory=lambda: {EVEN: (64,) * 8, TAILED: (8, 10, 12, 16, 24, 40, 82, 320)}
    )
    rank: int = 32
    small: int = 16
    operations: int = 80
    switched: int = 64
    models: int = 4
    published: int = 256
    waits: int = 30
    again_steps: int = 49
    again_passes: int = 20
    again: Size = field(default_factory=lambda: Size(256, 64, 2, 2))
    restarts: int = 2

    @property
    def steps(self) -> int:
        """How often `on_round` will be called: for each round of four measurements, each crowd and each
        restart."""
        return 4 * self.rounds + 2 + self.restarts


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Train in `folder`, the sides in turn.

    Raises:
        ConfigError: there is no client.
        BenchError: a process failed, or the sides do not learn the same.
    """
    client_python()
    model = write_model(folder / "model", plan.size)
    with closing(Stage(folder, model, plan.size, (FIRST, EVEN, SMALL))) as stage:
        stage.start()
        client, loop = stage.client(FIRST), stage.loop(plan.rank)
        of_client = ask(client, "make", model=FIRST, base=BASE, rank=plan.rank)
        speeds = _speeds(plan, client, loop, on_round)
        latencies = _latencies(plan, stage, of_client, client, loop, on_round)
        log = _log_bytes(plan, stage, client)
        switching = _switching(plan, stage, client, on_round)
        publishing = _publishing(plan, stage, client, on_round)
        crowds = [_crowd(plan, stage, client, batch, on_round) for batch in (EVEN, SMALL)]
    restarts = [_restart(folder, plan, number, on_round) for number in range(plan.restarts)]
    return Measured(speeds, latencies, switching, publishing, crowds, restarts, log)


def _speeds(plan: Plan, client: Process, loop: Process, on_round: Callable[[], None]) -> dict[str, Speed]:
    """Steps of both sides; the first loss, of the same weights, tells whether they do the same."""
    batches = {name: rows(plan.size, lengths) for name, lengths in plan.lengths.items()}
    models, first = [FIRST], batches[EVEN]
    came = (
        ask(client, "train", models=models, rows=first, steps=1, ahead=0),
        ask(loop, "train", rows=first, steps=1),
    )
    ours, theirs = (side["losses"][0] for side in came)
    if abs(ours - theirs) > 1e-4 * abs(theirs):
        raise BenchError(f"the first loss of the service is {ours}, of the loop {theirs}")
    seconds: dict[tuple[str, str], list[float]] = {}
    for number in range(plan.rounds):
        for name, batch in batches.items():
            for side in order([SERVICE, LOOP], number):
                if side == SERVICE:
                    took = ask(client, "train", models=models, rows=batch, steps=plan.steps_each, ahead=0)
                else:
                    took = ask(loop, "train", rows=batch, steps=plan.steps_each)
                seconds.setdefault((name, side), []).append(took["seconds"])
        on_round()
    return {
        name: Speed(seconds[name, SERVICE], seconds[name, LOOP], plan.steps_each * sum(plan.lengths[name]))
        for name in batches
    }


def _latencies(
    plan: Plan, stage: Stage, model_id: str, client: Process, loop: Process, on_round: Callable[[], None]
) -> dict[str, Latencies]:
    """Small operations one after the other, a pass and a step in turn."""
    small = rows(plan.size, [plan.small])
    before = len(_accepted_us(stage, model_id))
    done: list[tuple[float, float]] = []
    alone: list[tuple[float, float]] = []
    ask(client, "operate", model=FIRST, rows=small, count=2)
    for number in range(plan.rounds):
        for side in order([SERVICE, LOOP], number):
            if side == SERVICE:
                done += ask(client, "operate", model=FIRST, rows=small, count=plan.operations)
            else:
                alone += ask(loop, "operate", rows=small, count=plan.operations // 2)
        on_round()
    accepted_us = _accepted_us(stage, model_id)[before + 2 :]
    since = [moment - us / 1e6 for (_, moment), us in zip(done, accepted_us, strict=True)]
    return {
        kind: Latencies([called for called, _ in done[at::2]], since[at::2], [times[at] for times in alone])
        for at, kind in enumerate((PASS, STEP))
    }


def _accepted_us(stage: Stage, model_id: str) -> list[int]:
    """When a model's operations were accepted, in microseconds since 1970."""
    events = rb.open(stage.store).events()
    came = ((e.record, e.time_us) for e in events)
    return [us for r, us in came if isinstance(r, OperationAccepted) and r.model_id == model_id]


def _log_bytes(plan: Plan, stage: Stage, client: Process) -> LogBytes:
    """By how much the log grows in steps of the batch."""
    model_id = ask(client, "make", model="logged", base=BASE, rank=plan.rank)
    before, steps = _written(stage), plan.steps_each
    batch = rows(plan.size, plan.lengths[EVEN])
    ask(client, "train", models=["logged"], rows=batch, steps=steps, ahead=steps)
    grown = _written(stage) - before
    sent = results = 0
    for event in rb.open(stage.store).events():
        record = event.record
        if isinstance(record, OperationAccepted) and record.model_id == model_id and record.number:
            sent += len(orjson.dumps(record.body))
        elif isinstance(record, OperationEnded) and record.model_id == model_id and record.number:
            results += len(orjson.dumps(record.result))
    return LogBytes(grown, sent, results, 2 * steps)


def _written(stage: Stage) -> int:
    """Bytes of the log: of its closed segments, and of the last one as far as it is written."""
    folder = lane_folder(stage.store, LANE)
    mark = read_watermark(folder)
    closed = [file for file in folder.glob("*.wal") if int(file.stem) < mark.segment]
    return mark.offset + sum(file.stat().st_size for file in closed)


def _switching(plan: Plan, stage: Stage, client: Process, on_round: Callable[[], None]) -> Switching:
    """Steps of one model, and as many of several in turn; as many operations wait either way."""
    names = [f"switched-{number}" for number in range(plan.models)]
    ids = [ask(client, "make", model=name, base=BASE, rank=plan.rank) for name in names]
    batch, steps = rows(plan.size, [plan.switched]), plan.models * plan.steps_each
    seconds: dict[str, list[float]] = {ONE: [], SEVERAL: []}
    share = 0.0
    for number in range(-1, plan.rounds):
        for side in order([ONE, SEVERAL], max(number, 0)):
            models = names[:1] if side == ONE else names
            asked = {"models": models, "rows": batch, "steps": steps, "ahead": 2 * plan.models}
            before = _ends(stage)
            took = ask(client, "train", **asked)["seconds"]
            if number >= 0:
                seconds[side].append(took)
            if side == SEVERAL:
                share = _switched(_ends(stage)[len(before) :], ids)
        if number >= 0:
            on_round()
    tokens = steps * plan.switched
    return Switching(seconds[ONE], seconds[SEVERAL], plan.models, share, tokens)


def _ends(stage: Stage) -> list[str]:
    """The models of operations in the order in which they ended."""
    records = (event.record for event in rb.open(stage.store).events())
    return [record.model_id for record in records if isinstance(record, OperationEnded)]


def _switched(ends: Sequence[str], ids: Sequence[str]) -> float:
    """The share of operations before which another of these models had its turn."""
    own = [model_id for model_id in ends if model_id in ids]
    return sum(a != b for a, b in pairwise(own)) / max(len(own) - 1, 1)


def _publishing(plan: Plan, stage: Stage, client: Process, on_round: Callable[[], None]) -> Publishing:
    """A model's weights, new each time, to a sampler; and the same bytes to the disk and back."""
    ask(client, "make", model="published", base=BASE, rank=plan.published)
    small = rows(plan.size, [plan.small])
    parts: list[dict[str, float]] = []
    bare: list[float] = []
    size = 0
    for number in range(-1, plan.rounds):
        ask(client, "train", models=["published"], rows=small, steps=1, ahead=0)
        came = ask(client, "publish", model="published", name=f"v{number + 1}", prompt=small[0][:8])
        newest = max(stage.store.rglob(PEFT_WEIGHTS), key=lambda file: file.stat().st_mtime_ns)
        data = newest.read_bytes()
        size, took = len(data), _written_and_read(stage.folder / "bare", data)
        if number >= 0:
            parts.append(came)
            bare.append(took)
            on_round()
    return Publishing(parts, bare, size)


def _written_and_read(path: Path, data: bytes) -> float:
    """Seconds to write bytes durably, and to read them."""
    back, begun = bytearray(len(data)), time.perf_counter()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    with path.open("rb") as file:
        assert file.readinto(back) == len(data)
    took = time.perf_counter() - begun
    path.unlink()
    return took


def _crowd(plan: Plan, stage: Stage, first: Process, batch: str, on_round: Callable[[], None]) -> Crowd:
    """Passes of a second tenant, alone and beside the first, which sends a batch, or small ones."""
    lengths = (plan.small,) if batch == SMALL else plan.lengths[batch]
    small, sent = rows(plan.size, [plan.small]), rows(plan.size, lengths)
    second = stage.client(batch)
    ask(second, "make", model="second", base=BASE, rank=plan.rank)
    ask(second, "passes", model="second", rows=small, count=2)
    quiet = ask(second, "passes", model="second", rows=small, count=plan.waits)
    begun = time.perf_counter()
    ask(first, "flood", model=FIRST, rows=sent, ahead=16)
    time.sleep(0.1 * plan.waits)
    count = ask(first, "calm")
    each_s = (time.perf_counter() - begun) / count
    ask(first, "flood", model=FIRST, rows=sent, ahead=16)
    ask(second, "passes", model="second", rows=small, count=2)
    beside = ask(second, "passes", model="second", rows=small, count=plan.waits)
    ask(first, "calm")
    second.stop()
    on_round()
    return Crowd(quiet, beside, each_s, sum(lengths))


def _restart(folder: Path, plan: Plan, number: int, on_round: Callable[[], None]) -> Restart:
    """Operations behind the last state that was written, `kill -9`, and the next operation."""
    own = folder / f"again-{number}"
    own.mkdir()
    small = rows(plan.again, [plan.small])
    with closing(Stage(own, write_model(own / "model", plan.again), plan.again, (FIRST,))) as stage:
        stage.start()
        client = stage.client(FIRST)
        ask(client, "make", model=FIRST, base=BASE, rank=plan.rank)
        asked = {"model": FIRST, "rows": small}
        ran = ask(client, "accumulate", **asked, steps=plan.again_steps, passes=plan.again_passes)
        stage.kill()
        begun = time.time()
        stage.start()
        listens = time.time() - begun
        [(first, done)] = ask(client, "operate", **asked, count=1)
        usual = median(ask(client, "passes", **asked, count=10))
    shutil.rmtree(own)
    on_round()
    operations = plan.again_steps * (plan.again_passes + 1)
    return Restart(listens, done - begun, first, usual, operations, ran)


def outcome(measured: Measured) -> Outcome:
    """The figures and spreads of a measurement."""
    return Outcome(figures(measured), spreads(measured))
