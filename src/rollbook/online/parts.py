"""The parts of a run: what is started for each, in which order."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rollbook.ingest.engines.hub import model_folder
from rollbook.online.config import EnginesConfig, PlacedConfig, WholeConfig
from rollbook.online.part import Spec
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
    made = {
        "engines": [] if config.engines is None else _engines(config, config.engines),
        "proxy": [_proxy(config)] if config.here else [],
        "trainer": [] if config.train is None else [_trainer(config, ray)],
        "rollouts": [] if config.rollout is None else [_rollouts(config, ray)],
    }
    for part in only:
        if not made[part]:
            table = {"engines": config.engines, "proxy": config.serve, "trainer": config.train}
            has = table.get(part, config.rollout) is not None
            where = "its address is another host's" if has else "it has no such table"
            raise ConfigError(f"{config.path}: --only {part}: {where}")
    return [made[part] for part in PARTS if part in wanted]


def _engines(config: WholeConfig, engines: EnginesConfig) -> list[Spec]:
    assert config.serve.model is not None
    found, model = [], str(model_folder(config.serve.model, fetch=False))
    for at, address in enumerate(engines.here if engines.placed is None else engines.addresses):
        host, _, port = address.rpartition(":")
        gpus = {"CUDA_VISIBLE_DEVICES": engines.gpus[at]} if engines.gpus else {}
        where = ("--model-path", model, "--host", host, "--port", port)
        command, log = (*engines.command, *where, *engines.options), config.logs / f"engine-{port}.log"
        variables = engines.environment | gpus
        if engines.placed is not None:
            command, variables = _placed(config, engines.placed, at, host, log, command, variables), {}
        found.append(
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
    return found


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
    said = {"group": config.group or "", "bundle": str(bundle), "host": host, "log": str(log.resolve())}
    said |= {"resources": json.dumps(placed.resources), "environment": json.dumps(dict(variables))}
    options = (word for name, value in said.items() for word in (f"--{name}", value))
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
