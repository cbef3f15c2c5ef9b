"""The turns of a replay in order: each is requested, recorded and compared with the recorded one.

The agent and its tools are not there, so a new reply is followed by what of the recorded
conversation still applies. A user's message is sent whatever the model replied. A tool's result
answers one call: it is used for a call of the same name and arguments, and for no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson

from rollbook.ingest.fields import FinishTrajectory
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.recording.turn_records import Arrival
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.tokens.message_form import normal
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.turns.in_flight import CompletedTurn, InFlightCall
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.ingest.turns.planning import PromptPlan, key_of
from rollbook.replay.rollouts.compare import TurnAgain, compare
from rollbook.replay.rollouts.source import Draws, added_messages, as_chat, call_again, number_of, plan_again
from rollbook.store.errors import ReplayError
from rollbook.store.events import REPLAY, Json, LabelAdded, TrajectoryOpened
from rollbook.store.fold.trajectory import Trajectory, Turn
from rollbook.store.ids import new_id

STOPPED = "replay_stopped"
"""Label of a continuation that ended before the record does: why."""


@dataclass(slots=True, eq=False)
class ReplayCourse:
    """The course of a replay: its trajectory, its turns so far, and why it stopped early, if it did."""

    opened: TrajectoryOpened
    turns: list[TurnAgain] = field(default_factory=list)
    stopped: str | None = None


def check_shaping(
    source: Trajectory, turns: Sequence[Turn], draws: Draws, tokenizer: ChatTokenizer, model: Path
) -> list[ModelCall]:
    """The calls of the turns, once it is checked that their ids mean to a model what they meant when
    recorded.

    Args:
        model: whose tokenizer it is.

    Raises:
        ReplayError: they were made by another tokenizer or chat template.
    """
    calls = [call_again(source, turn, draws) for turn in turns]
    for turn, call in zip(turns, calls, strict=True):
        if key_of(tokenizer, call) != turn.requested.context_key:
            raise ReplayError(
                f"turn {number_of(turn)} of trajectory {source.opened.name!r} was recorded with another "
                f"tokenizer or chat template than {model} has, so its ids say something else there: name "
                "weights of the model that it was recorded with"
            )
    return calls


@dataclass(slots=True, eq=False)
class Session:
    """Samples turns again with a runner whose engine is running.

    Attributes:
        turns, calls: the recorded turns, in order, and the request of each.
        continues: each goes on from the replies that come now; else each is sent as it was recorded.
    """

    source: Trajectory
    turns: Sequence[Turn]
    calls: Sequence[ModelCall]
    runner: TurnRunner
    continues: bool = False

    async def run(self, origin: Json) -> ReplayCourse:
        """Sample all of it, in a new trajectory that is finished at the end, whatever happens.

        Args:
            origin: as of `TrajectoryOpened`.
        """
        recorder, trajectory_id = self.runner.recorder, new_id()
        name = f"{REPLAY}/{trajectory_id}"
        opened = TrajectoryOpened(trajectory_id, name, split=REPLAY, origin=origin)
        live, course = LiveTrajectory(opened, recorder.lane), ReplayCourse(opened)
        try:
            await (self._continue(live, course) if self.continues else self._repeat(live, course))
        except BaseException as error:
            ended = FinishTrajectory(status="failed" if isinstance(error, Exception) else "aborted")
            await self._give_up(live, ended)
            raise
        if course.stopped is not None:
            recorder.note(LabelAdded(trajectory_id, None, STOPPED, course.stopped, "rollbook"))
        ended = FinishTrajectory(status="completed" if course.stopped is None else "truncated")
        await recorder.finish(name, ended)
        return course

    async def _repeat(self, live: LiveTrajectory, course: ReplayCourse) -> None:
        """Send each recorded request again, with the ids that it had."""
        same: dict[str, str] = {}
        """Recorded turn -> its replay, if that has the same tokens: what extends one extends the other."""
        for turn, call in zip(self.turns, self.calls, strict=True):
            parent = live.tree.by_id(same.get(turn.requested.parent_turn_id or "", ""))
            plan = plan_again(self.source, turn, live.tree, parent)
            again = await self._ask(live, course, turn, call, (plan, turn.requested.context_key))
            assert turn.completed is not None
            if np.array_equal(again.completed.completion_ids, turn.completed.completion_ids):
                same[turn.turn_id] = again.turn_id

    async def _continue(self, live: LiveTrajectory, course: ReplayCourse) -> None:
        """Send the first request again, and go on from the reply with what the recorded agent added."""
        first, conversation = self.turns[0], self.source.messages(self.turns[0])
        plan = (plan_again(self.source, first, live.tree, None), first.requested.context_key)
        again = await self._ask(live, course, first, self.calls[0], plan)
        for turn, then, call in zip(self.turns, self.turns[1:], self.calls[1:], strict=False):
            assert turn.completed is not None
            added = added_messages(self.source, turn, then)
            messages = following(again.reply, turn.completed.reply, added)
            if isinstance(messages, Stopped):
                course.stopped = f"behind turn {number_of(turn)}: {messages.reason}"
                return
            conversation = [*conversation, again.reply, *messages]
            again = await self._ask(live, course, then, as_chat(call, conversation))
        if calls := call_signatures(again.reply):
            name, arguments = calls[0]
            course.stopped = f"the record ends here, and the last reply calls {name}({arguments[:80]})"

    async def _ask(
        self,
        live: LiveTrajectory,
        course: ReplayCourse,
        turn: Turn,
        call: ModelCall,
        planned: PromptPlan | None = None,
    ) -> CompletedTurn:
        """Have one request answered and recorded, and compare it with the recorded turn in its place."""
        runner = self.runner
        body = orjson.dumps([call.rest, call.messages])
        arrival = Arrival(Arrival.of(call.endpoint, body, 0).digest, repeats=turn.turn_id)
        in_flight = runner.begin(live, call, arrival, planned)
        [again] = await self._answered(in_flight)
        runner.recorder.mark_delivered(live, again.turn_id, "sent")
        tokenizer = runner.bridges.tokenizer
        course.turns.append(
            compare(
                turn,
                again,
                lambda token_id: tokenizer.decode([token_id], special=True),
                same_run=runner.recorder.run == self.source.run,
                seeded="seed" in runner.engine.honoured,
            )
        )
        return again

    async def _answered(self, in_flight: InFlightCall) -> list[CompletedTurn]:
        """The turns of a request; if the wait is cancelled, the engine stops, and what it had is recorded."""
        try:
            return await asyncio.shield(in_flight.done)
        except asyncio.CancelledError:
            await self.runner.abort(in_flight)
            await self.runner.drained()
            raise

    async def _give_up(self, live: LiveTrajectory, ended: FinishTrajectory) -> None:
        """Finish what was recorded of a replay that does not come to its end."""
        await self.runner.drained()
        await self.runner.recorder.settle()
        if self.runner.recorder.is_open(live):
            await self.runner.recorder.finish(live.opened.name, ended)


_RESULTS = ("tool", "function")
_SHOWN = 120
"""Characters of a call that a reason shows."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Why nothing can follow a reply."""

    reason: str


def following(reply: Json, recorded: Json, added: Sequence[Json]) -> list[Json] | Stopped:
    """The messages that go on after a new reply, or why none does.

    Args:
        reply: the new one, in chat form.
        recorded: the one in its place in the record.
        added: the messages that the recorded agent sent after that one.
    """
    if any(message.get("role") == "assistant" for message in added):
        return Stopped("the recorded agent went on from a reply of its own making")
    results = [message for message in added if message.get("role") in _RESULTS]
    calls = call_signatures(reply)
    if results and not calls:
        return Stopped(f"the new reply makes no call, where the recorded one made {_shown(recorded)}")
    answers = _answers(recorded, results)
    matched: list[Json] = []
    for call, wanted in zip(reply.get("tool_calls") or (), calls, strict=True):
        place = next((i for i, (known, _) in enumerate(answers) if known == wanted), None)
        if place is None:
            return Stopped(f"the recorded agent never called {_spelled(wanted)}, so no result of it is known")
        matched.append(answers.pop(place)[1] | {"tool_call_id": call.get("id")})
    return [*matched, *(message for message in added if message.get("role") not in _RESULTS)]


def call_signatures(reply: Json) -> list[tuple[str, str]]:
    """(name, canonical arguments) of each call of a reply."""
    return [(str(name), str(arguments)) for name, arguments in normal(reply)[2] or ()]


def _answers(recorded: Json, results: Sequence[Json]) -> list[tuple[tuple[str, str], Json]]:
    """(call, result) of the recorded reply: by the call's id, or by place where a result names none."""
    calls = call_signatures(recorded)
    ids = [call.get("id") for call in recorded.get("tool_calls") or ()]
    answers = []
    for place, result in enumerate(results):
        named = result.get("tool_call_id")
        at = ids.index(named) if named is not None and named in ids else place
        if at < len(calls):
            answers.append((calls[at], result))
    return answers


def _shown(reply: Json) -> str:
    return ", ".join(map(_spelled, call_signatures(reply))) or "none"


def _spelled(call: tuple[str, str]) -> str:
    text = f"{call[0]}({call[1]})"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
