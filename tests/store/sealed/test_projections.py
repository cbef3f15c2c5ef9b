"""What is derived of a requested turn does not depend on how its fields are written."""

from __future__ import annotations

from typing import Any

import duckdb
import orjson
import pyarrow as pa
import pytest

from rollbook.store.sealed.parquet import TABLE_SCHEMA
from rollbook.store.sealed.projections import turn_parts

FIELDS = {"request_id": "r", "parent_turn_id": None, "root_reason": None, "requested_model": "m"}
LIKE_AN_ID = '","parent_turn_id":"other","root_reason":"other",'


@pytest.mark.parametrize(
    "extra",
    [
        FIELDS,
        FIELDS | {"parent_turn_id": "turn-1"},
        FIELDS | {"root_reason": "first"},
        FIELDS | {"parent_turn_id": "", "root_reason": ""},
        FIELDS | {"parent_turn_id": "null", "root_reason": 'a "word" \\ é\n'},
        FIELDS | {"request_id": LIKE_AN_ID},
        {"root_reason": "first", "parent_turn_id": "turn-1", "messages": [FIELDS]},
        {"request_id": "r", "sampling": {"parent_turn_id": "other"}, "parent_turn_id": "turn-1"},
        {"request_id": "r"},
    ],
)
def test_fields_of_a_requested_turn_are_those_of_its_json(extra: dict[str, Any]) -> None:
    rows = [{"kind": "turn.requested", "turn_id": "t", "extra": orjson.dumps(extra).decode()}]
    with duckdb.connect() as database:
        database.register("events", pa.Table.from_pylist(rows, TABLE_SCHEMA))
        names = ("parent_turn_id", "root_reason", "requested_model")
        found = database.sql(f"SELECT {', '.join(names)} FROM ({turn_parts('events')})").fetchall()
    assert found == [tuple(extra.get(name) for name in names)]
