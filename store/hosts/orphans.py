"""What a lane holds behind the end that another host gave it: moved away, so that all hosts have the same
lane.

Its writer had acknowledged it here, and nobody else had it yet. Each of these events stays readable as an
`event.orphaned` in a lane of its own, and nothing is trained on, or made of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from rollbook.store.events import Event, EventOrphaned, codec
from rollbook.store.events.event_json import as_json
from rollbook.store.log.reader import LaneReader
from rollbook.store.log.recovery import cut_behind, recovered_lane
from rollbook.store.log.writer import LaneWriter
from rollbook.store.wal.files import FENCED, Watermark, lane_folder, read_shipped, read_watermark

LANE = "orphans"
TOGETHER = 64

logger = logging.getLogger(__name__)


def holds_orphans(store: Path, lane: str) -> bool:
    """Whether a lane of this host was ended, and holds events behind its end."""
    folder = lane_folder(store, lane)
    if not (folder / FENCED).exists():
        return False
    shipped = read_shipped(folder)
    return shipped is not None and read_watermark(folder).next_seq > shipped.next_seq


def move_orphans(store: Path, lane: str, take: Callable[[str], LaneWriter]) -> int:
    """Move what a lane holds behind its end; how many events.

    Where this is cut short, the next call goes on: each event keeps its id, by which none is moved twice.

    Args:
        take: takes a lane for writing.

    Raises:
        LaneLockedError: the lane's process still runs.
    """
    folder = lane_folder(store, lane)
    with recovered_lane(store, lane):
        shipped, end = read_shipped(folder), read_watermark(folder).next_seq
        assert shipped is not None
        reader, moved = LaneReader(store, lane, shipped.next_seq), list[Event]()
        for batch in reader.poll(end):
            moved += [_orphaned(event) for event in codec.decode(batch, lane, reader.body)]
        with take(LANE) as writer:
            for start in range(0, len(moved), TOGETHER):
                writer.append(moved[start : start + TOGETHER]).result()
        cut_behind(folder, Watermark(shipped.segment, shipped.offset, shipped.next_seq))
    logger.warning(
        "lane %s was ended by another host: %d events behind its end count for nothing, and are in lane %s",
        *(lane, len(moved), LANE),
    )
    return len(moved)


def _orphaned(event: Event) -> Event:
    trajectory_id = getattr(event.record, "trajectory_id", None)
    record = EventOrphaned(trajectory_id, event.lane, event.seq, as_json(event))
    return Event(record, event.run, event.event_id, event.time_us)
