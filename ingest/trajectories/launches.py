"""Launches of a trajectory's agent: what a launcher says of one, held against what the log has of it. Pure.

A launcher may repeat what it is not sure of: what the log says already is not said again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from rollbook.ingest.requests.launch_fields import EndLaunch, StartLaunch, TellLeaks
from rollbook.store import Event
from rollbook.store.errors import RequestError
from rollbook.store.events import LaunchEnded, LaunchLeaked, LaunchStarted

Said = TypeVar("Said", LaunchStarted, LaunchEnded, LaunchLeaked)


@dataclass(frozen=True, slots=True)
class Launch:
    """What the log has of a launch.

    Attributes:
        trajectory: its name.
        events: those of the launch.
    """

    trajectory: str
    trajectory_id: str
    launch_id: str
    events: tuple[Event, ...] = ()

    @classmethod
    def among(cls, events: Iterable[Event], trajectory: str, trajectory_id: str, launch_id: str) -> Launch:
        """The launch of that id among the events of its trajectory."""
        found = [e for e in events if getattr(e.record, "launch_id", None) == launch_id]
        return cls(trajectory, trajectory_id, launch_id, tuple(found))

    def started(self, body: StartLaunch, by: str | None) -> LaunchStarted | str:
        """The record of its start; the id of the event that says so already.

        Raises:
            RequestError: 409, it started as another one.
        """
        record = LaunchStarted(
            *(self.trajectory_id, self.launch_id, body.rollout, body.place.model_dump(), body.attempt),
            *(body.launcher, body.isolation, body.owner, body.clocks.model_dump(), by),
            places=body.places,
        )
        return self._once(record, "started", "choose another launch_id, or leave it out")

    def ended(self, body: EndLaunch, by: str | None) -> LaunchEnded | str:
        """The record of its end; the id of the event that says so already.

        Raises:
            RequestError: 422, it never started; 409, it ended otherwise.
        """
        self._check_started()
        output = {name: stream.model_dump() for name, stream in body.output.items()}
        record = LaunchEnded(
            *(self.trajectory_id, self.launch_id, body.status, body.why, body.exit_code, body.signal),
            *(body.seconds, body.cpu_s, body.peak_rss_mb, output, body.scoring, by),
            proxy_away=body.proxy_away,
        )
        return self._once(record, "ended", "it ends once, so repeat that or nothing")

    def leaked(self, body: TellLeaks, by: str | None) -> LaunchLeaked | str:
        """The record of what it left behind; the id of the event that says so already.

        Raises:
            RequestError: 422, it never started.
        """
        self._check_started()
        processes = [process.model_dump() for process in body.processes]
        record = LaunchLeaked(self.trajectory_id, self.launch_id, processes, body.found, by)
        same = (event_id for event_id, known in self._known(record) if not _differing(known, record))
        return next(same, record)

    def _once(self, record: Said, what: str, remedy: str) -> Said | str:
        for event_id, known in self._known(record):
            differing = _differing(known, record)
            if differing:
                field, value = differing[0], repr(getattr(known, differing[0]))[:200]
                text = (
                    f"launch {self.launch_id!r} of trajectory {self.trajectory!r} has {what} already, and "
                    f"in the log its {field} is {value}: {remedy}"
                )
                raise RequestError(409, f"launch_{what}", text)
            return event_id
        return record

    def _known(self, record: Said) -> list[tuple[str, Said]]:
        """What the log has of the record's kind, each with the id of its event."""
        return [(e.event_id, e.record) for e in self.events if isinstance(e.record, type(record))]

    def _check_started(self) -> None:
        if not any(isinstance(event.record, LaunchStarted) for event in self.events):
            text = (
                f"launch {self.launch_id!r} of trajectory {self.trajectory!r} never started: say first that "
                f"it did, by POST /v1/trajectories/{self.trajectory}/launches"
            )
            raise RequestError(422, "unknown_launch", text)


def _differing(known: Said, record: Said) -> list[str]:
    """Fields in which two records differ, whoever said them."""
    same_key = replace(known, by=record.by)
    return [
        field.name for field in fields(record) if getattr(same_key, field.name) != getattr(record, field.name)
    ]
