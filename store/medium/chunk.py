"""A chunk: the next bytes of a lane's segments, as another host needs them to write the same files. Pure.

An entry of a lane's sequence is 8 bytes (`RBMC` and the header's length), the header as JSON, the segments'
bytes as one zstd frame, and the xxh3-128 of all before it. `docs/format.md` specifies every key.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
import pyarrow as pa
import xxhash

from rollbook.store.cut import Cut
from rollbook.store.errors import CorruptionError, FormatError

_MAGIC, _FORMAT = b"RBMC", 1
_HEAD = struct.Struct("<4sI")
_DIGEST = 16
_CODEC = pa.Codec("zstd", 1)

Kind = Literal["data", "fence"]


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one segment, which follow those of the part before."""

    segment: int
    offset: int
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Chunk:
    """One entry of a lane's sequence.

    Attributes:
        store: id of the store.
        lane, host: whose it is; also of a fence, whoever put that.
        number: of the entry.
        epoch: how often the lane was taken, to write it or to end it; never less than in the entry before.
        session: the lease under which it was put.
        kind: a fence ends the lane: nothing is put behind it.
        next_seq: of the lane, behind these bytes.
        cut: lane -> its events at the sender, where they grew since the entry before; together with that
            one's and this lane's `next_seq` a closed cut.
        parts: the bytes.
        sent_us: the sender's clock, for people and measurements only.
    """

    store: str
    lane: str
    host: str
    number: int
    epoch: int
    session: str
    next_seq: int
    kind: Kind = "data"
    cut: Cut = field(default_factory=dict)
    parts: Sequence[Part] = ()
    sent_us: int = 0

    @property
    def end(self) -> tuple[int, int] | None:
        """(segment, offset) behind the last part; None without one."""
        return (
            (self.parts[-1].segment, self.parts[-1].offset + len(self.parts[-1].data)) if self.parts else None
        )


def encode_chunk(chunk: Chunk) -> bytes:
    """The entry's bytes."""
    body = b"".join(part.data for part in chunk.parts)
    header: dict[str, Any] = {name: getattr(chunk, name) for name in _PLAIN}
    header |= {"format": _FORMAT, "cut": dict(chunk.cut), "size": len(body)}
    header["parts"] = [[part.segment, part.offset, len(part.data)] for part in chunk.parts]
    text = orjson.dumps(header)
    packed = _CODEC.compress(body, asbytes=True) if body else b""
    entry = b"".join((_HEAD.pack(_MAGIC, len(text)), text, packed))
    return entry + xxhash.xxh3_128_digest(entry)


_PLAIN = ("store", "lane", "host", "number", "epoch", "session", "next_seq", "kind", "sent_us")


def decode_chunk(entry: bytes, place: str) -> Chunk:
    """The chunk in an entry.

    Args:
        place: what to call it in an error.

    Raises:
        CorruptionError: these are not the bytes that were put there.
        FormatError: a newer Rollbook put it.
    """
    view = memoryview(entry)
    if len(entry) < _HEAD.size + _DIGEST or xxhash.xxh3_128_digest(view[:-_DIGEST]) != entry[-_DIGEST:]:
        raise CorruptionError(f"{place}: the chunk does not match its checksum: it was changed in the medium")
    magic, length = _HEAD.unpack_from(entry)
    header = orjson.loads(view[_HEAD.size : _HEAD.size + length]) if magic == _MAGIC else {}
    if header.get("format") != _FORMAT:
        raise FormatError(f"{place}: a chunk of format {header.get('format')}: update rollbook")
    packed = view[_HEAD.size + length : -_DIGEST]
    body = memoryview(_CODEC.decompress(packed, header["size"], asbytes=True) if len(packed) else b"")
    parts, start = [], 0
    for segment, offset, size in header["parts"]:
        parts.append(Part(segment, offset, body[start : start + size]))
        start += size
    return Chunk(cut=header["cut"], parts=tuple(parts), **{name: header[name] for name in _PLAIN})
