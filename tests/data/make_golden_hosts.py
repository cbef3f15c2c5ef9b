"""Writes tests/data/format-1-hosts and chunk-1: a lane behind whose end another one was moved, and its
chunks.

    python tests/data/make_golden_hosts.py

They are never written again. What the store's events say is in `format-1-hosts.jsonl`; `chunk-1` has the
entries of lane `serve.one` in a medium, by number: its bytes in two, and the fence that ends it.
"""

from __future__ import annotations

from pathlib import Path

from golden_store import begin_golden, end_golden

from rollbook.store.events import Event, EventOrphaned, LabelAdded, TrajectoryOpened
from rollbook.store.medium.chunk import Chunk, Part, encode_chunk

FOLDER = Path(__file__).parent / "format-1-hosts"
CHUNKS = Path(__file__).parent / "chunk-1"
STORE_ID = "01900000-0000-7000-8000-00000000000a"


def main() -> None:
    """Write both."""
    log = begin_golden(FOLDER, STORE_ID)
    label = {"kind": "label.added", "lane": "serve.one", "seq": 2, "name": "n", "value": [1, "two"]}
    written = [
        ("serve.one", TrajectoryOpened("t1", "one")),
        ("serve.one", LabelAdded("t1", None, "n", 1, "agent", None)),
        ("orphans.one", EventOrphaned("t1", "serve.one", 2, label)),
    ]
    for number, (lane, record) in enumerate(written):
        with log.writer(lane) as writer:
            writer.append(
                [Event(record, "golden", f"e-{number:02}", 1_900_000_000_000_000 + number)]
            ).result()
    end_golden(log)
    segment = (FOLDER / "lanes" / "serve.one" / "00000001.wal").read_bytes()
    head = {"store": STORE_ID, "lane": "serve.one", "host": "one", "session": "one.s"}
    middle = len(segment) // 128 * 64
    chunks = [
        Chunk(**head, number=0, epoch=1, next_seq=0, parts=[Part(1, 0, segment[:middle])], sent_us=1),
        Chunk(
            **head,
            number=1,
            epoch=1,
            next_seq=1,
            cut={"orphans.one": 1},
            parts=[Part(1, middle, segment[middle:]), Part(2, 0, b"")],
            units=["00000001-00000001.1", "00000002-00000002.1!"],
            sent_us=2,
        ),
        Chunk(**head | {"session": "two.s"}, number=2, epoch=2, next_seq=1, kind="fence"),
    ]
    CHUNKS.mkdir()
    for chunk in chunks:
        (CHUNKS / f"{chunk.number:012d}").write_bytes(encode_chunk(chunk))


if __name__ == "__main__":
    main()
