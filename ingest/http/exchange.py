"""One client's request and its reply: what the reply says beside its body, and what becomes of both."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from rollbook.ingest.endpoints.api import AgentApi
from rollbook.ingest.http.error_replies import describe
from rollbook.ingest.http.metrics import Metrics
from rollbook.ingest.http.request_slots import RequestSlots
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.turns.completed import CompletedTurn
from rollbook.ingest.turns.in_flight import InFlightCall
from rollbook.store.events import QUARANTINE, Json

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
