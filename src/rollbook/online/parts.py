"""The parts of a run: what is started for each, in which order, how they are kept running, and how they are
stopped in the other order.

A part of a run: a process that is started, watched, started again when it dies, and stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from rollbook.engines.hub import model_folder
from rollbook.online.address import Proof
from rollbook.online.config import EnginesConfig, PlacedConfig, WholeConfig
from rollbook.store.errors import ConfigError, RollbookError

MOST_STARTS, WITHIN_S = 6, 600.0
"""A part that was started so often within this time is not started again."""
LOOK_S = 2.0
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
ANSWER_S = 10.0
"""So long an answer to one question whether it is well is waited for."""
LAST_LINES = 15
_SET_PARENT_DEATH_SIGNAL = 1
BAD_INPUT = 2
"""Exit code of our commands for what another start would not mend."""


class PartError(RollbookError):
    """A part of a run ended for good; the message ends with its last lines."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What a part is.

    Attributes:
        log: file for what it prints.
        health: address that answers 200 once it is ready; None: it is ready at once.
        any_answer: whatever it answers, it is ready: it may wait for another part.
        proof: that it is this very part which answers there; None: whatever does is taken for it.
        ready_s: longest time until then. silence_s: after this long without an answer it is ended.
        stop_s: from SIGTERM to SIGKILL.
        ends: it ends by itself, with exit code 0; another one runs until it is stopped.
    """

    name: str
    command: tuple[str, ...]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    health: str | None = None
    any_answer: bool = False
    proof: Proof | None = None
    ready_s: float = 300.0
    silence_s: float = 120.0
    stop_s: float = 30.0
    ends: bool = False


class Part:
    """Runs one part.

    Args:
        say: told what became of it.
    """

    def __init__(self, spec: Spec, say: Callable[[str], None]) -> None:
        self.spec, self._say = spec, say
        self.state, self.since = "not started", time.time()
        """For people: not started, starting, running, starting again, stopping, ended; and since when, in
        seconds since 1970."""
        self.pid: int | None = None
        self.ready = asyncio.Event()
        self._stopping = False
        self._child: asyncio.subprocess.Process | None = None
        self._starts: deque[float] = deque(maxlen=MOST_STARTS)
        self._log_from = 0
        """Where in its log begins what it printed since it was started last."""

    async def run(self) -> None:
        """Run it until it ends by itself, or is stopped.

        Raises:
            PartError: it cannot be started, or died too often.
        """
        pause = PAUSE_S
        while not self._stopping:
            begun = time.monotonic()
            self._starts.append(begun)
            self._become("starting" if len(self._starts) == 1 else "starting again")
            code = await self._once()
            if self._stopping or (self.spec.ends and code == 0):
                break
            self._check(code)
            pause = PAUSE_S if time.monotonic() - begun > WITHIN_S else min(pause * 2, LONGEST_PAUSE_S)
            self._become("starting again")
            self._say(f"{self.spec.name} {_ended(code)}: it is started again; {self.spec.log} says more")
            await asyncio.sleep(pause / 2)
        self._become("ended")

    def _become(self, state: str) -> None:
        if state != self.state:
            self.state, self.since = state, time.time()

    async def _once(self) -> int:
        """Start it, and wait for its end; the exit code."""
        spec = self.spec
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("ab") as log:
            self._log_from = log.tell()
            try:
                self._child = await asyncio.create_subprocess_exec(
                    *spec.command,
                    env=os.environ | spec.environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # a terminal's Ctrl-C is for us, who stop all in order
                    preexec_fn=_ends_with(os.getpid()),
                )
            except OSError as error:
                raise PartError(
                    f"{spec.name} cannot be started: {spec.command[0]}: {error.strerror}"
                ) from error
        self.pid = self._child.pid
        watching = asyncio.create_task(self._watch())
        try:
            return await self._child.wait()
        finally:
            watching.cancel()
            _end_group(self._child.pid, signal.SIGKILL)  # of what it started nothing is left behind

    async def _watch(self) -> None:
        """Note when it is ready, and end it when it falls silent."""
        assert self._child is not None
        if self.spec.health is None:
            self._answers()
            return
        heard, limit = time.monotonic(), self.spec.ready_s
        async with httpx.AsyncClient(timeout=ANSWER_S) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if await self._is_well(client, self.spec.health):
                        self._answers()
                        heard, limit = time.monotonic(), self.spec.silence_s
                if time.monotonic() - heard > limit:
                    self._say(f"{self.spec.name} does not answer {self.spec.health} for {limit:g} s: ended")
                    _end_group(self._child.pid, signal.SIGKILL)
                await asyncio.sleep(LOOK_S if self.ready.is_set() else LOOK_S / 8)

    async def _is_well(self, client: httpx.AsyncClient, health: str) -> bool:
        """Whether it answers as it should. Another one's server may be at its address."""
        proof = self.spec.proof
        question = {} if proof is None else proof.question()
        answer = await client.get(health, headers=question)
        if proof is not None and not proof.proven(question, answer):
            return False
        return self.spec.any_answer or answer.status_code == 200

    def _answers(self) -> None:
        if not self._stopping:
            self._become("running")
        self.ready.set()

    def _check(self, code: int) -> None:
        """See whether it may be started again.

        Raises:
            PartError: it may not.
        """
        spec, first = self.spec, len(self._starts) == 1
        often = len(self._starts) == MOST_STARTS and time.monotonic() - self._starts[0] < WITHIN_S
        if often:
            why = f"{_ended(code)}, for the {MOST_STARTS}th time within {WITHIN_S / 60:g} minutes"
        elif first and (not self.ready.is_set() or (code == BAD_INPUT and spec.health is None)):
            why = _ended(code) + ("" if spec.health is None else " before it was ready")
        else:
            return
        self._become("failed")
        raise PartError(f"{spec.name} {why}; {spec.log} ends with:\n{self.last_lines()}")

    def last_lines(self) -> str:
        """The end of what it printed since it was started last."""
        with contextlib.suppress(OSError), self.spec.log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - (64 << 10), self._log_from))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-LAST_LINES:])
        return ""

    async def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL to what is left after `stop_s`."""
        self._stopping = True
        child = self._child
        if child is None or child.returncode is not None:
            return
        self._become("stopping")
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            await asyncio.wait_for(child.wait(), self.spec.stop_s)
        except TimeoutError:
            self._say(f"{self.spec.name} did not end within {self.spec.stop_s:g} s of SIGTERM: killed")
        _end_group(child.pid, signal.SIGKILL)
        await child.wait()

    def kill(self) -> None:
        """End it at once."""
        self._stopping = True
        if self._child is not None and self._child.returncode is None:
            _end_group(self._child.pid, signal.SIGKILL)


def _ended(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _end_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _ends_with(parent: int) -> Callable[[], None]:
    """What a child does before it becomes its program: has the kernel end it when the thread that started it
    is gone, which is that of the event loop, orderly; Linux only."""

    def tie() -> None:
        if sys.platform == "linux":
            _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
            if os.getppid() != parent:  # it ended before
                os._exit(128 + signal.SIGTERM)

    return tie


_LIBC = ctypes.CDLL(None)


PROXY = "proxy"
PARTS = ("engines", PROXY, "trainer", "rollouts")
"""In the order in which they are started; they are stopped in the other."""
FINISH_S = 900.0
"""How long the step in hand may take, when a training is asked to end."""
TOLD_S = 6.0
"""How long rollouts may take, once their agents are ended, to tell the log of it: the next start would."""
SERVED_S = 15.0
"""How long a proxy may take to end."""


def specs_of(config: WholeConfig, only: Collection[str] = (), *, ray: bool = False) -> list[list[Spec]]:
    """What is to be started on this host: for each part its processes.

    Args:
        only: parts; empty: all that the CONFIG has, but for those whose addresses are another host's.
        ray: a Ray cluster places the trainer's ranks, and runs the rollouts.

    Raises:
        ConfigError: a part is asked for that the CONFIG does not have.
    """
    wanted = only or PARTS
    specs = {
        "engines": [] if config.engines is None else _engines(config, config.engines),
        "proxy": [_proxy(config)] if config.here else [],
        "trainer": [] if config.train is None else [_trainer(config, ray)],
        "rollouts": [] if config.rollout is None else [_rollouts(config, ray)],
    }
    for part in only:
        if not specs[part]:
            table = {"engines": config.engines, "proxy": config.serve, "trainer": config.train}
            has = table.get(part, config.rollout) is not None
            where = "its address is another host's" if has else "it has no such table"
            raise ConfigError(f"{config.path}: --only {part}: {where}")
    return [specs[part] for part in PARTS if part in wanted]


def _engines(config: WholeConfig, engines: EnginesConfig) -> list[Spec]:
    assert config.serve.model is not None
    specs, model = [], str(model_folder(config.serve.model, fetch=False))
    for at, address in enumerate(engines.here if engines.placed is None else engines.addresses):
        host, _, port = address.rpartition(":")
        gpus = {"CUDA_VISIBLE_DEVICES": engines.gpus[at]} if engines.gpus else {}
        where = ("--model-path", model, "--host", host, "--port", port)
        command, log = (*engines.command, *where, *engines.options), config.logs / f"engine-{port}.log"
        variables = engines.environment | gpus
        if engines.placed is not None:
            command, variables = _placed(config, engines.placed, at, host, log, command, variables), {}
        specs.append(
            Spec(
                name=f"engine {address}",
                command=command,
                log=log,
                environment=variables,
                health=f"http://{address}/health",
                ready_s=engines.ready_s,
                silence_s=engines.silence_s,
            )
        )
    return specs


def _placed(
    config: WholeConfig,
    placed: PlacedConfig,
    bundle: int,
    host: str,
    log: Path,
    command: Sequence[str],
    variables: Mapping[str, str],
) -> tuple[str, ...]:
    """The command that runs another one in a bundle of the engines' placement group."""
    values = {"group": config.group or "", "bundle": str(bundle), "host": host, "log": str(log.resolve())}
    values |= {"resources": json.dumps(placed.resources), "environment": json.dumps(dict(variables))}
    options = (word for name, value in values.items() for word in (f"--{name}", value))
    return (sys.executable, "-m", "rollbook.online.on_node", *options, "--", *command)


def _rollbook(*words: object) -> tuple[str, ...]:
    return (sys.executable, "-m", "rollbook", *map(str, words))


def _proxy(config: WholeConfig) -> Spec:
    health, log = f"{config.proxy}/healthz", config.logs / "proxy.log"
    # Its engine may wait for the trainer to give it weights, which begins after it.
    return Spec(PROXY, _rollbook("serve", config.path), log, health=health, any_answer=True, stop_s=SERVED_S)


def _trainer(config: WholeConfig, ray: bool) -> Spec:
    options = ("--launch", "ray") if ray else ()
    words = ("train", config.path, "--store", config.serve.store, "--source", "tail", *options)
    log = config.logs / "trainer.log"
    return Spec("trainer", _rollbook(*words), log, stop_s=FINISH_S, ends=True)


def _rollouts(config: WholeConfig, ray: bool) -> Spec:
    assert config.rollout is not None
    stop_s = config.rollout.clocks.grace_s + TOLD_S
    log = config.logs / "rollouts.log"
    words = ("rollout", config.path, "--follow", *(("--ray",) if ray else ()))
    return Spec("rollouts", _rollbook(*words), log, stop_s=stop_s, ends=True)


Waited = asyncio.Future[Any]
LINGER_S = 60.0
"""How long rollouts may take to notice that the training has ended."""


class Supervisor:
    """Runs the parts of a run.

    Args:
        stages: the parts, in the order in which they are started: those of one stage together, once those of
            the stage before are ready.
        say: told what somebody should know.
    """

    def __init__(self, stages: Sequence[Sequence[Spec]], say: Callable[[str], None]) -> None:
        self._say = say
        self.stages = [[Part(spec, say) for spec in stage] for stage in stages if stage]
        self._stop = asyncio.Event()
        self._running: dict[Part, asyncio.Task[None]] = {}

    @property
    def parts(self) -> list[Part]:
        """All of them."""
        return [part for stage in self.stages for part in stage]

    def stop(self) -> None:
        """Stop all of them in order; asked again, at once."""
        if self._stop.is_set():
            for part in self.parts:
                part.kill()
        self._stop.set()

    async def run(self) -> None:
        """Run until a part that ends by itself has ended, and with it all such, or until `stop`.

        Raises:
            PartError: a part ended for good. The others are stopped.
        """
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await self._start(stopping)
            await self._work(stopping)
        finally:
            stopping.cancel()
            await self._end()

    async def _start(self, stopping: Waited) -> None:
        """Start a stage once the one before is ready."""
        for stage in self.stages:
            if self._stop.is_set():
                return
            for part in stage:
                self._running[part] = asyncio.create_task(part.run())
            ready = asyncio.create_task(_all_ready(stage))
            await self._first(stopping, ready)
            ready.cancel()

    async def _work(self, stopping: Waited) -> None:
        """Wait until those that end by themselves have ended: rollouts soon after their training."""
        ends = {part: task for part, task in self._running.items() if part.spec.ends}
        for part, task in ends.items():
            if self._stop.is_set():
                return
            if not task.done():
                await self._first(stopping, task)
            if not self._stop.is_set():
                self._say(f"{part.spec.name} has ended")
                rest = [other for other in ends.values() if not other.done()]
                if rest:
                    await self._first(stopping, asyncio.ensure_future(asyncio.wait(rest, timeout=LINGER_S)))
                return
        await self._first(stopping)

    async def _first(self, *awaited: Waited) -> None:
        """Wait for one of these, or for a part that fails.

        Raises:
            PartError: one did.
        """
        while True:
            running = {task for task in self._running.values() if not task.done()}
            done, _ = await asyncio.wait({*awaited, *running}, return_when=asyncio.FIRST_COMPLETED)
            for task in self._running.values():
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    raise error
            if done & set(awaited):
                return

    async def _end(self) -> None:
        """Stop those that end by themselves, together, and then the stages that they need, the last first."""
        work = [part for part in self.parts if part.spec.ends]
        served = [[part for part in stage if not part.spec.ends] for stage in reversed(self.stages)]
        for parts in (work, *served):
            await asyncio.gather(*(part.stop() for part in parts))
            for part in parts:
                if part in self._running:
                    with contextlib.suppress(PartError):
                        await self._running[part]


async def _all_ready(stage: Sequence[Part]) -> None:
    for part in stage:
        await part.ready.wait()
