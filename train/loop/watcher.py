"""The interface between a training and what shows its progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rollbook.store.events import Json, Record


@dataclass(frozen=True, slots=True)
class TrainingStart:
    """The start, or resumption, of a training.

    Attributes:
        cut: of the log that it takes samples from; None for the tail.
        step: number of the step that comes next, and the policy version that it starts from.
        done, steps: of this configuration: committed before, and asked for.
        other: steps of the policy that were committed by other configurations.
    """

    run: str
    algorithm: str
    cut: str | None
    step: int
    version: int
    done: int
    steps: int
    other: int = 0


class Watcher(Protocol):
    """Gets what happens in a training, on the training's thread."""

    def begun(self, start: TrainingStart) -> None:
        """The training is about to take its first step."""

    def tell(self, *records: Record) -> None:
        """These events were written."""

    def committed(self, done: int, step: int, metrics: Json) -> None:
        """Step `step` is committed, the `done`-th of this configuration."""

    def note(self, text: str) -> None:
        """A message of interest."""

    def warn(self, text: str) -> None:
        """A warning that a person should act on."""
