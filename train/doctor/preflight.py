"""Preflight: what is worth checking before a training is started, each with a verdict. Pure but for the
log.
"""

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
    seen = None if log is None else read_recorded(log, cut, config)
    checks = [
        *model_and_memory(config, 0 if seen is None else seen.longest, memory),
        batch(config, seen, source),
        *normalization(config, seen),
        *kl_control(config, seen),
        _parts(config),
        staleness(config, source),
        *correction(config, seen, source),
        *routing(config, seen, source),
    ]
    if seen is not None:
        checks += [data(config, seen, source), *rewards(config, seen, source)]
        checks.append(evaluation(config, seen, source))
    if reward is not None and log is not None:
        checks.append(reward_function(reward, completions(log, cut, config)))
    return checks


def _parts(config: TrainConfig) -> Check:
    """Whether all that the algorithm is made of gives what is asked of it, on a batch that is made up."""
    try:
        try_out(config.algorithm)
    except TrainError as error:
        return Check("parts", "red", str(error), "[algorithm]")
    return Check("parts", "green", "each gives what is asked of it, on a batch made up to try it")
