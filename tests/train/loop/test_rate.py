"""`steps` raised under a schedule that decays: the rate jumps, and that is said before it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories import fabric

from rollbook.store import Store
from rollbook.store.events import RunOpened, StepPlanned
from rollbook.train.loop.loop import rate_change

COSINE = {"lr": 1e-2, "decay": "cosine"}


@pytest.mark.parametrize(
    ("optimizer", "done", "before", "announced"),
    [
        (COSINE, 5, 5, True),
        (COSINE, 5, 10, False),
        (COSINE, 0, 5, False),
        (COSINE | {"decay_steps": 5}, 5, 5, False),
        ({"lr": 1e-2}, 5, 5, False),
        (COSINE | {"lr": 1e-3}, 5, None, False),
    ],
)
def test_a_changed_rate_is_announced_in_the_middle_of_a_training(
    optimizer: Any, done: int, before: int | None, announced: bool
) -> None:
    """Of this same training, in the middle of it, where the schedule ends at another step than before."""
    config = fabric.config(fabric.SFT, steps=10, optimizer=optimizer)
    opened = None if before is None else RunOpened("train", config.as_json() | {"steps": before})
    message = rate_change(config, opened, done, lambda step, steps: 1.0 - step / steps)
    assert (message is not None) == announced
    if message is not None:
        assert "steps is 10 and was 5, which moves the end of the cosine schedule" in message
        assert "the learning rate of the next step is 0.5, where it was to be 0 (" in message


def test_another_trainings_steps_do_not_count() -> None:
    """What was trained last with another seed, or with another schedule, says nothing of this one."""
    config = fabric.config(fabric.SFT, steps=10, optimizer=COSINE)
    for other in ({"seed": 9}, {"optimizer": {"lr": 1e-3, "decay": "cosine"}}):
        opened = RunOpened("train", fabric.config(fabric.SFT, **({"steps": 5} | other)).as_json())
        assert rate_change(config, opened, 5, lambda step, steps: 1.0 / steps) is None


def test_it_is_said_before_training(
    recorded: Callable[..., Store], cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """With the rate that the next step then has."""
    log = recorded()
    (tmp_path / "train.toml").write_text(fabric.toml(fabric.config(fabric.SFT, steps=2, optimizer=COSINE)))
    command = ("train", tmp_path / "train.toml", "--store", log.path)
    assert "learning rate" not in cli(*command)[2]
    code, _, err = cli(*command, "--set", "steps=4")
    assert code == 0
    plans = [e.record for e in log.events() if isinstance(e.record, StepPlanned)]
    assert f"the learning rate of the next step is {plans[2].learning_rate:.3g}, where it was to be 0" in err
    assert err.index("the learning rate of the next step") < err.index("step 2: version 3")
    assert "learning rate" not in cli(*command, "--set", "steps=4")[2]
