"""A recorded step and what another rule makes of it, side by side: values, printed elsewhere. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rollbook.store.events import Json
from rollbook.train.algorithms.rollouts import Floats
from rollbook.train.batches.experience import Experience
from rollbook.train.select.samples import Sample

if TYPE_CHECKING:
    from rollbook.replay.what_if.gradients import GradientSides

ELSEWHERE = "other_part"
"""Why a sample is not on a side that has it in another step on the same rollout batch."""
NO_CANDIDATE = "no_candidate"
"""Why it is not on a side whose recipe has nothing to say of it: it is of another split, or another run."""


@dataclass(frozen=True, slots=True)
class SampleValues:
    """The values that a side has for a sample.

    Attributes:
        advantage: mean over its trained tokens; None where none is trained.
        tokens: how many are trained.
    """

    reward: float | None
    advantage: float | None
    tokens: int


@dataclass(frozen=True, slots=True)
class SampleSides:
    """A sample of a step, on the recorded side and on the other.

    Attributes:
        turn_id: its leaf.
        recorded, other: None where it is not on that side.
        why: the rule by which that side let it go, `other_part`, or `no_candidate`; empty where both
            have it.
    """

    trajectory_id: str
    trajectory: str
    turn_id: str
    group: str | None
    recorded: SampleValues | None
    other: SampleValues | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Differences:
    """How numbers of samples that are on both sides differ.

    Attributes:
        compared: samples that have a number on both.
        mean: of the absolute difference; None where nothing is compared.
        flips: samples whose number has the opposite sign.
        correlation: None where a side has the same number throughout.
    """

    compared: int
    mean: float | None
    flips: int
    correlation: float | None


@dataclass(frozen=True, slots=True)
class StepSides:
    """A step as it was recorded, and as it is by another rule.

    Attributes:
        equal: whether the recorded side, run again, is as recorded; differs_in: the first stage that is not.
        let_go: side -> rule -> samples that it dropped.
        metrics: side -> metrics; null of a step that was not taken since no sample was left.
        gradients: None where the other side took no step.
        kl: mean of k3 of the other weights to the recorded ones, after the step, over the other side's
            trained tokens; None where there are none.
        apart: norm of the difference of the weights after the step, over that of the recorded ones.
    """

    step: int
    policy_version: int
    equal: bool
    differs_in: str | None
    samples: Sequence[SampleSides]
    let_go: Mapping[str, Mapping[str, int]]
    rewards: Differences
    advantages: Differences
    metrics: Mapping[str, Json | None]
    gradients: GradientSides | None
    kl: float | None
    apart: float

    @property
    def came(self) -> list[SampleSides]:
        """Samples of the other side alone."""
        return [sample for sample in self.samples if sample.recorded is None]

    @property
    def went(self) -> list[SampleSides]:
        """Samples of the recorded side alone."""
        return [sample for sample in self.samples if sample.other is None]

    def metric(self, side: str, name: str) -> float | None:
        """A metric of a side, where it has it."""
        return (self.metrics[side] or {}).get(name)


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """What a side has to compare it by.

    Attributes:
        experience: of the step's batch; None where it was not taken.
        chosen: leaf turns of the samples of the whole rollout batch.
        dropped: leaf turn -> the rule that dropped its sample.
    """

    experience: Experience | None
    chosen: frozenset[str]
    dropped: Mapping[str, str]

    def rules(self) -> dict[str, int]:
        """Rule -> samples that it dropped, the most first."""
        return dict(Counter(self.dropped.values()).most_common())

    def values(self) -> dict[tuple[str, int], tuple[Sample, SampleValues]]:
        """(leaf turn, how often it came before) -> its sample, and the values for it."""
        values: dict[tuple[str, int], tuple[Sample, SampleValues]] = {}
        seen: Counter[str] = Counter()
        for at, sample in enumerate(() if self.experience is None else self.experience.samples):
            assert self.experience is not None
            values[sample.leaf_turn_id, seen[sample.leaf_turn_id]] = sample, _values(self.experience, at)
            seen[sample.leaf_turn_id] += 1
        return values

    def lacks(self, leaf: str) -> str:
        """Why the step has no sample of this leaf."""
        return self.dropped.get(leaf, ELSEWHERE if leaf in self.chosen else NO_CANDIDATE)


def sample_sides(recorded: Side, other: Side) -> list[SampleSides]:
    """The samples of both sides, in the order of the recorded one, and then those of the other alone."""
    before, after = recorded.values(), other.values()
    sides = []
    for key in dict.fromkeys([*before, *after]):
        first, second = before.get(key), after.get(key)
        sample = (first or second or _none())[0]
        lacking = recorded if first is None else other
        sides.append(
            SampleSides(
                sample.trajectory_id,
                sample.name,
                sample.leaf_turn_id,
                sample.group,
                None if first is None else first[1],
                None if second is None else second[1],
                "" if first is not None and second is not None else lacking.lacks(key[0]),
            )
        )
    return sides


def differences(samples: Sequence[SampleSides], what: str) -> Differences:
    """How `reward` or `advantage` differs, over the samples that have one on both sides."""
    pairs = [
        (getattr(sample.recorded, what), getattr(sample.other, what))
        for sample in samples
        if sample.recorded is not None and sample.other is not None
    ]
    numbers = np.array([pair for pair in pairs if None not in pair], np.float64).reshape(-1, 2)
    first, second = numbers[:, 0], numbers[:, 1]
    if not len(numbers):
        return Differences(0, None, 0, None)
    flips = int((np.sign(first) * np.sign(second) < 0).sum())
    return Differences(len(numbers), float(np.abs(second - first).mean()), flips, _correlation(first, second))


def _correlation(first: Floats, second: Floats) -> float | None:
    """Pearson's; exactly 1 of equal numbers."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    if np.array_equal(first, second):
        return 1.0
    return float(np.clip(np.corrcoef(first, second)[0, 1], -1, 1))


def _values(experience: Experience, at: int) -> SampleValues:
    reward = float(experience.rewards[at])
    tokens = int(experience.ends[at + 1] - experience.ends[at])
    advantages = (
        experience.of(experience.advantages.values, at)
        if experience.advantages.per_token
        else experience.advantages.values[at : at + 1]
    )
    advantage = float(advantages.mean()) if tokens and len(advantages) else None
    return SampleValues(reward if np.isfinite(reward) else None, advantage, tokens)


def _none() -> tuple[Sample, SampleValues]:
    raise AssertionError("a key is of a side")
