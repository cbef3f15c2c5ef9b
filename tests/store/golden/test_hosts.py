"""A store of several hosts, and the chunks of a lane, as the release that brought them wrote them, are read
for ever."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories.golden import digest_of, written_in

from rollbook import store as rb
from rollbook.store import Event
from rollbook.store.errors import CorruptionError
from rollbook.store.events import EventOrphaned
from rollbook.store.medium.chunk import decode_chunk

PINNED = "9880de44a06a513b"
CHUNKS_PINNED = "c00c9170cdfddd85"
"""The beginnings of the sha256 of the golden files: they are never changed."""


@pytest.fixture
def chunks(root: Path) -> list[bytes]:
    """The entries of a lane."""
    return [path.read_bytes() for path in sorted((root / "tests" / "data" / "chunk-1").iterdir())]


def test_golden_files_are_unchanged(chunks: list[bytes]) -> None:
    """The files in the repository are the ones that were pinned."""
    assert digest_of("format-1-hosts") == PINNED
    assert hashlib.sha256(b"".join(chunks)).hexdigest()[:16] == CHUNKS_PINNED


def test_every_event_is_what_was_written(
    root: Path, tmp_path: Path, plain: Callable[[Event], dict[str, Any]]
) -> None:
    """An event that was moved away says which it was."""
    log = rb.open(shutil.copytree(root / "tests" / "data" / "format-1-hosts", tmp_path / "golden"))
    events = list(log.events())
    assert [plain(e) for e in events] == [plain(e) for e in written_in("format-1-hosts")]
    orphans = [e.record for e in events if isinstance(e.record, EventOrphaned)]
    assert [(o.trajectory_id, o.of_lane, o.of_seq) for o in orphans] == [("t1", "serve.one", 2)]
    assert orphans[0].event["value"] == [1, "two"]


def test_the_chunks_are_read(root: Path, chunks: list[bytes]) -> None:
    """Every field, and the bytes of the segment."""
    data, more, fence = (decode_chunk(entry, "golden") for entry in chunks)
    segment = (
        root / "tests" / "data" / "format-1-hosts" / "lanes" / "serve.one" / "00000001.wal"
    ).read_bytes()
    assert b"".join(bytes(part.data) for chunk in (data, more) for part in chunk.parts) == segment
    assert [(p.segment, p.offset) for p in (*data.parts, *more.parts)] == [
        (1, 0),
        (1, len(segment) // 128 * 64),
        (2, 0),
    ]
    assert (data.number, data.epoch, data.next_seq, data.kind) == (0, 1, 0, "data")
    assert more.cut == {"orphans.one": 1}
    assert (fence.kind, fence.number, fence.epoch, fence.session, fence.next_seq) == (
        "fence",
        2,
        2,
        "two.s",
        1,
    )
    assert {chunk.host for chunk in (data, more, fence)} == {"one"}


def test_a_changed_chunk_is_refused(chunks: list[bytes]) -> None:
    """Whichever bit of it."""
    for at in range(0, len(chunks[0]), 7):
        changed = bytearray(chunks[0])
        changed[at] ^= 1 << at % 8
        with pytest.raises(CorruptionError, match="golden: the chunk does not match"):
            decode_chunk(bytes(changed), "golden")
