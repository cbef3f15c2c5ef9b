"""The verdict of a replay on a step, stage by stage and in words: what was compared, and what was not."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rollbook.store.events import Json


class Verdict(StrEnum):
    """The verdict of a replay on a stage."""

    equal = "equal"
    """It came out as recorded, bit for bit; or by the log it is as the manifest says."""
    within = "equal within"
    """Its numbers are within the tolerance for where bits cannot be promised."""
    differs = "differs"
    not_recorded = "not recorded"
    """The release that took the step did not record it."""
    not_proven = "not proven"
    """What it follows from is not here; `StageReplay.why` says what."""


PROVEN = (Verdict.equal, Verdict.within)


class Outcome(StrEnum):
    """The verdict of a replay on a step."""

    bits = "bit for bit"
    """All that was recorded was compared, and came out bit for bit."""
    within = "equal within"
    """All was compared; some of it is not the same bits, and within its tolerance."""
    part = "in part"
    """What was compared is as recorded, and not everything was."""
    nothing = "not proven"
    """Nothing of it could be compared."""
    differs = "differs"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stage begins to differ, as far as the step's records say; None where they do not.

    Attributes:
        sample: its place in the manifest; token: its place in the sample's path.
        tensor: its name; element: an index of each of its dimensions.
        key: of a manifest, or a metric.
        recorded, replayed: the values there; ulps: how many numbers of their type lie between them.
    """

    sample: int | None = None
    trajectory_id: str | None = None
    trajectory: str | None = None
    turn_id: str | None = None
    token: int | None = None
    tensor: str | None = None
    element: tuple[int, ...] | None = None
    key: str | None = None
    recorded: Json | str | float | None = None
    replayed: Json | str | float | None = None
    ulps: int | None = None

    def in_words(self) -> str:
        """In words."""
        parts = [] if self.key is None else [self.key]
        if self.sample is not None:
            parts.append(f"sample {self.sample}")
        if self.trajectory is not None:
            parts.append(f"trajectory {self.trajectory}")
        if self.turn_id is not None:
            parts.append(f"turn {self.turn_id}")
        if self.token is not None:
            parts.append(f"token {self.token}")
        if self.tensor is not None:
            parts.append(self.tensor + ("" if self.element is None else str(list(self.element))))
        where = ", ".join(parts)
        if self.recorded is None and self.replayed is None:
            return where
        apart = "" if self.ulps is None else f" ({self.ulps:,} ulps apart)"
        return f"{where}: recorded {self.recorded}, replayed {self.replayed}{apart}"


@dataclass(frozen=True, slots=True)
class StageReplay:
    """A stage of a step, as it was recorded and as it is now: the digests, and the verdict.

    Attributes:
        why: it differs or is not proven, where that is known.
        tolerance: of one that is `equal within` it.
    """

    stage: str
    verdict: Verdict
    recorded: str | None = None
    replayed: str | None = None
    why: str = ""
    place: Place | None = None
    tolerance: str = ""


@dataclass(frozen=True, slots=True)
class StepReplay:
    """The replay of one step: a value, printed elsewhere.

    Attributes:
        from_version: policy version of the checkpoint it started from; None: no model was run.
        weights_only: that checkpoint had no optimizer state, so the step's update is not proven.
        reran: steps run again, this one last.
        differs_at_step: the first step that differs, this one or one before it; the stages are then
            that step's.
        stages: by name, in the order in which they depend on each other.
        metrics: as computed now.
        environment: differences between the recorded environment and this one.
        promised: whether bits can be promised here; if not, numbers are compared within tolerances.
        passed_over: why nearer checkpoints were not started from.
        late: rewards of its trajectories that came after it was planned.
    """

    run: str
    step: int
    attempt: int
    policy: str
    policy_version: int
    from_version: int | None
    weights_only: bool
    reran: list[int]
    stages: dict[str, StageReplay]
    metrics: Json
    environment: list[str] = field(default_factory=list)
    promised: bool = True
    differs_at_step: int | None = None
    passed_over: tuple[str, ...] = ()
    late: list[Json] = field(default_factory=list)

    @property
    def first_difference(self) -> StageReplay | None:
        """The first stage that differs."""
        return next((stage for stage in self.stages.values() if stage.verdict == Verdict.differs), None)

    @property
    def differs_in(self) -> str | None:
        """The name of that stage."""
        return None if (first := self.first_difference) is None else first.stage

    @property
    def bit_for_bit(self) -> bool:
        """Whether all that was recorded was compared and came out bit for bit, including its new weights."""
        summary_json = self.named(Verdict.equal)
        rest = self.named(Verdict.not_recorded)
        return (
            bool(summary_json) and len(summary_json) + len(rest) == len(self.stages) and "weights" not in rest
        )

    @property
    def exact(self) -> bool:
        """Whether what was compared came out bit for bit; more may not have been compared."""
        return bool(self.named(Verdict.equal)) and not self.named(Verdict.differs, Verdict.within)

    @property
    def outcome(self) -> Outcome:
        """The verdict on the whole step."""
        if not self.equal:
            return Outcome.differs
        if self.bit_for_bit:
            return Outcome.bits
        if not self.named(*PROVEN):
            return Outcome.nothing
        return Outcome.part if self.unproven or "weights" in self.unrecorded else Outcome.within

    def named(self, *verdicts: Verdict) -> list[str]:
        """The stages with these verdicts, in order."""
        return [name for name, stage in self.stages.items() if stage.verdict in verdicts]

    @property
    def unrecorded(self) -> list[str]:
        """Stages that the step did not record."""
        return self.named(Verdict.not_recorded)

    @property
    def equal(self) -> bool:
        """Whether no stage differs beyond what is tolerated here."""
        return self.first_difference is None

    @property
    def as_far_as(self) -> str | None:
        """The last proven stage among those that lead to the new weights; None: none was."""
        proven = None
        for name, stage in self.stages.items():
            proven = name if stage.verdict in PROVEN else proven
            if name == "weights":
                break
        return proven

    @property
    def whole(self) -> bool:
        """Whether it proves the step's new weights, and with them all that they follow from."""
        return self.as_far_as == "weights"

    @property
    def unproven(self) -> list[StageReplay]:
        """Stages that could not be proven."""
        return [stage for stage in self.stages.values() if stage.verdict == Verdict.not_proven]


FEWEST = 3
"""Stages in a row that are named by the first and the last of them."""


def summary(replay: StepReplay) -> str:
    """A line about a replay in which nothing differs."""
    text = str(replay.outcome)
    match replay.outcome:
        case Outcome.nothing:
            return "nothing of it can be proven here"
        case Outcome.bits:
            if "weights" not in replay.stages:  # a part was asked for
                text += f" in {_listed(replay, replay.named(Verdict.equal))}"
            rest = _listed(replay, replay.unrecorded)
            return f"{text}, but for {rest}, which was not recorded" if rest else text
        case Outcome.within:
            text = "equal within tolerances"
        case _:
            text = "equal in part"
    parts = [
        ("bit for bit in", _listed(replay, replay.named(Verdict.equal))),
        ("within tolerances in", ", ".join(_within(replay))),
        ("not compared:", _listed(replay, replay.named(Verdict.not_proven))),
        ("not recorded:", _listed(replay, replay.unrecorded)),
    ]
    return f"{text}: " + "; ".join(f"{what} {which}" for what, which in parts if which)


def summary_json(replay: StepReplay) -> Json:
    """The summary for machines: the outcome, and the stages by verdict."""
    return {
        "outcome": str(replay.outcome),
        "compared": {str(v): replay.named(v) for v in (Verdict.equal, Verdict.within, Verdict.differs)},
        "not_compared": {str(v): replay.named(v) for v in (Verdict.not_proven, Verdict.not_recorded)},
    }


def _within(replay: StepReplay) -> list[str]:
    """The stages that are within tolerances, each with its own."""
    return [f"{name} ({replay.stages[name].tolerance})" for name in replay.named(Verdict.within)]


def _listed(replay: StepReplay, names: Collection[str]) -> str:
    """Stages by name; several in a row by the first and the last."""
    rows: list[list[str]] = [[]]
    for name in replay.stages:
        if name in names:
            rows[-1].append(name)
        elif rows[-1]:
            rows.append([])
    return ", ".join(_row(row) for row in rows if row)


def _row(row: Sequence[str]) -> str:
    return f"{row[0]} to {row[-1]}" if len(row) >= FEWEST else ", ".join(row)
