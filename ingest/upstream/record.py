"""Records turns that pass: what was asked, what came back, and whether it is exact or text only.

Recording must not get in the way: what cannot be recorded is passed on and counted.
"""

from __future__ import annotations

import sys
import time
import traceback
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from rollbook.ingest.access import Caller, Role
from rollbook.ingest.answered import AnsweredTurn
from rollbook.ingest.live import LiveTrajectory
from rollbook.ingest.metrics import Metrics
from rollbook.ingest.model_call import ModelCall
from rollbook.ingest.recorder import Recorder, all_durable, any_lost
from rollbook.ingest.redact import Redactor
from rollbook.ingest.requests import check_recordable
from rollbook.ingest.tokens.normal_form import chain_all
from rollbook.ingest.tokens.tree import TreeTurn, grown
from rollbook.ingest.turn_records import Arrival
from rollbook.ingest.upstream.completed import completed_turn
from rollbook.ingest.upstream.reply import UpstreamReply
from rollbook.ingest.upstream.reply_copy import ReplyRoom
from rollbook.ingest.upstream.request import EarlierResponse, choices_asked
from rollbook.store.errors import RequestError, UnstorableError, WriteFailedError
from rollbook.store.events import Json, Record, TurnCompleted, TurnFailed, TurnRequested
from rollbook.store.ids import new_id
from rollbook.store.redaction import shown
from rollbook.store.siblings import as_sibling

CONTEXT = "upstream"
MOST_REPLY_BYTES = 64 * 2**20
RESPONSES_KEPT = 65536
"""Responses that a later request may name instead of repeating them."""


@dataclass(slots=True, eq=False)
class Passing:
    """A request on its way: its turns, one for each completion that was asked for.

    Attributes:
        redacted: something was taken out of it, so its tokens are not to be kept.
        rests_on: the appends of its trajectory's opening and of the request itself.
        written: the append of how it came out.
        answered: turns that came back.
        settled: whether it was recorded how the request came out.
    """

    live: LiveTrajectory
    call: ModelCall
    requested: list[TurnRequested]
    messages: list[Json]
    hashes: list[bytes]
    parent: TreeTurn | None
    redacted: bool = False
    begun_s: float = field(default_factory=time.perf_counter)
    rests_on: list[Future[int] | None] = field(default_factory=list)
    written: Future[int] | None = None
    answered: list[AnsweredTurn] = field(default_factory=list)
    settled: bool = False

    def begin(self) -> None:
        """It is passed on."""
        self.live.running += 1
        self.live.active_s = time.monotonic()

    def replying(self) -> None:
        """The reply begins. From here on a finish waits for its end: a client may be quicker than we are."""
        self.live.running -= 1
        self.live.sending += 1

    def left(self) -> None:
        """Nothing more will come of a reply that began."""
        self.live.active_s = time.monotonic()
        self.live.sent()


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a response is: the trajectory it was asked in, and the name of the key that asked.

    Attributes:
        key: None: keys are not checked, or it is not known any more.
    """

    trajectory: str
    key: str | None

    def lets(self, caller: Caller, named: str | None) -> bool:
        """Whether a caller may see it, who names a trajectory or None."""
        if named == self.trajectory:
            return True
        if caller.name is None:  # without keys what is named is all that tells agents apart
            return named is None
        return caller.role is Role.operator or (caller.role is Role.writer and caller.name == self.key)


@dataclass(slots=True, eq=False)
class PassageRecorder:
    """Writes what passes into a recorder's log; where the log fails it raises only if it is told to."""

    recorder: Recorder
    metrics: Metrics
    redactor: Redactor = field(default_factory=Redactor)
    policy: str = "actor"
    unrecorded: int = 0
    refuses: bool = False
    """What cannot be recorded is refused; else it passes and is counted."""
    room: ReplyRoom = field(default_factory=lambda: ReplyRoom(MOST_REPLY_BYTES, 4 * MOST_REPLY_BYTES))
    _responses: dict[str, tuple[LiveTrajectory, EarlierResponse]] = field(default_factory=dict)
    _owners: dict[str, Owner] = field(default_factory=dict)

    def earlier(self, response_id: str) -> EarlierResponse | None:
        """The response of that id, if it passed here not long ago."""
        return self._responses[response_id][1] if response_id in self._responses else None

    def of_response(self, response_id: Any) -> LiveTrajectory | None:
        """The open trajectory that has the response of that id."""
        found = self._responses.get(response_id) if isinstance(response_id, str) else None
        return None if found is None or found[0].finished else found[0]

    def owner(self, response_id: str) -> Owner | None:
        """Whose a response is, if it passed here; after a restart, if its trajectory is open."""
        if response_id in self._owners:
            return self._owners[response_id]
        alive = self.recorder.open_trajectories()
        return next((Owner(t.opened.name, None) for t in alive if response_id in t.replies), None)

    def unrecordable(self, turns: int, why: str = "") -> None:
        """Count a request that passes unrecorded, or refuse it.

        Args:
            why: what is wrong with it; none: the store fails.

        Raises:
            RequestError: 503, the store fails; 400, it has no stored form.
        """
        if not self.refuses:
            self.lost(turns, why)
            return
        remedy = "what cannot be recorded is refused (--on-store-failure refuse)"
        if why:
            raise RequestError(400, "not_recordable", f"{why}: {remedy}")
        raise RequestError(503, "store_failed", f"{self.recorder.writer.failure}: {remedy}")

    async def kept(self, passing: Passing) -> None:
        """Where nothing may pass unrecorded, wait until what is known of a request so far is durable.

        Raises:
            RequestError: 503, it is not.
        """
        if not self.refuses:
            return
        try:
            await all_durable([*passing.rests_on, passing.written])
        except (WriteFailedError, UnstorableError) as error:
            text = f"{error}: what cannot be recorded is refused (--on-store-failure refuse)"
            raise RequestError(503, "store_failed", text) from error

    def lost(self, turns: int, why: str = "") -> None:
        """Count what passes unrecorded; say so the first time, and where it is no fault of the store."""
        if not self.unrecorded or why:
            why = why or f"the store fails: {self.recorder.writer.failure}"
            print(
                f"rollbook: traffic passes and is NOT recorded, see rollbook_unrecorded_total: {shown(why)}",
                file=sys.stderr,
                flush=True,
            )
        self.unrecorded += turns
        self.metrics.unrecorded.inc(turns)

    def asked(
        self, live: LiveTrajectory, call: ModelCall, arrival: Arrival, *, redacted: bool = False
    ) -> Passing | None:
        """Record a request, before it is passed on. None: it could not be."""
        choices = choices_asked(call)
        if self.recorder.writer.failure:
            self.unrecordable(choices)
            return None
        messages, hashes = live.tree.known_part(call.messages) if call.messages else ([], chain_all([]))
        candidates = live.tree.parents(messages, hashes, CONTEXT)
        # Whether this turn's ids go on from its parent's nobody knows yet: so it may only hang on text.
        parent = next((c.turn for c in candidates if c.turn.length == 0), None)
        base, shared = live.tree.base(messages, parent)
        reason = "upstream_renders" if candidates else "no_matching_turn" if live.tree.turns else "first_turn"
        wire: Json = {"endpoint": call.endpoint, "digest": arrival.digest}
        wire |= {"retry": arrival.retry} if arrival.retry else {}
        wire |= {"key": arrival.key} if arrival.key is not None else {}
        wire |= _items(live, base, call)
        first = TurnRequested(
            trajectory_id=live.opened.trajectory_id,
            turn_id=new_id(),
            request_id=new_id(),
            parent_turn_id=parent.turn_id if parent else None,
            root_reason=None if parent else reason,
            base_turn_id=base.turn_id if base else None,
            shared_messages=shared,
            messages=messages[shared:],
            request=call.rest,
            requested_model=call.fields.model,
            sampling={},
            honoured={},
            context_key=CONTEXT,
            wire=wire,
        )
        check_recordable([call.rest, first.messages, wire])
        passing = Passing(live, call, [first], messages, hashes, parent, redacted)
        passing.requested += [_sibling(first, choice) for choice in range(1, choices)]
        siblings = (as_sibling(turn, first) for turn in passing.requested[1:])
        asked = self.recorder.record_opening(live, first, *siblings)
        self.recorder.flush()  # at once: the log is to say so whatever comes of it
        passing.rests_on = [live.opening, asked]
        if candidates:
            self.recorder.mark_delivered(live, candidates[0].turn.turn_id, "echoed")
        return passing

    def _append(self, passing: Passing, *records: Record) -> None:
        """Append at once, behind what was noted: whoever settles from now on waits for these too.

        Nothing is written of a request that the log does not have: `durable` counts it.
        """
        if not any_lost(passing.rests_on):
            passing.written = self.recorder.append(*records)

    def settle(self, passing: Passing, reply: UpstreamReply, *, ended: bool) -> None:
        """Record what came back, at once: the client's next request may be here before the disk is.

        Args:
            ended: the reply came to its end by itself.
        """
        passing.settled = True
        self._own(passing, reply.rest.get("id"))
        if ended and reply.rest.get("status") in ("queued", "in_progress"):
            self.lost(1, "a response in the background is asked for later, by requests that only pass")
        if any_lost(passing.rests_on):
            return  # of a request that the log does not have, nothing is known: `durable` counts it
        try:
            records = self._outcome(passing, reply, ended=ended)
        except Exception as error:
            passing.answered.clear()
            self.lost(len(passing.requested), f"a reply has no stored form: {error!r}")
            print(shown(traceback.format_exc()), file=sys.stderr)
            self._append(passing, *_failed(passing, f"the reply cannot be recorded: {error!r}"))
            return
        self._append(passing, *records)

    def _own(self, passing: Passing, response_id: Any) -> None:
        """Remember whose a response is, that its agent may ask for or cancel by its id."""
        if passing.call.endpoint == "/v1/responses" and isinstance(response_id, str):
            key = passing.requested[0].wire.get("key")
            self._owners[response_id] = Owner(passing.live.opened.name, key)
            while len(self._owners) > RESPONSES_KEPT:
                del self._owners[next(iter(self._owners))]

    def _outcome(self, passing: Passing, reply: UpstreamReply, *, ended: bool) -> list[Record]:
        """The records of a reply; its completed turns may be extended from now on."""
        if not reply.choices:
            text = "the upstream's reply holds no completion, or ended before one"
            return _failed(passing, f"the upstream says: {reply.error}" if reply.error else text)
        if passing.redacted:
            reply = reply.without_tokens()
        took = {"engine_us": int((time.perf_counter() - passing.begun_s) * 1e6)}
        unasked = [c.index for c in reply.choices if c.index >= len(passing.requested)]
        siblings = [_sibling(passing.requested[0], index) for index in unasked]
        choices = {choice.index: choice for choice in reply.choices}
        records: list[Record] = [as_sibling(turn, passing.requested[0]) for turn in siblings]
        made: list[tuple[TurnRequested, TurnCompleted, TreeTurn]] = []
        for requested in (*passing.requested, *siblings):
            choice = choices.get(requested.wire.get("choice", 0))
            if choice is None:
                text = "the upstream gave no such choice"
                records.append(TurnFailed(requested.trajectory_id, requested.turn_id, text))
                continue
            completed = completed_turn(
                requested,
                choice,
                reply,
                policy=self.policy,
                timings=took,
                ended=ended and not reply.error,
                redacted=passing.redacted,
            )
            check_recordable([completed.reply, completed.upstream])
            records.append(completed)
            made.append((requested, completed, _grown(passing, requested, completed)))
        passing.requested += siblings
        for requested, completed, turn in made:
            passing.answered.append(AnsweredTurn(requested, completed))
            self._take(passing, requested, completed, turn)
        return records

    def _take(
        self, passing: Passing, requested: TurnRequested, completed: TurnCompleted, turn: TreeTurn
    ) -> None:
        live, call = passing.live, passing.call
        live.take(turn)
        if call.items is not None:
            live.items[turn.turn_id] = call.items
            live.requests[turn.turn_id] = requested.request
        response_id = completed.upstream.get("id")
        if isinstance(response_id, str):
            live.replies.setdefault(response_id, turn.turn_id)
        if call.endpoint == "/v1/responses" and isinstance(response_id, str):
            instructed = bool(call.rest.get("instructions"))
            earlier = EarlierResponse(passing.messages, completed.reply, instructed)
            self._responses[response_id] = (live, earlier)
            while len(self._responses) > RESPONSES_KEPT:
                del self._responses[next(iter(self._responses))]

    def failed(self, passing: Passing, error: str) -> None:
        """Record that nothing came back."""
        passing.settled = True
        self._append(passing, *_failed(passing, error))

    async def durable(self, passing: Passing, *, delivered: bool) -> None:
        """Wait for the disk, and count what it did not take."""
        try:
            await all_durable([*passing.rests_on, passing.written])
        except (WriteFailedError, UnstorableError) as error:
            self.lost(len(passing.requested), "" if isinstance(error, WriteFailedError) else str(error))
            return
        for turn in passing.answered:
            if delivered:
                self.recorder.mark_delivered(passing.live, turn.turn_id, "sent")
            self.metrics.answered(turn, delivered=delivered)


def _sibling(first: TurnRequested, choice: int) -> TurnRequested:
    return replace(first, turn_id=new_id(), wire=first.wire | {"choice": choice})


def _items(live: LiveTrajectory, base: TreeTurn | None, call: ModelCall) -> Json:
    """The messages as sent, where that is another form than chat's: those that the base has not."""
    if call.items is None:
        return {}
    earlier = live.items.get(base.turn_id, []) if base else []
    shared = 0
    for one, other in zip(earlier, call.items, strict=False):
        if one != other:
            break
        shared += 1
    return {"shared_items": shared, "items": call.items[shared:]}


def _failed(passing: Passing, error: str) -> list[Record]:
    return [TurnFailed(r.trajectory_id, r.turn_id, error) for r in passing.requested]


def _grown(passing: Passing, requested: TurnRequested, completed: TurnCompleted) -> TreeTurn:
    """The turn in the tree. One that could not be indexed now could not be after a restart either."""
    chain_all([completed.reply])
    parts = (completed.prompt_ids, completed.completion_ids)
    return grown(
        requested.turn_id, CONTEXT, passing.messages, passing.hashes, completed.reply, passing.parent, parts
    )
