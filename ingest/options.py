"""What an operator decides about the proxy's HTTP side."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from rollbook.edge.bodies import BodyBudget
from rollbook.edge.keys import Keys
from rollbook.edge.web_pages import Own
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.redact import Redactor
from rollbook.ingest.trajectories.identity import TRAJECTORY_HEADER
from rollbook.ingest.trajectories.registry import BUDGET_BYTES
from rollbook.store.secret import SECRETS, store_secret


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """After how many seconds of silence bytes are sent that mean nothing: comments in streams, spaces before
    a JSON reply.

    Once a byte is out, the status can no longer say that the request failed: so a reply that is sent whole
    waits longer than requests are held.
    """

    stream_s: float = 10.0
    whole_s: float = 120.0


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """Limits, keys and times.

    Attributes:
        keys: the proxy's keys, each with a role; without any, everybody may do everything.
        own: hosts and origins of our own; web pages of others are refused.
        trajectory_headers: headers that name a trajectory beside X-Rollbook-Trajectory, in lower case.
        on_store_failure: record only: `pass` on what cannot be recorded, or `refuse` it.
        max_body_bytes: largest body; a larger one is a 413.
        max_bodies_bytes: of all bodies that are read and answered at once; others wait their turn.
        body_timeout_s: longest silence of a client in the middle of its body.
        max_running: requests answered at once; more are a 429.
        max_connections: connections at once; None: as many as the system gives descriptors for.
        max_consumers: streams of `/v1/events` at once; more are a 503.
        max_reply_bytes: of an upstream's reply, so much is kept to be recorded; a larger one passes on alone.
        redactor: takes secrets out of what comes in.
        image_hosts: hosts that links to images are fetched from.
        admission: hold trajectories that would be too old by the time an online training uses them.
        memory_bytes: of open trajectories; of those not used for longest the rest is read back from the log.
        abandoned_s: a trajectory not heard of for so long is finished as aborted; 0: never.
    """

    keys: Keys = field(default_factory=Keys)
    own: Own = field(default_factory=Own)
    trajectory_headers: tuple[str, ...] = ()
    on_store_failure: str = "pass"
    max_body_bytes: int = 64 * 2**20
    max_bodies_bytes: int = 512 * 2**20
    body_timeout_s: float = 30.0
    max_running: int = 4096
    max_connections: int | None = None
    max_consumers: int = 64
    max_reply_bytes: int = 64 * 2**20
    memory_bytes: int = BUDGET_BYTES
    admission: bool = True
    abandoned_s: float = 0.0
    image_hosts: tuple[str, ...] = ()
    redactor: Redactor = field(default_factory=Redactor)
    keep_alive: KeepAlive = field(default_factory=KeepAlive)

    def body_budget(self) -> BodyBudget:
        """A budget of its own for bodies, within these limits."""
        return BodyBudget(self.max_body_bytes, self.max_bodies_bytes, self.body_timeout_s)

    @property
    def naming(self) -> tuple[str, ...]:
        """The headers that name a trajectory."""
        return (TRAJECTORY_HEADER, *self.trajectory_headers)

    def share(self, workers: int) -> ProxyOptions:
        """What one of so many workers has of the proxy's limits."""
        if workers == 1:
            return self
        most = self.max_connections
        return replace(
            self,
            max_bodies_bytes=self.max_bodies_bytes // workers,
            max_running=-(-self.max_running // workers),
            max_connections=None if most is None else -(-most // workers),
            max_consumers=-(-self.max_consumers // workers),
            memory_bytes=self.memory_bytes // workers,
        )

    def recorded_by(self, recorder: Recorder) -> ProxyOptions:
        """The same, with the store's own digests of secrets; the recorder cleans errors by them too."""
        recorder.redactor = self.redactor.keyed(store_secret(recorder.store.path, SECRETS))
        return replace(self, redactor=recorder.redactor)

    def as_json(self) -> dict[str, Any]:
        """For `run.opened`: of keys their names and roles."""
        return {
            "keys": self.keys.roles(),
            "keys_file": None if self.keys.file is None else str(self.keys.file),
            "hosts": sorted(self.own.names),
            "origins": sorted(self.own.origins),
            "trajectory_headers": list(self.trajectory_headers),
            "on_store_failure": self.on_store_failure,
            "max_body_bytes": self.max_body_bytes,
            "max_bodies_bytes": self.max_bodies_bytes,
            "body_timeout_s": self.body_timeout_s,
            "max_running": self.max_running,
            "max_connections": self.max_connections,
            "max_consumers": self.max_consumers,
            "max_reply_bytes": self.max_reply_bytes,
            "memory_bytes": self.memory_bytes,
            "admission": self.admission,
            "abandoned_s": self.abandoned_s,
            "image_hosts": list(self.image_hosts),
        }
