"""The attempts at a run's steps: which training each is of, what was dropped for it, how it failed."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import orjson

from rollbook.replay.claim import Claim
from rollbook.store import Store
from rollbook.store.events import Event, Json, RunOpened, SampleDropped, StepFailed, StepPlanned
from rollbook.store.fold.history import all_samples
from rollbook.store.sql.columns import json, text
from rollbook.store.sql.query import connect_at
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.select.recipe import Drop
from rollbook.train.source_files import source_digests

GIVEN = {"not_finite": "NotFiniteError", "all_rejected": "AllRejectedError"}
"""Rules by which a step that was skipped drops its samples, and the error that it failed with."""
COMPARING = ("top_fraction", "group_incomplete", "zero_variance", "unpaired")
"""Rules that compare the samples of a group, in the order in which they are applied."""
KINDS = frozenset(record.KIND for record in (RunOpened, SampleDropped, StepPlanned, StepFailed))
Dropped = tuple[str, str]
"""A leaf turn, and the rule by which its sample is dropped."""
_ATTEMPT = f"CAST(coalesce({text('attempt')}, '1') AS BIGINT)"
_DROPS = f"""
    WITH marks AS (
        SELECT lane, seq, kind, policy, step, {_ATTEMPT} AS attempt,
               coalesce(lag(seq) OVER (PARTITION BY lane ORDER BY seq), -1) AS before
        FROM internal.mark_events WHERE run = $run AND kind IN ('run.opened', 'step.planned')),
    plans AS (
        SELECT * FROM marks
        WHERE kind = 'step.planned' AND policy = $policy AND step BETWEEN $first AND $last
        QUALIFY row_number() OVER (PARTITION BY step, attempt ORDER BY seq DESC) = 1)
    SELECT d.trajectory_id, d.turn_id, d.rule, d.recipe, d.step, d.detail, d.attempt, d.policy_version, d.cut
    FROM (SELECT lane, seq, step, {_ATTEMPT} AS attempt, trajectory_id, turn_id, {text("rule")} AS rule,
                 {text("recipe")} AS recipe, {json("detail")} AS detail, policy_version, {text("cut")} AS cut
          FROM internal.mark_events
          WHERE kind = 'sample.dropped' AND run = $run AND step BETWEEN $first AND $last) d
    JOIN plans p ON p.lane = d.lane AND p.step = d.step AND p.attempt = d.attempt
    WHERE d.seq > p.before AND d.seq < p.seq
    ORDER BY d.lane, d.seq"""
"""Those since its training began: one that ended before could fill no step, and its drops count for none."""


@dataclass(frozen=True, slots=True)
class DueDrop:
    """A sample that has to be dropped.

    Attributes:
        detail: what the rule compared; None where that is not known any more.
    """

    leaf_turn_id: str
    rule: str
    detail: Json | None

    @staticmethod
    def of(drop: Drop) -> DueDrop:
        """From a recipe's drop; an erased sample's numbers are gone."""
        return DueDrop(drop.sample.leaf_turn_id, drop.rule, None if drop.sample.erased else drop.detail)


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """An attempt at a step.

    Attributes:
        drops: recorded for it since the plan before it, or since its training began.
        earlier: drops of earlier trainings, which ended before they planned anything.
        error: with which it failed; empty where it did not.
    """

    plan: StepPlanned
    drops: tuple[SampleDropped, ...]
    earlier: tuple[SampleDropped, ...] = ()
    error: str = ""

    @property
    def skipped_by(self) -> str | None:
        """The rule by which its samples are dropped, if it was skipped."""
        return next((rule for rule, name in GIVEN.items() if self.error.startswith(f"{name}(")), None)

    @property
    def spoilt(self) -> str | None:
        """The leaf turn of the sample with a number that was not finite, where it is known."""
        try:
            call = ast.parse(self.error, mode="eval").body
            arguments = [ast.literal_eval(node) for node in call.args] if isinstance(call, ast.Call) else []
        except (SyntaxError, ValueError):
            return None
        return str(arguments[2]) if len(arguments) > 2 and arguments[2] is not None else None

    @property
    def number(self) -> int:
        """Its number on its rollout batch; samples are chosen for the first, number 0."""
        return 0 if self.plan.rollout_batch is None else int(self.plan.rollout_batch["number"])


@dataclass(slots=True, eq=False)
class Training:
    """A process that trained: its configuration, and its attempts in order."""

    config: Json
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def follows_tail(self) -> bool:
        """Whether samples came from the log as it grew."""
        return bool(self.config.get("source") == "tail")


def trainings(events: Iterable[Event], run: str, policy: str) -> list[Training]:
    """The trainings of a policy in a run, from events of `KINDS`, each lane in order."""
    result: list[Training] = []
    current: dict[str, Training | None] = {}
    drops: dict[str, list[SampleDropped]] = {}
    earlier: dict[str, list[SampleDropped]] = {}
    for event in events:
        record, lane = event.record, event.lane
        if event.run != run:
            continue
        if isinstance(record, RunOpened):
            mine = record.command == "train" and record.config.get("policy") == policy
            current[lane] = Training(record.config) if mine else None
            result += [training] if (training := current[lane]) is not None else []
            earlier.setdefault(lane, []).extend(drops.pop(lane, ()))
        elif isinstance(record, SampleDropped):
            drops.setdefault(lane, []).append(record)
        elif isinstance(record, StepPlanned):
            own, before = drops.pop(lane, []), earlier.pop(lane, [])
            if (training := current.get(lane)) is not None and record.policy == policy:
                here = tuple(d for d in own if (d.step, d.attempt) == (record.step, record.attempt))
                training.attempts.append(Attempt(record, here, tuple(before)))
        elif isinstance(record, StepFailed) and record.policy == policy:
            _fail(current.get(lane), record)
    return result


def _fail(training: Training | None, failed: StepFailed) -> None:
    last = None if training is None or not training.attempts else training.attempts[-1]
    if training is not None and last is not None:
        which = last.plan.step, last.plan.attempt
        if which == (failed.step, failed.attempt):
            training.attempts[-1] = Attempt(last.plan, last.drops, last.earlier, failed.error)


def first_of_step(training: Training, place: int) -> int:
    """The place of the first attempt at a step in a training."""
    step = training.attempts[place].plan.step
    while place and training.attempts[place - 1].plan.step == step:
        place -= 1
    return place


def retaken(training: Training, place: int) -> list[str] | None:
    """The leaf turns that the attempt after a failed one takes again: its batch, without the sample (with
    its pair) that spoilt it. None where nothing is taken again."""
    attempt = training.attempts[place]
    spoilt = attempt.spoilt
    if training.config.get("on_not_finite") != "retake" or attempt.skipped_by != "not_finite":
        return None
    if attempt.number or spoilt is None:
        return None
    batch = [ref["turn_id"] for ref in all_samples(attempt.plan)]
    size = 2 if "pairs" in recorded_algorithm(attempt.plan.algorithm).needs else 1
    units = [batch[start : start + size] for start in range(0, len(batch), size)]
    return [leaf for unit in units if spoilt not in unit for leaf in unit] or None


def drops_of_skipped(training: Training, place: int) -> list[Dropped]:
    """The samples that a skipped attempt leaves to be dropped."""
    attempt = training.attempts[place]
    rule, left = attempt.skipped_by, retaken(training, place) or ()
    if rule is None:
        return []
    own = dict.fromkeys(ref["turn_id"] for ref in attempt.plan.samples)
    return [(leaf, rule) for leaf in own if leaf not in left]


def drops_of(log: Store, run: str, policy: str, steps: range) -> dict[tuple[int, int], list[SampleDropped]]:
    """The drops that were recorded with attempts at consecutive steps: (step, attempt) -> drops."""
    parameters = {"run": run, "policy": policy, "first": steps[0], "last": steps[-1]}
    with connect_at(log, "head") as connection:
        rows = connection.read(_DROPS, parameters).fetchall()
    drops: dict[tuple[int, int], list[SampleDropped]] = {}
    for trajectory, turn, rule, recipe, step, detail, attempt, version, cut in rows:
        parsed = orjson.loads(detail)
        drop = SampleDropped(trajectory, turn, rule, recipe, step, parsed, attempt, version, cut)
        drops.setdefault((step, attempt), []).append(drop)
    return drops


def in_arrival_order(drops: Iterable[SampleDropped]) -> list[SampleDropped]:
    """Drops in an order in which their samples may have come, after those that were kept."""
    return sorted(drops, key=lambda drop: -_place(drop.rule))


def _place(rule: str) -> int:
    """The place of a rule in `COMPARING`; -1 for any other rule."""
    return COMPARING.index(rule) if rule in COMPARING else -1


def details_of(plan: StepPlanned, drops: Sequence[SampleDropped], due: Iterable[DueDrop]) -> Claim:
    """What the rules compared in the samples that they dropped: rule and sample -> numbers and texts.

    Of what an older release recorded, only keys that today's form has too are compared. Left out are
    the errors of skipped steps (`GIVEN`), what was erased since, and then also the sizes of groups.
    """
    same_form = plan.environment.get("sources") == source_digests()
    computed = {(d.leaf_turn_id, d.rule): d.detail for d in due}
    unknown = {*GIVEN, "group_incomplete"} if None in computed.values() else {*GIVEN}
    claim = Claim({}, {})
    for drop in drops:
        now = computed.get((drop.turn_id, drop.rule))
        if now is None or drop.rule in unknown:
            continue
        named, again = f"{drop.rule} of {drop.turn_id}", orjson.loads(orjson.dumps(now))
        keys = drop.detail.keys() | again.keys() if same_form else drop.detail.keys() & again.keys()
        claim.recorded[named] = {key: drop.detail[key] for key in keys if key in drop.detail}
        claim.due[named] = {key: again[key] for key in keys if key in again}
    return claim
