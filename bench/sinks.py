"""The targets of the append benchmark: Rollbook's log, the bare file, and what peers use. All durable.

Each sink converts the round's events into what its user would have at hand (`prepare`, not
timed), and then writes commit by commit (`write`, timed): when `write` returns, every commit is
on the disk.
"""

from __future__ import annotations

import os
import sqlite3
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import duckdb
import orjson
import pyarrow as pa

from rollbook.bench.turns import RUN
from rollbook.store import Event
from rollbook.store.events import TurnCompleted
from rollbook.store.events.batches import encode
from rollbook.store.events.codec import as_json
from rollbook.store.events.schema import LOG_SCHEMA
from rollbook.store.log.writer import LaneWriter
from rollbook.store.wal.frame import BATCH_FRAME, EMPTY_CHAIN, encode_frame

Commits = Sequence[Sequence[TurnCompleted]]
ACK_TIMEOUT_S = 60.0


class Sink(Protocol):
    """One side of the append benchmark."""

    def prepare(self, commits: Commits) -> Any:
        """The commits in the form that this sink is given."""

    def write(self, prepared: Any) -> None:
        """Make every commit durable, in order."""


def in_envelopes(turns: Sequence[TurnCompleted]) -> list[Event]:
    """New events, each with an id of its own."""
    return [Event(turn, RUN) for turn in turns]


class LogSink:
    """A lane's writer; up to `in_flight` appends await their acknowledgement at a time."""

    def __init__(self, writer: LaneWriter, in_flight: int) -> None:
        self._writer, self._in_flight = writer, in_flight

    def prepare(self, commits: Commits) -> list[list[Event]]:
        """Events: records of numpy arrays and of JSON values."""
        return [in_envelopes(turns) for turns in commits]

    def write(self, prepared: list[list[Event]]) -> None:
        """Append each commit as one group."""
        waiting: deque[Future[int]] = deque()
        for events in prepared:
            if len(waiting) == self._in_flight:
                waiting.popleft().result(ACK_TIMEOUT_S)
            waiting.append(self._writer.append(events))
        for future in waiting:
            future.result(ACK_TIMEOUT_S)


class _FileSink:
    """A file that only grows."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _commit(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        os.fdatasync(self._fd)


class RawSink(_FileSink):
    """The bytes that the log writes, ready-made: `os.write` and `os.fdatasync`."""

    def prepare(self, commits: Commits) -> list[bytes]:
        """Each commit's frame."""
        return [frame_bytes(in_envelopes(turns)) for turns in commits]

    def write(self, prepared: list[bytes]) -> None:
        """Write and sync each."""
        for data in prepared:
            self._commit(data)


class JsonlSink(_FileSink):
    """A line of JSON an event, by orjson: one write and one `fdatasync` a commit."""

    def prepare(self, commits: Commits) -> list[list[dict[str, Any]]]:
        """A dict an event; its ids and logprobs are lists, as they come out of a reply's JSON."""
        return [[as_json(event) for event in in_envelopes(turns)] for turns in commits]

    def write(self, prepared: list[list[dict[str, Any]]]) -> None:
        """Encode, write and sync each commit."""
        for events in prepared:
            self._commit(b"".join(orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE) for event in events))


class DuckDBSink:
    """A DuckDB file: one insert from an Arrow table, and so one transaction, a commit."""

    def __init__(self, path: Path) -> None:
        self._db = duckdb.connect(str(path))
        self._db.register("empty", LOG_SCHEMA.empty_table())
        self._db.execute("create table events as select * from empty")

    def prepare(self, commits: Commits) -> list[pa.Table]:
        """An Arrow table a commit."""
        return [pa.Table.from_batches([encode(in_envelopes(turns), 0)]) for turns in commits]

    def write(self, prepared: list[pa.Table]) -> None:
        """Insert each table."""
        for table in prepared:
            self._db.register("commit_rows", table)
            self._db.execute("insert into events select * from commit_rows")

    def close(self) -> None:
        """Close the database."""
        self._db.close()


class SqliteSink:
    """SQLite with a write-ahead log and `synchronous=FULL`: a row an event, its arrays as blobs, no index."""

    _COLUMNS = ("event_id", "kind", "time", "run", "trajectory_id", "turn_id", "policy", "policy_version")
    _BLOBS = ("prompt_ids", "completion_ids", "logprobs", "extra")

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("pragma journal_mode=wal")
        self._db.execute("pragma synchronous=full")
        columns = ", ".join((*self._COLUMNS, *self._BLOBS))
        self._db.execute(f"create table events ({columns})")
        self._insert = f"insert into events values ({', '.join('?' * columns.count(',') + '?')})"

    def prepare(self, commits: Commits) -> list[list[Event]]:
        """Events, as the log gets them."""
        return [in_envelopes(turns) for turns in commits]

    def write(self, prepared: list[list[Event]]) -> None:
        """Make rows of the events and insert them, one transaction a commit."""
        for events in prepared:
            self._db.execute("begin")
            self._db.executemany(self._insert, [_row(event) for event in events])
            self._db.execute("commit")

    def close(self) -> None:
        """Close the database."""
        self._db.close()


def _row(event: Event) -> tuple[Any, ...]:
    turn = event.record
    assert isinstance(turn, TurnCompleted)
    assert turn.logprobs is not None
    spans = [(s.policy, s.version, s.start, s.end) for s in turn.version_spans]
    extra = {
        "version_spans": spans,
        "prompt_length": turn.prompt_length,
        "prompt_sha256": turn.prompt_sha256,
        "finish_reason": turn.finish_reason,
        "reply": turn.reply,
        "logprob_semantics": turn.logprob_semantics,
        "flags": turn.flags,
        "timings": turn.timings,
    }
    return (
        *(event.event_id, event.kind, event.time_us, event.run),
        *(turn.trajectory_id, turn.turn_id, turn.policy, turn.policy_version),
        *(turn.prompt_ids.tobytes(), turn.completion_ids.tobytes(), turn.logprobs.tobytes()),
        orjson.dumps(extra),
    )


def frame_bytes(events: Sequence[Event]) -> bytes:
    """The events as one frame: as many bytes as the lane writer writes for them."""
    payload = encode(events, 0).serialize()
    buffers, _ = encode_frame(BATCH_FRAME, payload, 0, len(events), EMPTY_CHAIN)
    return b"".join(bytes(buffer) for buffer in buffers)
