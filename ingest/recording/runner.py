"""One model call from request to durable turns: plan, record, generate, record."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rollbook.ingest.engines.engine import Engine, Generation, OnTokens, Prompt, Sampling, ignore_tokens
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.run_writer import any_lost
from rollbook.ingest.recording.turn_records import (
    Arrival,
    completed_record,
    failed_record,
    requested_records,
    seeds,
)
from rollbook.ingest.replies.detect import opens_reasoning
from rollbook.ingest.replies.family import Family
from rollbook.ingest.requests.large_work import LARGE_BYTES, aside
from rollbook.ingest.tokens.bridge import Bridges
from rollbook.ingest.tokens.message_form import in_form
from rollbook.ingest.tokens.raw_prompt import plan_prompt
from rollbook.ingest.tokens.tree import Plan, TurnTree, context_key, plan_turn
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.turns.completed import CompletedTurn
from rollbook.ingest.turns.in_flight import InFlightCall, InFlightTurn
from rollbook.ingest.turns.model_call import (
    ModelCall,
    check_ids,
    check_images,
    images_of,
    sampling_of,
    unhonoured,
)
from rollbook.ingest.turns.reply import STOP_STRING, Reading
from rollbook.store.errors import EngineError, EngineHeldError, EngineLostError, RequestError, UnstorableError
from rollbook.store.fold.siblings import as_sibling
from rollbook.store.ids import new_id

RAW = "raw prompts"
ATTEMPTS = 4
"""How often a request is asked of engines, each of which went away, before its client hears of it."""

Planned = tuple[Plan, str]
"""How a request is sent, and its context key."""


@dataclass(slots=True, eq=False)
class TurnRunner:
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

    async def planned(self, tree: TurnTree, call: ModelCall, size: int) -> Planned | None:
        """The plan of a request of so many bytes, if it is so large that making it would hold others up.

        A thread makes it then; the tokenizer needs no interpreter.

        Raises:
            RequestError: 400, the chat template refuses the messages.
        """
        return await aside(self._plan, tree, call) if size > LARGE_BYTES else None

    def begin(
        self, live: LiveTrajectory, call: ModelCall, arrival: Arrival, planned: Planned | None = None
    ) -> InFlightCall:
        """Record a request and begin to answer it.

        Args:
            planned: its plan, where it has been made.

        Raises:
            RequestError: it cannot be answered; nothing was recorded.
        """
        check_images(call, self.engine.name, takes_images=self.engine.takes_images)
        plan, key = planned or self._plan(live.tree, call)
        room = (len(plan.prompt_ids), self.bridges.tokenizer.context_length)
        samplings = [sampling_of(call, seed, *room) for seed in seeds(call)]
        reading = self._reading(call, plan)
        honoured = unhonoured(call, self.engine.honoured) | dict.fromkeys(plan.left_out, False)
        records, items = requested_records(live, call, plan, key, honoured, arrival, samplings)
        grows = call.stream or bool(call.stops)
        turns = [InFlightTurn(r, s, reading, grows=grows) for r, s in zip(records, samplings, strict=True)]
        # Nothing can refuse the request any more. It is stored once, whole or not at all.
        first = records[0]
        asked = self.recorder.record_opening(live, first, *(as_sibling(r, first) for r in records[1:]))
        if plan.echoed is not None:
            self.recorder.mark_delivered(live, plan.echoed.turn_id, "echoed")
        running = InFlightCall(call, turns, reading, items)
        running.rests_on += [live.opening, asked]
        live.begun(running, arrival.digest)
        task = asyncio.create_task(self._answer(live, running, plan))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return running

    def stored(self, call: ModelCall, turns: Sequence[CompletedTurn]) -> InFlightCall:
        """A request that was answered before, as if it had just ended."""
        reading = Reading(self.bridges.tokenizer, self.family)
        nothing = Sampling(0, 0.0, 0)
        ended = [InFlightTurn(t.requested, nothing, reading, grows=False) for t in turns]
        running = InFlightCall(call, ended, reading)
        running.done.set_result(list(turns))
        return running

    async def drained(self) -> None:
        """Wait until nothing runs any more."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def abort(self, running: InFlightCall) -> None:
        """End a request that nobody waits for; what was sampled is recorded."""
        for turn in running.turns:
            await self.engine.abort(turn.turn_id)

    def _plan(self, tree: TurnTree, call: ModelCall) -> Planned:
        tokenizer = self.bridges.tokenizer
        check_ids(call, tokenizer.vocabulary)
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

    async def _answer(self, live: LiveTrajectory, running: InFlightCall, plan: Plan) -> None:
        """Answer a request; whatever happens, its future is resolved and the trajectory knows."""
        try:
            await self._let_in()
            _check_wanted(running)
            # All siblings come to an end, also where one fails: each is a turn of its own.
            ends = [self._turn(live, running, turn, plan) for turn in running.turns]
            answers = await asyncio.gather(*ends, return_exceptions=True)
            failure = next((a for a in answers if isinstance(a, BaseException)), None)
            if failure is not None:
                raise failure
            running.done.set_result([a for a in answers if isinstance(a, CompletedTurn)])
        except BaseException as error:
            self._fail(live, running, plan, error)
        finally:
            live.ended(running)

    def _fail(self, live: LiveTrajectory, running: InFlightCall, plan: Plan, error: BaseException) -> None:
        for turn in running.turns:
            if not turn.ended:
                self._note_failed(live, running, turn, plan, error)
        shown = error if isinstance(error, Exception) else EngineError(f"the request was cut off: {error!r}")
        running.done.set_exception(shown)

    def _note_failed(
        self,
        live: LiveTrajectory,
        running: InFlightCall,
        turn: InFlightTurn,
        plan: Plan,
        error: BaseException,
    ) -> None:
        turn.ended = True
        if not any_lost(running.rests_on):  # else the log knows of no such turn
            self.recorder.note(failed_record(live, running, turn, plan, error))

    async def _let_in(self) -> None:
        try:
            async with asyncio.timeout(self.hold_s):
                await self.engine.ready()
        except TimeoutError:
            text = f"the engine's weights are being replaced, and were not ready within {self.hold_s:g} s"
            raise RequestError(503, "engine_held", text) from None

    async def _turn(
        self, live: LiveTrajectory, running: InFlightCall, turn: InFlightTurn, plan: Plan
    ) -> CompletedTurn:
        """Sample one completion and record it; elsewhere, as a turn of its own, where an engine goes away."""
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._attempt(live, running, turn, plan)
            except EngineLostError:
                if running.shown or running.abandoned:
                    raise
            # At once: from here on nothing of the turn that failed may reach the client.
            wire = turn.requested.wire | {"instead_of": turn.turn_id}
            again = replace(turn.requested, turn_id=new_id(), wire=wire)
            running.rests_on.append(self.recorder.note(as_sibling(again, running.first)))
            turn.again(again)
            running.changed()
            await self._let_in()
            _check_wanted(running)
        return await self._attempt(live, running, turn, plan)

    async def _attempt(
        self, live: LiveTrajectory, running: InFlightCall, turn: InFlightTurn, plan: Plan
    ) -> CompletedTurn:
        """Ask an engine, once."""
        stopping: list[asyncio.Task[None]] = []

        def on_tokens(ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
            turn.add(ids, logprobs)
            if turn.stopped and not stopping and "stop" not in self.engine.honoured:
                stopping.append(asyncio.create_task(self.engine.abort(turn.turn_id)))
            running.changed()

        call = running.call
        prompt = Prompt(
            plan.prompt_ids,
            [in_form(message) for message in call.messages],
            call.tools,
            turn.turn_id,
            live.opened.trajectory_id,
            images_of(call.messages),
            len(plan.prompt_ids) - len(plan.delta_ids),
        )
        try:
            # Who needs only the end is not told on the way: an engine may then answer all at once.
            generation = await self._generated(
                running, prompt, turn.sampling, on_tokens if turn.grows else ignore_tokens
            )
        except BaseException as error:
            self._note_failed(live, running, turn, plan, error)
            raise
        completed = completed_record(live, turn, plan, generation, running.reading)
        turn.ended = True
        try:
            await self.recorder.write(completed, behind=running.rests_on)
        except UnstorableError as error:
            if any_lost(running.rests_on):
                raise
            turn.ended = False
            raise EngineError(f"the engine's answer cannot be recorded: {error}") from error
        asked, cut = turn.requested, STOP_STRING in completed.flags
        ids = completed.completion_ids
        made = plan.completed(asked.turn_id, asked.context_key, completed.reply, ids, cut=cut)
        self.recorder.trajectories.take(live, made, asked.request, running.items)
        return CompletedTurn(turn.requested, completed)

    async def _generated(
        self, running: InFlightCall, prompt: Prompt, sampling: Sampling, on_tokens: OnTokens
    ) -> Generation:
        """What an engine makes of a prompt. A sync may begin after it was let in: then it waits once more."""
        while True:
            try:
                return await self.engine.generate(prompt, sampling, on_tokens)
            except EngineHeldError:
                await self._let_in()
                _check_wanted(running)


def _check_wanted(running: InFlightCall) -> None:
    if running.abandoned:
        raise EngineError("its client left before the engine took it")
