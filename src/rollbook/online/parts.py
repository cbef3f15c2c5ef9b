"""The parts of a run: what is started for each, in which order, how they are kept running, and how they are
stopped in the other order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollbook.engines.hub import model_folder
from rollbook.online.config import EnginesConfig, PlacedConfig, WholeConfig
from rollbook.online.part import Part, PartError, Spec
from rollbook.store.errors import ConfigError

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
