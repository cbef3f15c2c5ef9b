"""Records turns that pass: what was asked, what came back, and whether it is exact or text only.

Recording must not get in the way: what cannot be recorded is passed on and counted.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollbook.ingest.endpoints.history import no_history
from rollbook.ingest.live import LiveTrajectory
from rollbook.ingest.metrics import Metrics
from rollbook.ingest.model_call import ModelCall
from rollbook.ingest.recorder import Recorder
from rollbook.ingest.requests import SamplingFields, check_recordable, validated
from rollbook.ingest.respond import Endpoint
from rollbook.ingest.tokens.normal_form import chain_all
from rollbook.ingest.tokens.tree import TreeTurn, grown
from rollbook.ingest.turns import Arrival
from rollbook.ingest.upstream.reply import UpstreamChoice, UpstreamReply
from rollbook.store.errors import RequestError, WriteFailedError
from rollbook.store.events import (
    Json,
    Record,
    TurnCompleted,
    TurnFailed,
    TurnRequested,
    VersionSpan,
    token_ids,
)
from rollbook.store.ids import new_id
from rollbook.store.trajectory import prompt_sha256

CONTEXT = "upstream"
TEXT_ONLY = "text_only"


@dataclass(slots=True, eq=False)
class Passing:
    """A request on its way: its turns, one for each completion that was asked for."""

    live: LiveTrajectory
    requested: list[TurnRequested]
    messages: list[Json]
    hashes: list[bytes]
    parent: TreeTurn | None
    begun_s: float = field(default_factory=time.perf_counter)


@dataclass(slots=True, eq=False)
class PassageRecorder:
    """Writes what passes into a recorder's log; never raises where the log fails."""

    recorder: Recorder
    metrics: Metrics
    policy: str = "actor"
    unrecorded: int = 0

    def read(self, endpoint: Endpoint, body: Json) -> ModelCall:
        """The request in our form; of one that an upstream may take and we do not, the items as sent."""
        try:
            call = endpoint.read(body, no_history)
            check_recordable(body)
        except RequestError:
            model = body.get("model") if isinstance(body.get("model"), str) else None
            fields = validated(SamplingFields, {"model": model})
            sent: Any = next((body[k] for k in ("messages", "input", "prompt") if k in body), [])
            items = sent if isinstance(sent, list) else [sent]
            rest = {k: v for k, v in body.items() if k not in ("messages", "input", "prompt")}
            return ModelCall(endpoint.path, [], None, fields, rest, items=items)
        if call.prompt is not None:
            piece = {"role": "prompt", "content": body["prompt"]}
            return ModelCall(endpoint.path, [piece], None, call.fields, call.rest)
        return call

    def asked(self, live: LiveTrajectory, call: ModelCall, arrival: Arrival) -> Passing | None:
        """Record a request, before it is passed on. None: it could not be."""
        messages, hashes = live.tree.known_part(call.messages) if call.messages else ([], chain_all([]))
        candidates = live.tree.parents(messages, hashes, CONTEXT)
        # Whether this turn's ids go on from its parent's nobody knows yet: only text may hang on text.
        parent = next((c.turn for c in candidates if c.turn.length == 0), None)
        base, shared = live.tree.base(messages, parent)
        reason = "upstream_renders" if candidates else "no_matching_turn" if live.tree.turns else "first_turn"
        turns = []
        request_id = new_id()
        for choice in range(call.fields.n or 1):
            wire: Json = {"endpoint": call.endpoint, "digest": arrival.digest}
            wire |= {"choice": choice} if choice else {}
            wire |= {"retry": arrival.retry} if arrival.retry else {}
            wire |= {"shared_items": 0, "items": call.items} if call.items is not None else {}
            turns.append(
                TurnRequested(
                    trajectory_id=live.opened.trajectory_id,
                    turn_id=new_id(),
                    request_id=request_id,
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
            )
        if not self._note(live, turns):
            return None
        if candidates:
            self.recorder.mark_delivered(live, candidates[0].turn.turn_id, "echoed")
        return Passing(live, turns, messages, hashes, parent)

    def _note(self, live: LiveTrajectory, records: list[Any]) -> bool:
        if self.recorder.writer.failure:
            self._lost(len(records))
            return False
        self.recorder.record_opening(live)
        self.recorder.note(*records)
        return True

    def _lost(self, turns: int) -> None:
        if not self.unrecorded:
            print(
                "rollbook: the store fails: traffic passes and is NOT recorded", file=sys.stderr, flush=True
            )
        self.unrecorded += turns
        self.metrics.unrecorded.inc(turns)

    async def answered(self, passing: Passing, reply: UpstreamReply, *, whole: bool) -> None:
        """Record what came back.

        Args:
            whole: the reply came to its end, and the client took it.
        """
        took = {"engine_us": int((time.perf_counter() - passing.begun_s) * 1e6)}
        records: list[Record] = []
        done: list[TurnRequested] = []
        for index, requested in enumerate(passing.requested):
            if index < len(reply.choices):
                completed = _completed(requested, reply.choices[index], reply, self.policy, took, whole=whole)
                records.append(completed)
                done.append(requested)
                # At once: the client has the reply, and its next request may be here before the disk is.
                passing.live.take(_grown(passing, requested, completed))
            else:
                records.append(
                    TurnFailed(requested.trajectory_id, requested.turn_id, "the upstream gave no such choice")
                )
        try:
            await self.recorder.write(*records)
        except WriteFailedError:
            self._lost(len(records))
            return
        for requested in done:
            if whole:
                self.recorder.mark_delivered(passing.live, requested.turn_id, "sent")

    def failed(self, passing: Passing, error: str) -> None:
        """Record that nothing came back."""
        if self.recorder.writer.failure:
            self._lost(len(passing.requested))
            return
        self.recorder.note(*(TurnFailed(r.trajectory_id, r.turn_id, error) for r in passing.requested))


def _completed(
    requested: TurnRequested,
    choice: UpstreamChoice,
    reply: UpstreamReply,
    policy: str,
    timings: Json,
    *,
    whole: bool,
) -> TurnCompleted:
    """The record of a choice. Its tokens count only with the prompt's: without, they have no context."""
    exact = bool(choice.ids and reply.prompt_ids and requested.parent_turn_id is None)
    ids = token_ids(choice.ids if exact else [])
    prompt_ids = token_ids(reply.prompt_ids if exact else [])
    logprobs = choice.logprobs if exact else None
    told = {"choice": choice.told} if choice.told else {}
    if not exact:
        kept: Json = {
            "prompt_token_ids": reply.prompt_ids,
            "token_ids": choice.ids,
            "logprobs": choice.logprobs,
        }
        told |= {k: v for k, v in kept.items() if v is not None}
    version = _version(reply.rest) if exact else None
    spans = () if version is None else (VersionSpan(policy, version, 0, len(ids)),)
    semantics = (
        {"kind": "upstream", "of": "as the upstream says"} if logprobs is not None else {"kind": "none"}
    )
    return TurnCompleted(
        trajectory_id=requested.trajectory_id,
        turn_id=requested.turn_id,
        policy=policy if spans else None,
        policy_version=version,
        prompt_ids=prompt_ids,
        completion_ids=ids,
        logprobs=None if logprobs is None else _float32(logprobs),
        version_spans=spans,
        prompt_length=len(prompt_ids),
        prompt_sha256=prompt_sha256(prompt_ids),
        finish_reason=choice.finish_reason or ("unknown" if whole else "abort"),
        reply=choice.message,
        logprob_semantics=semantics,
        flags=[] if exact else [TEXT_ONLY],
        timings=timings,
        upstream=reply.rest | told,
    )


def _float32(values: list[float]) -> Any:
    return np.asarray(values, dtype=np.float32)


def _version(rest: Json) -> int | None:
    """The policy version that SGLang's replies name in their metadata."""
    metadata = rest.get("metadata")
    text = str(metadata.get("weight_version", "")) if isinstance(metadata, dict) else ""
    return int(text) if text.isascii() and text.isdigit() else None


def _grown(passing: Passing, requested: TurnRequested, completed: TurnCompleted) -> TreeTurn:
    parts = (completed.prompt_ids, completed.completion_ids)
    return grown(
        requested.turn_id, CONTEXT, passing.messages, passing.hashes, completed.reply, passing.parent, parts
    )
