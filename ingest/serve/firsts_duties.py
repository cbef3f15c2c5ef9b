"""The duties of the proxy that holds the first seat: it keeps the gate, and seals."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rollbook.ingest.admission.gate import AdmissionGate
from rollbook.ingest.admission.outstanding import KINDS
from rollbook.ingest.peers.asking import PeerBus
from rollbook.ingest.recording.restore import RunReader
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.serve.follow import Follower
from rollbook.ingest.serve.sealer_child import SealerChild
from rollbook.ingest.workers.admitting import Gatekeeper
from rollbook.store.log.tail import Filter

SIBLINGS_GATHER_S = 0.2
"""Pause after each read of what others write: admission counts what begins before it reads of it."""


@dataclass(slots=True, eq=False)
class KeepsGate:
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
        self._kept.callback(Gatekeeper(gate, self.bus, follower.caught_up).close)

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
