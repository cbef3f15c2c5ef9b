"""Numbers of columns: other engines know a column of an Iceberg table by its number, not by its name. Pure.

Sealed files and the derived scalars have them in their Parquet schema. A number is given once and for
ever; a later column has the next one. They are those that Iceberg itself gives to the columns of a new
table: first those of the table, in order, then those within them. Files that were sealed before have
none: their columns go by name.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from rollbook.store.events.schema import LOG_SCHEMA

COLUMN_IDS = {
    "lane": 1,
    **{name: number for number, name in enumerate(LOG_SCHEMA.names, 2)},
    "prompt_ids.element": 19,
    "completion_ids.element": 20,
    "logprobs.element": 21,
    "version_spans.element": 22,
    "version_spans.element.policy": 23,
    "version_spans.element.version": 24,
    "version_spans.element.start": 25,
    "version_spans.element.end": 26,
}
"""Column of a sealed file, or what is within one -> its number."""

_SCALARS = """
trajectory_id string, turn_id string, run string, lane string, seq int64, requested timestamp[us],
parent_turn_id string, root_reason string, requested_model string, completed timestamp[us], policy string,
policy_version int64, prompt_length int64, completion_length int64, finish_reason string, min_version int64,
max_version int64, min_logprob float, sum_logprob double, completed_lane string, completed_seq int64,
delta_length int64, known_tokens int64, exact_logprobs bool, erased bool, temperature double,
lowest_token int64, highest_token int64, altered bool, prompt_sha256 binary, upstream_prompt_tokens int64,
upstream_completion_tokens int64, upstream_total_tokens int64, error string, delivered string,
one_version bool, whole bool
"""
SCALARS_SCHEMA = pa.schema(
    [(name, pa.type_for_alias(type_)) for name, type_ in map(str.split, _SCALARS.split(","))]
)
"""Columns of the scalars that are derived of turns, by their query (`projections.turn_parts`)."""
SCALARS_IDS = {name: number for number, name in enumerate(SCALARS_SCHEMA.names, 1)}


def numbered(schema: pa.Schema, ids: Mapping[str, int]) -> pa.Schema:
    """The schema with the number of each column, as Parquet files keep it."""
    return pa.schema([_numbered(field, ids, field.name) for field in schema])


def _numbered(field: pa.Field, ids: Mapping[str, int], path: str) -> pa.Field:
    inside = field.type
    if pa.types.is_list(inside):
        inside = pa.list_(_numbered(inside.value_field, ids, f"{path}.element"))
    elif pa.types.is_struct(inside):
        inside = pa.struct(
            [_numbered(inside[i], ids, f"{path}.{inside[i].name}") for i in range(len(inside))]
        )
    return pa.field(field.name, inside, field.nullable, {"PARQUET:field_id": str(ids[path])})
