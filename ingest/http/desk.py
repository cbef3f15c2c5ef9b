"""What routes about trajectories have in common: how a body is read, and what the log has of a trajectory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fastapi import Request

from rollbook.ingest.http.body_room import BodyRoom
from rollbook.ingest.http.front_door import FrontDoor
from rollbook.ingest.http.guard import Guard
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.requests.fields import Model, OpenTrajectory, check_recordable, json_object, validated
from rollbook.ingest.requests.large_work import beside
from rollbook.store import Event
from rollbook.store.errors import RequestError
from rollbook.store.events import TrajectoryOpened
from rollbook.store.fold.trajectory import Trajectory

REMARK_BYTES = 4 << 20
"""Most bytes of what is said of a trajectory."""
_IDS = frozenset({"id", "launch_id"})
"""Fields of a body that are never taken for a secret."""


@dataclass(frozen=True, slots=True, eq=False)
class Desk:
    """What these routes work with."""

    recorder: Recorder
    door: FrontDoor
    guard: Guard
    room: BodyRoom

    async def read(self, request: Request, model: type[Model]) -> Model:
        """The body as the model, without secrets; an id is never taken for one."""
        async with self.room.plain(request, REMARK_BYTES) as raw:
            body = await beside(len(raw), json_object, raw)
            check_recordable(body)
            names = {k: v for k, v in body.items() if k in _IDS}
            fields = await beside(len(raw), self.door.options.redactor.fields, body)
            found = validated(model, fields | names)
            if self.door.others is not None and isinstance(found, OpenTrajectory) and found.id is not None:
                self.door.others.check_name(request, found.id, raw)
            return found

    async def recorded(self, name: str) -> Trajectory:
        """The trajectory as the log has it, whichever proxy wrote it.

        Raises:
            RequestError: 404, there is none.
        """
        trajectory_id = await self._settled(name)
        trajectory = await asyncio.to_thread(self.recorder.store.trajectory, trajectory_id)
        if trajectory is None:
            raise _dropped(name)
        return trajectory

    async def events(self, name: str) -> tuple[str, list[Event]]:
        """The trajectory's id, and all events of it that are durable.

        Raises:
            RequestError: 404, there is none.
        """
        trajectory_id = await self._settled(name)
        events = await asyncio.to_thread(self.recorder.store.events_about, [trajectory_id])
        if not any(isinstance(event.record, TrajectoryOpened) for event in events):
            raise _dropped(name)
        return trajectory_id, events

    async def _settled(self, name: str) -> str:
        """The trajectory's id, once all that was said of it here is durable or failed."""
        await self.recorder.look_up(name)
        trajectory_id = self.recorder.known(name).opened.trajectory_id
        await self.recorder.settle()
        return trajectory_id


def _dropped(name: str) -> RequestError:
    text = f"trajectory {name!r} is no longer in the store: its events were dropped by retention"
    return RequestError(404, "trajectory_dropped", text)
