"""The frame format of segment files: encoding and decoding. Pure.

A segment is a sequence of frames, each a 64-byte header and a payload padded to 64 bytes. The
first frame of a segment carries the Arrow schema (with the lane, segment number and store id as
its metadata), every other one carries events: as an Arrow IPC record batch message or, if they
are few, as rows. `docs/format.md` specifies every byte.

Building and serializing an Arrow batch costs about the same for one event as for ten. A commit
of fewer than `FEW` events is therefore written row by row, and converted to a batch by its
readers. As a batch, an append of one event would take a fifth longer (`rollbook bench append`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import crc32c
import numpy as np
import orjson
import xxhash

from rollbook.store.events import VersionSpan
from rollbook.store.events.schema import ROW_NAMES, Row, real, stored_array, utf8, whole
from rollbook.store.marker import FORMAT_VERSION

MAGIC = b"RBLF"
ALIGN = 64
HEADER_FRAME, BATCH_FRAME, ROW_FRAME = 0, 1, 2
EMPTY_CHAIN = bytes(16)
_LOOK, _PATIENCE = 1 << 26, 1 << 30
"""Bytes that are searched at once, and bytes of seeming frames that are checked of any file."""

# magic, format, kind, payload length, crc32c, first seq, events, reserved, chain, reserved
_HEADER = struct.Struct("<4sHHIIQII16s16x")
_CHECKSUM = slice(12, 16)
assert _HEADER.size == ALIGN


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame as it lies in a buffer; `offset` is its header's, `end` the next frame's."""

    kind: int
    offset: int
    end: int
    first_seq: int
    count: int
    chain: bytes
    payload: memoryview


class BadFrameError(Exception):
    """The bytes at `offset` are no whole, valid frame. Internal: callers turn it into their own."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset = offset
        self.reason = reason


def padded(length: int) -> int:
    """`length` rounded up to the frame alignment."""
    return -(-length // ALIGN) * ALIGN


def next_chain(previous: bytes, payload: Any) -> bytes:
    """Chain value of a frame: xxh3-128 over the value before it and the payload."""
    state = xxhash.xxh3_128(previous)
    state.update(payload)
    return state.digest()


def encode_frame(
    kind: int, payload: Any, first_seq: int, count: int, previous: bytes
) -> tuple[list[Any], bytes]:
    """The buffers to write, in order, and the frame's chain value."""
    size = memoryview(payload).nbytes
    chain = next_chain(previous, payload)
    fields = (MAGIC, FORMAT_VERSION, kind, size)
    bare = _HEADER.pack(*fields, 0, first_seq, count, 0, chain)
    checksum = crc32c.crc32c(payload, crc32c.crc32c(bare))
    header = _HEADER.pack(*fields, checksum, first_seq, count, 0, chain)
    return [header, payload, bytes(padded(size) - size)], chain


def read_frame(buffer: memoryview, offset: int) -> Frame:
    """The frame at `offset`, its checksum verified.

    Raises:
        BadFrameError: the frame is cut short, or its bytes do not match its checksum.
    """
    if offset + ALIGN > len(buffer):
        raise BadFrameError(offset, "the header is cut short")
    header = buffer[offset : offset + ALIGN]
    magic, version, kind, size, checksum, first_seq, count, _, chain = _HEADER.unpack(header)
    if magic != MAGIC or version > FORMAT_VERSION:
        raise BadFrameError(offset, "no frame header here")
    start = offset + ALIGN
    if start + padded(size) > len(buffer):
        raise BadFrameError(offset, "the payload is cut short")
    payload = buffer[start : start + size]
    # Every bit is checked, reserved ones too: the checksum covers the header as it was read, with
    # zeros in the checksum's place, and the padding must be zeros.
    bare = bytearray(header)
    bare[_CHECKSUM] = bytes(4)
    if crc32c.crc32c(payload, crc32c.crc32c(bare)) != checksum:
        raise BadFrameError(offset, "the checksum does not match")
    if any(buffer[start + size : start + padded(size)]):
        raise BadFrameError(offset, "the padding is not zero")
    return Frame(kind, offset, start + padded(size), first_seq, count, chain, payload)


def skip_frame(buffer: memoryview, offset: int) -> Frame:
    """The frame at `offset` by its header alone: nothing is verified but that a header is there.

    Raises:
        BadFrameError: it is none, or says more bytes than there are.
    """
    if offset + ALIGN > len(buffer):
        raise BadFrameError(offset, "the header is cut short")
    header = buffer[offset : offset + ALIGN]
    magic, version, kind, size, _, first_seq, count, _, chain = _HEADER.unpack(header)
    end = offset + ALIGN + padded(size)
    if magic != MAGIC or version > FORMAT_VERSION or end > len(buffer):
        raise BadFrameError(offset, "no frame header here")
    return Frame(kind, offset, end, first_seq, count, chain, buffer[offset + ALIGN : offset + ALIGN + size])


def span_of(buffer: memoryview, offset: int) -> tuple[int, int]:
    """(offset of the next frame, the first event there) by the header at `offset`; the payload need not be
    there.

    Raises:
        BadFrameError: no frame begins there.
    """
    header = buffer[offset : offset + ALIGN]
    if len(header) < ALIGN:
        raise BadFrameError(offset, "the header is cut short")
    magic, version, _, size, _, first_seq, count, *_ = _HEADER.unpack(header)
    if magic != MAGIC or version > FORMAT_VERSION:
        raise BadFrameError(offset, "no frame header here")
    return offset + ALIGN + padded(size), first_seq + count


def first_seq_of(header: bytes) -> int | None:
    """The sequence number in a frame's first 64 bytes, unverified; None where no frame begins."""
    if len(header) < ALIGN:
        return None
    magic, version, _, _, _, first_seq, *_ = _HEADER.unpack(header[:ALIGN])
    return int(first_seq) if magic == MAGIC and version <= FORMAT_VERSION else None


def scan(buffer: memoryview, start: int, end: int, previous: bytes | None = None) -> Iterator[Frame]:
    """Frames from `start` until `end`; with `previous`, the chain is verified too.

    Raises:
        BadFrameError: at the first byte range that is no valid frame in its place.
    """
    offset = start
    while offset < end:
        frame = read_frame(buffer[:end], offset)
        if previous is not None:
            if frame.chain != next_chain(previous, frame.payload):
                raise BadFrameError(offset, "the chain from the frame before is broken")
            previous = frame.chain
        yield frame
        offset = frame.end


def valid_frame_after(buffer: memoryview, offset: int) -> int | None:
    """Offset of the first whole, valid frame beyond `offset`, if any (frames are 64-byte aligned).

    If the file has more seeming frames than can be checked, the first unchecked one counts as valid.
    """
    looked_at = 0
    for candidate in _magics(buffer, padded(offset + 1)):
        try:
            size = skip_frame(buffer, candidate).payload.nbytes
            if looked_at > _PATIENCE + 4 * len(buffer):
                return candidate
            looked_at += size
            return read_frame(buffer, candidate).offset
        except BadFrameError:
            continue
    return None


def _magics(buffer: memoryview, start: int) -> Iterator[int]:
    """Where, at multiples of 64 from `start`, a frame's first bytes are."""
    first = np.frombuffer(MAGIC, np.uint32)[0]
    last = len(buffer) - len(buffer) % ALIGN
    for begin in range(start, last, _LOOK):
        part = np.frombuffer(buffer[begin : min(begin + _LOOK, last)], np.uint32)[:: ALIGN // 4]
        yield from (begin + ALIGN * np.flatnonzero(part == first)).tolist()


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
