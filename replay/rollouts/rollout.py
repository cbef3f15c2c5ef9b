"""Samples a recorded trajectory again with other weights, or with the same, as a new trajectory of
split `replay`. The source is only read.

`repeated`: every recorded request is sent again with exactly its prompt's ids, whatever the new
replies before it are. `continued`: only the first request is; what follows goes on from the new
replies with the recorded agent's messages, as far as they apply. Requests, replies, tokens and
versions are recorded by the parts that `rollbook serve` records with.

The turns of a replay in order: each is requested, recorded and compared with the recorded one.

The agent and its tools are not there, so a new reply is followed by what of the recorded
conversation still applies. A user's message is sent whatever the model replied. A tool's result
answers one call: it is used for a call of the same name and arguments, and for no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import orjson

from rollbook.engines.address import EngineAddress
from rollbook.engines.engine import Engine
from rollbook.engines.model_files import is_sharded
from rollbook.engines.startup_check import check_engines
from rollbook.engines.weights.identify import Identity
from rollbook.ingest.fields import FinishTrajectory
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.recording.turn_records import Arrival
from rollbook.ingest.replies.choose import choose_family
from rollbook.ingest.secrets import ProxySecrets, engine_key_of
from rollbook.ingest.serve.engines import make_engine, model_of
from rollbook.ingest.serve.proxy import identity_of
from rollbook.ingest.settings import ServeSettings
from rollbook.ingest.tokens.bridge import Bridges
from rollbook.ingest.tokens.chat_template import ChatTokenizer, load_chat_tokenizer
from rollbook.ingest.tokens.message_form import normal
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.turns.in_flight import CompletedTurn, InFlightCall
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.ingest.turns.planning import PromptPlan, key_of
from rollbook.replay.rollouts.compare import TurnAgain, compare
from rollbook.replay.rollouts.source import (
    Draws,
    added_messages,
    as_chat,
    call_again,
    conversation_from,
    number_of,
    plan_again,
    read_source,
    turns_between,
)
from rollbook.store import Event, Store, format_cut
from rollbook.store.errors import ConfigError, ReplayError
from rollbook.store.events import REPLAY, Json, LabelAdded, RunOpened, TrajectoryFinished, TrajectoryOpened
from rollbook.store.fold.trajectory import Trajectory, Turn
from rollbook.store.ids import new_id
from rollbook.store.sql.query import connect_at
from rollbook.train.checkpoints.export import checkpoint_of, export_model

How = Literal["repeated", "continued"]

_LEFT_OPEN = """
    SELECT run, trajectory_id FROM internal.trajectory_scalars
    WHERE split = $split AND lane = $lane AND finished IS NULL ORDER BY trajectory_id"""


@dataclass(frozen=True, slots=True)
class Weights:
    """What samples: the engine, and the weights that it serves.

    Attributes:
        version: of the policy, whose checkpoint is in the store; None: `model`, or what an engine
            serves.
        run: to which the version belongs, and in which the replay is recorded; None: that of the
            source.
        model: a model directory, in the place of a version.
        engine, engine_urls, script, device, threads: as settings of a proxy.
    """

    version: int | None = None
    policy: str = "actor"
    run: str | None = None
    model: Path | None = None
    engine: str = "embedded"
    engine_urls: tuple[EngineAddress, ...] = ()
    script: str | None = None
    device: str = "cpu"
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """What is sampled again.

    Attributes:
        trajectory_id: of the recorded one.
        how: each recorded request again, or from a fork on.
        first, last: numbers of the first and the last turn, from 1; None: of the trajectory's.
    """

    trajectory_id: str
    how: How = "repeated"
    first: int | None = None
    last: int | None = None
    draws: Draws = field(default_factory=Draws)


@dataclass(frozen=True, slots=True)
class RolloutReplay:
    """The result of a replay: a value, printed elsewhere.

    Attributes:
        trajectory, trajectory_id, run: the recorded one.
        new_trajectory, new_trajectory_id, new_run: the one that was sampled now.
        policy_version: of the weights; None where the engine does not say which.
        stopped: why a continuation ended before the record does, or None.
    """

    trajectory: str
    trajectory_id: str
    run: str
    new_trajectory: str
    new_trajectory_id: str
    new_run: str
    how: How
    engine: str
    policy: str
    policy_version: int | None
    turns: tuple[TurnAgain, ...]
    stopped: str | None

    @property
    def differing(self) -> tuple[TurnAgain, ...]:
        """The turns that were to come out the same, and did not."""
        return tuple(turn for turn in self.turns if turn.repeatable and not turn.same)


def replay_rollout(log: Store, rollout: Rollout, weights: Weights, lane: str = "replay") -> RolloutReplay:
    """Sample a recorded trajectory again, and record and compare what comes.

    Args:
        lane: to write; one process each.

    Raises:
        ReplayError: there is nothing to sample again, or its ids are of another tokenizer or template.
        InterchangeError: the store holds no checkpoint of the version.
        ConfigError: weights or engine are not named, or not clearly.
        ModelError: the weights are damaged.
        EngineError: the engine failed; the replay is recorded as failed, as far as it came.
        LaneLockedError: another process writes the lane.
    """
    source = read_source(log, rollout.trajectory_id)
    choose = conversation_from if rollout.how == "continued" else turns_between
    turns = choose(source, rollout.first, rollout.last)
    run = weights.run or source.run
    with _model(log, weights, run) as model:
        secrets = ProxySecrets(engine_key_of(None, os.environ), engine_key_of(None, os.environ, admin=True))
        settings = _settings(log, weights, run, lane, model)
        tokenizer = load_chat_tokenizer(model)
        calls = check_shaping(source, turns, rollout.draws, tokenizer, model)
        factory = make_engine(settings, secrets, tokenizer)
        with contextlib.closing(Recorder(log, lane, run, goes_on=False)) as recorder:
            _abort_left_open(recorder)
            identity = identity_of(recorder, weights.policy, model)
            engine = factory(identity)
            check_engines(engine, identity, model)
            family = choose_family("auto", model, tokenizer.template_source)
            runner = TurnRunner(recorder, engine, Bridges.tested(tokenizer), family)
            recorder.append(_opened(rollout, settings, tokenizer)).result()
            session = Session(source, turns, calls, runner, continues=rollout.how == "continued")
            return asyncio.run(_sampled(session, rollout, weights, identity))


@contextlib.contextmanager
def _model(log: Store, weights: Weights, run: str) -> Iterator[Path]:
    """The directory of the weights; an engine that serves other weights has its tokenizer from there.

    Raises:
        ConfigError: none is named, or two are.
        InterchangeError: the store holds no checkpoint of the version.
    """
    if (weights.version is None) == (weights.model is None):
        raise ConfigError("name the weights: either --policy VERSION, or --model DIR")
    if weights.model is not None:
        yield weights.model
        return
    _, record = checkpoint_of(log, weights.version, run, weights.policy, named_by="--policy")
    folder = log.folder(record.path)
    if not is_sharded(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="rollbook-replay-") as temporary:
        export_model(log, Path(temporary) / "model", weights.version, run, weights.policy)
        yield Path(temporary) / "model"


def _settings(log: Store, weights: Weights, run: str, lane: str, model: Path) -> ServeSettings:
    """The settings of a proxy for these weights.

    Raises:
        ModelError: the model's directory is not there.
    """
    settings = ServeSettings(
        store=log.path,
        model=model,
        engine=weights.engine,
        script=weights.script,
        run=run,
        lane=lane,
        policy=weights.policy,
        device=weights.device,
        threads=weights.threads,
        engine_url=weights.engine_urls,
    )
    model_of(settings)
    return settings


def _opened(rollout: Rollout, settings: ServeSettings, tokenizer: ChatTokenizer) -> RunOpened:
    shown = {name: getattr(settings, name) for name in ("engine", "policy", "device", "threads", "lane")}
    shown["engine_urls"] = [address.url for address in settings.engine_url]
    shown |= {"trajectory_id": rollout.trajectory_id, "how": rollout.how}
    digests = (tokenizer.tokenizer_digest, tokenizer.template_digest)
    return RunOpened("replay rollout", shown, str(settings.model), *digests)


def _abort_left_open(recorder: Recorder) -> None:
    """Finish as aborted the replays that a process, now gone, left open in this lane: the lane is ours."""
    store = recorder.store
    with connect_at(store, format_cut(store.head())) as connection:
        rows = connection.read(_LEFT_OPEN, {"split": REPLAY, "lane": recorder.lane}).fetchall()
    for run, trajectory_id in rows:
        left = store.trajectory(trajectory_id)
        if left is not None and left.lane == recorder.lane:
            recorder.writer.append([Event(TrajectoryFinished(trajectory_id, "aborted"), run)]).result()


async def _sampled(session: Session, rollout: Rollout, weights: Weights, identity: Identity) -> RolloutReplay:
    runner, source = session.runner, session.source
    async with _running(runner, identity) as engine:
        version = engine.policy_version()
        if weights.version is not None and version != weights.version:
            raise ReplayError(
                f"the engine serves version {version} of policy {weights.policy!r}, not {weights.version}: "
                "sync it, or name it by --model and take what it serves"
            )
        origin = _origin(session, rollout, weights, version)
        course = await session.run(origin)
    return _result(source, course, rollout, weights, runner, version)


@contextlib.asynccontextmanager
async def _running(runner: TurnRunner, identity: Identity) -> AsyncIterator[Engine]:
    engine = runner.engine
    await engine.start(partial(identity.activated, engine.name))
    try:
        yield engine
    finally:
        await engine.close()
        await runner.drained()
        await runner.recorder.settle()


def _origin(session: Session, rollout: Rollout, weights: Weights, version: int | None) -> Json:
    return {
        "trajectory_id": rollout.trajectory_id,
        "turn_id": session.turns[0].turn_id,
        "how": rollout.how,
        "policy": weights.policy,
        "policy_version": version,
    }


def _result(
    source: Trajectory,
    course: ReplayCourse,
    rollout: Rollout,
    weights: Weights,
    runner: TurnRunner,
    version: int | None,
) -> RolloutReplay:
    return RolloutReplay(
        trajectory=source.opened.name,
        trajectory_id=source.opened.trajectory_id,
        run=source.run,
        new_trajectory=course.opened.name,
        new_trajectory_id=course.opened.trajectory_id,
        new_run=runner.recorder.run,
        how=rollout.how,
        engine=runner.engine.name,
        policy=weights.policy,
        policy_version=version,
        turns=tuple(course.turns),
        stopped=course.stopped,
    )


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
