"""Row frames: a few events as plain bytes, where an Arrow batch would cost more than it is worth. Pure.

Building and serializing an Arrow batch costs about the same for one event as for ten. A commit of fewer than
`FEW` events is therefore written row by row, and made into a batch by whoever reads it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from rollbook.store.codec import ROW_NAMES, Row, stored_array, whole
from rollbook.store.events import VersionSpan

FEW = 8

# time, policy version, step, reward, schema version, which are null, and eleven lengths in bytes
_HEAD = struct.Struct("<qqqdHH11I")
_SPAN = struct.Struct("<qii")
_TEXTS = ("event_id", "kind", "run", "trajectory_id", "turn_id", "policy")
_DTYPES = {"prompt_ids": np.dtype("<i4"), "completion_ids": np.dtype("<i4"), "logprobs": np.dtype("<f4")}
_NUMBERS = ("policy_version", "step", "reward")
_NULLABLE = ("trajectory_id", "turn_id", "policy", *_NUMBERS, *_DTYPES, "version_spans")
_AT = {name: i for i, name in enumerate(ROW_NAMES)}


def encode_rows(rows: Sequence[Row]) -> bytes:
    """The rows as the payload of a row frame.

    Raises:
        struct.error, AttributeError, TypeError, ValueError: a value has no stored form.
    """
    return b"".join(part for row in rows for part in _encode(row))


def _encode(row: Row) -> list[bytes]:
    value = {name: row[i] for name, i in _AT.items()}
    nulls = sum(1 << i for i, name in enumerate(_NULLABLE) if value[name] is None)
    parts = [b"" if value[name] is None else value[name].encode() for name in _TEXTS]
    for name, dtype in _DTYPES.items():
        found = value[name]
        parts.append(b"" if found is None else stored_array(found, dtype).tobytes())
    spans = value["version_spans"]
    parts += [b"" if spans is None else orjson.dumps([_span(s) for s in spans]), value["extra"]]
    head = _HEAD.pack(
        value["time"],
        *(0 if value[name] is None else value[name] for name in _NUMBERS),
        value["schema_version"],
        nulls,
        *map(len, parts),
    )
    return [head, *parts]


def _span(span: VersionSpan) -> tuple[str | None, int | None, int | None, int | None]:
    """The span's members. Only what fits into their columns is written: a row is acknowledged unread."""
    if span.policy is not None:
        span.policy.encode()
    version, start, end = whole(span.version), whole(span.start), whole(span.end)
    _SPAN.pack(version or 0, start or 0, end or 0)
    return span.policy, version, start, end


def decode_rows(payload: memoryview, count: int) -> list[Row]:
    """The rows of a row frame.

    Raises:
        ValueError: the bytes are not `count` rows.
    """
    rows: list[Row] = []
    offset = 0
    for _ in range(count):
        row, offset = _decode(payload, offset)
        rows.append(row)
    if offset != len(payload):
        raise ValueError(f"{len(payload) - offset} bytes follow the last row")
    return rows


def _decode(payload: memoryview, offset: int) -> tuple[Row, int]:
    if offset + _HEAD.size > len(payload):
        raise ValueError("a row is cut short")
    time, *numbers, schema_version, nulls = _HEAD.unpack_from(payload, offset)[:6]
    lengths = _HEAD.unpack_from(payload, offset)[6:]
    start, parts = offset + _HEAD.size, []
    for length in lengths:
        parts.append(payload[start : start + length])
        start += length
    if start > len(payload):
        raise ValueError("a row is cut short")
    value: dict[str, Any] = {"time": time, "schema_version": schema_version, "extra": bytes(parts[-1])}
    value |= dict(zip(_NUMBERS, numbers, strict=True))
    value |= {name: str(part, "utf-8") for name, part in zip(_TEXTS, parts, strict=False)}
    for (name, dtype), part in zip(_DTYPES.items(), parts[len(_TEXTS) :], strict=False):
        value[name] = np.frombuffer(part, dtype)
    spans = orjson.loads(parts[-2]) if parts[-2] else []
    value["version_spans"] = [VersionSpan(*span) for span in spans]
    for i, name in enumerate(_NULLABLE):
        if nulls >> i & 1:
            value[name] = None
    return tuple(value[name] for name in ROW_NAMES), start


assert len(_TEXTS) + len(_DTYPES) + 2 == 11
