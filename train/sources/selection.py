"""The interface of a source of samples, and what it gives for one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rollbook.store.cut import Cut
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.config.config import AdmissionConfig
from rollbook.train.config.recipe import RecipeConfig
from rollbook.train.select.recipe import Drop
from rollbook.train.select.samples import Sample


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Samples for the next step, what was dropped on the way, and the cut they were taken at.

    Attributes:
        slice: of the endless row of epochs; None where samples are used once.
    """

    samples: list[Sample]
    drops: list[Drop]
    cut: Cut
    slice: int | None = None


class Choosing(Protocol):
    """The part of a training's configuration that decides which samples its steps take."""

    @property
    def run(self) -> str: ...
    @property
    def policy(self) -> str: ...
    @property
    def recipe(self) -> RecipeConfig: ...
    @property
    def algorithm(self) -> Algorithm: ...
    @property
    def admission(self) -> AdmissionConfig: ...
    @property
    def idle_timeout_s(self) -> float: ...


Evicted = Callable[[list[Drop]], None]
"""Called with what is dropped while a source waits for more: admission may wait for that room."""


class Source(Protocol):
    """Gives the samples of one step after another."""

    def take(self, version: int, served: int, evicted: Evicted) -> Selection | None:
        """The next step's samples, or None when there are no more.

        Args:
            version: the trainer's.
            served: the engines'.
        """

    def unfilled(self, version: int) -> list[Drop]:
        """The recipe's drops among the samples that are left when no further step can be filled."""
