"""Encodes events as an Arrow record batch: one IPC message, into which each array is copied once.
Pure.

`RecordBatch.serialize` gives the same message, but needs a batch first: token ids would be
copied into the batch's columns (two to three times, as these grow) and then into the message.
Here every array is copied straight to its place. In the message's metadata, a flatbuffer, only
numbers differ between batches of one schema, so the metadata of a batch that pyarrow serialized
is the pattern for all. With pyarrow an append of 40 turns takes a third more CPU (`rollbook
bench append`).

Source: the Arrow columnar format, "Serialization and Interprocess Communication", and
Message.fbs.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa

from rollbook.store.events import Event, VersionSpan
from rollbook.store.events.schema import (
    ARRAYS,
    LOG_SCHEMA,
    REQUIRED,
    ROW_NAMES,
    Row,
    real,
    row_of,
    stored_array,
    utf8,
)

_ALIGN = 8
_CODES = {"schema_version": "h", **dict.fromkeys(("time", "policy_version", "step"), "q")}
"""Columns of integers, and the type codes of the standard library's `array` for them."""


class _Pattern:
    """The metadata of a record batch message in `LOG_SCHEMA`, and where its numbers are."""

    def __init__(self) -> None:
        one_row = pa.record_batch([pa.nulls(1, type_) for type_ in LOG_SCHEMA.types], schema=LOG_SCHEMA)
        message = one_row.serialize().to_pybytes()
        self._bytes = message[: 8 + _u32(message, 4)]
        table = 8 + _u32(message, 8)
        self._body_length = self._field(table, 3)
        batch = self._target(self._field(table, 2))
        self._length = self._field(batch, 0)
        nodes, buffers = (self._target(self._field(batch, i)) for i in (1, 2))
        self._nodes, self._buffers = nodes + 4, buffers + 4  # behind the count of the vector's members
        self._vectors = [struct.Struct(f"<{2 * _u32(message, at)}q") for at in (nodes, buffers)]

    def _field(self, table: int, number: int) -> int:
        """Where a field of a flatbuffer table is."""
        vtable = table - struct.unpack_from("<i", self._bytes, table)[0]
        offset: int = struct.unpack_from("<H", self._bytes, vtable + 4 + 2 * number)[0]
        assert offset, f"pyarrow left out field {number}"
        return table + offset

    def _target(self, at: int) -> int:
        return at + _u32(self._bytes, at)

    def filled(self, rows: int, nodes: Sequence[int], buffers: Sequence[int], body_length: int) -> bytearray:
        """The metadata of a batch.

        Args:
            nodes: length and count of nulls of each array, a parent before its children.
            buffers: offset in the body and length of each buffer, in the same order.
        """
        metadata = bytearray(self._bytes)  # a copy: lanes share the pattern
        struct.pack_into("<q", metadata, self._length, rows)
        struct.pack_into("<q", metadata, self._body_length, body_length)
        self._vectors[0].pack_into(metadata, self._nodes, *nodes)
        self._vectors[1].pack_into(metadata, self._buffers, *buffers)
        return metadata


def _u32(data: Any, at: int) -> int:
    value: int = struct.unpack_from("<I", data, at)[0]
    return value


class _Message:
    """A message that is being put together: arrays, a parent before its children, and their buffers."""

    def __init__(self) -> None:
        self.parts: list[Any] = [b""]
        self.nodes: list[int] = []
        self.buffers: list[int] = []
        self.size = 0

    # Not tested for None beforehand, because `None in values` would compare each value with it.

    def strings(self, values: Sequence[str | None], *, nullable: bool = True) -> None:
        """A column of strings."""
        try:
            text = "".join(values)  # type: ignore[arg-type]
            lengths = list(map(len, values))  # type: ignore[arg-type]
            self._node(len(values))
        except TypeError:
            if not nullable:
                raise
            text = "".join(value for value in values if value is not None)
            lengths = [0 if value is None else len(value) for value in values]
            self._node_with_nulls(values)
        data = text.encode()
        if len(data) != len(text):  # some character is more than one byte
            lengths = [0 if value is None else len(value.encode()) for value in values]
        self._buffer(self._offsets(lengths), data)

    def texts(self, values: Sequence[bytes]) -> None:
        """A column of strings, given as UTF-8."""
        self._node(len(values))
        self._buffer(self._offsets(list(map(len, values))), *map(utf8, values))

    def numbers(self, values: Sequence[Any], code: str, *, nullable: bool = True) -> None:
        """A column of numbers of this type code of `array`, which takes no fraction for an integer."""
        try:
            packed = array(code, values)
            self._node(len(values))
        except TypeError:
            if not nullable:
                raise
            packed = array(code, [0 if value is None else value for value in values])
            self._node_with_nulls(values)
        self._packed(packed)

    def lists(self, values: Sequence[Any], dtype: np.dtype[Any]) -> None:
        """A column of lists of numbers."""
        # Converted to arrays first, so that the count matches what is written even if a list grows meanwhile.
        arrays = [None if value is None else _contiguous(value, dtype) for value in values]
        total = self._list_node(arrays)
        self._node(total)
        self._buffer(total * dtype.itemsize, *(part for part in arrays if part is not None))

    def spans(self, values: Sequence[Sequence[VersionSpan] | None]) -> None:
        """The column of version spans: a list of structs."""
        values = [None if spans is None else tuple(spans) for spans in values]
        self._node(self._list_node(values))
        flat = [span for spans in values if spans is not None for span in spans]
        self.strings([span.policy for span in flat])
        self.numbers([span.version for span in flat], "q")
        self.numbers([span.start for span in flat], "i")
        self.numbers([span.end for span in flat], "i")

    def _list_node(self, values: Sequence[Any]) -> int:
        """The array of a column of lists; how many members they have together."""
        try:
            lengths = list(map(len, values))
        except TypeError:
            lengths = [0 if value is None else len(value) for value in values]
            self._node_with_nulls(values)
        else:
            self._node(len(values))
        return self._offsets(lengths)

    def _node(self, length: int) -> None:
        """The next array, of so many values, none of which is None."""
        self.nodes += (length, 0)
        self._buffer(0)

    def _node_with_nulls(self, values: Sequence[Any]) -> None:
        """The next array, and its buffer that says which of the values are None."""
        there = [value is not None for value in values]
        self.nodes += (len(there), len(there) - sum(there))
        bits = np.packbits(there, bitorder="little")
        self._buffer(len(bits), bits)

    def _offsets(self, lengths: Sequence[int]) -> int:
        """The next buffer: where each of the values begins and the last one ends; that end is returned."""
        offsets = array("i", accumulate(lengths, initial=0))
        self._packed(offsets)
        return offsets[-1]

    def _packed(self, packed: array[Any]) -> None:
        self._buffer(packed.itemsize * len(packed), packed)

    def _buffer(self, size: int, *parts: Any) -> None:
        """The next buffer: these parts, together of this size."""
        self.buffers += (self.size, size)
        self.parts += parts
        padding = -size % _ALIGN
        if padding:
            self.parts.append(bytes(padding))
        self.size += size + padding


def _contiguous(values: Any, dtype: np.dtype[Any]) -> Any:
    if (
        type(values) is np.ndarray
        and values.dtype is dtype
        and values.ndim == 1
        and values.flags.c_contiguous
    ):
        return values  # the usual case: the call below would take longer than copying the array
    return np.ascontiguousarray(stored_array(values, dtype))


_PATTERN = _Pattern()


def encode_batch(rows: Sequence[Row], first_seq: int) -> bytes:
    """The rows as an IPC message of a batch in `LOG_SCHEMA`; row i gets sequence number `first_seq + i`.

    The arrays are copied: changing one later does not change the message.

    Raises:
        AttributeError, OverflowError, TypeError, ValueError: a value has no stored form.
    """
    message = _Message()
    message.numbers(range(first_seq, first_seq + len(rows)), "q")
    for name, values in zip(ROW_NAMES, zip(*rows, strict=True), strict=True):
        if name in ARRAYS:
            message.lists(values, ARRAYS[name])
        elif name == "reward":
            message.numbers(list(map(real, values)), "d")
        elif name in _CODES:
            message.numbers(values, _CODES[name], nullable=name not in REQUIRED)
        elif name == "version_spans":
            message.spans(values)
        elif name == "extra":
            message.texts(values)
        else:
            message.strings(values, nullable=name not in REQUIRED)
    message.parts[0] = _PATTERN.filled(len(rows), message.nodes, message.buffers, message.size)
    data = b"".join(message.parts)
    assert len(data) == len(message.parts[0]) + message.size
    return data


def to_batch(rows: Sequence[Row], first_seq: int) -> pa.RecordBatch:
    """The rows as a batch; row i gets sequence number `first_seq + i`.

    Raises:
        as `encode_batch`
    """
    return pa.ipc.read_record_batch(pa.py_buffer(encode_batch(rows, first_seq)), LOG_SCHEMA)


def encode(events: Sequence[Event], first_seq: int) -> pa.RecordBatch:
    """One batch of the events; event i gets sequence number `first_seq + i`.

    Raises:
        as `encode_batch`
    """
    return to_batch([row_of(event) for event in events], first_seq)


assert {array(code).itemsize for code in "qhdi"} == {8, 2, 4}
assert sys.byteorder == "little", "what is stored is little-endian"
