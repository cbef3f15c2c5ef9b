"""Passes a training's points to TensorBoard and Weights & Biases, in threads of their own.

The training comes first: it waits for neither, and an error there is only a warning. Points that
were not written are in the log, from which the next start or `rollbook plot --tensorboard` makes
them anew.

Writers of the points of one policy: a TensorBoard file in the folder `RUN/POLICY`, or a run of
Weights & Biases, where `wandb` is installed and was asked for.

The messages are TensorBoard's own (`tensorboard.compat.proto`), but not the writer, which takes
a second to import, ten times as long as they do. A record is a length and the message, each
followed by its checksum: https://www.tensorflow.org/tutorials/load_data/tfrecord, "TFRecords
format details".

The points of a training's curves: a step's row of the view `metrics`, an evaluation's of
`evaluations`.

A point is the same whether it is read from the log afterwards or made from the training's
records as they are written.
"""

from __future__ import annotations

import hashlib
import os
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import crc32c

from rollbook import store
from rollbook.store import Store
from rollbook.store.cut import Cut, format_cut
from rollbook.store.errors import ConfigError
from rollbook.store.events import EvalFinished, Json, Record, StepAbandoned, StepCommitted, StepPlanned
from rollbook.store.fold.history import gone_versions
from rollbook.store.marker import read_marker
from rollbook.store.permissions import make_folder, open_file
from rollbook.store.redaction import Scrubber
from rollbook.store.safe_paths import place_inside
from rollbook.store.secret import SECRETS, store_secret
from rollbook.store.sql.columns import EVALUATIONS, ViewColumn
from rollbook.store.sql.query import connect_at
from rollbook.store.sql.sandbox import Connection
from rollbook.store.sql.training_views import METRICS, RECORDED
from rollbook.train.config.config import OF_AGENTS, TrainConfig
from rollbook.train.loop.watcher import TrainingStart, Watcher

STEPS, HELD_OUT = "metrics", "evaluations"
"""The views, and what a curve's name begins with: `metrics/loss`, `evaluations/loss`."""
WHOLE, NOT_WHOLE = "whole", "_not_whole"
"""A column of evaluations, and the end of the name of a curve of those that are not."""
_NUMBERS = ("DOUBLE", "BIGINT")


def _numbers(columns: Sequence[ViewColumn]) -> tuple[str, ...]:
    return tuple(column.name for column in columns if column.type in _NUMBERS and column.name != "step")


OF_STEPS, OF_EVALUATIONS = _numbers(METRICS.columns), _numbers(EVALUATIONS)
_MEASURED = frozenset(OF_EVALUATIONS) - {"policy_version", "samples", "tokens", "trajectories", "expected"}


@dataclass(frozen=True, slots=True)
class Point:
    """Values at a step, by the names of their curves. An evaluation stands at the step that starts from its
    version, or would; `time` is in seconds since 1970."""

    kind: str
    step: int
    version: int
    time: float
    values: Mapping[str, float]


def read_points(log: Store, cut: Cut, run: str, policy: str) -> list[Point]:
    """The points of a policy at a cut, in the order of their steps; steps that were abandoned have none.

    Raises:
        CorruptionError: a file is damaged.
    """
    if next(log.events_of([StepCommitted.KIND, EvalFinished.KIND], cut), None) is None:
        return []
    abandoned = [event for event in log.events_of([StepAbandoned.KIND], cut) if event.run == run]
    records = [e.record for e in abandoned if isinstance(e.record, StepAbandoned)]
    gone = gone_versions(record for record in records if record.policy == policy)
    with connect_at(log, format_cut(cut)) as connection:
        params = {"run": run, "policy": policy}
        points = [*_rows(connection, _EVALUATED, HELD_OUT, (*OF_EVALUATIONS, WHOLE), params)]
        points = [point for point in points if point.version not in gone]
        points += _rows(connection, _STEPS, STEPS, OF_STEPS, params)
    return sorted(points, key=lambda point: (point.step, point.kind != HELD_OUT, point.version))


def _rows(
    connection: Connection, query: str, kind: str, columns: Sequence[str], params: Mapping[str, str]
) -> Iterator[Point]:
    named = ", ".join(f"v.{column}" for column in columns)
    for step, version, at, *values in connection.read(query.format(columns=named), params).fetchall():
        yield Point(kind, step, version, at, _named(kind, dict(zip(columns, values, strict=True))))


def _named(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The values by the names of their curves; partial evaluations have curves of their own."""
    partial = OF_AGENTS if values.get(WHOLE) is False else frozenset()
    return {
        f"{kind}/{name}{NOT_WHOLE if name in partial else ''}": float(value)
        for name, value in values.items()
        if value is not None and name != WHOLE
    }


_STEPS = """
    SELECT v.step, v.policy_version, epoch(s.committed), {columns}
    FROM metrics v JOIN steps s USING (run, policy, step, status)
    WHERE v.run = $run AND v.policy = $policy AND v.status = 'committed'"""
_NEXT = """coalesce((SELECT max(step) + 1 FROM steps WHERE run = $run AND policy = $policy
                     AND status IN ('committed', 'abandoned')), 0)"""
_EVALUATED = f"""
    SELECT coalesce(s.step, m.step + 1, {_NEXT}), v.policy_version, epoch(v.time), {{columns}}
    FROM evaluations v LEFT JOIN steps s ON s.run = v.run AND s.policy = v.policy
      AND s.policy_version = v.policy_version AND s.status = 'committed'
    LEFT JOIN steps m ON m.run = v.run AND m.policy = v.policy
      AND m.output_version = v.policy_version AND m.status = 'committed'
    WHERE v.run = $run AND v.policy = $policy"""


@dataclass(slots=True)
class Following:
    """Makes points of a training's records as they are written.

    Attributes:
        next_step: number of the step that is planned next.
    """

    policy: str
    next_step: int
    _plan: StepPlanned | None = None
    _planned: float = field(default=0.0)

    def point(self, record: Record) -> Point | None:
        """The point that a record makes; None where it makes none."""
        now = time.time()
        match record:
            case StepPlanned(policy=self.policy):
                self._plan, self._planned = record, now
            case StepCommitted(policy=self.policy) if self._plan is not None:
                self.next_step = record.step + 1
                return self._step(record, self._plan, now)
            case EvalFinished(policy=self.policy):
                return self._evaluation(record, now)
        return None

    def _step(self, record: StepCommitted, plan: StepPlanned, now: float) -> Point:
        seconds = now - self._planned
        metrics = record.metrics
        values: dict[str, Any] = {column.name: metrics.get(column.name) for column in RECORDED}
        values |= {"policy_version": plan.policy_version, "learning_rate": plan.learning_rate}
        values |= {
            "seconds": seconds,
            "tokens_s": metrics.get("trained_tokens", 0) / seconds if seconds else None,
        }
        return Point(STEPS, record.step, plan.policy_version, now, _named(STEPS, values))

    def _evaluation(self, record: EvalFinished, now: float) -> Point:
        values = {name: getattr(record, name, None) for name in (*OF_EVALUATIONS, WHOLE)}
        values |= {name: record.metrics.get(name) for name in _MEASURED if name in record.metrics}
        return Point(HELD_OUT, self.next_step, record.policy_version, now, _named(HELD_OUT, values))


PATIENCE_S = 30.0
"""How long the end of a training waits for what is still to be written or sent."""


class Sink(Protocol):
    """A destination of points. Any error ends it."""

    def write(self, point: Point) -> None:
        """Take a point."""

    def close(self) -> None:
        """The training is over."""


Opens = Callable[[Iterable[Point]], Sink]
"""From the points of the past to what takes those to come."""


class _Feeder(threading.Thread):
    """Opens one sink with the past points, and feeds it new ones. `problem` says why it ended
    early."""

    def __init__(self, name: str, opens: Opens, past: Callable[[], list[Point]]) -> None:
        super().__init__(name=f"curves for {name}", daemon=True)
        self.sink, self._opens, self._past = name, opens, past
        self._waiting: queue.SimpleQueue[Point | None] = queue.SimpleQueue()
        self.problem: str | None = None
        self.start()

    def feed(self, point: Point | None) -> None:
        """Take a point to hand on; None: there are no more."""
        self._waiting.put(point)

    def run(self) -> None:
        """Pass on all points, those of the past first and none twice."""
        try:
            past = self._past()
            seen = {(point.kind, point.step, point.version) for point in past}
            sink = self._opens(past)
            while (point := self._waiting.get()) is not None:
                if (point.kind, point.step, point.version) not in seen:
                    sink.write(point)
            sink.close()
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}" if str(error) else repr(error)


class Reporter(AbstractContextManager["Reporter"]):
    """A watcher that passes everything on to another watcher, and the points of the training to its
    sinks.

    Args:
        path: the store's folder.
        shown: the watcher who shows the training.
    """

    def __init__(self, config: TrainConfig, path: Path, shown: Watcher) -> None:
        self._config, self._path, self._shown = config, path, shown
        self._following: Following | None = None
        self._feeders: list[_Feeder] = []
        self._reported: set[str] = set()

    def __exit__(self, *_: object) -> None:
        for feeder in self._feeders:
            feeder.feed(None)
        for feeder in self._feeders:
            feeder.join(PATIENCE_S)
            if feeder.is_alive():
                self._shown.warn(f"{feeder.sink} took no more for {PATIENCE_S:g} s: some curves end early")
        self._report()

    def begun(self, start: TrainingStart) -> None:
        """Start the sinks, and pass it on."""
        self._shown.begun(start)
        try:
            self._begin(start)
        except Exception as error:
            self._shown.warn(f"no curves are written: {error}")

    def _begin(self, start: TrainingStart) -> None:
        log, config = store.open(self._path), self._config
        cut, whose = log.head(), (config.run, config.policy)
        self._following = Following(config.policy, start.step)

        def past() -> list[Point]:
            return read_points(log, cut, *whose)

        folder = place_inside(self._path, f"{FOLDER}/{config.run}/{config.policy}")
        self._feeders.append(_Feeder("TensorBoard", lambda points: EventFile(folder, points), past))
        if is_asked_for(os.environ):
            settings = Scrubber(store_secret(self._path, SECRETS)).value(config.as_json())
            self._feeders.append(_Feeder("Weights & Biases", self._wandb(settings), past))

    def _wandb(self, settings: Json) -> Opens:
        store_id, run, policy = read_marker(self._path), self._config.run, self._config.policy
        return lambda points: WandbRun(store_id, run, policy, settings, points)

    def tell(self, *records: Record) -> None:
        """Pass the events on, and the points that they make to the sinks."""
        self._shown.tell(*records)
        if self._following is None:
            return
        for record in records:
            if (point := self._following.point(record)) is not None:
                for feeder in self._feeders:
                    feeder.feed(point)

    def committed(self, done: int, step: int, metrics: Json) -> None:
        """Pass it on, and report what went wrong since."""
        self._shown.committed(done, step, metrics)
        self._report()

    def note(self, text: str) -> None:
        """Pass it on."""
        self._shown.note(text)

    def warn(self, text: str) -> None:
        """Pass it on."""
        self._shown.warn(text)

    def _report(self) -> None:
        for feeder in self._feeders:
            if feeder.problem is not None and feeder.sink not in self._reported:
                self._reported.add(feeder.sink)
                self._shown.warn(
                    f"curves for {feeder.sink} are not written any more: {feeder.problem}. The training goes "
                    "on; its log has all of them"
                )


FOLDER = "tensorboard"
"""Of a store: the log directory of its trainings."""
_OURS = ".rollbook"
"""How the name of a file ends that we wrote, and may replace."""


def messages() -> Any:
    """The module of TensorBoard's messages.

    Raises:
        ConfigError: TensorBoard is missing.
    """
    try:
        from tensorboard.compat.proto import event_pb2
    except ImportError as error:
        raise ConfigError(
            "curves for TensorBoard need its package: pip install 'rollbook[train]', or tensorboard alone"
        ) from error
    return event_pb2


class EventFile(AbstractContextManager["EventFile"]):
    """A new file in a folder, which replaces those that were written there before.

    What a running TensorBoard has open of the earlier ones is replaced: the file begins with a
    session that starts at step 0.
    """

    def __init__(self, folder: Path, points: Iterable[Point]) -> None:
        """Write the points of the past, and then remove the earlier files.

        Raises:
            ConfigError: TensorBoard is missing.
            OSError: the file cannot be written; it is removed, and the earlier ones stay.
        """
        self._proto = messages()
        make_folder(folder)
        earlier = [path for path in folder.iterdir() if path.name.endswith(_OURS)]
        self._path = folder / f"events.out.tfevents.{time.time_ns():020d}.{os.getpid()}{_OURS}"
        self._file: BinaryIO = os.fdopen(open_file(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")
        try:
            now = time.time()
            self._put(self._proto.Event(wall_time=now, file_version="brain.Event:2"))
            started = self._proto.SessionLog(status=self._proto.SessionLog.START)
            self._put(self._proto.Event(wall_time=now, step=0, session_log=started))
            for point in points:
                self._put(self._event(point))
            self._file.flush()
        except BaseException:
            self._path.unlink()
            self._file.close()
            raise
        for path in earlier:
            path.unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, point: Point) -> None:
        """Add a point; a TensorBoard sees it at once.

        Raises:
            OSError: the disk is full, or the like.
        """
        self._put(self._event(point))
        self._file.flush()

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: the disk is full, or the like.
        """
        self._file.close()

    def _event(self, point: Point) -> Any:
        event = self._proto.Event(wall_time=point.time, step=point.step)
        for name, value in point.values.items():
            event.summary.value.add(tag=name, simple_value=value)
        return event

    def _put(self, event: Any) -> None:
        data = event.SerializeToString()
        size = struct.pack("<Q", len(data))
        self._file.write(b"".join((size, _checksum(size), data, _checksum(data))))


def _checksum(data: bytes) -> bytes:
    """The masked CRC-32C of a record's part."""
    plain = crc32c.crc32c(data)
    return struct.pack("<I", ((plain >> 15 | plain << 17) + 0xA282EAD8) & 0xFFFFFFFF)


VARIABLES = ("WANDB_PROJECT", "WANDB_MODE")
"""Of the environment: one of them asks for it. wandb reads them, its key and the others itself."""


def is_asked_for(environment: Mapping[str, str]) -> bool:
    """Whether trainings are to be shown in Weights & Biases."""
    return any(environment.get(name) for name in VARIABLES) and find_spec("wandb") is not None


class WandbRun:
    """A run that continues where an earlier process ended: its id follows from store, run and
    policy."""

    def __init__(
        self, store_id: str, run: str, policy: str, config: Mapping[str, Any], points: Iterable[Point]
    ) -> None:
        """Begin or resume the run, and send the past points that it does not have.

        Raises:
            Exception: any of wandb's.
        """
        import wandb

        name = f"{run}/{policy}"
        self._run = wandb.init(
            id=hashlib.sha256(f"{store_id}/{name}".encode()).hexdigest()[:16],
            name=name,
            group=run,
            job_type="train",
            config=dict(config),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._first = int(self._run.starting_step)
        for point in points:
            self.write(point)

    def write(self, point: Point) -> None:
        """Add a point, unless the run is already past it.

        Raises:
            Exception: any of wandb's.
        """
        if point.step >= self._first:
            self._run.log(dict(point.values), step=point.step)

    def close(self) -> None:
        """End it, once everything is sent or on disk.

        Raises:
            Exception: any of wandb's.
        """
        self._run.finish()
