"""The rollout batch on which a training takes its steps, and how an interrupted one is found again in the
log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollbook.store import Store
from rollbook.store.cut import Cut, parse_cut
from rollbook.store.events import Json
from rollbook.store.fold.history import History, all_samples
from rollbook.train.config.config import TrainConfig
from rollbook.train.data.batch import Partition
from rollbook.train.data.mini_batches import mini_batches
from rollbook.train.data.recipe import Drop
from rollbook.train.data.samples import Sample
from rollbook.train.loop.rerun import samples_at_cut
from rollbook.train.loop.step import step_seed


@dataclass(slots=True)
class BatchInHand:
    """A rollout batch on which steps are being taken.

    Attributes:
        first_step: number of the first of them.
        parts: positions of the samples of each.
        drops: to be recorded with the next plan.
        others: members of the samples' groups that were dropped, and with which they are compared.
        next: which of the parts comes next.
        committed: how many steps on it are.
        scored: the micro-batches in which it was scored while it came; None: it was not.
        iterations: samples of each part that was scored.
        slice: as of the selection.
    """

    samples: list[Sample]
    cut: Cut
    first_step: int
    parts: list[list[int]]
    drops: list[Drop] = field(default_factory=list)
    others: list[Json] = field(default_factory=list)
    next: int = 0
    committed: int = 0
    scored: Partition | None = None
    iterations: Sequence[int] = ()
    slice: int | None = None

    def described(self, divide: Callable[[Sequence[Sample]], Partition]) -> Json | None:
        """What the manifest of its next step says of it.

        Args:
            divide: samples into micro-batches.
        """
        if len(self.parts) == 1 and self.scored is None:
            return None
        said: Json = {"first_step": self.first_step, "number": self.next, "steps": len(self.parts)}
        if self.committed:
            return said
        said |= {
            "samples": [sample.reference for sample in self.samples],
            "partition": divide(self.samples) if self.scored is None else self.scored,
        }
        return said if self.scored is None else said | {"iterations": list(self.iterations)}


def unfinished(log: Store, history: History, phase: str, config: TrainConfig) -> BatchInHand | None:
    """The rollout batch on which a training was taking steps when it was interrupted, if it was.

    Raises:
        ReplayError: the log does not hold one of its samples, or its tokens were erased.
    """
    taken = history.in_hand()
    if not taken or taken[-1].planned.phase != phase:
        return None
    first, last = taken[0].planned, taken[-1].planned
    assert last.rollout_batch is not None
    named, found = all_samples(first), samples_at_cut(log, first, config.run)
    begun = int(last.rollout_batch["first_step"])
    return BatchInHand(
        [found[ref["turn_id"]] for ref in named],
        parse_cut(first.cut),
        begun,
        mini_batches(len(named), config.algorithm.demand, step_seed(config.seed, begun)),
        next=last.rollout_batch["number"] + 1,
        committed=len(taken),
        slice=None if first.schedule is None else first.schedule["slice"],
    )


def without(in_hand: BatchInHand, leaf: str | None, config: TrainConfig) -> BatchInHand | None:
    """A rollout batch of which no step is taken, without the sample of a leaf turn, and without its pair;
    None where the leaf is not known, or nothing is left."""
    unit, whole = 2 if "pairs" in config.algorithm.needs else 1, in_hand.samples
    units = [whole[start : start + unit] for start in range(0, len(whole), unit)]
    left = [one for own in units if leaf not in [s.leaf_turn_id for s in own] for one in own]
    if leaf is None or not left:
        return None
    parts = mini_batches(len(left), config.algorithm.demand, step_seed(config.seed, in_hand.first_step))
    return BatchInHand(
        left, in_hand.cut, in_hand.first_step, parts, others=in_hand.others, slice=in_hand.slice
    )
