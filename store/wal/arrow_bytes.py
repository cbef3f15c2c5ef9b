"""Reads Arrow record batches from untrusted bytes.

Arrow checks that a message is well-formed but not its buffers: it would follow offsets that point outside. A
compressed message can expand a few bytes to any amount of memory; Rollbook writes none. So a compressed
message is refused unread, and every other one is validated in full, which takes about as long as its
checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

MOST_COLUMNS = 1000
"""Most columns of a schema, far above those of any release."""
_RECORD_BATCH = 3
"""In Message.fbs: the kind of a message's header."""
_HEADER_TYPE, _HEADER, _COMPRESSION = 1, 2, 3
"""Fields of a message, and of a record batch."""


def read_schema(data: Any) -> pa.Schema:
    """The schema in an IPC message.

    Raises:
        pa.ArrowException: the bytes are none.
    """
    schema = _arrow(pa.ipc.read_schema, pa.py_buffer(data))
    if len(schema) > MOST_COLUMNS:
        raise pa.ArrowInvalid(f"a schema of {len(schema):,} columns")
    return schema


def read_batch(data: Any, schema: pa.Schema) -> pa.RecordBatch:
    """The record batch in an IPC message; its columns share the bytes.

    Raises:
        pa.ArrowException: the bytes are none, or values of it are not within them.
    """
    return _checked(_arrow(pa.ipc.read_message, pa.py_buffer(data)), schema)


def read_file(data: pa.Buffer, schema: pa.Schema) -> pa.Table:
    """The rows of an IPC file of this schema; they share the bytes.

    Raises:
        pa.ArrowException: the bytes are none, or of another schema.
    """
    messages = _messages(pa.BufferReader(data.slice(8)))  # behind its magic, a file is a stream and a footer
    first = next(messages, None)
    if first is None or not _arrow(pa.ipc.read_schema, first).equals(schema):
        raise pa.ArrowInvalid("another schema")
    return pa.Table.from_batches([_checked(message, schema) for message in messages], schema)


def _messages(source: Any) -> Iterator[Any]:
    reader = pa.ipc.MessageReader.open_stream(source)
    while True:
        try:
            yield _arrow(reader.read_next_message)
        except StopIteration:
            return


def _checked(message: Any, schema: pa.Schema) -> pa.RecordBatch:
    if _is_compressed(message.metadata):
        raise pa.ArrowInvalid("compressed, which nothing here is")
    batch = _arrow(pa.ipc.read_record_batch, message, schema)
    batch.validate(full=True)
    return batch


def _is_compressed(metadata: Any) -> bool:
    """Whether a message's flatbuffer says that its buffers are compressed.

    Raises:
        pa.ArrowInvalid: it is no record batch's.
    """
    data = memoryview(metadata)
    try:
        (table,) = struct.unpack_from("<I", data, 0)
        kind = _field(data, table, _HEADER_TYPE)
        header = _field(data, table, _HEADER)
        if kind is None or header is None or data[kind] != _RECORD_BATCH:
            raise pa.ArrowInvalid("not a record batch")
        (distance,) = struct.unpack_from("<I", data, header)
        return _field(data, header + distance, _COMPRESSION) is not None
    except (struct.error, IndexError) as error:
        raise pa.ArrowInvalid(f"its metadata is damaged: {error}") from error


def _field(data: memoryview, table: int, number: int) -> int | None:
    """Where a field of a flatbuffer's table is, or None where it is left out."""
    (back,) = struct.unpack_from("<i", data, table)
    vtable = table - back
    if vtable < 0:
        raise IndexError(vtable)
    (size,) = struct.unpack_from("<H", data, vtable)
    at = 4 + 2 * number
    if at + 2 > size:
        return None
    (offset,) = struct.unpack_from("<H", data, vtable + at)
    return table + offset if offset else None


def _arrow(read: Callable[..., Any], *args: Any) -> Any:
    """The result of a pyarrow reader; OSErrors, which some invalid messages cause, become ArrowInvalid."""
    try:
        return read(*args)
    except (OSError, EOFError) as error:
        raise pa.ArrowInvalid(str(error)) from error
