"""Passes a training's points to TensorBoard and Weights & Biases, in threads of their own.

The training comes first: it waits for neither, and an error there is only a warning. Points that
were not written are in the log, from which the next start or `rollbook plot --tensorboard` makes
them anew.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rollbook import store
from rollbook.store.events import Json, Record
from rollbook.store.marker import read_marker
from rollbook.store.redaction import Scrubber
from rollbook.store.safe_paths import place_inside
from rollbook.store.secret import SECRETS, store_secret
from rollbook.train.config.config import TrainConfig
from rollbook.train.curves.points import Following, Point, read_points
from rollbook.train.curves.writers import FOLDER, EventFile, WandbRun, is_asked_for
from rollbook.train.loop.watcher import TrainingStart, Watcher

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
        self.told, self._opens, self._past = name, opens, past
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


class Reporter:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for feeder in self._feeders:
            feeder.feed(None)
        for feeder in self._feeders:
            feeder.join(PATIENCE_S)
            if feeder.is_alive():
                self._shown.warn(f"{feeder.told} took no more for {PATIENCE_S:g} s: some curves end early")
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
            if feeder.problem is not None and feeder.told not in self._reported:
                self._reported.add(feeder.told)
                self._shown.warn(
                    f"curves for {feeder.told} are not written any more: {feeder.problem}. The training goes "
                    "on; its log has all of them"
                )
