"""Bytes that clients send, as events have them: compressed, as text."""

from __future__ import annotations

import base64

import pyarrow as pa

from rollbook.store.events import Json


def stored_body(kind: str, body: bytes) -> Json:
    """Bytes of a kind (`protobuf`; `tokens`: int32) as an event has them."""
    return {kind: base64.b64encode(pa.Codec("zstd").compress(body, asbytes=True)).decode()}


def sent_body(kind: str, body: Json) -> bytes:
    """Bytes as they were sent."""
    packed = pa.BufferReader(base64.b64decode(body[kind]))
    with pa.CompressedInputStream(packed, "zstd") as reader:
        inflated: bytes = reader.read()
    return inflated
