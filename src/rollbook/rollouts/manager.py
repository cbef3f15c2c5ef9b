"""Runs the rollouts of a CONFIG in one process: that of a command, or one of a cluster.

It holds nothing that the log does not: a manager that dies is replaced by another, which goes on
from the log.

Rollouts beside an online training: over the tasks again and again until it ends, and evaluations on
other tasks wherever it waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rollbook.rollouts.config import AgentConfig, RolloutConfig
from rollbook.rollouts.launchers.agents import agents_of, launcher_of
from rollbook.rollouts.launchers.isolation import isolation_warning
from rollbook.rollouts.places import Progress
from rollbook.rollouts.proxy import Proxy
from rollbook.rollouts.rollouts import Rollouts
from rollbook.rollouts.tasks import read_tasks
from rollbook.store.errors import LaunchError, RolloutError, StoreError
from rollbook.store.events import (
    EvalFinished,
    EvalSampled,
    EvalStarted,
    Event,
    RunOpened,
    StepCommitted,
    StopFired,
)
from rollbook.store.ids import new_id
from rollbook.store.marker import read_marker
from rollbook.store.whose import WANTED, ProxyIdentity


class RolloutManager:
    """Runs rollouts.

    Args:
        key: an operator's, if the proxy asks for keys.
        follow: beside an online training, as long as it goes on.
        say: told what somebody should know; tell: told how far they are.
    """

    def __init__(
        self,
        config: RolloutConfig,
        key: str | None = None,
        *,
        follow: bool = False,
        say: Callable[[str], None] = lambda text: None,
        tell: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._config, self._key, self._follow = config, key, follow
        self._say, self._tell = say, tell
        self._work: Rollouts | Following | None = None
        self._stopped = False

    def stop(self) -> None:
        """Begin nothing more, and cancel what runs."""
        self._stopped = True
        if self._work is not None:
            self._work.stop()

    async def run(self) -> Progress:
        """Run them to their end, or until `stop`.

        Raises:
            ConfigError: tasks, agents or scorers cannot be used.
            RolloutError: another process runs them; the proxy is away; or too many launches failed by their
                infrastructure.
        """
        config = self._config
        with alone(config):
            async with Proxy(config.proxy, self._key, wanted(config)) as proxy:
                proxy.say = self._say
                launcher = launcher_of(config)
                agents = agents_of(config, proxy, launcher)
                if (warning := await asyncio.to_thread(_unkept, config.agent)) is not None:
                    self._say(warning)
                owner = f"{socket.gethostname()}-{os.getpid()}-{new_id()[-8:]}"
                names = dict[str, str]()

                async def make(run_config: RolloutConfig) -> Rollouts:
                    tasks = await asyncio.to_thread(read_tasks, run_config.tasks, run_config.limit)
                    # Of evaluations the trainer tells: what is told here are the rollouts beside them.
                    tell = self._tell if run_config is config else lambda progress: None
                    args = (run_config, tasks, proxy, agents, launcher, owner, self._say, tell)
                    return Rollouts(*args, endless=self._follow and run_config is config, names=names)

                if self._follow:
                    self._work = Following(config, proxy, make, self._say)
                else:
                    self._work = await make(config)
                if self._stopped:
                    self._work.stop()
                try:
                    return await self._work.run()
                finally:
                    await agents.close()


def _unkept(agent: AgentConfig) -> str | None:
    """What agents on this host are not kept from; where they cannot be started, that will say why."""
    if agent.launcher not in ("subprocess", "verifiers"):
        return None
    with contextlib.suppress(LaunchError):
        return isolation_warning(agent.isolation, agent.require, agent.user)
    return None


def wanted(config: RolloutConfig) -> ProxyIdentity:
    """The owner that the proxy of these rollouts is to have, as far as is known here."""
    store_id = ""
    if config.store is not None:
        with contextlib.suppress(StoreError):
            store_id = read_marker(config.store)
    return ProxyIdentity(store_id, config.run or "", os.environ.get(WANTED, ""))


@contextlib.contextmanager
def alone(config: RolloutConfig, what: str = "") -> Iterator[None]:
    """Context: no other process runs these rollouts from the same folder, or does `what` with them.

    Raises:
        RolloutError: one does.
    """
    config.folder.mkdir(parents=True, exist_ok=True)
    with lock_of(config, what).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            text = (
                f"another process runs rollouts {config.name!r} in {config.folder}: wait for it, or stop it"
            )
            raise RolloutError(text) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def lock_of(config: RolloutConfig, what: str = "") -> Path:
    """The file that the process running these rollouts from this folder has locked, with its pid in it."""
    return config.folder / (f"{config.name}.{what}.lock" if what else f"{config.name}.lock")


KINDS = tuple(
    record.KIND for record in (RunOpened, StepCommitted, StopFired, EvalStarted, EvalSampled, EvalFinished)
)


@dataclass(slots=True)
class Training:
    """What the log says of the online training of a run that began last; a fold.

    Attributes:
        policy: that it trains; None: none has begun.
        steps_left: optimizer steps until its end.
        asked: the version at which it waits for agents to be evaluated; None: it does not wait.
        asks: how often it began to wait.
        waits: whether it waits for such evaluations at all.
        evaluated: the version that was evaluated last.
        version: of the policy.
    """

    policy: str | None = None
    steps_left: int = 0
    asked: int | None = None
    asks: int = 0
    waits: bool = False
    evaluated: int | None = None
    version: int | None = None
    _stopped: bool = False

    @property
    def over(self) -> bool:
        """Whether it has ended, with its last evaluation."""
        if self.policy is None or (self.steps_left > 0 and not self._stopped):
            return False
        return not self.waits or self.version is None or self.evaluated == self.version

    def take(self, events: Iterable[Event]) -> None:
        """Fold events, in order."""
        for event in events:
            record = event.record
            if isinstance(record, RunOpened):
                self._opened(record)
            elif getattr(record, "policy", None) == self.policy:
                self._of_policy(record)

    def _opened(self, record: RunOpened) -> None:
        config = record.config
        if record.command != "train" or config.get("source") != "tail":
            return
        self.policy, self.asked, self._stopped = config["policy"], None, False
        self.steps_left = config["steps"] - config["steps_done"]
        self.waits = bool((config.get("evaluation") or {}).get("wait_s"))

    def _of_policy(self, record: object) -> None:
        match record:
            case StepCommitted():
                self.steps_left, self.version = self.steps_left - 1, record.policy_version
            case StopFired():
                self._stopped = True
            case EvalStarted():
                self.asked = self.version = record.policy_version
                self.asks += 1
            case EvalSampled() if record.policy_version == self.asked:
                self.asked = None
            case EvalFinished():
                self.asked, self.evaluated = None, record.policy_version


MakeRollouts = Callable[[RolloutConfig], Awaitable[Rollouts]]


class Following:
    """Runs rollouts for as long as a training goes on.

    Args:
        make: makes the rollouts of a CONFIG, its tasks read.
        say: told what somebody should know.
    """

    def __init__(
        self, config: RolloutConfig, proxy: Proxy, make: MakeRollouts, say: Callable[[str], None]
    ) -> None:
        self._config, self._proxy, self._make, self._say = config, proxy, make, say
        self._training, self._changed = Training(), asyncio.Condition()
        self._stop = asyncio.Event()
        self._answered = 0
        """How many of the training's asks were answered."""

    def stop(self) -> None:
        """Begin nothing more, and cancel what runs."""
        self._stop.set()
        self._telling = asyncio.ensure_future(self._tell())

    async def run(self) -> Progress:
        """Run until the training has ended, or `stop`.

        Raises:
            RolloutError: the proxy is away, or too many launches failed by their infrastructure.
        """
        run = await self._proxy.run_name()
        events, cut = await self._proxy.recorded(run, KINDS)
        self._training.take(events)
        following = asyncio.create_task(self._follow(run, cut))
        if self._training.policy is None or self._training.over:
            self._say(f"waiting for an online training of run {run!r} (rollbook train --source tail)")
        try:
            await self._until(lambda: self._training.policy is not None and not self._training.over)
            if self._stop.is_set():
                return Progress(None)
            rollouts = await self._make(self._config)
            work = [asyncio.create_task(rollouts.run()), asyncio.create_task(self._evaluate())]
            ended = asyncio.create_task(self._until(lambda: self._training.over))
            try:
                await asyncio.wait([*work, ended, following], return_when=asyncio.FIRST_COMPLETED)
            finally:
                rollouts.stop()
                self.stop()
                await asyncio.wait([*work, ended])
            for task in (*work, following):
                if task.done() and (error := task.exception()) is not None:
                    raise error
            return rollouts.progress
        finally:
            following.cancel()
            await asyncio.wait([following])

    async def _follow(self, run: str, cut: str) -> None:
        async for events, _ in self._proxy.batches(run, KINDS, cut):
            self._training.take(events)
            await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Return once something holds of the training, or somebody stops this."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._stop.is_set() or holds())

    async def _evaluate(self) -> None:
        """Evaluate agents wherever the training waits for it."""
        training = self._training
        while not self._stop.is_set():
            await self._until(lambda: training.asked is not None and training.asks > self._answered)
            version, policy, asks = training.asked, training.policy, training.asks
            if version is None or policy is None:
                continue
            await self._evaluate_at(version, policy)
            self._answered = asks

    async def _evaluate_at(self, version: int, policy: str) -> None:
        """Run all tasks that are held out, and tell the training."""
        evaluation = self._config.evaluation
        if evaluation is None:
            self._say(
                f"version {version}: the training waits for agents to be evaluated (evaluation.wait_s), and "
                "this CONFIG has no [evaluation]: add one, with its tasks"
            )
            return
        rollouts = await self._make(evaluation.config(self._config, version))
        running = asyncio.create_task(rollouts.run())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            rollouts.stop()
        stopping.cancel()
        progress = await running
        if progress.total is not None and progress.done == progress.total:
            await self._proxy.evaluated(policy, version, rollouts.name, progress.total)
