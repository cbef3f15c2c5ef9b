"""Records forwarded turns: request, reply, and whether the reply is exact (it has all token ids) or text
only.

Recording does not block traffic: what cannot be recorded is forwarded and counted.

A request for completions may hold several prompts, n completions of each: choice i answers prompt i // n.
An upstream tells the ids of prompts beside each choice, or once for the whole reply. Ids that are taken for
another prompt's would be a wrong sample that looks exact; so what cannot be true is not believed at all.

Copies of forwarded replies are kept until they are recorded; each is bounded, and so is their sum.

A request that is forwarded to an upstream: its prompts, its turns, and their records.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from cachetools import FIFOCache

from rollbook.edge.keys import Caller, Role
from rollbook.engines.weights.name import version_in
from rollbook.ingest.endpoints.api import AgentApi
from rollbook.ingest.endpoints.upstream_reply import AskedPrompts, UpstreamChoice, UpstreamReply, are_ids
from rollbook.ingest.fields import check_recordable
from rollbook.ingest.recording.metrics import Metrics
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.redact import Redactor
from rollbook.ingest.recording.run_writer import all_durable, any_lost
from rollbook.ingest.recording.turn_records import Arrival, known_items
from rollbook.ingest.tokens.message_form import chain_all
from rollbook.ingest.tokens.tree import TreeTurn, grown
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.turns.in_flight import CompletedTurn
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store.errors import RequestError, UnstorableError, WriteFailedError
from rollbook.store.events import (
    Json,
    Record,
    TurnCompleted,
    TurnFailed,
    TurnRequested,
    VersionSpan,
    token_ids,
)
from rollbook.store.fold.siblings import as_sibling
from rollbook.store.fold.trajectory import prompt_sha256
from rollbook.store.ids import new_id
from rollbook.store.redaction import shown

CONTEXT = "upstream"


@dataclass(frozen=True, slots=True, eq=False)
class PlacedPrompt:
    """A prompt of a request among the turns of its trajectory.

    Attributes:
        requested: the first of its completions.
        echoed: the turn whose reply it shows.
    """

    messages: list[Json]
    hashes: list[bytes]
    parent: TreeTurn | None
    requested: TurnRequested
    echoed: TreeTurn | None


@dataclass(slots=True, eq=False)
class ForwardedCall:
    """A forwarded request, with a turn for each completion that it asks for.

    Attributes:
        asked: its prompts, which are `placed` one by one.
        redacted: something was taken out of it, so its tokens are not to be kept.
        depends_on: the appends of its trajectory's opening and of the request itself.
        written: the append of how it came out.
        answered: turns that came back.
        settled: whether it was recorded how the request came out.
    """

    api: AgentApi
    live: LiveTrajectory
    call: ModelCall
    asked: AskedPrompts
    placed: list[PlacedPrompt]
    requested: list[TurnRequested]
    redacted: bool = False
    begun_s: float = field(default_factory=time.perf_counter)
    depends_on: list[Future[int] | None] = field(default_factory=list)
    written: Future[int] | None = None
    answered: list[CompletedTurn] = field(default_factory=list)
    settled: bool = False

    def begin(self) -> None:
        """Note that the request is forwarded."""
        self.live.running += 1
        self.live.active_s = time.monotonic()

    def refused(self) -> None:
        """Note that the request is not forwarded after all."""
        self.live.running -= 1

    def replying(self) -> None:
        """Note that the reply begins. From here on a finish waits for its end: a client may be faster."""
        self.live.running -= 1
        self.live.sending += 1

    def left(self) -> None:
        """Note the end of a reply that began."""
        self.live.active_s = time.monotonic()
        self.live.sent()


def which_prompt(prompts: AskedPrompts, prompt: int) -> Json:
    """Which of a request's several prompts a turn answers."""
    return {"prompt": prompt} if len(prompts.prompts) > 1 else {}


def of_choice(forwarded: ForwardedCall, choice: int) -> TurnRequested:
    """The request for one completion. Completions of one prompt share the messages of the first."""
    prompt, each = forwarded.asked.of(choice), forwarded.asked.each
    placed = forwarded.placed[prompt or 0]
    first = placed.requested
    if prompt is None:  # it was not asked for, so its prompt is unknown
        wire = {k: v for k, v in first.wire.items() if k != "prompt"} | {"choice": choice}
        return replace(first, turn_id=new_id(), base_turn_id=None, shared_messages=0, messages=[], wire=wire)
    if choice == prompt * each:
        return replace(first, wire=first.wire | ({"choice": choice} if choice else {}))
    wire = first.wire | {"choice": choice}
    if "items" in wire:
        wire |= {"shared_items": wire["shared_items"] + len(wire["items"]), "items": []}
    return replace(
        first,
        turn_id=new_id(),
        base_turn_id=first.turn_id,
        shared_messages=len(placed.messages),
        messages=[],
        wire=wire,
    )


def sent_items(live: LiveTrajectory, base: TreeTurn | None, call: ModelCall) -> Json:
    """The messages as sent, where their form is not chat's, without those of the base turn."""
    items, shared = known_items(live, base.turn_id if base else None, call)
    return {} if items is None else {"shared_items": shared, "items": items[shared:]}


def grown_turn(forwarded: ForwardedCall, requested: TurnRequested, completed: TurnCompleted) -> TreeTurn:
    """The completed turn for the tree. A turn that cannot be indexed now could not be after a restart
    either."""
    chain_all([completed.reply])
    parts = (completed.prompt_ids, completed.completion_ids)
    prompt = forwarded.asked.of(requested.wire.get("choice", 0))
    if prompt is None:
        return grown(requested.turn_id, CONTEXT, [], chain_all([]), completed.reply, None, parts)
    placed = forwarded.placed[prompt]
    node = (placed.messages, placed.hashes, completed.reply, placed.parent)
    return grown(requested.turn_id, CONTEXT, *node, parts)


logger = logging.getLogger(__name__)

MOST_REPLY_BYTES = 64 * 2**20
RESPONSES_KEPT = 16_384
"""How many responses' owners are remembered; owners in open trajectories are always known."""
UNRESOLVED = "unresolved_reference"


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a response: the trajectory of its request, and the name of the key.

    Attributes:
        key: None: keys are not checked, or it is not known any more.
    """

    trajectory: str
    key: str | None

    def lets(self, caller: Caller, named: str | None) -> bool:
        """Whether a caller, whose request names this trajectory or None, may see the response."""
        if named == self.trajectory:
            return True
        if (
            caller.name is None
        ):  # without keys agents are distinguished only by the trajectories that they name
            return named is None
        return caller.role is Role.operator or (caller.role is Role.writer and caller.name == self.key)


@dataclass(slots=True, eq=False)
class UpstreamRecorder:
    """Records forwarded traffic. If the log fails, it raises only with `refuses`."""

    recorder: Recorder
    metrics: Metrics
    redactor: Redactor = field(default_factory=Redactor)
    policy: str = "actor"
    unrecorded: int = 0
    refuses: bool = False
    """Whether requests that cannot be recorded are refused; else they pass and are counted."""
    room: ReplyBudget = field(default_factory=lambda: ReplyBudget(MOST_REPLY_BYTES, 4 * MOST_REPLY_BYTES))
    _owners: FIFOCache[str, Owner] = field(default_factory=lambda: FIFOCache(RESPONSES_KEPT))
    _warned_spells: int = -1

    def referred(self, api: AgentApi, body: Json, caller: Caller) -> LiveTrajectory | None:
        """The open trajectory that has a response which a request names, or an item of one.

        Args:
            caller: of a request that names no trajectory; another caller's is never extended.
        """
        for named in () if api.ids is None else api.ids.in_body(body):
            owner, live = self.owner(named), self.recorder.trajectories.of_response(named)
            if live is not None and owner and owner.lets(caller, None):
                return live
        return None

    def owner(self, response_id: str) -> Owner | None:
        """Whose a response is, or an item of one, if it passed here; later, if its trajectory is open."""
        if response_id in self._owners:
            return self._owners[response_id]
        live = self.recorder.trajectories.of_response(response_id)
        return None if live is None else Owner(live.opened.name, None)

    def knows(self, response_id: str) -> bool:
        """Whether a response of that id passed here."""
        return self.owner(response_id) is not None

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
        raise RequestError(503, "store_failed", f"{self._trouble()}: {remedy}")

    def _trouble(self) -> str:
        writer = self.recorder.writer
        return writer.failure or writer.waiting or "it does not become durable in time"

    async def kept(self, forwarded: ForwardedCall) -> None:
        """With `refuses`, wait until the records of a request so far are durable.

        Raises:
            RequestError: 503, it is not.
        """
        if not self.refuses:
            return
        try:
            await all_durable([*forwarded.depends_on, forwarded.written])
        except (WriteFailedError, UnstorableError) as error:
            text = f"{error}: what cannot be recorded is refused (--on-store-failure refuse)"
            raise RequestError(503, "store_failed", text) from error

    def lost(self, turns: int, why: str = "") -> None:
        """Count what passes unrecorded, and warn: once in each spell of a failing store, and for every other
        cause."""
        spells = self.recorder.writer.spells
        if self._warned_spells != spells or why:
            self._warned_spells = spells
            why = why or f"the store fails: {self._trouble()}"
            logger.warning(
                "traffic passes and is NOT recorded, see rollbook_unrecorded_total: %s", shown(why)
            )
        self.unrecorded += turns
        self.metrics.unrecorded.inc(turns)

    def asked(
        self,
        api: AgentApi,
        live: LiveTrajectory,
        call: ModelCall,
        arrival: Arrival,
        *,
        redacted: bool = False,
    ) -> ForwardedCall | None:
        """Record a request, before it is passed on. None: it could not be."""
        prompts = api.upstream.prompts(call)
        if self.recorder.writer.failure:
            self.unrecordable(prompts.choices)
            return None
        wire: Json = {"endpoint": call.endpoint, "digest": arrival.digest}
        wire |= {"retry": arrival.retry} if arrival.retry else {}
        wire |= {"key": arrival.key} if arrival.key is not None else {}
        wire |= {"unresolved": list(call.unresolved)} if call.unresolved else {}
        request_id = new_id()
        placed = [
            self._placed(live, call, messages, request_id, wire | which_prompt(prompts, prompt))
            for prompt, messages in enumerate(prompts.prompts)
        ]
        forwarded = ForwardedCall(api, live, call, prompts, placed, [], redacted)
        forwarded.requested = [of_choice(forwarded, choice) for choice in range(prompts.choices)]
        first = forwarded.requested[0]
        check_recordable([call.rest, *([p.requested.messages, p.requested.wire] for p in placed)])
        siblings = (as_sibling(turn, first) for turn in forwarded.requested[1:])
        forwarded.depends_on = [self.recorder.record_opening(live, first, *siblings)]
        self.recorder.flush()  # at once, so that the log holds the request whatever becomes of it
        forwarded.depends_on.insert(0, live.opening)
        for prompt in placed:
            if prompt.echoed is not None:
                self.recorder.mark_delivered(live, prompt.echoed.turn_id, "echoed")
        return forwarded

    def _placed(
        self, live: LiveTrajectory, call: ModelCall, sent: list[Json], request_id: str, wire: Json
    ) -> PlacedPrompt:
        """A prompt and the request for the first of its completions."""
        messages, hashes = live.tree.known_part(sent) if sent else ([], chain_all([]))
        # A request that lacks messages only appears to continue a turn that it matches.
        candidates = [] if call.unresolved else live.tree.parents(messages, hashes, CONTEXT)
        # Whether its ids continue its parent's is not known yet, so the parent may only be a turn of text.
        parent = next((c.turn for c in candidates if c.turn.length == 0), None)
        base, shared = live.tree.base(messages, parent)
        reason = "upstream_renders" if candidates else "no_matching_turn" if live.tree.turns else "first_turn"
        requested = TurnRequested(
            trajectory_id=live.opened.trajectory_id,
            turn_id=new_id(),
            request_id=request_id,
            parent_turn_id=parent.turn_id if parent else None,
            root_reason=UNRESOLVED if call.unresolved else None if parent else reason,
            base_turn_id=base.turn_id if base else None,
            shared_messages=shared,
            messages=messages[shared:],
            request=call.rest,
            requested_model=call.fields.model,
            sampling={},
            honoured={},
            context_key=CONTEXT,
            wire=wire | sent_items(live, base, call),
        )
        return PlacedPrompt(messages, hashes, parent, requested, candidates[0].turn if candidates else None)

    def _append(self, forwarded: ForwardedCall, *records: Record) -> None:
        """Append at once, behind what was noted: a request that settles from now on waits for these too.

        Nothing is written of a request that the log does not have: `durable` counts it.
        """
        if not any_lost(forwarded.depends_on):
            forwarded.written = self.recorder.append(*records)

    def settle(self, forwarded: ForwardedCall, reply: UpstreamReply, *, ended: bool) -> None:
        """Record what came back, at once: the client's next request may arrive before the write is durable.

        Args:
            ended: the reply came to its end by itself.
        """
        forwarded.settled = True
        self._own(forwarded, reply)
        if ended and reply.rest.get("status") in ("queued", "in_progress"):
            self.lost(1, "a response in the background is asked for later, by requests that only pass")
        if any_lost(forwarded.depends_on):
            return  # of a request that the log does not have, nothing is known: `durable` counts it
        try:
            records = self._outcome(forwarded, reply, ended=ended)
        except Exception as error:
            forwarded.answered.clear()
            self.lost(len(forwarded.requested), f"a reply has no stored form: {error!r}")
            logging.getLogger(__name__).exception("rollbook: a reply cannot be recorded")
            self._append(forwarded, *_failed(forwarded, f"the reply cannot be recorded: {error!r}"))
            return
        self._append(forwarded, *records)

    def _own(self, forwarded: ForwardedCall, reply: UpstreamReply) -> None:
        """Remember the owner of a response and its items: later requests may name their ids."""
        if forwarded.api.ids is not None:
            owner = Owner(forwarded.live.opened.name, forwarded.requested[0].wire.get("key"))
            self._owners.update(dict.fromkeys(forwarded.api.ids.of_reply(reply), owner))

    def _outcome(self, forwarded: ForwardedCall, reply: UpstreamReply, *, ended: bool) -> list[Record]:
        """The records of a reply; its completed turns may be extended from now on."""
        if not reply.choices:
            text = "the upstream's reply holds no completion, or ended before one"
            return _failed(forwarded, f"the upstream says: {reply.error}" if reply.error else text)
        if forwarded.redacted:
            reply = reply.without_tokens()
        took = {"engine_us": int((time.perf_counter() - forwarded.begun_s) * 1e6)}
        unasked = [c.index for c in reply.choices if c.index >= len(forwarded.requested)]
        siblings = [of_choice(forwarded, index) for index in unasked]
        choices = {choice.index: choice for choice in reply.choices}
        prompts = prompt_ids(forwarded.asked, reply)
        records: list[Record] = [as_sibling(turn, forwarded.requested[0]) for turn in siblings]
        completions: list[tuple[TurnRequested, TurnCompleted, TreeTurn]] = []
        for requested in (*forwarded.requested, *siblings):
            choice = choices.get(requested.wire.get("choice", 0))
            if choice is None:
                text = "the upstream gave no such choice"
                records.append(TurnFailed(requested.trajectory_id, requested.turn_id, text))
                continue
            completed = completed_turn(
                requested,
                choice,
                reply,
                prompt_ids=prompts.get(choice.index),
                policy=self.policy,
                timings=took,
                ended=ended and not reply.error,
                redacted=forwarded.redacted,
            )
            check_recordable([completed.reply, completed.upstream])
            records.append(completed)
            completions.append((requested, completed, grown_turn(forwarded, requested, completed)))
        forwarded.requested += siblings
        for requested, completed, turn in completions:
            forwarded.answered.append(CompletedTurn(requested, completed))
            self._take(forwarded, requested, completed, turn)
        return records

    def _take(
        self, forwarded: ForwardedCall, requested: TurnRequested, completed: TurnCompleted, turn: TreeTurn
    ) -> None:
        live = forwarded.live
        if live.contents is None:
            return  # dropped from memory meanwhile: it is read back from the log
        items, _ = known_items(live, requested.base_turn_id, forwarded.call)
        self.recorder.trajectories.take(live, turn, requested.request, items, completed)

    def failed(self, forwarded: ForwardedCall, error: str) -> None:
        """Record that nothing came back."""
        forwarded.settled = True
        self._append(forwarded, *_failed(forwarded, error))

    async def durable(self, forwarded: ForwardedCall, *, delivered: bool) -> None:
        """Wait for the disk, and count what it did not take."""
        try:
            await all_durable([*forwarded.depends_on, forwarded.written])
        except (WriteFailedError, UnstorableError) as error:
            self.lost(len(forwarded.requested), "" if isinstance(error, WriteFailedError) else str(error))
            return
        for turn in forwarded.answered:
            if delivered:
                self.recorder.mark_delivered(forwarded.live, turn.turn_id, "sent")
            self.metrics.answered(turn, delivered=delivered)


def _failed(forwarded: ForwardedCall, error: str) -> list[Record]:
    return [TurnFailed(r.trajectory_id, r.turn_id, error) for r in forwarded.requested]


TEXT_ONLY = "text_only"
REDACTED = "redacted"
INCOMPLETE = "incomplete_request"
"""Flag: the request names content that never passed here, so its recorded messages lack it."""


def completed_turn(
    requested: TurnRequested,
    choice: UpstreamChoice,
    reply: UpstreamReply,
    *,
    prompt_ids: list[int] | None,
    policy: str,
    timings: Json,
    ended: bool,
    redacted: bool,
) -> TurnCompleted:
    """The record of a choice. Its ids are used only if the prompt's ids are known too.

    Args:
        prompt_ids: those of the prompt that it answers, where that is certain.
        ended: the reply came to its end by itself.
        redacted: something was taken out of the text, so its tokens are not to be kept.
    """
    exact = bool(choice.ids and prompt_ids)
    ids = token_ids((choice.ids or []) if exact else [])
    asked_ids = token_ids((prompt_ids or []) if exact else [])
    logprobs = choice.logprobs if exact else None
    version = _version(reply.rest) if exact else None
    spans = () if version is None else (VersionSpan(policy, version, 0, len(ids)),)
    semantics = (
        {"kind": "upstream", "of": "as the upstream says"} if logprobs is not None else {"kind": "none"}
    )
    flagged = {TEXT_ONLY: not exact, REDACTED: redacted, INCOMPLETE: "unresolved" in requested.wire}
    return TurnCompleted(
        trajectory_id=requested.trajectory_id,
        turn_id=requested.turn_id,
        policy=policy if spans else None,
        policy_version=version,
        prompt_ids=asked_ids,
        completion_ids=ids,
        logprobs=None if logprobs is None else _float32(logprobs),
        version_spans=spans,
        prompt_length=len(asked_ids),
        prompt_sha256=prompt_sha256(asked_ids),
        finish_reason=choice.finish_reason or ("unknown" if ended else "abort"),
        reply=choice.message,
        logprob_semantics=semantics,
        flags=[flag for flag, raised in flagged.items() if raised],
        timings=timings,
        upstream=reply.rest | _upstream_fields(choice, reply, exact=exact),
    )


def _upstream_fields(choice: UpstreamChoice, reply: UpstreamReply, *, exact: bool) -> Json:
    fields: Json = {"choice": choice.extra} if choice.extra else {}
    if reply.error:
        fields["error"] = reply.error
    if not exact:
        prompt_ids = reply.prompt_ids if choice.prompt_ids is None else choice.prompt_ids
        raw = {"prompt_token_ids": prompt_ids, "token_ids": choice.ids, "logprobs": choice.logprobs}
        fields |= {k: v for k, v in raw.items() if v is not None}
    return fields


def _float32(values: list[float]) -> Any:
    return np.asarray(values, dtype=np.float32)


def _version(rest: Json) -> int | None:
    """The policy version that SGLang's replies name in their metadata."""
    metadata = rest.get("metadata")
    return version_in(metadata.get("weight_version")) if isinstance(metadata, dict) else None


def prompt_ids(prompts: AskedPrompts, reply: UpstreamReply) -> dict[int, list[int]]:
    """Choice -> the ids of its prompt. Choices whose ids are missing or implausible are left out."""
    several = len(prompts.prompts) > 1
    if not prompts.certain or (several and not reply.placed):
        return {}
    reported: dict[int, list[Any]] = {}
    for choice in reply.choices:
        prompt = prompts.of(choice.index)
        if choice.prompt_ids is not None and prompt is not None:
            reported.setdefault(prompt, []).append(choice.prompt_ids)
    if reply.prompt_ids is not None and not several:
        reported.setdefault(0, []).append(reply.prompt_ids)
    agreed = {prompt: ids[0] for prompt, ids in reported.items() if _agree(ids)}
    agreed = {p: ids for p, ids in agreed.items() if _can_be(prompts.prompts[p], ids)}
    agreed = {p: agreed[p] for p in agreed if _alone(p, agreed, reported, prompts.prompts)}
    of_choices = [(choice.index, prompts.of(choice.index)) for choice in reply.choices]
    return {choice: agreed[prompt] for choice, prompt in of_choices if prompt in agreed}


def _agree(candidates: Sequence[Any]) -> bool:
    """Whether all ids given for one prompt are equal, and valid."""
    return bool(candidates[0]) and are_ids(candidates[0]) and all(ids == candidates[0] for ids in candidates)


def _can_be(messages: Sequence[Json], ids: list[int]) -> bool:
    """Whether ids are those of a prompt that was sent as ids: an upstream may put one in front, or cut."""
    sent = messages[0].get("content") if messages and messages[0].get("role") == "prompt" else None
    if not are_ids(sent):
        return True
    assert isinstance(sent, list)
    longer, shorter = (sent, ids) if len(sent) > len(ids) else (ids, sent)
    return longer[len(longer) - len(shorter) :] == shorter


def _alone(
    prompt: int,
    agreed: Mapping[int, list[int]],
    reported: Mapping[int, list[Any]],
    prompts: Sequence[list[Json]],
) -> bool:
    """Whether no other prompt contradicts its ids: other prompts have other ids, and equal ones the same."""
    content = prompts[prompt][0].get("content") if len(prompts) > 1 else None
    for other, ids in reported.items():
        if other != prompt and (prompts[other][0].get("content") == content) != (ids[0] == agreed[prompt]):
            return False
    return True


class ReplyBudget:
    """Memory for all copies. When it is full the largest copy is dropped: that reply alone is not recorded.

    Args:
        each: most bytes of one copy.
        most: most bytes of all.
    """

    def __init__(self, each: int, most: int) -> None:
        self.each, self._most = each, most
        self._taken = 0
        self._copies: set[ReplyCopy] = set()

    def take(self, copy: ReplyCopy, size: int) -> None:
        """Account for a copy's growth; drop the largest copies while there is too little room."""
        self._copies.add(copy)
        self._taken += size
        while self._taken > self._most:
            max(self._copies, key=lambda item: item.size).give_up()

    def leave(self, copy: ReplyCopy) -> None:
        """Release a copy's room."""
        if copy in self._copies:
            self._copies.discard(copy)
            self._taken -= copy.size


class ReplyCopy:
    """The bytes of a reply so far; nothing once they are too many."""

    def __init__(self, room: ReplyBudget) -> None:
        self.size = 0
        self.given_up = False
        self._room = room
        self._parts: list[bytes] = []

    def add(self, data: bytes) -> None:
        """Add bytes of the reply."""
        if self.given_up:
            return
        self.size += len(data)
        self._parts.append(data)
        self._room.take(self, len(data))
        if self.size > self._room.each:
            self.give_up()

    def give_up(self) -> None:
        """Drop the copy; the rest of the reply is not kept."""
        self.given_up = True
        self.close()

    def close(self) -> None:
        """Free the copy."""
        self._room.leave(self)
        self._parts.clear()

    def whole(self) -> bytes:
        """All bytes so far."""
        return b"".join(self._parts)
