"""The relations that the views read: sealed files and the live tail of every lane, at one cut.

| relation | rows |
|---|---|
| `_turn_events` | the log's `turn.requested` and `turn.completed` events: the fat ones |
| `_mark_events` | all other events |
| `_turn_scalars` | one per turn: all that is small about it |
| `_outliers`, `_tokens` | sampled tokens below a logprob; all |

What a unit's derived files hold is read from there; what is not sealed, what a cut holds in part, and what
has no derived file is computed by the very queries that made those files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollbook.store.cut import Cut
from rollbook.store.sealed.derived import OUTLIERS, SCALARS
from rollbook.store.sealed.parquet import FAT_KINDS
from rollbook.store.sealed.projections import outliers, tokens, turn_parts, turn_scalars
from rollbook.store.sealed.unit import MARKS, TURNS, Unit, current_units, derived_folder, unit_folder

LIVE = "_live"
"""Name of the registered Arrow table with what is in no sealed unit; it has the log's columns, lane first."""

_FAT = ", ".join(f"'{kind}'" for kind in FAT_KINDS)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Which sealed units a cut holds: whole ones, and one of each lane that it may hold in part."""

    store: Path
    whole: tuple[Unit, ...]
    parts: tuple[tuple[Unit, int], ...]

    def sealed_to(self) -> dict[str, int]:
        """Lane -> sequence number from which its events are not in these units."""
        ends = {unit.lane: unit.next_seq for unit in self.whole}
        return ends | {unit.lane: end for unit, end in self.parts}


def snapshot(store: Path, cut: Cut) -> Snapshot:
    """The units that hold the cut's events."""
    whole: list[Unit] = []
    parts: list[tuple[Unit, int]] = []
    for lane, end in sorted(cut.items()):
        for unit in current_units(store, lane):
            if unit.next_seq <= end:
                whole.append(unit)
            elif unit.first_seq < end and unit.dropped_us is None:
                parts.append((unit, end))
    return Snapshot(store, tuple(whole), tuple(parts))


def file_path(store: Path, unit: Unit, name: str) -> str:
    """Where DuckDB finds a unit's file: a path or an s3:// address."""
    return f"{unit.remote or unit_folder(store, unit)}/{name}"


def definitions(of: Snapshot) -> list[tuple[str, str]]:
    """(name, query) of every relation, each after those it reads. Pure but for looking which files exist."""
    present = [unit for unit in of.whole if unit.dropped_us is None]
    scalars = [u for u in present if _derived(of, u, SCALARS) is not None]
    sharp = [u for u in present if _derived(of, u, OUTLIERS) is not None]
    names = ", ".join(["trajectory_id", "turn_id"])
    return [
        ("_turn_events", _events(of, present, of.parts, TURNS, f"kind IN ({_FAT})")),
        ("_mark_events", _events(of, present, of.parts, MARKS, f"kind NOT IN ({_FAT})")),
        ("_other_events", _other(of, [u for u in present if u not in scalars])),
        ("_turn_parts", _with_derived(of, scalars, SCALARS, turn_parts("_other_events"))),
        ("_turn_scalars", turn_scalars("_turn_parts")),
        (
            "_several",
            f"SELECT * FROM _turn_events SEMI JOIN (SELECT {names} FROM _turn_scalars "
            f"WHERE NOT one_version) USING ({names})",
        ),
        ("_tokens", tokens("_turn_events", "_several")),
        (
            "_blunt_turns",
            _events(of, [u for u in present if u not in sharp], of.parts, TURNS, f"kind IN ({_FAT})"),
        ),
        ("_outliers", _with_derived(of, sharp, OUTLIERS, outliers("_blunt_turns"))),
    ]


def _derived(of: Snapshot, unit: Unit, name: str) -> Path | None:
    path = derived_folder(of.store, unit) / name
    return path if path.exists() else None


def _events(
    of: Snapshot, units: Iterable[Unit], parts: Sequence[tuple[Unit, int]], name: str, live: str
) -> str:
    """The events of these units' files of one name, and of the live tail those that satisfy `live`."""
    files = [file_path(of.store, unit, name) for unit in units if unit.file(name)]
    queries = [f"SELECT * FROM {LIVE} WHERE {live}"]
    if files:
        queries.append(f"SELECT * FROM {_read(files)}")
    queries += [
        f"SELECT * FROM {_read([file_path(of.store, unit, name)])} WHERE seq < {end}"
        for unit, end in parts
        if unit.file(name)
    ]
    return " UNION ALL ".join(queries)


def _other(of: Snapshot, units: Sequence[Unit]) -> str:
    """All events whose turns' scalars are in no derived file."""
    every = "true"
    turns = _events(of, units, of.parts, TURNS, every)
    marks = _events(of, units, of.parts, MARKS, "false")
    return f"{turns} UNION ALL {marks}"


def _with_derived(of: Snapshot, units: Iterable[Unit], name: str, rest: str) -> str:
    files = [str(path) for unit in units if (path := _derived(of, unit, name))]
    return f"SELECT * FROM ({rest})" + (f" UNION ALL BY NAME SELECT * FROM {_read(files)}" if files else "")


def _read(files: Sequence[str]) -> str:
    listed = ", ".join("'" + file.replace("'", "''") + "'" for file in files)
    return f"read_parquet([{listed}], hive_partitioning = false)"
