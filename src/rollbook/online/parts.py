"""The parts of a run: what is started for each, in which order."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from rollbook.online.config import EnginesConfig, WholeConfig
from rollbook.online.part import Spec
from rollbook.store.errors import ConfigError

PARTS = ("engines", "proxy", "trainer", "rollouts")
"""In the order in which they are started; they are stopped in the other."""
FINISH_S = 900.0
"""How long the step in hand may take, when a training is asked to end."""


def specs_of(
    config: WholeConfig, only: Collection[str] = (), trainer: Sequence[str] = ()
) -> list[list[Spec]]:
    """What is to be started on this host: for each part its processes.

    Args:
        only: parts; empty: all that the CONFIG has, but for those whose addresses are another host's.
        trainer: more options of `rollbook train`.

    Raises:
        ConfigError: a part is asked for that the CONFIG does not have.
    """
    wanted = only or PARTS
    made = {
        "engines": [] if config.engines is None else _engines(config, config.engines),
        "proxy": [_proxy(config)] if config.here else [],
        "trainer": [] if config.train is None else [_trainer(config, trainer)],
        "rollouts": [] if config.rollout is None else [_rollouts(config)],
    }
    for part in only:
        if not made[part]:
            table = {"engines": config.engines, "proxy": config.serve, "trainer": config.train}
            has = table.get(part, config.rollout) is not None
            where = "its address is another host's" if has else "it has no such table"
            raise ConfigError(f"{config.path}: --only {part}: {where}")
    return [made[part] for part in PARTS if part in wanted]


def _engines(config: WholeConfig, engines: EnginesConfig) -> list[Spec]:
    found = []
    for at, address in enumerate(engines.here):
        host, _, port = address.rpartition(":")
        gpus = {"CUDA_VISIBLE_DEVICES": engines.gpus[at]} if engines.gpus else {}
        where = ("--model-path", str(config.serve.model), "--host", host, "--port", port)
        found.append(
            Spec(
                name=f"engine {address}",
                command=(*engines.command, *where, *engines.options),
                log=config.logs / f"engine-{port}.log",
                environment=engines.environment | gpus,
                health=f"http://{address}/health",
                ready_s=engines.ready_s,
                silence_s=engines.silence_s,
            )
        )
    return found


def _rollbook(*words: object) -> tuple[str, ...]:
    return (sys.executable, "-m", "rollbook", *map(str, words))


def _proxy(config: WholeConfig) -> Spec:
    health, log = f"{config.proxy}/healthz", config.logs / "proxy.log"
    # Its engine may wait for the trainer to give it weights, which begins after it.
    return Spec("proxy", _rollbook("serve", config.path), log, health=health, any_answer=True)


def _trainer(config: WholeConfig, options: Sequence[str]) -> Spec:
    words = ("train", config.path, "--store", config.serve.store, "--source", "tail", *options)
    log = config.logs / "trainer.log"
    return Spec("trainer", _rollbook(*words), log, stop_s=FINISH_S, ends=True)


def _rollouts(config: WholeConfig) -> Spec:
    assert config.rollout is not None
    stop_s = config.rollout.clocks.grace_s + 60.0
    log = config.logs / "rollouts.log"
    return Spec("rollouts", _rollbook("rollout", config.path, "--follow"), log, stop_s=stop_s, ends=True)
