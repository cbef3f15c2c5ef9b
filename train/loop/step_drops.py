"""The drops of the steps to come: what their plans record, and what becomes of it where a step is skipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollbook.store.cut import parse_cut
from rollbook.store.digest import digest_json
from rollbook.store.errors import AllRejectedError, NotFiniteError
from rollbook.store.events import Json, SampleDropped, StepPlanned
from rollbook.train.data.recipe import Drop, decided
from rollbook.train.data.samples import Sample

SKIPS_IN_A_ROW = 8
"""Most batches in a row that may be skipped, not finite or all rejected: more are not caused by samples."""
Skipped = NotFiniteError | AllRejectedError
"""Why a step is skipped."""


@dataclass(slots=True)
class StepDrops:
    """What is dropped before the next plan.

    Attributes:
        skipped: how many steps in a row were skipped.
    """

    skipped: int = 0
    _held_back: list[Drop] = field(default_factory=list)
    """Drops of steps that were skipped, until a plan follows."""
    _recorded: list[Drop] = field(default_factory=list)
    """Drops that were written with the attempt that is the next one to plan."""

    def to_record(self, drops: Sequence[Drop]) -> list[Drop]:
        """With these the drops that are to be written now."""
        fresh, self._held_back = [*self._held_back, *drops], []
        self._recorded += fresh
        return fresh

    def may_skip(self, error: Skipped, on_not_finite: str) -> bool:
        """Whether the step's samples are to be dropped. Not possible if the weights were updated already."""
        may = isinstance(error, AllRejectedError) or (on_not_finite != "stop" and error.stage != "weights")
        return may and self.skipped < SKIPS_IN_A_ROW

    def hold_back(self, samples: Sequence[Sample], error: Skipped, plan: StepPlanned) -> None:
        """Keep the drops of a planned step, and its samples as drops, for the next plan; they count once a
        step commits."""
        self.skipped += 1
        rule, detail = "all_rejected", {"error": str(error).partition(": the step is")[0]}
        if isinstance(error, NotFiniteError):
            rule = "not_finite"
            detail = {"stage": error.stage, "error": str(error).partition(": the step")[0]}
        one_each = {sample.leaf_turn_id: sample for sample in samples}
        self._held_back += decided(self._recorded, plan.policy_version, parse_cut(plan.cut))
        self._held_back += [Drop(sample, rule, detail) for sample in one_each.values()]
        self._recorded = []

    def committed(self) -> None:
        """The step that they were dropped before is committed."""
        self._recorded, self._held_back, self.skipped = [], [], 0


def drop_records(drops: Sequence[Drop], recipe: Json, step: int, attempt: int) -> list[SampleDropped]:
    """The events of drops before an attempt at a step."""
    digest = digest_json(recipe)
    return [
        SampleDropped(
            d.sample.trajectory_id,
            d.sample.leaf_turn_id,
            d.rule,
            digest,
            step,
            d.detail,
            attempt,
            *(d.decided or (None, None)),
        )
        for d in drops
    ]
