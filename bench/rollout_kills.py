"""Kills rollout managers in the middle: how soon another one launches agents."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollbook import store
from rollbook.bench.processes import Process, module
from rollbook.store.events import Event, LaunchStarted
from rollbook.store.log.tail import Filter

LAUNCHES = 6
"""Of a manager before it is killed."""
WITHIN_S, LOOK_S = 120.0, 0.02


@dataclass(frozen=True, slots=True)
class Kills:
    """Managers to kill.

    Attributes:
        folder, cores: of their processes; store: that the proxy records into.
        config: a CONFIG's file; name: its rollouts'.
        environment: of the processes.
    """

    folder: Path
    cores: str
    store: Path
    config: Path
    name: str
    environment: Mapping[str, str]

    def run(self, kills: int, *, actor: bool) -> list[float]:
        """Seconds from each `kill -9` of a manager to the first launch of the next one.

        Args:
            actor: one of Ray, which starts it again; else a process, which is started again at once.

        Raises:
            BenchError: none launches anything in time.
        """
        took: list[float] = []
        process = self._begin(actor)
        log = store.open(self.store)
        kinds = Filter(kinds=frozenset({LaunchStarted.KIND}))
        try:
            with log.tail(log.head(), kinds) as tail:
                owner, _ = self._launched(process, tail.poll, after="", many=LAUNCHES)
                for _ in range(kills):
                    began = time.time()
                    os.kill(_pid(owner), signal.SIGKILL)
                    if not actor:
                        process.stop()
                        process = self._begin(actor)
                    owner, first = self._launched(process, tail.poll, after=owner, many=LAUNCHES)
                    took.append(first - began)
        finally:
            process.stop()
        return took

    def _begin(self, actor: bool) -> Process:
        words = ["rollout", self.config, "--json", *(["--ray"] if actor else [])]
        command = module("rollbook.cli.app", *words)
        return Process(self.name, command, self.folder, self.cores, self.environment, talks=False)

    def _launched(
        self, process: Process, poll: Callable[[], list[Event]], after: str, many: int
    ) -> tuple[str, float]:
        """The owner of so many launches, other than the previous owner, and the time of the first."""
        seen: list[tuple[str, float]] = []
        until = time.monotonic() + WITHIN_S
        while len(seen) < many:
            for event in poll():
                record = event.record
                if (
                    isinstance(record, LaunchStarted)
                    and record.rollout == self.name
                    and record.owner != after
                ):
                    seen.append((record.owner, event.time_us / 1e6))
            if process.child.poll() is not None or time.monotonic() > until:
                raise process.failed(f"launched {len(seen)} agents")
            time.sleep(LOOK_S)
        return seen[0]


def _pid(owner: str) -> int:
    """Of a manager, by its name in the log."""
    return int(owner.rsplit("-", 2)[1])
