"""A run of Weights & Biases with the points of one policy, where `wandb` is installed and was told of."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from rollbook.train.curves.points import Point

VARIABLES = ("WANDB_PROJECT", "WANDB_MODE")
"""Of the environment: one of them asks for it. wandb reads them, its key and the others itself."""


def is_asked_for(environment: Mapping[str, str]) -> bool:
    """Whether trainings are to be shown there."""
    return any(environment.get(name) for name in VARIABLES) and find_spec("wandb") is not None


class WandbRun:
    """A run that goes on where an earlier process was: its id follows from store, run and policy."""

    def __init__(
        self, store_id: str, run: str, policy: str, config: Mapping[str, Any], points: Iterable[Point]
    ) -> None:
        """Begin or resume it, and send the points of the past that it has not.

        Raises:
            Exception: any of wandb's.
        """
        import wandb

        name = f"{run}/{policy}"
        self._run = wandb.init(
            id=hashlib.sha256(f"{store_id}/{name}".encode()).hexdigest()[:16],
            name=name,
            group=run,
            job_type="train",
            config=dict(config),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._first = int(self._run.starting_step)
        for point in points:
            self.write(point)

    def write(self, point: Point) -> None:
        """Add a point, unless the run goes on after it.

        Raises:
            Exception: any of wandb's.
        """
        if point.step >= self._first:
            self._run.log(dict(point.values), step=point.step)

    def close(self) -> None:
        """End it, everything sent or on disk.

        Raises:
            Exception: any of wandb's.
        """
        self._run.finish()
