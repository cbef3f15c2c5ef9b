"""What a replay says of a log that leaves samples out, or gives false reasons: it names the first of them.

Nothing is run: a manifest's choice is made again by the log alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.replay.claim import judge_claim
from rollbook.replay.step.run_log import RunLog
from rollbook.replay.verdict import StageReplay, Verdict
from rollbook.store import Event, Store
from rollbook.store.cut import format_cut
from rollbook.store.events import Json, SampleDropped, StepFailed, StepPlanned
from rollbook.store.fold.history import KINDS, fold_history
from rollbook.store.sql.balance import Omitted, read_ledger
from rollbook.store.sql.query import connect_at
from rollbook.train.loop import trainer

GROUPS = {"name": "grpo", "groups": 2, "group_size": 4}
RUNS = ("cut", "tail")
"""Those that drop samples."""
PLAIN = ("plain-cut", "plain-tail")
"""Those that drop none, of a group that is used."""
HALF = {"top_fraction": 0.5, "drop_zero_variance": True}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Runs that drop the worse half of each group, or none of it, at a cut, and on the tail, where more came
    after the first step. Never write to it."""
    store = rb.open(tmp_path_factory.mktemp("choices") / "store", create=True)
    for place, run in enumerate(RUNS + PLAIN):
        rollouts = fabric.rollout_records(8, 4, first=10 * place)
        flat = [r for i in range(4) for r in fabric.records(f"{run}.{i}", group=f"{run}-flat", reward=1.0)]
        half = len(rollouts) // 2
        append = partial(fabric.append, store, run=run, lane=f"serve-{run}")
        append([*flat, *rollouts[:half]])
        changes = {"run": run, "steps": 2, "algorithm": GROUPS, "recipe": HALF if run in RUNS else {}}
        with _told_late(append, rollouts[half:]):
            fabric.train(
                store, fabric.config(fabric.GRPO, **changes), run.removeprefix("plain-"), lane=f"train-{run}"
            )
    return store


@pytest.fixture(scope="module")
def lanes(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two runs on the tail whose trajectories ended in two lanes, in the second more than a group takes.
    Never write to it."""
    store = rb.open(tmp_path_factory.mktemp("lanes") / "store", create=True)
    for run, size in (("lanes", 4), ("more", 5)):
        for i in range(size):
            own = [fabric.records(f"{run}{g}.{i}", group=f"{run}{g}", reward=float(i)) for g in range(4)]
            fabric.append(store, [r for records in own for r in records], run=run, lane=f"serve-{i % 2}")
        settings = fabric.config(fabric.GRPO, run=run, steps=2, algorithm=GROUPS)
        fabric.train(store, settings, "tail", lane=f"train-{run}")
    return store


@contextmanager
def _told_late(append: Callable[[Any], None], records: list[Any]) -> Iterator[None]:
    """These are recorded while the first step of a training runs."""
    right, more = trainer.run_step, [records]

    def run_step(*given: Any, **options: Any) -> Any:
        if more:
            append(more.pop())
        return right(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "run_step", run_step)
        yield


def _selection(log: Store, run: str, step: int) -> StageReplay:
    history = fold_history(log.events_of(KINDS), run, "actor")
    return judge_claim("selection", RunLog(log, history).selections.claim(history.steps[step]))


def _forged(log: Store, folder: Path, run: str, change: Callable[[list[Event]], list[Event]]) -> Store:
    """A copy of the log whose training wrote other events."""
    path, lane = folder / "forged", f"train-{run}"
    shutil.copytree(log.path, path, ignore=lambda _, names: {lane, "catalog.db", "derived"} & set(names))
    store = rb.open(path)
    with store.writer(lane) as writer:
        writer.append(change([event for event in log.events() if event.lane == lane])).result(30)
    return store


@dataclass(frozen=True)
class Forgery:
    """Another course of a step.

    Attributes:
        leaves: which of the plan's samples it is without, of those with whole groups.
        drops: what becomes of the drops that were recorded with it.
        more: drops beyond them, of the samples left out.
        key: of the claim that differs.
    """

    key: str
    leaves: Callable[[int, Any], bool] = lambda place, plan: False
    drops: Callable[[SampleDropped], SampleDropped | None] = lambda drop: drop
    more: str = ""

    def __call__(self, step: int, events: list[Event]) -> list[Event]:
        """The events of the training with it."""
        forged: list[Event] = []
        for event in events:
            record = event.record
            if isinstance(record, SampleDropped) and record.step == step:
                changed = self.drops(record)
                forged += [] if changed is None else [replace(event, record=changed)]
            elif isinstance(record, StepPlanned) and record.step == step:
                forged += self._planned(event, record)
            else:
                forged.append(event)
        return [Event(event.record, event.run) for event in forged]

    def _planned(self, event: Event, plan: StepPlanned) -> list[Event]:
        gone = [ref for i, ref in enumerate(plan.samples) if self.leaves(i, plan)]
        left = [ref for ref in plan.samples if ref not in gone]
        why = (self.more, plan.recipe_digest, plan.step, {})
        drops = [SampleDropped(ref["trajectory_id"], ref["turn_id"], *why) for ref in gone if self.more]
        parts = [[list(range(len(left)))]]
        planned = replace(plan, samples=left, partition=parts)
        return [*(replace(event, record=drop) for drop in drops), replace(event, record=planned)]


def _renamed(rule: str) -> Callable[[SampleDropped], SampleDropped]:
    return lambda drop: replace(drop, rule=rule)


def _first(place: int, plan: Any) -> bool:
    return place == 0


def _first_group(place: int, plan: Any) -> bool:
    return place < 2


FORGERIES = {
    "a member is left out": Forgery("samples[0]", _first),
    "a group is left out": Forgery("samples[0]", _first_group),
    "a group is left out with its drops": Forgery("samples[0]", _first_group, lambda drop: None),
    "no drop is told": Forgery("drops[0]", drops=lambda drop: None),
    "the best is dropped as not finite": Forgery("samples[0]", _first, more="not_finite"),
    "the best is dropped as below the top": Forgery("samples[0]", _first, more="top_fraction"),
    "a rule is renamed not_finite": Forgery("drops[0]", drops=_renamed("not_finite")),
    "a rule is renamed all_rejected": Forgery("drops[0]", drops=_renamed("all_rejected")),
    "a rule is renamed staleness": Forgery("drops[0]", drops=_renamed("staleness")),
    "a detail is another": Forgery("details", drops=lambda drop: replace(drop, detail={"reward": 9.0})),
    "a detail is removed": Forgery("details", drops=lambda drop: replace(drop, detail={})),
    "a detail is added": Forgery("details", drops=lambda drop: replace(drop, detail=drop.detail | {"a": 1})),
}


@pytest.mark.more_but(
    *("tail-a member is left out", "tail-a group is left out", "tail-no drop is told"),
    *("tail-*below the top", "tail-*renamed not_finite", "tail-*renamed staleness"),
    *("tail-a detail is another", "plain-cut-a member is left out"),
)
@pytest.mark.parametrize(
    ("run", "forgery"),
    [
        *((run, forgery) for run in RUNS for forgery in FORGERIES),
        *((run, forgery) for run in PLAIN for forgery, of in FORGERIES.items() if of.leaves(0, None)),
    ],
)
def test_what_is_left_out_is_named(log: Store, tmp_path: Path, run: str, forgery: str) -> None:
    """At a cut and on the tail alike, at the step itself."""
    forged = FORGERIES[forgery]
    stage = _selection(_forged(log, tmp_path, run, partial(forged, 1)), run, 1)
    assert stage.verdict == Verdict.differs
    assert stage.place is not None
    assert (stage.place.key or "").partition("[")[0].partition(".")[0] == forged.key.partition("[")[0]


@pytest.mark.more_but("tail")
@pytest.mark.parametrize("run", RUNS + PLAIN)
def test_the_ledger_names_a_member_that_is_left_out(log: Store, tmp_path: Path, run: str) -> None:
    """Of the honest log it names nobody."""
    forged = _forged(log, tmp_path, run, partial(FORGERIES["a member is left out"], 1))
    [gone] = _refs(log, run) - _refs(forged, run)
    assert _omitted(log) == []
    assert [(omitted.trajectory_id, *omitted.turns[-1:]) for omitted in _omitted(forged)] in (
        [gone],
        [gone[:1]],
    )


def _refs(log: Store, run: str) -> set[tuple[str, str]]:
    plan = fold_history(log.events_of(KINDS), run, "actor").steps[1].planned
    return {(ref["trajectory_id"], ref["turn_id"]) for ref in plan.samples}


def _omitted(log: Store) -> list[Omitted]:
    ledgers = read_ledger(connect_at(log, format_cut(log.head())))
    return [omitted for ledger in ledgers for omitted in ledger.omitted]


@pytest.mark.more_but("tail")
@pytest.mark.parametrize("run", RUNS + PLAIN)
def test_the_log_as_it_was_written_is_proven(log: Store, tmp_path: Path, run: str) -> None:
    """Each step, its own order of groups too, and so is a copy in which nothing was changed."""
    copy = _forged(log, tmp_path, run, partial(Forgery(""), 0))
    for held in (log, copy):
        for step in fold_history(held.events_of(KINDS), run, "actor").steps:
            stage = _selection(held, run, step)
            assert (stage.verdict, stage.why) == (Verdict.equal, "")


@pytest.mark.more_but("detail1-*-False", "detail2-*-False")
@pytest.mark.parametrize("excerpt", [False, True])
@pytest.mark.parametrize(
    ("detail", "verdict"),
    [({}, Verdict.equal), ({"another": 1}, Verdict.equal), ({"reward": 9.0}, Verdict.differs)],
)
def test_details_of_another_form(
    log: Store, tmp_path: Path, detail: Json, verdict: Verdict, *, excerpt: bool
) -> None:
    """Of what another release recorded, those of today's keys that it has are compared; in an excerpt too."""

    def change(events: list[Event]) -> list[Event]:
        edited = Forgery("", drops=lambda drop: replace(drop, detail=detail))(1, events)
        old = (
            replace(e.record, environment={}) if isinstance(e.record, StepPlanned) else e.record
            for e in edited
        )
        return [Event(record, RUNS[0]) for record in old]

    forged = _forged(log, tmp_path, RUNS[0], change)
    history = fold_history(forged.events_of(KINDS), RUNS[0], "actor")
    selections = RunLog(forged, history).selections
    selections.excerpt = excerpt
    assert judge_claim("selection", selections.claim(history.steps[1])).verdict == verdict


@pytest.mark.more_but("tail")
@pytest.mark.parametrize("run", RUNS)
def test_groups_in_another_order(log: Store, tmp_path: Path, run: str) -> None:
    """They are taken as they completed."""

    def swapped(events: list[Event]) -> list[Event]:
        return [
            Event(replace(e.record, samples=e.record.samples[2:] + e.record.samples[:2]), e.run)
            if isinstance(e.record, StepPlanned) and e.record.step == 1
            else Event(e.record, e.run)
            for e in events
        ]

    stage = _selection(_forged(log, tmp_path, run, swapped), run, 1)
    assert stage.place is not None
    assert stage.place.key == "samples[0]"


@pytest.mark.more_but("tail")
@pytest.mark.parametrize("run", RUNS)
def test_a_sample_that_is_trained_again(log: Store, tmp_path: Path, run: str) -> None:
    """It was used by the step before, and is there no more."""
    before = fold_history(log.events_of(KINDS), run, "actor").steps[0].planned.samples

    def again(events: list[Event]) -> list[Event]:
        return [
            Event(replace(e.record, samples=[before[0], *e.record.samples[1:]]), e.run)
            if isinstance(e.record, StepPlanned) and e.record.step == 1
            else Event(e.record, e.run)
            for e in events
        ]

    assert _selection(_forged(log, tmp_path, run, again), run, 1).verdict == Verdict.differs


@pytest.mark.more_but("tail")
@pytest.mark.parametrize("run", RUNS)
def test_a_failure_of_another_kind_gives_no_reason(log: Store, tmp_path: Path, run: str) -> None:
    """An attempt that failed for lack of memory drops nothing as not finite."""

    def failed(events: list[Event]) -> list[Event]:
        forged: list[Event] = []
        for event in events:
            record = event.record
            if isinstance(record, StepPlanned) and record.step == 1:
                forged += [Event(record, run), Event(StepFailed(1, 1, "actor", "MemoryError('none')"), run)]
                first = record.samples[0]
                why = ("not_finite", record.recipe_digest, 1, {}, 2)
                forged.append(Event(SampleDropped(first["trajectory_id"], first["turn_id"], *why), run))
                forged.append(Event(replace(record, attempt=2, samples=record.samples[1:]), run))
            else:
                again = getattr(record, "step", None) == 1 and not isinstance(record, SampleDropped)
                forged.append(Event(replace(record, attempt=2) if again else record, run))  # type: ignore[call-arg]
        return forged

    stage = _selection(_forged(log, tmp_path, run, failed), run, 1)
    assert stage.verdict == Verdict.differs


def test_several_lanes_hide_what_came_first(lanes: Store, tmp_path: Path) -> None:
    """The order of groups is then as recorded, and that is said; that a group is whole, and that none is left
    out, is proven all the same."""
    assert _omitted(lanes) == []
    for step in (0, 1):
        stage = _selection(lanes, "lanes", step)
        assert (stage.verdict, stage.why.split(",")[0]) == (
            Verdict.equal,
            "which groups came first hung on clocks or on several lanes",
        )
    for number, leaves in enumerate((_first, lambda place, plan: place < 4)):
        forged = partial(Forgery("", leaves), 1)
        (tmp_path / f"{number}").mkdir()
        stage = _selection(_forged(lanes, tmp_path / f"{number}", "lanes", forged), "lanes", 1)
        assert stage.verdict == Verdict.differs


def test_more_than_a_group_takes_in_several_lanes(lanes: Store) -> None:
    """Nobody knows which of them came first: what was taken is looked at by itself."""
    assert [_selection(lanes, "more", step).verdict for step in (0, 1)] == [Verdict.equal] * 2
