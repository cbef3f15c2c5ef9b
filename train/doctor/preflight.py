"""Preflight: the checks worth making before a training is started, each with a verdict. Pure but
for reading the log."""

from __future__ import annotations

from rollbook.store import Store
from rollbook.store.cut import Cut
from rollbook.store.errors import TrainError
from rollbook.train.algorithms.trial import try_out
from rollbook.train.config.config import TrainConfig
from rollbook.train.doctor.check import Check
from rollbook.train.doctor.correction import correction
from rollbook.train.doctor.memory import model_and_memory
from rollbook.train.doctor.recorded import data, evaluation, read_recorded, rewards, routing
from rollbook.train.doctor.reward_function import completions, reward_function
from rollbook.train.doctor.settings import batch, kl_control, normalization, staleness


def preflight(
    config: TrainConfig, log: Store | None, cut: Cut, source: str, memory: int, reward: str | None = None
) -> list[Check]:
    """Every check of a configuration.

    Args:
        log: that it is to train on; None: only what needs none is checked.
        cut: of the log.
        source: `cut` or `tail`.
        memory: bytes of this machine.
        reward: `module:function` that is to be tried on completions of the log.

    Raises:
        ConfigError: a condition of the recipe is not SQL.
        CorruptionError: a file of the log is damaged.
    """
    recorded = None if log is None else read_recorded(log, cut, config)
    checks = [
        *model_and_memory(config, 0 if recorded is None else recorded.longest, memory),
        batch(config, recorded, source),
        *normalization(config, recorded),
        *kl_control(config, recorded),
        _parts(config),
        staleness(config, source),
        *correction(config, recorded, source),
        *routing(config, recorded, source),
    ]
    if recorded is not None:
        checks += [data(config, recorded, source), *rewards(config, recorded, source)]
        checks.append(evaluation(config, recorded, source))
    if reward is not None and log is not None:
        checks.append(reward_function(reward, completions(log, cut, config)))
    return checks


def _parts(config: TrainConfig) -> Check:
    """Whether every part of the algorithm gives what is asked of it, on a made-up batch."""
    try:
        try_out(config.algorithm)
    except TrainError as error:
        return Check("parts", "red", str(error), "[algorithm]")
    return Check("parts", "green", "each gives what is asked of it, on a batch made up to try it")
