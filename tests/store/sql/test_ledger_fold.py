"""The ledger balances at every cut, and says what the trainer does, in Python and in SQL alike."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.fakes.stories.ledger import History
from tests.fakes.stories.views import EventViews

from rollbook import store as rb
from rollbook.store import Event, Store, format_cut
from rollbook.store.cut import parse_cut
from rollbook.store.events.batches import encode
from rollbook.store.fold.trajectory import fold
from rollbook.store.sealed.derived import build_derived
from rollbook.store.sealed.parquet import TABLE_SCHEMA
from rollbook.store.sealed.projections import paths, turn_parts
from rollbook.store.sealed.seal import seal_closed
from rollbook.store.sealed.unit import current_units
from rollbook.store.settings import SealSettings
from rollbook.store.sql.relations import NO_PATHS
from rollbook.testing.ledger import TRAINED, Ledger, fold_ledger
from rollbook.train.select.samples import samples_of

SEEDS = st.integers(0, 2**32 - 1)
LEDGER = "SELECT * FROM ledger"


def _rows(ledger: Ledger) -> list[tuple[Any, ...]]:
    """The view's rows."""
    entries = ledger.entries.items()
    return _sorted((m.run, m.policy, m.version, *where, e.turns, e.tokens) for (m, where), e in entries)


def _sorted(rows: Iterable[Any]) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, rows), key=lambda row: tuple((v is not None, v) for v in row))


class Asked(EventViews):
    """The views over events that are in no store.

    Of each lane so many first events are taken for a sealed unit, whose paths are known beforehand.
    """

    def paths(self, history: History, cut: dict[str, int], sealed: dict[str, int]) -> int:
        """How many paths the sealed events of the cut have."""
        tables = []
        for lane, count in cut.items():
            if count:
                batch = encode(history.lanes[lane][:count], 0)
                lanes = pa.repeat(pa.scalar(lane), batch.num_rows)
                tables.append(pa.Table.from_arrays([lanes, *batch.columns], schema=TABLE_SCHEMA))
        self.put(pa.concat_tables(tables) if tables else pa.Table.from_batches([], TABLE_SCHEMA))
        ranges = {
            lane: f"(FROM internal.live WHERE lane = {lane!r} AND seq < {end})"
            for lane, end in sealed.items()
        }
        units = [NO_PATHS] + [
            f"SELECT * FROM ({paths(ranges[lane], f'({turn_parts(ranges[lane])})')})"
            for lane, end in sealed.items()
            if any(event.kind == "turn.completed" for event in history.lanes[lane][:end])  # others have none
        ]
        self.connection.execute(f"CREATE OR REPLACE TABLE internal.found AS {' UNION ALL '.join(units)}")
        self.connection.execute("CREATE OR REPLACE VIEW internal.paths AS FROM internal.found")
        [row] = self.ask("SELECT count(*) FROM internal.found")
        return int(row[0])

    def ledger(self, history: History, cut: dict[str, int], sealed: dict[str, int]) -> list[Any]:
        """The rows of the ledger at the cut."""
        self.paths(history, cut, sealed)
        return _sorted(self.ask(LEDGER))


@pytest.fixture(scope="module")
def asked() -> Asked:
    """Views that are made once."""
    return Asked()


def _history(seed: int, size: int = 60, **options: Any) -> History:
    history = History(random.Random(seed), **options)
    history.tell(size)
    return history


@given(SEEDS, st.booleans())
@example(6260098, True).via("a sample dropped by two rules, one of which is another path")
@example(6260098, False).via("the same at an earlier cut")
@settings(max_examples=80)
def test_the_view_and_the_fold_are_one(asked: Asked, seed: int, whole: bool) -> None:
    """Over any history, at its end or at any cut, both say the same, and no token is unaccounted for."""
    history, rng = _history(seed), random.Random(seed)
    cut = history.head if whole else history.some_cut()
    ledger = fold_ledger(history.events(cut))
    assert ledger.unaccounted() == {}
    sealed = {lane: rng.randint(0, count) for lane, count in cut.items()}
    assert asked.ledger(history, cut, sealed) == _rows(ledger)


def test_there_are_paths_in_these_histories(asked: Asked) -> None:
    """Of fifty, sealed to their ends, more than one has trajectories that are one path."""
    histories = (_history(seed, 80, odd=False) for seed in range(50))
    with_paths = (history for history in histories if asked.paths(history, history.head, history.head))
    assert len(list(islice(with_paths, 2))) > 1


def _trained(history: History) -> Counter[str]:
    """Tokens by run in the loss masks of samples of committed steps that were not abandoned, each once."""
    plans = {_attempt(e.run, e.record): e.record for e in history.events(history.head) if _is(e, "planned")}
    done = {_attempt(e.run, e.record) for e in history.events(history.head) if _is(e, "committed")}
    gone = {_attempt(e.run, e.record) for e in history.events(history.head) if _is(e, "abandoned")}
    turns: dict[tuple[str, str], int] = {}
    for run, plan in ((key[0], plans[key]) for key in done - gone):
        trajectories = fold(history.events(parse_cut(plan.cut)))
        for ref in plan.samples:
            trajectory = trajectories[ref["trajectory_id"]]
            [sample] = [
                s
                for s in samples_of(trajectory, paths=plan.recipe.get("paths", "all"))
                if s.leaf_turn_id == ref["turn_id"]
            ]
            for turn_id in sample.turn_ids:
                completed = trajectory.turns[turn_id].completed
                assert completed is not None
                start, count = completed.prompt_length, len(completed.completion_ids)
                if sample.loss_mask[start : start + count].any():
                    turns[run, turn_id] = count
    total: Counter[str] = Counter()
    for (run, _), count in turns.items():
        total[run] += count
    return total


def _is(event: Event, what: str) -> bool:
    return event.kind == f"step.{what}"


def _attempt(run: str, record: Any) -> tuple[str, str, int, int]:
    return run, record.policy, record.step, record.attempt


@given(SEEDS)
@settings(max_examples=50)
def test_trained_is_what_the_loss_masks_were(seed: int) -> None:
    """Trained tokens are those in the masks of the samples that the trainer made at each plan's cut."""
    history = _history(seed, 80, odd=False)
    tokens: Counter[str] = Counter()
    for (maker, where), entry in fold_ledger(history.events(history.head)).entries.items():
        if where[0] == TRAINED:
            tokens[maker.run] += entry.tokens
    assert tokens == _trained(history)


def _store(history: History, folder: Path) -> Store:
    """The history on disk: of each lane the first half in sealed units, the rest in its live tail."""
    log = rb.open(folder, create=True)
    for part in (0, 1):
        for lane, events in history.lanes.items():
            half = len(events) // 2
            if some := events[half:] if part else events[:half]:
                with log.writer(lane) as writer:
                    writer.append(some).result(30)
        if not part:
            for lane in log.lanes():
                list(seal_closed(log.path, lane, SealSettings(row_group=4), all_of_it=True))
    return log


@pytest.mark.more
@pytest.mark.parametrize("seed", range(4))
def test_a_store_half_sealed(tmp_path: Path, seed: int) -> None:
    """Sealed or not, with derived files or without, the view at a cut is the fold of what the cut holds."""
    history = _history(seed, 120)
    log = _store(history, tmp_path / "store")
    assert log.head() == history.head
    cuts = (log.head(), history.some_cut(), history.some_cut())
    folded = [_rows(fold_ledger(log.events(cut))) for cut in cuts]
    for derived in (False, True):
        if derived:
            for lane in log.lanes():
                for unit in current_units(log.path, lane):
                    build_derived(log.path, unit)
        for cut, rows in zip(cuts, folded, strict=True):
            with rb.connect(log.path, as_of=format_cut(cut)) as connection:
                viewed = _sorted(connection.execute(LEDGER).fetchall())
            assert viewed == rows, f"derived: {derived}"
