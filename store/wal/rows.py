"""Row frames: a few events as plain bytes, where an Arrow batch would cost more than it is worth. Pure.

Building and serializing an Arrow batch costs about the same for one event as for ten. A commit of fewer than
`FEW` events is therefore written row by row, and made into a batch by whoever reads it. As a batch, an append
of one event would take a fifth longer (`rollbook bench append`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from rollbook.store.events import VersionSpan
from rollbook.store.events.row import ROW_NAMES, Row, real, stored_array, utf8, whole

FEW = 8

# time, policy version, step, reward, schema version, which are null, and eleven lengths in bytes
_HEAD = struct.Struct("<qqqdHH11I")
_SPAN = struct.Struct("<qii")
_TEXTS = ("event_id", "kind", "run", "trajectory_id", "turn_id", "policy")
_DTYPES = {"prompt_ids": np.dtype("<i4"), "completion_ids": np.dtype("<i4"), "logprobs": np.dtype("<f4")}
_NUMBERS = ("policy_version", "step", "reward")
_NULLABLE = ("trajectory_id", "turn_id", "policy", *_NUMBERS, *_DTYPES, "version_spans")
_NULL_BITS = tuple(1 << i for i in range(len(_NULLABLE)))


def encode_rows(rows: Sequence[Row]) -> bytes:
    """The rows as the payload of a row frame.

    Raises:
        struct.error, AttributeError, OverflowError, TypeError, ValueError: a value has no stored form.
    """
    return b"".join(part for row in rows for part in _encode(row))


def _encode(row: Row) -> list[bytes]:
    event_id, kind, version, time, run, *ids, policy_version, step, reward = row[:11]
    *arrays, spans, extra = row[11:]
    numbers = policy_version, step, real(reward)
    nulls = 0
    for bit, value in zip(_NULL_BITS, (*ids, *numbers, *arrays, spans), strict=True):
        if value is None:
            nulls |= bit
    parts = [event_id.encode(), kind.encode(), run.encode()]
    parts += [b"" if text is None else text.encode() for text in ids]
    for values, dtype in zip(arrays, _DTYPES.values(), strict=True):
        parts.append(b"" if values is None else stored_array(values, dtype).tobytes())
    parts.append(b"" if spans is None else orjson.dumps([_span(span) for span in spans]))
    parts.append(utf8(extra))
    head = _HEAD.pack(
        time, *(0 if number is None else number for number in numbers), version, nulls, *map(len, parts)
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
    str(parts[-1], "utf-8")  # a text, although bytes are wanted
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
_ORDER = (*_TEXTS[:2], "schema_version", "time", *_TEXTS[2:], *_NUMBERS, *_DTYPES, "version_spans", "extra")
assert _ORDER == ROW_NAMES
