"""From a request's body to a call that can begin: parse it, check limits, wait for admission, find its
trajectory, plan its prompt."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from starlette.requests import Request

from rollbook.ingest.endpoints.api import AgentApi
from rollbook.ingest.endpoints.history import EarlierTurn
from rollbook.ingest.http.front_door import Address, FrontDoor
from rollbook.ingest.http.request_slots import RequestSlots
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.recording.turn_records import Arrival
from rollbook.ingest.requests.fields import json_object
from rollbook.ingest.requests.large_work import beside
from rollbook.ingest.trajectories.identity import Identity
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.turns.images import ImageLinks
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.ingest.turns.planning import PromptPlan
from rollbook.ingest.turns.request_limits import check_call
from rollbook.ingest.turns.retry import retry_count
from rollbook.store.events import Json


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

    door: FrontDoor
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
        sent = await beside(size, json_object, raw)
        body = await self.door.redacted(sent, size)
        identity = self.door.identity(address, request, body)
        retry = retry_count(request)
        arrival = await beside(size, Arrival.kept, api.path, raw, sent, body, retry, address.caller.name)
        named = () if api.ids is None else api.ids.in_body(body)
        await self.door.stay(request, identity.name, named, raw)
        identity, known = await self._known(api, identity, body)
        call = await beside(size, api.read, body, lambda turn_id: _earlier(known, turn_id))
        check_call(call, size, self.door.options.max_body_bytes)
        call = replace(call, messages=await self.images.resolved(call.messages))
        if identity.name is not None and known is None:
            with self.slots.lent():  # a held request must not keep those out that others wait for
                await self.door.admit(identity.name, self.door.wanted(identity), request, reservation)
        live, plan = await self._planned(identity, call, size, address.caller.name)
        return ReadCall(live, call, arrival, plan, identity)

    async def _known(
        self, api: AgentApi, identity: Identity, body: Json
    ) -> tuple[Identity, LiveTrajectory | None]:
        """(which trajectory it is, by its name or by an earlier response that it names; that, if it is open)

        Raises:
            RequestError: 409, another proxy writes it.
        """
        recorder = self.door.recorder
        if identity.name is None and api.ids is not None:
            turns = (api.ids.turn_of(named) for named in api.ids.in_body(body))
            turn_id = next((turn_id for turn_id in turns if turn_id is not None), None)
            found = None if turn_id is None else recorder.of_turn(turn_id)
            if found is not None:
                identity = replace(identity, name=found.opened.name)
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
        live = await self.door.trajectory(identity, call.messages, size, by)
        while True:
            tree = live.tree
            plan = await self.turn_runner.planned(tree, call, size)
            if plan is None:
                return live, None
            live = await self.door.trajectory(identity, call.messages, size, by)
            if live.tree is tree or not (live.tree.turns or tree.turns):
                return live, plan  # else the trajectory was read back meanwhile: plan anew


def _earlier(live: LiveTrajectory | None, turn_id: str) -> EarlierTurn | None:
    contents = None if live is None else live.contents
    turn = None if contents is None else contents.tree.by_id(turn_id)
    if contents is None or turn is None:
        return None
    return EarlierTurn(turn.messages, contents.requests.get(turn_id, {}), turn.reply)
