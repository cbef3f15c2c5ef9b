"""One model call from request to durable turns: plan, record, generate, record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollbook.edge.bounds import LARGE_BYTES, run_in_thread
from rollbook.engines.engine import Engine, Generation, OnTokens, Prompt, Sampling, ignore_tokens
from rollbook.engines.patience import end_now
from rollbook.ingest.admission.gate import ANSWERED_S
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.run_writer import any_lost
from rollbook.ingest.recording.turn_records import (
    Arrival,
    completed_record,
    failed_record,
    requested_records,
    seeds,
)
from rollbook.ingest.replies.family import Family
from rollbook.ingest.tokens.bridge import Bridges
from rollbook.ingest.tokens.message_form import in_form
from rollbook.ingest.tokens.tree import Plan, TurnTree
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.turns.in_flight import CompletedTurn, InFlightCall, InFlightTurn
from rollbook.ingest.turns.model_call import ModelCall, check_images, images_of, sampling_of, unhonoured
from rollbook.ingest.turns.planning import PromptPlan, plan_call, reader_of
from rollbook.ingest.turns.reply import STOP_STRING, ReplyReader
from rollbook.store.errors import (
    EndingError,
    EngineError,
    EngineHeldError,
    EngineLostError,
    RequestError,
    UnstorableError,
)
from rollbook.store.fold.siblings import as_sibling
from rollbook.store.ids import new_id

SOON_S = 0.05
"""An engine that takes requests says so within this time."""
ATTEMPTS = 4
"""How many engines are tried, each lost on the way, before the client gets the error."""


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
    _held: dict[asyncio.Timeout, InFlightCall] = field(default_factory=dict)
    """Those that wait for an engine that takes requests, by how long they may."""
    _sampled: set[asyncio.Timeout] = field(default_factory=set)
    """What engines answer now."""
    _stopped: bool = False
    """Whether the proxy is ending."""

    async def planned(self, tree: TurnTree, call: ModelCall, size: int) -> PromptPlan | None:
        """The plan of a request that is so large that planning it would delay others; None for a small one.

        It is made in a thread: the tokenizer releases the interpreter lock.

        Raises:
            RequestError: 400, the chat template refuses the messages.
        """
        return await run_in_thread(plan_call, self.bridges, tree, call) if size > LARGE_BYTES else None

    def begin(
        self, live: LiveTrajectory, call: ModelCall, arrival: Arrival, planned: PromptPlan | None = None
    ) -> InFlightCall:
        """Record a request and begin to answer it.

        Args:
            planned: its plan, where it has been made.

        Raises:
            RequestError: it cannot be answered; nothing was recorded.
        """
        check_images(call, self.engine.name, takes_images=self.engine.takes_images)
        plan, key = planned or plan_call(self.bridges, live.tree, call)
        room = (len(plan.prompt_ids), self.bridges.tokenizer.context_length)
        samplings = [sampling_of(call, seed, *room) for seed in seeds(call)]
        reader = reader_of(self.bridges, self.family, call, plan)
        honoured = unhonoured(call, self.engine.honoured) | dict.fromkeys(plan.left_out, False)
        records, items = requested_records(live, call, plan, key, honoured, arrival, samplings)
        grows = call.stream or bool(call.stops)
        turns = [InFlightTurn(r, s, reader, grows=grows) for r, s in zip(records, samplings, strict=True)]
        # From here on nothing can refuse the request. It is stored whole or not at all.
        first = records[0]
        written = self.recorder.record_opening(live, first, *(as_sibling(r, first) for r in records[1:]))
        if plan.echoed is not None:
            self.recorder.mark_delivered(live, plan.echoed.turn_id, "echoed")
        in_flight = InFlightCall(call, turns, reader, items)
        in_flight.depends_on += [live.opening, written]
        live.begun(in_flight, arrival.digest)
        task = asyncio.create_task(self._answer(live, in_flight, plan))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return in_flight

    def stored(self, call: ModelCall, turns: Sequence[CompletedTurn]) -> InFlightCall:
        """A request that was answered before, as a call that has just ended."""
        reader = ReplyReader(self.bridges.tokenizer, self.family)
        nothing = Sampling(0, 0.0, 0)
        ended = [InFlightTurn(t.requested, nothing, reader, grows=False) for t in turns]
        in_flight = InFlightCall(call, ended, reader)
        in_flight.done.set_result(list(turns))
        return in_flight

    def stop(self) -> None:
        """Let nobody wait for an engine any more; what an engine is answering has a while to finish."""
        self._stopped = True
        self._wake(lambda _: True)
        asyncio.get_running_loop().call_later(ANSWERED_S, self._cut)

    def _wake(self, which: Callable[[InFlightCall], bool]) -> None:
        """Have these wait no more for an engine."""
        for patience, in_flight in self._held.items():
            if which(in_flight):
                end_now(patience)

    def _cut(self) -> None:
        for sampled in self._sampled:
            end_now(sampled)

    async def drained(self) -> None:
        """Wait until no request runs."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def abort(self, in_flight: InFlightCall) -> None:
        """End a request whose client has gone; what was sampled is recorded."""
        self._wake(lambda held: held is in_flight)
        for turn in in_flight.turns:
            await self.engine.abort(turn.turn_id)

    async def _answer(self, live: LiveTrajectory, in_flight: InFlightCall, plan: Plan) -> None:
        """Answer a request. Its future is resolved and its trajectory updated whatever happens."""
        try:
            await self._let_in(in_flight)
            # Every sibling runs to its end even if one fails: each is a turn of its own.
            ends = [self._turn(live, in_flight, turn, plan) for turn in in_flight.turns]
            answers = [await ends[0]] if len(ends) == 1 else await _all_ended(ends)
            in_flight.done.set_result(answers)
        except BaseException as error:
            self._fail(live, in_flight, plan, error)
        finally:
            live.ended(in_flight)

    def _fail(self, live: LiveTrajectory, in_flight: InFlightCall, plan: Plan, error: BaseException) -> None:
        for turn in in_flight.turns:
            if not turn.ended:
                self._note_failed(live, in_flight, turn, plan, error)
        shown = error if isinstance(error, Exception) else EngineError(f"the request was cut off: {error!r}")
        in_flight.done.set_exception(shown)

    def _note_failed(
        self,
        live: LiveTrajectory,
        in_flight: InFlightCall,
        turn: InFlightTurn,
        plan: Plan,
        error: BaseException,
    ) -> None:
        turn.ended = True
        if not any_lost(in_flight.depends_on):  # else the log has no such turn
            self.recorder.note(failed_record(live, in_flight, turn, plan, error))

    async def _let_in(self, in_flight: InFlightCall) -> None:
        """Wait until an engine takes requests.

        Raises:
            RequestError: 503, none did in time.
            EndingError: the proxy is ending.
            EngineError: nobody waits for the reply any more.
        """
        hold_s = SOON_S if self._stopped else self.hold_s
        patience = asyncio.timeout(hold_s)
        try:
            async with patience:
                self._held[patience] = in_flight
                try:
                    await self.engine.ready()
                finally:
                    del self._held[patience]
        except TimeoutError:
            if not (patience.expired() or in_flight.abandoned):
                raise
            if self._stopped and not in_flight.abandoned:
                raise EndingError from None
            if not in_flight.abandoned:
                text = "the engine's weights are being replaced, and were not ready within"
                raise RequestError(503, "engine_held", f"{text} {self.hold_s:g} s") from None
        if in_flight.abandoned:
            raise EngineError("its client left before the engine took it")

    async def _turn(
        self, live: LiveTrajectory, in_flight: InFlightCall, turn: InFlightTurn, plan: Plan
    ) -> CompletedTurn:
        """Sample one completion and record it. If its engine is lost, try another one, as a new turn."""
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._attempt(live, in_flight, turn, plan)
            except EngineLostError:
                if in_flight.shown or in_flight.abandoned:
                    raise
            # Immediately: from here on nothing of the failed turn may reach the client.
            wire = turn.requested.wire | {"instead_of": turn.turn_id}
            again = replace(turn.requested, turn_id=new_id(), wire=wire)
            in_flight.depends_on.append(self.recorder.note(as_sibling(again, in_flight.first)))
            turn.again(again)
            in_flight.changed()
            await self._let_in(in_flight)
        return await self._attempt(live, in_flight, turn, plan)

    async def _attempt(
        self, live: LiveTrajectory, in_flight: InFlightCall, turn: InFlightTurn, plan: Plan
    ) -> CompletedTurn:
        """Ask an engine, once."""
        stopping: list[asyncio.Task[None]] = []

        def on_tokens(ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
            turn.add(ids, logprobs)
            if turn.stopped and not stopping and "stop" not in self.engine.honoured:
                stopping.append(asyncio.create_task(self.engine.abort(turn.turn_id)))
            in_flight.changed()

        call = in_flight.call
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
            # Non-streaming callers get no partial tokens: the engine may then answer all at once.
            generation = await self._generated(
                in_flight, prompt, turn.sampling, on_tokens if turn.grows else ignore_tokens
            )
        except BaseException as error:
            self._note_failed(live, in_flight, turn, plan, error)
            raise
        completed = completed_record(live, turn, plan, generation, in_flight.reader)
        turn.ended = True
        try:
            await self.recorder.write(completed, behind=in_flight.depends_on)
        except UnstorableError as error:
            if any_lost(in_flight.depends_on):
                raise
            turn.ended = False
            raise EngineError(f"the engine's answer cannot be recorded: {error}") from error
        requested, cut = turn.requested, STOP_STRING in completed.flags
        ids = completed.completion_ids
        tree_turn = plan.completed(requested.turn_id, requested.context_key, completed.reply, ids, cut=cut)
        self.recorder.trajectories.take(live, tree_turn, requested.request, in_flight.items)
        return CompletedTurn(turn.requested, completed)

    async def _generated(
        self, in_flight: InFlightCall, prompt: Prompt, sampling: Sampling, on_tokens: OnTokens
    ) -> Generation:
        """The engine's completion. If a sync began after the request was let in, it waits once more.

        Raises:
            EndingError: the proxy ends, and the engine took too long.
        """
        while True:
            patience = asyncio.timeout(None)
            try:
                async with patience:
                    self._sampled.add(patience)
                    try:
                        return await self.engine.generate(prompt, sampling, on_tokens)
                    finally:
                        self._sampled.remove(patience)
            except EngineHeldError:
                await self._let_in(in_flight)
            except TimeoutError:
                if not patience.expired():
                    raise
                raise EndingError from None


async def _all_ended(ends: Sequence[Coroutine[Any, Any, CompletedTurn]]) -> list[CompletedTurn]:
    """The turns, once all have ended; the first failure of one if there is any."""
    answers = await asyncio.gather(*ends, return_exceptions=True)
    failure = next((a for a in answers if isinstance(a, BaseException)), None)
    if failure is not None:
        raise failure
    return [a for a in answers if isinstance(a, CompletedTurn)]
