"""Samples a recorded trajectory again with other weights, or with the same, as a new trajectory of
split `replay`. The source is only read.

`repeated`: every recorded request is sent again with exactly its prompt's ids, whatever the new
replies before it are. `continued`: only the first request is; what follows goes on from the new
replies with the recorded agent's messages, as far as they apply. Requests, replies, tokens and
versions are recorded by the parts that `rollbook serve` records with.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from rollbook.engines.address import EngineAddress
from rollbook.engines.engine import Engine
from rollbook.engines.model_files import is_sharded
from rollbook.engines.startup_check import check_engines
from rollbook.engines.weights.identify import Identity
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.replies.choose import choose_family
from rollbook.ingest.secrets import ProxySecrets, engine_key_of
from rollbook.ingest.serve.engines import make_engine, model_of
from rollbook.ingest.serve.proxy import identity_of
from rollbook.ingest.settings import ServeSettings
from rollbook.ingest.tokens.bridge import Bridges
from rollbook.ingest.tokens.chat_template import ChatTokenizer, load_chat_tokenizer
from rollbook.replay.rollouts.compare import TurnAgain
from rollbook.replay.rollouts.session import ReplayCourse, Session, check_shaping
from rollbook.replay.rollouts.source import Draws, conversation_from, read_source, turns_between
from rollbook.store import Event, Store, format_cut
from rollbook.store.errors import ConfigError, ReplayError
from rollbook.store.events import REPLAY, Json, RunOpened, TrajectoryFinished
from rollbook.store.fold.trajectory import Trajectory
from rollbook.store.safe_paths import place_inside
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
    folder = place_inside(log.path, record.path)
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
        rows = connection.execute(_LEFT_OPEN, {"split": REPLAY, "lane": recorder.lane}).fetchall()
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
