"""Trajectories that a training of groups had to decide on, and did not: a part of the ledger. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from rollbook.store.cut import Cut, parse_cut
from rollbook.store.events import Json, RunOpened, SampleDropped, StepPlanned
from rollbook.store.fold.ownership import Position

Training = tuple[str, str, int]
"""Run, policy, and how many trajectories make up a group."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A sample that a training of groups decided on, and the cut at which it did."""

    training: Training
    trajectory_id: str
    leaf: str
    cut: Cut


@dataclass(frozen=True, slots=True)
class Member:
    """A trajectory, and what was decided on of it.

    Attributes:
        group: its run, and its name; None where it is not known, or has none.
        finished: where it ended, unless as void.
        waits: whether nobody has used it who may.
        of_use: whether there was something to train on by a cut.
    """

    trajectory_id: str
    group: tuple[str, str] | None
    finished: Position | None
    waits: bool
    taken: list[Taken]
    of_use: Callable[[Cut], bool]


@dataclass(slots=True)
class Openings:
    """The trainings that lanes began, up to an event, and what each attempt is of."""

    _last: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    _of: dict[tuple[str, str, int, int], tuple[str, int, int]] = field(default_factory=dict)

    def open(self, lane: str, seq: int, run: str, record: RunOpened) -> None:
        """A process begins to write."""
        self._last[lane, run] = seq, int((record.config.get("demand") or {}).get("group_size", 1))

    def plan(self, lane: str, run: str, record: StepPlanned) -> None:
        """It plans an attempt."""
        key = run, record.policy, record.step, record.attempt
        self._of[key] = (lane, *self._last.get((lane, run), (0, 1)))

    def consumed(self, run: str, plan: StepPlanned) -> Iterator[Taken]:
        """What a committed attempt took, with what its rollout batch has for later ones."""
        training = self._training(run, plan)
        samples: list[Json] = (
            plan.samples if plan.rollout_batch is None else plan.rollout_batch.get("samples", [])
        )
        for ref in samples if training else ():
            assert training is not None
            yield Taken(training, ref["trajectory_id"], ref["turn_id"], parse_cut(plan.cut))

    def dropped(
        self, run: str, plan: StepPlanned, lane: str, seq: int, drop: SampleDropped
    ) -> Iterator[Taken]:
        """A drop that was recorded with it, since its training began."""
        training = self._training(run, plan)
        of, since, _ = self._of[run, plan.policy, plan.step, plan.attempt]
        if training is not None and of == lane and seq > since:
            unknown = drop.rule in ("not_finite", "all_rejected")  # of a step that was skipped
            cut = {} if unknown else parse_cut(drop.cut or plan.cut)
            yield Taken(training, drop.trajectory_id, drop.turn_id, cut)

    def _training(self, run: str, plan: StepPlanned) -> Training | None:
        """That it is of, if samples of groups were chosen for it, to be used once."""
        size = self._of[run, plan.policy, plan.step, plan.attempt][2]
        once = plan.schedule is not None and plan.schedule.get("slice") is None
        chosen = plan.rollout_batch is None or "samples" in plan.rollout_batch
        fits = size > 1 and once and chosen and "train" in plan.recipe.get("splits", ["train"])
        return (run, plan.policy, size) if fits else None


def omitted(members: Iterable[Member], partly: Iterable[Training]) -> set[str]:
    """The trajectories of groups of which others were decided on, and that are missing there.

    What was decided on makes up whole groups, with trajectories that were of no use then. Where it does not,
    those that were passed by are missing, the first to end first.

    Args:
        partly: trainings that decided on trajectories of which the log has no opening any more.
    """
    groups: dict[tuple[str, str], list[Member]] = defaultdict(list)
    trainings: dict[Training, set[tuple[str, str]]] = defaultdict(set)
    for member in members:
        if member.group is not None:
            groups[member.group].append(member)
            for taken in member.taken:
                trainings[taken.training].add(member.group)
    unknown = {training[:2] for training in partly}
    return {
        one.trajectory_id
        for training, names in trainings.items()
        if training[:2] not in unknown
        for name in names
        for one in _missing(groups[name], training)
    }


def _missing(members: Iterable[Member], training: Training) -> list[Member]:
    """Those of a group that a training passed by, as many as are missing."""
    cuts, beside, count = list[Cut](), list[tuple[Position, Member]](), 0
    for one in members:
        own = [taken.cut for taken in one.taken if taken.training == training]
        cuts += own
        count += bool(own)
        if not own and one.finished is not None:
            beside.append((one.finished, one))
    passed_by = [(at, one) for at, one in beside if one.waits and any(one.of_use(cut) for cut in cuts)]
    missing = -count % training[2] - (len(beside) - len(passed_by))
    return [one for _, one in sorted(passed_by, key=lambda pair: pair[0])[: max(missing, 0)]]
