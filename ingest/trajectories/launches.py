"""Launches of a trajectory's agent: what a launcher reports, compared with what the log has.

A launcher may repeat a report when in doubt: what the log already says is not written again.

The progress of the rollouts of one name is queried by SQL, since a launcher that begins again is to
wait seconds for it, however many launches there were.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from rollbook.ingest.fields import EndLaunch, StartLaunch, TellLeaks
from rollbook.store import Event, Store, format_cut
from rollbook.store.errors import RequestError
from rollbook.store.events import Json, LaunchEnded, LaunchLeaked, LaunchStarted
from rollbook.store.sql.query import connect_at

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
        mine = [e for e in events if getattr(e.record, "launch_id", None) == launch_id]
        return cls(trajectory, trajectory_id, launch_id, tuple(mine))

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


def rollout_course(store: Store, run: str, name: str) -> Json:
    """The course of the rollouts of a name.

    Returns:
        `cut`, that it is of. `places`: `epoch`, `task`, `sample`, `attempt`, `launch_id` and `status`, each a
        list, of the last attempt in each place; `status` is null where that has not ended; and `spared`, how
        many attempts of the place failed because the proxy was away. `orphans`: of
        launches without an end `launch_id`, `trajectory_id`, their place and attempt, and what the trajectory
        was `finished` with, or null. `unlaunched`: names of trajectories that were opened and have no launch.

    Raises:
        CorruptionError: a file is damaged.
    """
    cut, params = format_cut(store.head()), {"run": run, "name": name}
    with connect_at(store, cut) as connection:

        def table(query: str) -> dict[str, list[Any]]:
            result = connection.relation(query, params).to_arrow_table()
            return {column: result[column].to_pylist() for column in result.column_names}

        places = table(_PLACES)
        orphans = table(_ORPHANS)
        unlaunched = table(_UNLAUNCHED)["trajectory"]
    rows = [dict(zip(orphans, row, strict=True)) for row in zip(*orphans.values(), strict=True)]
    return {"cut": cut, "places": places, "orphans": rows, "unlaunched": unlaunched}


# What was erased has no task.
_PLACES = """
    SELECT epoch, task, sample, attempt, launch_id, CASE WHEN ended IS NOT NULL THEN status END AS status,
           count(*) FILTER (proxy_away) OVER (PARTITION BY epoch, task, sample) AS spared
    FROM launches WHERE run = $run AND rollout = $name AND task IS NOT NULL
    QUALIFY row_number() OVER (PARTITION BY epoch, task, sample ORDER BY attempt DESC, started DESC) = 1
    ORDER BY epoch, task, sample"""
_ORPHANS = """
    SELECT l.launch_id, l.trajectory_id, l.epoch, l.task, l.sample, l.attempt,
           CASE WHEN t.finished IS NOT NULL THEN t.status END AS finished
    FROM launches l LEFT JOIN trajectories t USING (run, trajectory_id)
    WHERE run = $run AND rollout = $name AND l.ended IS NULL AND l.task IS NOT NULL
    ORDER BY l.started, l.launch_id"""
_UNLAUNCHED = """
    SELECT trajectory FROM trajectories
    WHERE run = $run AND labels->>'$.rollout' = $name
      AND trajectory_id NOT IN (SELECT trajectory_id FROM launches WHERE run = $run AND rollout = $name)
    ORDER BY trajectory"""
