"""Requests for completions, through whichever API: `ModelRoutes.answer` is the whole way of one.

1. `FrontDoor.address`: the caller, the endpoint, and what the path says of the trajectory.
2. `BodyRoom.plain`: the body, within its limits.
3. `CallReader.read`: what is asked, in which trajectory, and the prompt's plan. Nothing is recorded so far.
4. `TurnRunner.begin`: the request is recorded, and a task has an engine answer it and records that.
5. `TurnResponse`: the reply is sent, as it grows or whole, its end once everything is durable.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from urllib.parse import unquote

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from rollbook.ingest.endpoints.registry import APIS
from rollbook.ingest.http.body_room import BodyRoom
from rollbook.ingest.http.call_reader import CallReader, ReadCall
from rollbook.ingest.http.exchange import Exchange
from rollbook.ingest.http.front_door import FrontDoor
from rollbook.ingest.http.metrics import Metrics
from rollbook.ingest.http.request_slots import RequestSlots
from rollbook.ingest.http.shared_connections import ElsewhereError
from rollbook.ingest.http.turn_response import TurnResponse
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.turns.completed import CompletedTurn
from rollbook.ingest.turns.images import ImageLinks
from rollbook.ingest.turns.in_flight import InFlightCall
from rollbook.store.errors import RequestError


@dataclass(slots=True, eq=False)
class ModelRoutes:
    """Answers requests for completions."""

    turn_runner: TurnRunner
    door: FrontDoor
    room: BodyRoom
    metrics: Metrics
    slots: RequestSlots = field(init=False)
    reader: CallReader = field(init=False)

    def __post_init__(self) -> None:
        options = self.door.options
        self.slots = RequestSlots(options.max_running)
        self.reader = CallReader(self.door, self.turn_runner, ImageLinks(options.image_hosts), self.slots)

    def add(self, app: FastAPI) -> None:
        """Add the APIs' paths, each with a trajectory in front of it and without."""
        for prefix in ("", "/t/{said:path}"):
            for path in APIS:
                app.add_route(prefix + path, self.answer, methods=["POST"])

    async def answer(self, request: Request) -> Response:
        """Answer a request for a completion."""
        address = self.door.address(request)
        api = APIS.get(unquote(address.path))
        if api is None:
            text = f"{address.path}: write /t/ID/v1/..., with the path as it is"
            raise RequestError(404, "not_found", text)
        self.slots.check()
        try:
            # A request takes a slot once its body is there: a slow sender must not keep others out.
            async with self.room.plain(request) as raw:
                with self.slots.taken_by_one():
                    with contextlib.ExitStack() as reservation:
                        asked = await self.reader.read(api, address, request, raw, reservation)
                        in_flight = await self._in_flight(asked)
                    label = self.door.label(asked.live, asked.identity, address.caller.name)
                    in_flight.depends_on.append(label)
        except ElsewhereError:
            raise
        except BaseException as error:
            self.metrics.failed(error)
            raise
        asked.live.sending += 1
        exchange = Exchange(api, asked.live, in_flight, self.turn_runner, self.metrics, self.slots)
        return TurnResponse(exchange, self.door.options.keep_alive)

    async def _in_flight(self, asked: ReadCall) -> InFlightCall:
        """What answers a request: the one that it repeats, which may run or be stored, or one of its own."""
        live, arrival = asked.live, asked.arrival
        earlier = live.known.arrivals.get(arrival.digest) if arrival.retry else None
        if isinstance(earlier, InFlightCall) and not earlier.abandoned:
            self.metrics.retries.labels("joined").inc()
            return earlier
        if isinstance(earlier, tuple):
            self.metrics.retries.labels("replayed").inc()
            turns = await self.turn_runner.recorder.answered(live, earlier)
            in_flight = self.turn_runner.stored(asked.call, turns)
            in_flight.counted = True
            return in_flight
        # Also where the repeated request is being aborted because no client waited: it has half a reply.
        in_flight = self.turn_runner.begin(live, asked.call, arrival, asked.plan)
        in_flight.done.add_done_callback(lambda done: self._done(in_flight, done))
        return in_flight

    def _done(self, in_flight: InFlightCall, done: asyncio.Future[list[CompletedTurn]]) -> None:
        """Count a request that failed, or whose reply no client is left to be sent."""
        error = done.exception()
        if error is not None:
            self.metrics.failed(error)
        elif in_flight.abandoned:
            self.metrics.answered_call(in_flight, done.result(), delivered=False)
