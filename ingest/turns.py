"""One model call from request to durable turns: plan, record, generate, record."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from rollbook.ingest.answered import AnsweredTurn
from rollbook.ingest.engines.engine import Engine, Generation, Prompt, Sampling, unheard
from rollbook.ingest.live import LiveTrajectory
from rollbook.ingest.model_call import ModelCall, check_images, images_of, sampling_of, unhonoured
from rollbook.ingest.recorder import Recorder
from rollbook.ingest.replies.detect import opens_reasoning
from rollbook.ingest.replies.family import Family
from rollbook.ingest.reply import Reading
from rollbook.ingest.requests import check_recordable
from rollbook.ingest.running import RunningCall, RunningTurn
from rollbook.ingest.tokens.bridge import Bridges
from rollbook.ingest.tokens.tree import Plan, TurnTree, context_key, exactly, plan_prompt, plan_turn
from rollbook.store.errors import EngineError, RequestError
from rollbook.store.events import Json, TurnCompleted, TurnFailed, TurnRequested
from rollbook.store.ids import new_id

RAW = "raw prompts"


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a request came in: the digest of its endpoint and body, and which retry the client calls it."""

    digest: str
    retry: int = 0

    @classmethod
    def of(cls, endpoint: str, body: bytes, retry: int) -> Arrival:
        """The arrival of a body at an endpoint."""
        return cls(xxhash.xxh3_128_hexdigest(endpoint.encode() + b"\n" + body), retry)


@dataclass(slots=True, eq=False)
class TurnTaker:
    """Answers requests of a recorder's trajectories with one engine.

    Attributes:
        hold_s: how long a request waits for an engine whose weights are being replaced.
    """

    recorder: Recorder
    engine: Engine
    bridges: Bridges
    family: Family
    hold_s: float = 110.0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def begin(self, live: LiveTrajectory, call: ModelCall, arrival: Arrival) -> RunningCall:
        """Record a request and begin to answer it.

        Raises:
            RequestError: it cannot be answered; nothing was recorded.
        """
        check_images(call, self.engine.name, takes_images=self.engine.takes_images)
        tokenizer = self.bridges.tokenizer
        plan, key = self._plan(live.tree, call)
        draws = _seeds(call)
        samplings = [
            sampling_of(call, seed, len(plan.prompt_ids), tokenizer.context_length) for seed in draws
        ]
        reading = self._reading(call, plan)
        base = None if plan.base is None else plan.base.turn_id
        items, shared_items = _known_items(live, base, call)
        check_recordable([call.rest, plan.messages[plan.shared_messages :], call.items])
        honoured = unhonoured(call, self.engine.honoured)
        request_id = new_id()
        grows = call.stream or bool(call.stops)
        turns: list[RunningTurn] = []
        shared = plan.shared_messages
        for choice, sampling in enumerate(samplings):
            if choice:  # a sibling asks what the first one asks: nothing of it is stored again
                base, shared, shared_items = turns[0].turn_id, len(plan.messages), len(items or ())
            wire = _wire(arrival, choice, call, items, shared_items)
            requested = TurnRequested(
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
                wire=wire,
            )
            turns.append(RunningTurn(requested, sampling, reading, grows=grows))
        self.recorder.record_opening(live)  # nothing can refuse the request any more
        if plan.echoed is not None:
            self.recorder.mark_delivered(live, plan.echoed.turn_id, "echoed")
        self.recorder.note(*(turn.requested for turn in turns))
        running = RunningCall(call, turns, reading, items)
        live.begun(running, arrival.digest)
        task = asyncio.create_task(self._answer(live, running, plan))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return running

    def stored(self, call: ModelCall, turns: Sequence[AnsweredTurn]) -> RunningCall:
        """A request that was answered before, as if it had just ended."""
        reading = Reading(self.bridges.tokenizer, self.family)
        nothing = Sampling(0, 0.0, 0)
        ended = [RunningTurn(t.requested, nothing, reading, grows=False) for t in turns]
        running = RunningCall(call, ended, reading)
        running.done.set_result(list(turns))
        return running

    async def drained(self) -> None:
        """Wait until nothing runs any more."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def abort(self, running: RunningCall) -> None:
        """End a request that nobody waits for; what was sampled is recorded."""
        for turn in running.turns:
            await self.engine.abort(turn.turn_id)

    def _plan(self, tree: TurnTree, call: ModelCall) -> tuple[Plan, str]:
        tokenizer = self.bridges.tokenizer
        if call.prompt is not None:
            key = context_key([], RAW, tokenizer.tokenizer_digest, {})
            return plan_prompt(tree, tokenizer, call.prompt, key), key
        digests = (tokenizer.template_digest, tokenizer.tokenizer_digest)
        key = context_key(call.tools, *digests, call.template_kwargs)
        return plan_turn(tree, self.bridges, call.messages, call.tools, key, call.template_kwargs), key

    def _reading(self, call: ModelCall, plan: Plan) -> Reading:
        tokenizer = self.bridges.tokenizer
        raw = call.prompt is not None
        # The end of a prompt says whether the model answers inside a reasoning block; 16 ids hold its marker.
        end = "" if raw else tokenizer.decode(plan.prompt_ids[-16:], special=True)
        tools = call.tools if call.tool_calls_wanted else None
        return Reading(tokenizer, self.family, tools, opens_reasoning(end), call.stops, raw)

    async def _answer(self, live: LiveTrajectory, running: RunningCall, plan: Plan) -> None:
        """Answer a request; whatever happens, its future is resolved and the trajectory knows."""
        try:
            await self._let_in()
            # All siblings come to an end, also where one fails: each is a turn of its own.
            ends = [self._turn(live, running, turn, plan) for turn in running.turns]
            answers = await asyncio.gather(*ends, return_exceptions=True)
            failure = next((a for a in answers if isinstance(a, BaseException)), None)
            if failure is not None:
                raise failure
            running.done.set_result([a for a in answers if isinstance(a, AnsweredTurn)])
        except BaseException as error:
            self._fail(live, running, error)
        finally:
            live.ended(running)

    def _fail(self, live: LiveTrajectory, running: RunningCall, error: BaseException) -> None:
        for turn in running.turns:
            if not turn.ended:
                turn.ended = True
                self.recorder.note(TurnFailed(live.opened.trajectory_id, turn.turn_id, repr(error)))
        shown = error if isinstance(error, Exception) else EngineError(f"the request was cut off: {error!r}")
        running.done.set_exception(shown)

    async def _let_in(self) -> None:
        try:
            async with asyncio.timeout(self.hold_s):
                await self.engine.ready()
        except TimeoutError:
            text = f"the engine's weights are being replaced, and were not ready within {self.hold_s:g} s"
            raise RequestError(503, "engine_held", text) from None

    async def _turn(
        self, live: LiveTrajectory, running: RunningCall, turn: RunningTurn, plan: Plan
    ) -> AnsweredTurn:
        """Sample one completion and record it."""
        stopping: list[asyncio.Task[None]] = []

        def heard(ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
            turn.hear(ids, logprobs)
            if turn.stopped and not stopping and "stop" not in self.engine.honoured:
                stopping.append(asyncio.create_task(self.engine.abort(turn.turn_id)))
            running.changed()

        call = running.call
        prompt = Prompt(
            plan.prompt_ids,
            call.messages,
            call.tools,
            turn.turn_id,
            live.opened.trajectory_id,
            images_of(call.messages),
        )
        try:
            # Who needs only the end is not told on the way: an engine may then answer all at once.
            generation = await self.engine.generate(prompt, turn.sampling, heard if turn.grows else unheard)
        except BaseException as error:
            turn.ended = True
            failed = TurnFailed(live.opened.trajectory_id, turn.turn_id, repr(error))
            self.recorder.note(failed)
            raise
        completed = _completed(live, turn, plan, generation, running.reading)
        turn.ended = True
        await self.recorder.write(completed)
        live.completed_turn(plan, turn.requested, completed, running.items)
        return AnsweredTurn(turn.requested, completed)


def _completed(
    live: LiveTrajectory, turn: RunningTurn, plan: Plan, made: Generation, reading: Reading
) -> TurnCompleted:
    """The record of a generation."""
    reply = reading.reply(made.completion_ids, made.finish_reason, turn.turn_id)
    spans = made.version_spans
    flags = [*reply.flags]
    if plan.twins:
        flags.append("ambiguous_parent")
    if holds_control_tokens(reading, plan):
        flags.append("control_in_input")
    return TurnCompleted(
        trajectory_id=live.opened.trajectory_id,
        turn_id=turn.turn_id,
        policy=spans[-1].policy if spans else None,
        policy_version=spans[-1].version if spans else None,
        prompt_ids=plan.delta_ids,
        completion_ids=made.completion_ids,
        logprobs=made.logprobs,
        version_spans=spans,
        prompt_length=len(plan.prompt_ids),
        prompt_sha256=plan.hasher.hexdigest(),
        finish_reason=reply.finish_reason,
        reply=reply.message,
        logprob_semantics=made.logprob_semantics,
        flags=flags,
        timings=made.timings,
    )


def holds_control_tokens(reading: Reading, plan: Plan) -> bool:
    """Whether new text of this request spells a control token, such as a file that a tool read."""
    spelled = tuple(reading.tokenizer.special.values())
    return any(
        token in text for text in _texts(plan.messages[plan.shared_messages :]) for token in spelled if token
    )


def _texts(messages: Sequence[Json]) -> list[str]:
    found = []
    for message in messages:
        content = message.get("content")
        if message.get("role") == "assistant":
            continue
        if isinstance(content, str):
            found.append(content)
        elif isinstance(content, list):
            found += [str(p["text"]) for p in content if isinstance(p, dict) and "text" in p]
    return found


def _seeds(call: ModelCall) -> list[int]:
    """A seed for each choice: siblings of one seed would be one and the same."""
    asked = call.fields
    if asked.seed is None:
        return [secrets.randbits(63) for _ in range(asked.n or 1)]
    return [(asked.seed + choice + 2**63) % 2**64 - 2**63 for choice in range(asked.n or 1)]


def _known_items(live: LiveTrajectory, base: str | None, call: ModelCall) -> tuple[list[Any] | None, int]:
    """(the items as sent, those that the base turn had replaced by its own; how many they are)"""
    if call.items is None:
        return None, 0
    earlier = live.items.get(base or "", [])
    shared = 0
    for one, other in zip(earlier, call.items, strict=False):
        if not exactly(one, other):
            break
        shared += 1
    return [*earlier[:shared], *call.items[shared:]], shared


def _wire(arrival: Arrival, choice: int, call: ModelCall, items: list[Any] | None, shared_items: int) -> Json:
    wire: dict[str, Any] = {"endpoint": call.endpoint, "digest": arrival.digest}
    if choice:
        wire["choice"] = choice
    if arrival.retry:
        wire["retry"] = arrival.retry
    if items is not None:
        wire |= {"shared_items": shared_items, "items": items[shared_items:]}
    return wire
