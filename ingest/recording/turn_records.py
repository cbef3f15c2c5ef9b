"""The records of a turn: of its request, and of its completion or failure. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import xxhash

from rollbook.engines.engine import Generation, Sampling
from rollbook.ingest.fields import check_recordable
from rollbook.ingest.tokens.tree import Plan, exactly
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.turns.in_flight import InFlightCall, InFlightTurn
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.ingest.turns.reply import ReplyReader
from rollbook.store.events import Json, TurnCompleted, TurnFailed, TurnRequested
from rollbook.store.fold.siblings import as_sibling
from rollbook.store.ids import new_id


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a request came in: the digest of its endpoint and body, which retry the client calls it, the name
    of its key, and the recorded turn that it is a replay of."""

    digest: str
    retry: int = 0
    key: str | None = None
    repeats: str | None = None

    @classmethod
    def of(cls, endpoint: str, body: bytes, retry: int, key: str | None = None) -> Arrival:
        """The arrival of a body at an endpoint."""
        digest = xxhash.xxh3_128(endpoint.encode() + b"\n")
        digest.update(body)
        return cls(digest.hexdigest(), retry, key)

    @classmethod
    def kept(cls, endpoint: str, raw: bytes, sent: Json, body: Json, retry: int, key: str | None) -> Arrival:
        """The arrival of a body as it is recorded: the digest of a body with a weak secret would give it
        away.

        Args:
            sent: what the raw body says.
            body: the same, or what is left of it without secrets.
        """
        return cls.of(endpoint, raw if body is sent else orjson.dumps(body), retry, key)


def requested_records(
    live: LiveTrajectory,
    call: ModelCall,
    plan: Plan,
    key: str,
    honoured: Json,
    arrival: Arrival,
    samplings: Sequence[Sampling],
) -> tuple[list[TurnRequested], list[Any] | None]:
    """(a whole record for each completion that is asked for; the items as sent, for the next request's sake).

    Their messages go on from the first one's, so they are not said again.

    Raises:
        RequestError: 400, the request cannot be written down.
    """
    base = None if plan.base is None else plan.base.turn_id
    items, shared_items = known_items(live, base, call)
    shared = plan.shared_messages
    check_recordable([call.rest, plan.messages[shared:], call.items])
    request_id = new_id()
    records: list[TurnRequested] = []
    for choice, sampling in enumerate(samplings):
        if choice:
            base, shared, shared_items = records[0].turn_id, len(plan.messages), len(items or ())
        records.append(
            TurnRequested(
                trajectory_id=live.opened.trajectory_id,
                turn_id=new_id(),
                request_id=request_id,
                parent_turn_id=plan.parent.turn_id if plan.parent else None,
                root_reason=plan.root_reason,
                base_turn_id=base,
                shared_messages=shared,
                messages=plan.messages[shared:],
                request=call.rest,
                requested_model=call.fields.model,
                sampling=sampling.as_json(),
                honoured=honoured,
                context_key=key,
                wire=_wire(arrival, choice, call, items, shared_items),
            )
        )
    return records, items


def completed_record(
    live: LiveTrajectory, turn: InFlightTurn, plan: Plan, generation: Generation, reader: ReplyReader
) -> TurnCompleted:
    """The record of a generation."""
    reply = reader.reply(generation.completion_ids, generation.finish_reason, turn.turn_id)
    spans = generation.version_spans
    flags = [*reply.flags]
    if plan.twins:
        flags.append("ambiguous_parent")
    if holds_control_tokens(reader, plan):
        flags.append("control_in_input")
    return TurnCompleted(
        trajectory_id=live.opened.trajectory_id,
        turn_id=turn.turn_id,
        policy=spans[-1].policy if spans else None,
        policy_version=spans[-1].version if spans else None,
        prompt_ids=plan.delta_ids,
        completion_ids=generation.completion_ids,
        logprobs=generation.logprobs,
        version_spans=spans,
        prompt_length=len(plan.prompt_ids),
        prompt_sha256=plan.hasher.hexdigest(),
        finish_reason=reply.finish_reason,
        reply=reply.message,
        logprob_semantics=generation.logprob_semantics,
        flags=flags,
        timings=generation.timings,
        routed_experts=generation.routed_experts,
    )


def failed_record(
    live: LiveTrajectory, in_flight: InFlightCall, turn: InFlightTurn, plan: Plan, error: BaseException
) -> TurnFailed:
    """The record of a turn that no engine answered, with the prompt that it had.

    Ids that the first turn of the request holds are not stored again.
    """
    stored = as_sibling(turn.requested, in_flight.first).sibling_of
    shared = stored is not None and turn.turn_id != in_flight.first.turn_id
    return TurnFailed(
        live.opened.trajectory_id,
        turn.turn_id,
        repr(error),
        None if shared else plan.delta_ids,
        len(plan.prompt_ids),
        plan.hasher.hexdigest(),
    )


def holds_control_tokens(reader: ReplyReader, plan: Plan) -> bool:
    """Whether new text of this request spells a control token, such as a file that a tool read."""
    spelled = tuple(reader.tokenizer.special.values())
    return any(
        token in text for text in _texts(plan.messages[plan.shared_messages :]) for token in spelled if token
    )


def _texts(messages: Sequence[Json]) -> list[str]:
    texts = []
    for message in messages:
        content = message.get("content")
        if message.get("role") == "assistant":
            continue
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            texts += [str(p["text"]) for p in content if isinstance(p, dict) and "text" in p]
    return texts


def seeds(call: ModelCall) -> list[int]:
    """A seed for each choice: siblings with the same seed would be identical."""
    fields = call.fields
    if fields.seed is None:
        return [secrets.randbits(63) for _ in range(fields.n or 1)]
    return [(fields.seed + choice + 2**63) % 2**64 - 2**63 for choice in range(fields.n or 1)]


def known_items(live: LiveTrajectory, base: str | None, call: ModelCall) -> tuple[list[Any] | None, int]:
    """(the items as sent, those that the base turn had replaced by its own; how many they are)"""
    if call.items is None:
        return None, 0
    earlier = live.known.items.get(base or "", [])
    shared = 0
    for item, other in zip(earlier, call.items, strict=False):
        if not exactly(item, other):
            break
        shared += 1
    return [*earlier[:shared], *call.items[shared:]], shared


def _wire(arrival: Arrival, choice: int, call: ModelCall, items: list[Any] | None, shared_items: int) -> Json:
    wire: dict[str, Any] = {"endpoint": call.endpoint, "digest": arrival.digest}
    if choice:
        wire["choice"] = choice
    if arrival.retry:
        wire["retry"] = arrival.retry
    if arrival.key is not None:
        wire["key"] = arrival.key
    if arrival.repeats is not None:
        wire["repeats"] = arrival.repeats
    if items is not None:
        wire |= {"shared_items": shared_items, "items": items[shared_items:]}
    return wire
