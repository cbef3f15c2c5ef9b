"""Compaction: which neighbours are merged, how often a row is written, and that its bits stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.store import Event, Store
from rollbook.store.errors import CorruptionError
from rollbook.store.sealed.parquet import same_bits, unit_table
from rollbook.store.sealed.seal import seal_closed
from rollbook.store.sealed.unit import (
    TURNS,
    Erasure,
    Unit,
    choose,
    current_units,
    unit_folder,
    write_manifest,
)
from rollbook.store.settings import SealSettings
from rollbook.store.upkeep.compact import compact, merge, next_run

LIMIT = 256


@pytest.mark.parametrize(
    ("sizes", "run"),
    [
        ([], None),
        ([1, 1, 1], None),
        ([1, 1, 1, 1], (0, 4)),
        ([1] * 300, (0, 256)),
        ([64, 64, 64], None),
        ([64, 64, 64, 65], (0, 3)),
        ([64, 64, 64, 65, 1], (0, 3)),
        ([200, 1, 1, 1], None),
        ([200, 1, 1, 1, 1], (1, 5)),
        ([200, 1, 1, 100], (0, 3)),
        ([200, 100], None),
        ([300, 1, 1, 300], (1, 3)),
        ([None, 1, 1, None], (1, 3)),
        ([1, 1, None, 1, 1], (0, 2)),
        ([1, None, 1, 1], None),
        ([8, 4, 2, 1], None),
        ([8, 4, 2, 1, 1], (0, 5)),
    ],
)
def test_which_units_are_merged(sizes: list[int | None], run: tuple[int, int] | None) -> None:
    """Four that fit and at least double each other, or a run of two that nothing can join."""
    assert next_run(sizes, LIMIT) == run


@given(st.lists(st.integers(1, 80), max_size=300))
def test_a_row_is_written_a_bounded_number_of_times(sizes: list[int]) -> None:
    """As units come one by one: none grows beyond the limit, few are left, and rewriting is logarithmic."""
    units: list[tuple[int, int]] = []  # (size, bytes times how often each was rewritten)
    for size in sizes:
        units.append((size, 0))
        while run := next_run([u for u, _ in units], LIMIT):
            part = units[run[0] : run[1]]
            total = sum(u for u, _ in part)
            units[run[0] : run[1]] = [(total, total + sum(r for _, r in part))]
    assert sum(u for u, _ in units) == sum(sizes)
    assert all(u <= LIMIT for u, _ in units)
    assert sum(r for _, r in units) <= (math.log2(LIMIT) + 1) * sum(sizes)
    assert len(units) <= 2 * sum(sizes) / LIMIT + 3 * math.log2(LIMIT)


def _sealed(store: Store, parts: list[list[Event]]) -> list[Unit]:
    """Each part in a segment and a unit of its own, in lane a."""
    for part in parts:
        with store.writer("a") as writer:
            writer.append(part).result(30)
        list(seal_closed(store.path, "a", SealSettings(), all_of_it=True))
    return current_units(store.path, "a")


def test_merging_keeps_every_bit_and_the_lane_s_history(
    store: Store, story: dict[str, list[Event]], plain: Callable[[Event], dict[str, Any]]
) -> None:
    """Rows, segments, chain and erasures of the merged unit are those of its parts."""
    events = story["serve"]
    units = _sealed(store, [events[i : i + 4] for i in range(0, len(events), 4)])
    assert len(units) == 5
    units[1] = Unit(**_values(units[1]) | {"erased": (Erasure("t9", 5, True),)})
    write_manifest(unit_folder(store.path, units[1]), units[1])
    for path in (store.path / "lanes" / "a").glob("*.wal"):
        path.unlink()
    before = [plain(event) for event in store.events()]
    assert len(before) == len(events)
    rows = [unit_table(store.path, unit) for unit in units]

    ((new, old),) = compact(store.path, "a", SealSettings(row_group=2))
    assert (old, current_units(store.path, "a")) == (tuple(units), [new])
    assert (new.name, new.chain_before, new.chain) == (
        "00000001-00000005.2",
        units[0].chain_before,
        units[-1].chain,
    )
    assert new.segments == tuple(segment for unit in units for segment in unit.segments)
    assert new.erased == (Erasure("t9", 5, True),)
    assert same_bits(unit_table(store.path, new), pa.concat_tables(rows)) is None
    assert [plain(event) for event in store.events()] == before
    assert list(compact(store.path, "a", SealSettings())) == []


def _values(unit: Unit) -> dict[str, Any]:
    return {name: getattr(unit, name) for name in Unit.__dataclass_fields__}


def test_a_merged_unit_counts_before_its_parts_are_gone(
    store: Store, notes: Callable[..., list[Event]]
) -> None:
    """Of overlapping units the widest counts, then the newest: nothing is read twice."""
    units = _sealed(store, [notes(2, i) for i in range(0, 8, 2)])
    new = merge(store.path, units, SealSettings())
    assert choose([*units, new]) == [new]
    newer = merge(store.path, [new], SealSettings())
    assert newer.name == "00000001-00000004.3"
    assert choose([*units, newer, new]) == [newer]
    assert len(list(store.events())) == 8


def test_dropped_and_remote_units_are_left_alone(store: Store, notes: Callable[..., list[Event]]) -> None:
    """A unit whose files are elsewhere or gone is not merged, and parts the units around it."""
    units = _sealed(store, [notes(2, i) for i in range(0, 12, 2)])
    units[2] = Unit(**_values(units[2]) | {"remote": f"s3://bucket/x/sealed/a/{units[2].name}"})
    write_manifest(unit_folder(store.path, units[2]), units[2])
    ((new, old),) = compact(store.path, "a", SealSettings())
    assert [unit.name for unit in old] == [units[0].name, units[1].name]
    assert [u.name for u in current_units(store.path, "a")] == [new.name, *(u.name for u in units[2:])]


def test_a_damaged_unit_is_not_merged(store: Store, story: dict[str, list[Event]]) -> None:
    """A file that cannot be read, or holds other events than its segments did, stops the merge."""
    units = _sealed(store, [story["serve"][i : i + 4] for i in range(0, 16, 4)])
    path = unit_folder(store.path, units[1]) / TURNS
    data = path.read_bytes()
    path.write_bytes((unit_folder(store.path, units[0]) / TURNS).read_bytes())
    with pytest.raises(CorruptionError, match="does not hold events 4 to 7 once each"):
        list(compact(store.path, "a", SealSettings()))
    path.write_bytes(data[:-9])
    with pytest.raises(CorruptionError, match=TURNS):
        list(compact(store.path, "a", SealSettings()))
    assert current_units(store.path, "a") == units
    path.write_bytes(data)
    assert len(list(compact(store.path, "a", SealSettings()))) == 1
