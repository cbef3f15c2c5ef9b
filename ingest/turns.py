"""One model call from request to durable turn: plan, record, generate, record, reply."""

from __future__ import annotations

import secrets
from bisect import insort
from dataclasses import dataclass

import numpy as np

from rollbook.ingest.engines.engine import Engine, Generation, Prompt, Sampling
from rollbook.ingest.recorder import LiveTrajectory, Recorder
from rollbook.ingest.reply import Reply, read_reply
from rollbook.ingest.requests import ChatRequest
from rollbook.ingest.tokens.bridge import self_test
from rollbook.ingest.tokens.tree import Plan, TreeTurn, context_key, plan_turn
from rollbook.store.errors import RequestError
from rollbook.store.events import Json, TurnCompleted, TurnFailed, TurnRequested
from rollbook.store.ids import new_id
from rollbook.store.trajectory import prompt_sha256

DEFAULT_MAX_TOKENS = 1024
PLAIN_FIELDS = frozenset({"model", "messages", "tools", "stream", "user", "metadata", "store"})
"""Request fields that ask nothing of an engine."""


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredTurn:
    """A durable turn, ready to be sent."""

    turn_id: str
    reply: Reply
    prompt_tokens: int
    completion_tokens: int
    not_honoured: list[str]
    policy_version: int | None


class TurnTaker:
    """Answers chat requests of a recorder's trajectories with one engine."""

    def __init__(self, recorder: Recorder, engine: Engine) -> None:
        self._recorder, self._engine = recorder, engine
        self._tokenizer = recorder.tokenizer
        self.extension_refused = self_test(recorder.tokenizer)
        """Why turns are never extended with this tokenizer and template, or None."""

    async def take(self, live: LiveTrajectory, chat: ChatRequest, body: Json) -> AnsweredTurn:
        """Answer a request; when this returns, the turn is durable.

        Args:
            body: the request's JSON as sent.

        Raises:
            RequestError: 400, the request cannot be answered; nothing was recorded.
            EngineError: the engine failed; the turn is recorded as failed.
            WriteFailedError: the log failed.
        """
        tools = chat.tools or None
        key = context_key(tools, self._tokenizer.template_digest, self._tokenizer.tokenizer_digest)
        may_extend = self.extension_refused is None
        plan = plan_turn(live.tree, self._tokenizer, chat.messages, tools, key, may_extend=may_extend)
        sampling = self._sampling(chat, len(plan.prompt_ids))
        honoured = {f: False for f in sorted(body) if f not in PLAIN_FIELDS | self._engine.honoured}
        requested = self._requested(live, plan, chat, body, key, sampling, honoured)
        self._recorder.record_opening(live)  # nothing can refuse the request any more
        if plan.echoed is not None:
            self._recorder.mark_delivered(live, plan.echoed.turn_id, "echoed")
        self._recorder.note(requested)
        try:
            generation = await self._engine.generate(Prompt(plan.prompt_ids, chat.messages, tools), sampling)
        except BaseException as error:
            failed = TurnFailed(live.opened.trajectory_id, requested.turn_id, repr(error))
            self._recorder.note(failed)
            raise
        return await self._complete(live, plan, requested, generation, chat.messages)

    async def _complete(
        self,
        live: LiveTrajectory,
        plan: Plan,
        requested: TurnRequested,
        generation: Generation,
        messages: list[Json],
    ) -> AnsweredTurn:
        offered = bool(requested.request.get("tools"))
        ids = generation.completion_ids
        reply = read_reply(
            self._tokenizer,
            ids,
            generation.finish_reason,
            tools_offered=offered,
            turn_id=requested.turn_id,
        )
        spans = generation.version_spans
        completed = TurnCompleted(
            trajectory_id=live.opened.trajectory_id,
            turn_id=requested.turn_id,
            policy=spans[-1].policy if spans else None,
            policy_version=spans[-1].version if spans else None,
            prompt_ids=plan.delta_ids,
            completion_ids=ids,
            logprobs=generation.logprobs,
            version_spans=spans,
            prompt_length=len(plan.prompt_ids),
            prompt_sha256=prompt_sha256(plan.prompt_ids),
            finish_reason=reply.finish_reason,
            reply=reply.message,
            logprob_semantics=generation.logprob_semantics,
            flags=reply.flags,
            timings=generation.timings,
        )
        await self._recorder.write(completed)
        whole = np.concatenate([plan.prompt_ids, ids])
        live.tree.add(TreeTurn(requested.turn_id, requested.context_key, messages, reply.message, whole))
        insort(live.completed, requested.turn_id)  # in turn order: ids sort by when they were asked
        not_honoured = sorted(requested.honoured)
        version = completed.policy_version
        return AnsweredTurn(requested.turn_id, reply, len(plan.prompt_ids), len(ids), not_honoured, version)

    def _sampling(self, chat: ChatRequest, prompt_length: int) -> Sampling:
        wanted = chat.max_completion_tokens or chat.max_tokens
        room = (self._tokenizer.context_length or 2**31) - prompt_length
        if room < 1 or (wanted or 1) > room:
            text = (
                f"the prompt holds {prompt_length} tokens and {wanted or 1} more were asked for, but "
                f"the model's context is {self._tokenizer.context_length}"
            )
            raise RequestError(400, "context_length_exceeded", text)
        return Sampling(
            max_new_tokens=wanted or min(room, DEFAULT_MAX_TOKENS),
            temperature=1.0 if chat.temperature is None else chat.temperature,
            seed=secrets.randbits(63) if chat.seed is None else chat.seed,
        )

    def _requested(
        self,
        live: LiveTrajectory,
        plan: Plan,
        chat: ChatRequest,
        body: Json,
        key: str,
        sampling: Sampling,
        honoured: Json,
    ) -> TurnRequested:
        return TurnRequested(
            trajectory_id=live.opened.trajectory_id,
            turn_id=new_id(),
            request_id=new_id(),
            parent_turn_id=plan.parent.turn_id if plan.parent else None,
            root_reason=plan.root_reason,
            base_turn_id=plan.base.turn_id if plan.base else None,
            shared_messages=plan.shared_messages,
            messages=chat.messages[plan.shared_messages :],
            request={k: v for k, v in body.items() if k != "messages"},
            requested_model=chat.model,
            sampling=sampling.as_json(),
            honoured=honoured,
            context_key=key,
        )
