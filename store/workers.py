"""Work in slices, whose results come in the order of the slices: done here, or spread over workers of Ray.

A worker is an actor. It makes once what it works with (an open store, a model), and is given one slice
after the other. Results are streamed: a few for each worker are on their way, however many slices there are.
A worker that is lost is made anew by Ray, and does its slices again; so work leaves nothing behind, and what
is to be written, whoever asks for the results writes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rollbook.store.cut import Cut, format_cut
from rollbook.store.errors import ConfigError, CutError, NotAStoreError, WorkerLostError
from rollbook.store.fold.trajectory import Trajectory
from rollbook.store.log.store import Store
from rollbook.store.open import open_store
from rollbook.store.ray_connection import connect, imported

TRAJECTORIES = 16
"""Of a slice: few, as all of them are in memory, however long they are."""
WAITING = 4
"""Results for each worker that are on their way, or wait for those before them."""
RESTARTS = 3
"""How often Ray makes a worker anew that is lost."""
LOOK_S, ROOM_S = 0.5, 60.0
"""Longest wait for results, as a longer one would not hear Ctrl-C; and for room in the cluster."""
T = TypeVar("T")
R = TypeVar("R")
Spread = Callable[[Iterable[T]], Iterator[R]]
"""From slices to their results, in the order of the slices."""


@dataclass(frozen=True, slots=True)
class Workers:
    """How work is spread.

    Attributes:
        count: workers of Ray; 0: the work is done here.
        store: folder of the store on their hosts; None: the same as here.
        gpu: each takes a GPU, too; else a CPU alone.
        environment: variables that each has before it imports what it works with.
        ahead: slices that each has at a time; with two it waits for nobody, and with one no long slice
            waits for a worker while another has nothing to do.
    """

    count: int = 0
    store: Path | None = None
    gpu: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    ahead: int = 2


HERE = Workers()


@contextlib.contextmanager
def spread(make: Callable[[], Callable[[T], R]], workers: Workers) -> Iterator[Spread[T, R]]:
    """Context: a function from slices to their results, in order, as they are asked for.

    What work on a slice raises is raised in the place of its result.

    Args:
        make: makes, once a worker, what does a slice; it can be pickled, and so can slices and results.

    Raises:
        ConfigError: Ray is not installed or does not answer, or has no room.
        WorkerLostError: a worker was lost, and lost again each time that Ray had made it anew.
    """
    if not workers.count:
        work = make()
        yield lambda slices: map(work, slices)
        return
    with contextlib.ExitStack() as undo:
        try:
            if leave := connect():
                undo.callback(leave)
        except ConnectionError as error:
            raise ConfigError(str(error)) from error
        yield _Pool(imported(), make, workers, undo).results


class SliceWorker:
    """An actor. What it works with is unpickled with the first slice: so errors of that are the slice's, and
    libraries that it imports find the variables."""

    def __init__(self, environment: Mapping[str, str], make: bytes) -> None:
        os.environ.update(environment)
        self._make = make
        self._work: Callable[[Any], Any] | None = None

    def placed(self) -> None:
        """It is there."""

    def do(self, part: Any) -> Any:
        """Do a slice."""
        if self._work is None:
            self._work = pickle.loads(self._make)()
        return self._work(part)


class _Pool:
    """The actors, and which of them can take a slice.

    Args:
        undo: ends them.
    """

    def __init__(self, ray: Any, make: Any, workers: Workers, undo: contextlib.ExitStack) -> None:
        self._ray, self._workers = ray, workers
        kind = ray.remote(SliceWorker).options(
            num_cpus=1,
            num_gpus=int(workers.gpu),
            max_restarts=RESTARTS,
            max_task_retries=RESTARTS,
            scheduling_strategy="SPREAD",
        )
        made = ray.cloudpickle.dumps(make)
        self._placed: dict[Any, Any] = {}
        for _ in range(workers.count):
            actor = kind.remote(dict(workers.environment), made)
            undo.callback(self._end, actor)
            self._placed[actor.placed.remote()] = actor
        self._free: deque[Any] = deque()
        self._doing: dict[Any, Any] = {}
        self._until = time.monotonic() + ROOM_S

    def results(self, slices: Iterable[Any]) -> Iterator[Any]:
        """The results of slices, in their order."""
        left, ended = iter(slices), False
        waiting: deque[Any] = deque()
        while True:
            while self._free and not ended and len(waiting) < WAITING * self._workers.count:
                try:
                    part = next(left)
                except StopIteration:
                    ended = True
                    break
                actor = self._free.popleft()
                waiting.append(actor.do.remote(part))
                self._doing[waiting[-1]] = actor
            if ended and not waiting:
                return
            first = bool(waiting) and waiting[0] not in self._doing
            self._look(0 if first else LOOK_S)
            if first:
                yield self._got(waiting.popleft())

    def _look(self, within_s: float) -> None:
        """Wait for a worker that is placed, or is done with a slice."""
        awaited = [*self._placed, *self._doing]
        ready, _ = self._ray.wait(awaited, num_returns=1, timeout=within_s) if awaited else ([], [])
        for reference in ready:
            if reference in self._placed:
                self._got(reference)
                self._free += [self._placed.pop(reference)] * self._workers.ahead
            else:
                self._free.append(self._doing.pop(reference))
        if not ready and not self._free and not self._doing and time.monotonic() > self._until:
            raise ConfigError(self._no_room())

    def _got(self, reference: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from error
        except errors.RayError as error:
            lines = "\n".join(f"  {line.strip()}" for line in str(error).splitlines() if line.strip())
            raise WorkerLostError(
                f"a worker of Ray was lost, and again each of {RESTARTS} times that it was made anew; the "
                f"same command does what is left. Ray says:\n{lines}"
            ) from error

    def _no_room(self) -> str:
        wanted = "a CPU and a GPU" if self._workers.gpu else "a CPU"
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        there = ", ".join(f"{free.get(n, 0):g} of {total.get(n, 0):g} {n}s" for n in ("CPU", "GPU"))
        return (
            f"Ray had no room for a worker within {ROOM_S:g} s: it takes {wanted}, and the cluster has "
            f"{there} free. Wait, add nodes, or leave out --ray"
        )

    def _end(self, actor: Any) -> None:
        with contextlib.suppress(Exception):  # Ray is gone, and the actor with it
            self._ray.kill(actor)


# What workers read --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreThere:
    """A store at a cut, as a worker finds it on its host.

    Attributes:
        folder: on that host.
        store_id: of the store that is meant.
    """

    folder: Path
    store_id: str
    cut: str

    def open(self) -> tuple[Store, Cut]:
        """The store, and the cut.

        Raises:
            ConfigError: the folder holds none, or another one, or one that does not have the cut yet.
        """
        where = f"{self.folder} on host {socket.gethostname()}, where Ray has a worker"
        remedy = (
            "workers read the store by its folder, on every node: have it there, or name it by --ray-store"
        )
        try:
            log = open_store(self.folder)
            if log.store_id != self.store_id:
                raise ConfigError(f"{where}, is another store: {remedy}")
            return log, log.cut(self.cut)
        except NotAStoreError as error:
            raise ConfigError(f"{where}, is no store: {remedy}") from error
        except CutError as error:
            raise ConfigError(f"{where}, does not have all of the store: {error}") from error


def store_there(log: Store, cut: Cut, workers: Workers) -> StoreThere:
    """A store that is open here, for workers."""
    return StoreThere(workers.store or log.path, log.store_id, format_cut(cut))


def made_of_trajectories(
    there: StoreThere, make: Callable[[list[Trajectory]], R]
) -> Callable[[Sequence[str]], R]:
    """What does slices of trajectories, each by their ids: what a function makes of them, in this order."""
    log, cut = there.open()

    def work(ids: Sequence[str]) -> R:
        held = log.trajectories(cut, ids)
        return make([held[trajectory_id] for trajectory_id in ids if trajectory_id in held])

    return work


def sliced(items: Sequence[T], size: int = TRAJECTORIES) -> Iterator[Sequence[T]]:
    """Slices of so many items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
