"""Requests for completions, through whichever API: `ModelRoutes.answer` is the whole way of one.

1. `RequestResolver.address`: the caller, the endpoint, and what the path says of the trajectory.
2. `BodyBudget.plain`: the body, within its limits.
3. `CallReader.read`: what is asked, in which trajectory, and the prompt's plan. Nothing is recorded so far.
4. `TurnRunner.begin`: the request is recorded, and a task has an engine answer it and records that.
5. `TurnResponse`: the reply is sent, as it grows or whole, its end once everything is durable.

What streams out before the turn is durable is tokens only; the finish, the usage and the terminator are
withheld until it is. While nothing is ready, bytes without meaning keep the connection alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, unquote

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from rollbook.edge.bodies import BodyBudget
from rollbook.edge.bounds import run_by_size
from rollbook.edge.direct_routes import DirectRoutes
from rollbook.edge.errors import describe
from rollbook.edge.requests import RequestSlots, until_gone
from rollbook.ingest.cluster.shared_connections import ElsewhereError
from rollbook.ingest.endpoints.api import AgentApi, EarlierTurn, StreamWriter
from rollbook.ingest.endpoints.registry import APIS
from rollbook.ingest.fields import json_object
from rollbook.ingest.recording.metrics import Metrics
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.recording.turn_records import Arrival
from rollbook.ingest.replies.family import Parsed
from rollbook.ingest.routes.resolver import Address, RequestResolver
from rollbook.ingest.trajectories.identity import Identity
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.turns.images import ImageLinks
from rollbook.ingest.turns.in_flight import CompletedTurn, InFlightCall
from rollbook.ingest.turns.model_call import ModelCall, check_call
from rollbook.ingest.turns.planning import PromptPlan, retry_count
from rollbook.store.errors import RequestError
from rollbook.store.events import QUARANTINE, Json

_PATHS = re.compile("(?:/t/.*)?(?:" + "|".join(map(re.escape, APIS)) + ")", re.DOTALL)
STREAM_SILENCE_S, WHOLE_SILENCE_S = 10.0, 120.0
"""After so much silence bytes are sent that mean nothing: comments in streams, spaces before a JSON reply.

Once a byte is out, the status can no longer say that the request failed: so a reply that is sent whole waits
longer than requests are held.
"""


@dataclass(slots=True, eq=False)
class ModelRoutes:
    """Answers requests for completions."""

    turn_runner: TurnRunner
    resolver: RequestResolver
    room: BodyBudget
    metrics: Metrics
    slots: RequestSlots = field(init=False)
    reader: CallReader = field(init=False)

    def __post_init__(self) -> None:
        settings = self.resolver.settings
        self.slots = RequestSlots(settings.max_running)
        self.reader = CallReader(self.resolver, self.turn_runner, ImageLinks(settings.image_host), self.slots)

    def add(self, app: FastAPI) -> None:
        """Add the APIs' paths, each with a trajectory in front of it and without; before any middleware."""
        for prefix in ("", "/t/{said:path}"):
            for path in APIS:
                app.add_route(prefix + path, self.answer, methods=["POST"])
        app.add_middleware(DirectRoutes, paths=_PATHS, answer=self.answer, handlers=app.exception_handlers)

    async def answer(self, request: Request) -> Response:
        """Answer a request for a completion."""
        address = self.resolver.address(request)
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
                        read = await self.reader.read(api, address, request, raw, reservation)
                        in_flight = await self._in_flight(read)
                    label = self.resolver.label(read.live, read.identity, address.caller.name)
                    in_flight.depends_on.append(label)
        except ElsewhereError:
            raise
        except BaseException as error:
            self.metrics.failed(error)
            raise
        read.live.sending += 1
        exchange = Exchange(api, read.live, in_flight, self.turn_runner, self.metrics, self.slots)
        return TurnResponse(exchange)

    async def _in_flight(self, read: ReadCall) -> InFlightCall:
        """What answers a request: the one that it repeats, which may run or be stored, or one of its own."""
        live, arrival = read.live, read.arrival
        earlier = live.known.arrivals.get(arrival.digest) if arrival.retry else None
        if isinstance(earlier, InFlightCall) and not earlier.abandoned:
            self.metrics.retries.labels("joined").inc()
            return earlier
        if isinstance(earlier, tuple):
            self.metrics.retries.labels("replayed").inc()
            turns = await self.turn_runner.recorder.answered(live, earlier)
            in_flight = self.turn_runner.stored(read.call, turns)
            in_flight.counted = True
            return in_flight
        # Also where the repeated request is being aborted because no client waited: it has half a reply.
        in_flight = self.turn_runner.begin(live, read.call, arrival, read.plan)
        in_flight.done.add_done_callback(lambda done: self._done(in_flight, done))
        return in_flight

    def _done(self, in_flight: InFlightCall, done: asyncio.Future[list[CompletedTurn]]) -> None:
        """Count a request that failed, or whose reply no client is left to be sent."""
        error = done.exception()
        if error is not None:
            self.metrics.failed(error)
        elif in_flight.abandoned:
            self.metrics.answered_call(in_flight, done.result(), delivered=False)


@dataclass(frozen=True, slots=True, eq=False)
class ReadCall:
    """A request that can be begun. Nothing is recorded of it yet, and a new trajectory is only drafted.

    Attributes:
        plan: its prompt's plan, made in a thread for a large request; None: `TurnRunner.begin` makes it.
        identity: which trajectory it named.
    """

    live: LiveTrajectory
    call: ModelCall
    arrival: Arrival
    plan: PromptPlan | None
    identity: Identity


@dataclass(frozen=True, slots=True, eq=False)
class CallReader:
    """Reads requests for completions."""

    resolver: RequestResolver
    turn_runner: TurnRunner
    images: ImageLinks
    slots: RequestSlots

    async def read(
        self,
        api: AgentApi,
        address: Address,
        request: Request,
        raw: bytes,
        reservation: contextlib.ExitStack,
    ) -> ReadCall:
        """A request as a call in its trajectory. It can be begun until the caller awaits something else.

        Args:
            reservation: keeps room for a new trajectory until it is recorded.

        Raises:
            RequestError: it cannot be answered.
        """
        size = len(raw)
        sent = await run_by_size(size, json_object, raw)
        body = await self.resolver.redacted(sent, size)
        identity = self.resolver.identity(address, request, body)
        retry = retry_count(request)
        arrival = await run_by_size(size, Arrival.kept, api.path, raw, sent, body, retry, address.caller.name)
        named = () if api.ids is None else api.ids.in_body(body)
        await self.resolver.ensure_local(request, identity.name, named, raw)
        identity, known = await self._known(api, identity, body)
        call = await run_by_size(size, api.read, body, lambda turn_id: _earlier(known, turn_id))
        check_call(call, size, self.resolver.settings.max_body_bytes)
        messages = await self.images.resolved(call.messages)
        call = call if messages is call.messages else replace(call, messages=messages)
        if identity.name is not None and known is None:
            with self.slots.lent():  # a held request must not keep those out that others wait for
                await self.resolver.admit(identity.name, self.resolver.wanted(identity), request, reservation)
        live, plan = await self._planned(identity, call, size, address.caller.name)
        return ReadCall(live, call, arrival, plan, identity)

    async def _known(
        self, api: AgentApi, identity: Identity, body: Json
    ) -> tuple[Identity, LiveTrajectory | None]:
        """(which trajectory it is, by its name or by an earlier response that it names; that, if it is open)

        Raises:
            RequestError: 409, another proxy writes it.
        """
        recorder = self.resolver.recorder
        if identity.name is None and api.ids is not None:
            turns = (api.ids.turn_of(named) for named in api.ids.in_body(body))
            turn_id = next((turn_id for turn_id in turns if turn_id is not None), None)
            live = None if turn_id is None else recorder.of_turn(turn_id)
            if live is not None:
                identity = replace(identity, name=live.opened.name)
        if identity.name is None:
            return identity, None
        await recorder.recall(identity.name)
        return identity, recorder.find(identity.name)

    async def _planned(
        self, identity: Identity, call: ModelCall, size: int, by: str | None
    ) -> tuple[LiveTrajectory, PromptPlan | None]:
        """The trajectory, and the plan of a large request, which is made in a thread.

        Nothing waits once the trajectory is found: one that is new is drafted once, and recorded next.
        """
        live = await self.resolver.trajectory(identity, call.messages, size, by)
        while True:
            tree = live.tree
            plan = await self.turn_runner.planned(tree, call, size)
            if plan is None:
                return live, None
            live = await self.resolver.trajectory(identity, call.messages, size, by)
            if live.tree is tree or not (live.tree.turns or tree.turns):
                return live, plan  # else the trajectory was read back meanwhile: plan anew


def _earlier(live: LiveTrajectory | None, turn_id: str) -> EarlierTurn | None:
    contents = None if live is None else live.contents
    turn = None if contents is None else contents.tree.by_id(turn_id)
    if contents is None or turn is None:
        return None
    return EarlierTurn(turn.messages, contents.requests.get(turn_id, {}), turn.reply)


FIELD_NAMES_LENGTH = 4096
"""Longest header of field names: clients choose the names."""


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """A request that is being answered, and the client that waits for it: one of several, after a retry."""

    api: AgentApi
    live: LiveTrajectory
    in_flight: InFlightCall
    turn_runner: TurnRunner
    metrics: Metrics
    slots: RequestSlots

    def headers(self, turns: list[CompletedTurn] | None) -> dict[str, str]:
        """What a reply says beside its body. The policy version is known once the turn is done."""
        opened = self.live.opened
        headers = {
            "x-rollbook-trajectory-id": opened.trajectory_id,
            "x-rollbook-turn-id": ",".join(turn.turn_id for turn in self.in_flight.turns),
        }
        not_honoured = self.in_flight.turns[0].requested.honoured
        if not_honoured:
            # Field names are the client's: quoted, whatever they hold is a valid header.
            names = ",".join(quote(name) for name in not_honoured)
            cut = names if len(names) <= FIELD_NAMES_LENGTH else names[:FIELD_NAMES_LENGTH] + "..."
            headers["x-rollbook-not-honoured"] = cut
        if opened.split == QUARANTINE:
            headers["x-rollbook-quarantined"] = quote(opened.name)
        if turns is not None and turns[0].completed.policy_version is not None:
            headers["x-rollbook-policy-version"] = str(turns[0].completed.policy_version)
        return headers

    def error(self, error: Exception) -> Json:
        """An error in the API's form."""
        return self.api.error(*describe(error))

    def sent(self, turns: list[CompletedTurn], *, delivered: bool) -> None:
        """Note that the whole reply was sent, and whether the client was still there for all of it."""
        for turn in turns if delivered else ():
            self.turn_runner.recorder.mark_delivered(self.live, turn.turn_id, "sent")
        self.metrics.answered_call(self.in_flight, turns, delivered=delivered)

    def left(self) -> None:
        """Note that nothing more is sent to this client."""
        self.slots.release()
        self.live.sent()

    async def abort(self) -> None:
        """End the request: every client that waited for it has gone."""
        await self.turn_runner.abort(self.in_flight)


class TurnResponse(Response):
    """The reply to a request that is being answered.

    Args:
        exchange: the request and the client that waits.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._in_flight, self._api = exchange.in_flight, exchange.api
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the reply. An error before the first byte is raised, so that the reply has its status."""
        client = _Client(receive, send, self._in_flight)
        woken = self._in_flight.listen()
        client.on_gone = woken.set
        try:
            if self._in_flight.call.stream:
                await self._stream(client, woken)
            else:
                await self._whole(client, woken)
        finally:
            client.close()
            self._exchange.left()
            if self._in_flight.leave(woken):
                await self._exchange.abort()

    async def _whole(self, client: _Client, woken: asyncio.Event) -> None:
        in_flight, done = self._in_flight, self._in_flight.done
        while not done.done() and not client.gone:
            woken.clear()
            if not await _wait(woken, WHOLE_SILENCE_S):
                await client.body(b" ", self._head(None, "application/json"))
        if not done.done():
            return
        turns = done.result()
        reply = self._api.reply(in_flight.call, turns, in_flight.reader.tokenizer)
        await self._last(client, turns, orjson.dumps(reply), self._head(turns, "application/json"))

    async def _stream(self, client: _Client, woken: asyncio.Event) -> None:
        in_flight, done = self._in_flight, self._in_flight.done
        turn_ids: list[str] = []
        silent = False
        while not client.gone:
            woken.clear()
            if not client.begun and turn_ids != [turn.turn_id for turn in in_flight.turns]:
                # At first, and after a turn was started over on another engine before any of it was shown.
                turn_ids = [turn.turn_id for turn in in_flight.turns]
                writer = self._api.writer(in_flight.call, turn_ids, in_flight.reader.tokenizer)
                head = self._head(None, "text/event-stream; charset=utf-8")
                shown = [_Shown() for _ in turn_ids]
                opening = writer.begin()  # before all else, as events are numbered; sent with the first
            data = b"".join(self._pieces(writer, shown))
            if silent and not data and not done.done():
                data = writer.keep_alive
            if data:
                await client.body(opening + data, head)
                opening = b""
            if done.done():
                break
            silent = not await _wait(woken, STREAM_SILENCE_S)
        if not done.done():
            return
        error = done.exception()
        if error is not None:
            if not client.begun:
                raise error
            assert isinstance(error, Exception)
            await client.body(writer.failed(self._exchange.error(error)), head, more=False)
            return
        turns = done.result()
        rest = b"".join(self._rest(writer, shown, turns)) + writer.end(turns)
        await self._last(client, turns, opening + rest, head)

    def _pieces(self, writer: StreamWriter, shown: list[_Shown]) -> list[bytes]:
        """The final part of what was sampled since the last time."""
        pieces = []
        for choice, turn in enumerate(self._in_flight.turns):
            piece = shown[choice].news(turn.certain(), turn.ids, turn.logprobs)
            if piece is not None:
                pieces.append(writer.piece(choice, *piece))
        return pieces

    def _rest(self, writer: StreamWriter, shown: list[_Shown], turns: list[CompletedTurn]) -> list[bytes]:
        pieces = []
        for choice, turn in enumerate(turns):
            whole = Parsed(turn.reply.get("reasoning_content"), turn.reply.get("content") or "", (), ())
            numbers = turn.completed.logprobs
            logprobs = [] if numbers is None else numbers.tolist()
            piece = shown[choice].news(whole, turn.completed.completion_ids.tolist(), logprobs)
            if piece is not None:
                pieces.append(writer.piece(choice, *piece))
        return pieces

    async def _last(self, client: _Client, turns: list[CompletedTurn], data: bytes, head: _Head) -> None:
        """Send the end. It counts as delivered if the client had not gone before."""
        there = not client.gone
        delivered = False
        try:
            await client.body(data, head, more=False)
            delivered = there
        finally:
            self._exchange.sent(turns, delivered=delivered)

    def _head(self, turns: list[CompletedTurn] | None, kind: str) -> _Head:
        headers = self._exchange.headers(turns) | {"content-type": kind}
        if kind.startswith("text/event-stream"):
            headers |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


_Head = list[tuple[bytes, bytes]]


class _Shown:
    """How much of a choice a client has been sent."""

    def __init__(self) -> None:
        self._reasoning = self._content = self._tokens = 0

    def news(
        self, reply: Parsed, ids: list[int], logprobs: list[float]
    ) -> tuple[str, str, list[tuple[int, float]]] | None:
        """What is new, or None."""
        reasoning, content = (reply.reasoning or "")[self._reasoning :], reply.content[self._content :]
        tokens = list(zip(ids[self._tokens :], logprobs[self._tokens :], strict=False))
        if not (reasoning or content or tokens):
            return None
        self._reasoning += len(reasoning)
        self._content += len(content)
        self._tokens += len(tokens)
        return reasoning, content, tokens


class _Client:
    """The client's end of the connection, watched for a disconnect."""

    def __init__(self, receive: Any, send: Any, in_flight: InFlightCall) -> None:
        self._send, self._in_flight = send, in_flight
        self.begun = False
        self.gone = False
        self.on_gone: Callable[[], None] = lambda: None
        self._watch = asyncio.create_task(until_gone(receive))
        self._watch.add_done_callback(self._ended)

    def _ended(self, watch: asyncio.Task[None]) -> None:
        if watch.cancelled():
            return
        watch.result()  # raises what went wrong, of which nothing follows about the client
        self.gone = True
        self.on_gone()

    async def body(self, data: bytes, head: _Head, *, more: bool = True) -> None:
        """Send bytes, the headers first."""
        if not more:
            self.close()  # with the last byte out, "disconnect" no longer means that the client left
        if not self.begun:
            self.begun = self._in_flight.shown = True
            if not more:
                head = [*head, (b"content-length", str(len(data)).encode())]
            await self._send({"type": "http.response.start", "status": 200, "headers": head})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def close(self) -> None:
        """Stop watching."""
        self._watch.cancel()


async def _wait(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event came within so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
