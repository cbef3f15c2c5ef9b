"""The duties of the proxy that holds the first seat: it keeps the gate, and seals.

The sealer is a child process that ends with the proxy, however that ends.

So reading, compressing and writing segments takes no time from the event loop, and has a low priority.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import rollbook
from rollbook.ingest.admission.gate import AdmissionGate
from rollbook.ingest.admission.outstanding import KINDS
from rollbook.ingest.cluster.admitting import GateServer
from rollbook.ingest.cluster.peers import PeerBus
from rollbook.ingest.recording.restore import RunReader
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.serve.follow import Follower
from rollbook.store.log.tail import Filter

SIBLINGS_GATHER_S = 0.2
"""Pause after each read of what others write: admission counts what begins before it reads of it."""


@dataclass(slots=True, eq=False)
class GateDuty:
    """Keeps the gate of admission for all proxies: by all that is in the log, this one's part too."""

    bus: PeerBus
    turn_runner: TurnRunner
    on_error: Callable[[str | None], None]
    _kept: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def begin(self, runs: RunReader) -> None:
        """Admit from now on, beginning with what there is in the run."""
        recorder, engine = self.turn_runner.recorder, self.turn_runner.engine
        gate = AdmissionGate(runs.outstanding, engine.policy_version, self.turn_runner.hold_s)
        wanted = Filter(KINDS, run=recorder.run)
        follower = Follower(recorder.store, runs.cut, wanted, gate.take, self.on_error, SIBLINGS_GATHER_S)
        follower.start()
        self._kept.push_async_callback(follower.stop)
        self._kept.callback(GateServer(gate, self.bus, follower.caught_up).close)

    async def end(self) -> None:
        """Another one does."""
        await self._kept.aclose()


@dataclass(slots=True, eq=False)
class Seals:
    """Has a sealer beside this proxy."""

    store: Path
    _child: SealerChild | None = None

    async def begin(self, _: RunReader) -> None:
        """Start it."""
        self._child = SealerChild(self.store)

    async def end(self) -> None:
        """End it."""
        if self._child is not None:
            await asyncio.to_thread(self._child.close)


logger = logging.getLogger(__name__)

RESTARTS = 5
PAUSE_S = 1.0
"""Seconds before the first restart; each later one waits that much longer."""
END_S = 4.0
"""How long an ending sealer may take for the unit it is writing. Killed later, it is written anew."""


class SealerChild:
    """Starts the sealer, and again when it dies, up to `RESTARTS` times."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._ending = threading.Event()
        self.process = self._start()
        self._thread = threading.Thread(target=self._watch, name="sealer-child", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the sealer, by force if it takes too long."""
        self._ending.set()
        self._end()
        self._thread.join(END_S)

    def _start(self) -> subprocess.Popen[bytes]:
        # The same package that this process runs, wherever it was imported from.
        path = [str(Path(rollbook.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "rollbook", "store", "seal", "--watch", "--json"]
        return subprocess.Popen(
            [*command, "--store", str(self._store), "--parent", str(os.getpid())],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            process_group=0,  # a terminal's interrupt goes to the proxy, which ends this process
        )

    def _watch(self) -> None:
        for restart in range(RESTARTS + 1):
            status = self.process.wait()
            # 0: it was asked to end.
            if status == 0 or self._ending.is_set():
                return
            if restart == RESTARTS:
                break
            logger.warning(
                "the sealer ended (exit code %s); starting it again, %s of %s", status, restart + 1, RESTARTS
            )
            if self._ending.wait(PAUSE_S * (restart + 1)):
                return
            self.process = self._start()
            if self._ending.is_set():
                self._end()
                return
        logger.warning(
            "the sealer ended %s times and is left alone: recording goes on, nothing is sealed; see what "
            "`rollbook store seal --store %s` says",
            RESTARTS + 1,
            self._store,
        )

    def _end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def sealer_beside(store: Path) -> Iterator[SealerChild]:
    """A sealer of the store while the context lasts."""
    child = SealerChild(store)
    try:
        yield child
    finally:
        child.close()
