"""A step's numbers from the log alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollbook.replay.step.partial import Part, why_no_losses
from rollbook.store.errors import ReplayError
from rollbook.store.events import StepPlanned
from rollbook.train.algorithms.rollouts import Singles
from rollbook.train.batches.batch import Batch


@dataclass(slots=True, eq=False)
class LogNumbers:
    """A `NumbersSource`: models' outputs for tokens are as the step recorded them."""

    plan: StepPlanned
    batch: Batch
    values: Mapping[str, Singles]

    def passes(self, batch: Batch, part: Part) -> tuple[list[Singles], list[Singles]]:
        """As of the protocol.

        Raises:
            ReplayError: the step recorded no logprobs, or its loss also needs what only a model gives.
        """
        from rollbook.replay.step.passes import recorded_passes

        if (why := why_no_losses(self.plan, self.values)) is not None:
            raise ReplayError(why)
        return recorded_passes(self.plan, batch, self.values["logprobs"])
