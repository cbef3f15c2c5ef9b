"""Takes the text out of rows of the log that are handed on, and leaves what training reads. Pure.

What erasing a trajectory with its tokens kept removes goes here too (`events.erased`), and more: names of
trajectories, groups and API keys, and how a run was started.
Token ids stay, and are text to whoever has the tokenizer.
"""

from __future__ import annotations

from typing import Any

import orjson
import pyarrow as pa

from rollbook.store.events import RunOpened, StepPlanned, TrajectoryOpened
from rollbook.store.events.about import GONE, MARK
from rollbook.store.events.erased import CHANGED, erase_row, text_kinds
from rollbook.store.ids import now_us
from rollbook.store.sealed.parquet import TABLE_SCHEMA
from rollbook.store.sealed.unit import Erasure


class Redaction:
    """Redacts the rows of one excerpt, lane by lane: a group has the same new name in all of them."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str], str] = {}

    def of(self, table: pa.Table) -> tuple[pa.Table, tuple[Erasure, ...]]:
        """Rows in `TABLE_SCHEMA` without their text, and the trajectories that had some."""
        kinds, with_text = table["kind"].to_pylist(), set(text_kinds())
        runs, ids = table["run"].to_pylist(), table["trajectory_id"].to_pylist()
        extras = table["extra"].to_pylist()
        made = [self._extra(*row) for row in zip(kinds, runs, ids, extras, strict=True)]
        field = TABLE_SCHEMA.field("extra")
        table = table.set_column(TABLE_SCHEMA.get_field_index("extra"), field, pa.array(made, field.type))
        told = sorted({one for kind, one in zip(kinds, ids, strict=True) if kind in with_text})
        return table, tuple(Erasure(one, now_us(), True) for one in told)

    def _extra(self, kind: str, run: str, trajectory_id: str | None, extra: str) -> str:
        row = dict.fromkeys(CHANGED) | {"extra": extra}
        values = orjson.loads(erase_row(kind, row, keep_tokens=True)["extra"])
        if values.get("by") is not None:
            values["by"] = None
        match kind:
            case TrajectoryOpened.KIND:
                values |= {"name": trajectory_id, "group": self._group(run, values["group"])}
            case StepPlanned.KIND:
                for one in values.get("others") or []:
                    one["group"] = self._group(one["run"], one["group"])
            case RunOpened.KIND:
                values |= {"command": GONE, "config": dict(MARK), "model": None, "environment": {}}
            case _:
                _forget_key(values)
        return orjson.dumps(values).decode()

    def _group(self, run: str, group: str | None) -> str | None:
        """The new name of a group: its number, by when it came."""
        return group and self._groups.setdefault((run, group), f"group-{len(self._groups) + 1}")


def _forget_key(values: dict[str, Any]) -> None:
    """Take the name of the API key out of how a request came in."""
    wire = values.get("wire")
    if wire:
        wire.pop("key", None)
