"""What steps leave in the log for their replay, and how long that took, from the logs of trainings."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import orjson

from rollbook import store
from rollbook.bench import scale_commands as commands
from rollbook.bench.processes import BenchError, Process, module
from rollbook.bench.replay_rollouts import Steps, append_rollouts
from rollbook.store import Event, Store
from rollbook.store.events import StepCommitted, StepPlanned
from rollbook.store.events.schema import row_of
from rollbook.store.wal.frame import encode_rows
from rollbook.train.step.evidence import recorded_hashes

TRAIN_S = 3600.0
FREE, A_SAMPLE, A_TENSOR = 16 << 10, 48, 64
"""Bytes that a step may keep, and for each of its samples and tensors."""
PARTS = ("data_s", "forward_s", "backward_s", "optimizer_s", "scoring_s")
"""Metrics of what a step would take without being recorded."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a step stores besides the log that it reads and its checkpoints.

    Attributes:
        stored: bytes of its `step.planned` and `step.committed` in the WAL, without the names of
            its samples.
    """

    samples: int
    tensors: int
    stored: int

    @property
    def ratio(self) -> float:
        """Its size relative to the allowed size."""
        return self.stored / (FREE + A_SAMPLE * self.samples + A_TENSOR * self.tensors)


def take(log: Store, steps: Steps, model: Path, scratch: Path, *, fault: int | None = None) -> None:
    """Record rollouts and train on them: `rollbook train`, to its end.

    Args:
        fault: the step from which on it goes wrong.

    Raises:
        BenchError: it failed.
    """
    append_rollouts(log, steps)
    config = scratch / f"{steps.run}.toml"
    config.write_text(steps.config(model))
    if fault is None:
        commands.run(["train", config, "--store", log.path], scratch)
        return
    words = module("rollbook.bench.replay_fault", config, log.path, fault)
    with Process("train", words, scratch, "all", talks=False) as trainer:
        if code := trainer.child.wait(TRAIN_S):
            raise trainer.failed(f"ended with {code}")


def kept(log: Store, run: str) -> Kept:
    """What the first step of a run stores.

    Raises:
        BenchError: it has none, or recorded no hashes.
    """
    planned, committed = (_first(log, run, record_type.KIND) for record_type in (StepPlanned, StepCommitted))
    assert isinstance(planned.record, StepPlanned)
    assert isinstance(committed.record, StepCommitted)
    hashes = recorded_hashes(committed.record.hashes).tensors
    if not hashes:
        raise BenchError(f"the first step of run {run!r} recorded no hashes of tensors")
    stored = sum(len(encode_rows([row_of(event)])) for event in (planned, committed))
    samples = planned.record.samples
    return Kept(len(samples), len(hashes["weights"]), stored - len(orjson.dumps(samples)))


def _first(log: Store, run: str, kind: str) -> Event:
    for event in log.events_of([kind]):
        if event.run == run:
            return Event(event.record, event.run, event.event_id, event.time_us)
    raise BenchError(f"run {run!r} has no {kind}")


def capture_shares(log: Store, run: str) -> list[float]:
    """For each step but the first, the share of its time until `step.committed` is written that
    recording took, by its metrics."""
    shares = []
    for event in log.events_of([StepCommitted.KIND]):
        if isinstance(event.record, StepCommitted) and event.run == run:
            metrics = event.record.metrics
            whole = metrics["manifest_s"] + sum(metrics.get(part, 0.0) for part in PARTS)
            shares.append(metrics["manifest_s"] / whole)
    return shares[1:]


def step_time(log: Store, run: str) -> float:
    """Median seconds from step to step of a training, including everything between two steps."""
    ended = [event.time_us for event in log.events_of([StepCommitted.KIND]) if event.run == run]
    return median(after - before for before, after in pairwise(ended)) / 1e6


def in_store(folder: Path, name: str, make: Callable[[Store], None]) -> Store:
    """The store of that name, made if it is missing; an incomplete one is made anew."""
    place, done = folder / name, folder / f"{name}.made"
    if not done.exists():
        shutil.rmtree(place, ignore_errors=True)
        make(store.open(place, create=True))
        done.touch()
    return store.open(place)
