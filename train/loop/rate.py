"""Reports how the learning rate changes if `steps`, at which its schedule ends, was changed. Pure."""

from __future__ import annotations

from collections.abc import Callable

from rollbook.store.events import RunOpened
from rollbook.train.config.config import TrainConfig
from rollbook.train.config.phase import FREE


def rate_change(
    config: TrainConfig, before: RunOpened | None, done: int, rate: Callable[[int, int], float]
) -> str | None:
    """A message about the next step's learning rate, or None if the rate continues as planned.

    Args:
        before: the `run.opened` of the run's previous training.
        done: steps of the configuration that are committed.
        rate: gives the learning rate of a step under a schedule of so many steps.
    """
    decay, planned = config.optimizer.decay, _steps_before(config, before)
    if decay == "constant" or config.optimizer.decay_steps is not None or not done or planned is None:
        return None
    old, new = rate(done, planned), rate(done, config.steps)
    if planned == config.steps or old == new:
        return None
    return (
        f"steps is {config.steps} and was {planned}, which moves the end of the {decay} schedule: the "
        f"learning rate of the next step is {new:.3g}, where it was to be {old:.3g} (optimizer.decay_steps, "
        "set when a training begins, keeps the end where it is)"
    )


def _steps_before(config: TrainConfig, before: RunOpened | None) -> int | None:
    """`steps` of the last start of this same training; None where that was another."""
    if before is None:
        return None
    decides = {key: value for key, value in config.as_json().items() if key not in FREE}
    same = all(_is_same(before.config.get(key, value), value) for key, value in decides.items())
    steps = before.config.get("steps")
    return steps if same and isinstance(steps, int) else None


def _is_same(before: object, now: object) -> bool:
    """Whether a value, or each key of a table that there was then, is the same."""
    if isinstance(before, dict) and isinstance(now, dict):
        return all(before.get(key, value) == value for key, value in now.items())
    return before == now
