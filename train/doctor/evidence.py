"""What a diagnosis looks at, the course of a training, and what it finds. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from rollbook.store.events import Json
from rollbook.train.doctor.queries import Training

FEWEST = 10
"""Steps below which nothing is said about a course."""
Row = Mapping[str, float | None]
"""Metric -> its value in a step; None where the step has none."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The mean reward of a version's held-out trajectories, and the variance of that mean."""

    mean: float
    variance: float


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns that ended in one way since a training began: how many, of which lane, with which error."""

    status: str
    lane: str
    error: str
    count: int


@dataclass(frozen=True, slots=True)
class Launches:
    """Launches of agents that ended since a training began: of which rollouts, how many, and of those that
    failed by their infrastructure why."""

    rollout: str
    by_infrastructure: bool
    why: str
    count: int


@dataclass(frozen=True, slots=True)
class Course:
    """What a training did: its steps' metrics in order, and what happened beside them.

    Attributes:
        training: which one.
        rows: of committed steps.
        numbers: of these steps.
        held_out: version -> reward of evaluations; held_out_losses: version -> loss of held-out samples.
        dropped: rule -> samples that it dropped; used: samples that steps consumed.
        failed: step -> error, of attempts that failed; syncs: version and error of syncs that failed.
        partial: version -> trajectories of its evaluation, and how many there were to be, if it is not whole;
            it has no `held_out`.
        turns: those that ended since it began, the most frequent first; launches: likewise.
    """

    training: Training
    rows: Sequence[Row]
    numbers: Sequence[int]
    held_out: Mapping[int, HeldOut]
    dropped: Mapping[str, int]
    used: int
    failed: Mapping[int, str]
    syncs: Sequence[tuple[int, str]]
    held_out_losses: Mapping[int, float] = field(default_factory=dict)
    partial: Mapping[int, tuple[int, int | None]] = field(default_factory=dict)
    turns: Sequence[Turns] = ()
    launches: Sequence[Launches] = ()

    def values(self, metric: str) -> list[float]:
        """A metric of the steps that have it."""
        return [value for row in self.rows if (value := row.get(metric)) is not None]

    def whole(self) -> tuple[int, int] | None:
        """The first and the last of its steps; None where it has none."""
        return (self.numbers[0], self.numbers[-1]) if self.numbers else None

    def ends(self, metric: str) -> tuple[float, float] | None:
        """Its mean over the first and the last tenth of those steps; None where they are too few."""
        values = self.values(metric)
        if len(values) < FEWEST:
            return None
        size = max(len(values) // 10, 3)
        return fmean(values[:size]), fmean(values[-size:])


@dataclass(frozen=True, slots=True)
class Finding:
    """A failure of which there are signs.

    Attributes:
        name: of the failure; said: what was seen, with its numbers.
        steps: first and last step that it was seen in; None where it is not about steps.
        evidence: the numbers; sql: a query that shows them.
        levers: settings that act on it.
    """

    name: str
    said: str
    steps: tuple[int, int] | None
    evidence: Json
    sql: str
    levers: tuple[str, ...]
