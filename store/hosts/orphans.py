"""What a lane holds behind the end that another host gave it: moved away, so that all hosts have the same
lane.

Its writer had acknowledged it here, and nobody else had it yet. Each of these events stays readable as an
`event.orphaned` in a lane of its own, and nothing is trained on, or made of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rollbook.store.events import Event, EventOrphaned, codec
from rollbook.store.events.event_json import as_json
from rollbook.store.hosts.shipper import Sender, settled_end
from rollbook.store.log.reader import LaneReader
from rollbook.store.log.recovery import cut_behind, recovered_lane
from rollbook.store.log.writer import LaneWriter
from rollbook.store.wal.files import Watermark, folders_of_lanes, lane_folder, read_watermark

LANE = "orphans"
TOGETHER = 64

logger = logging.getLogger(__name__)


def move_orphans(sender: Sender, lane: str, take: Callable[[], LaneWriter]) -> int:
    """Move what a lane of this host holds behind the end that another one gave it; how many events.

    Where this is cut short, the next call goes on: each event keeps its id, by which none is moved twice.

    Args:
        take: takes the lane of orphans for writing, or one after it.

    Raises:
        LaneLockedError: the lane's process still runs.
    """
    store, folder = sender.store, lane_folder(sender.store, lane)
    with recovered_lane(store, lane):
        at, end = settled_end(sender, lane), read_watermark(folder).next_seq
        if end == at.next_seq:
            return 0
        reader, moved = LaneReader(store, lane, at.next_seq), list[Event]()
        for batch in reader.poll(end):
            moved += [_orphaned(event) for event in codec.decode(batch, lane, reader.body)]
        with take() as writer:
            earlier = _in_lanes_before(sender, lane, writer.lane)
            moved = [event for event in moved if event.event_id not in earlier]
            for start in range(0, len(moved), TOGETHER):
                writer.append(moved[start : start + TOGETHER]).result()
        cut_behind(folder, Watermark(at.segment, at.offset, at.next_seq))
    logger.warning(
        "lane %s was ended by another host: %d events behind its end count for nothing, and are in lane %s",
        *(lane, len(moved), LANE),
    )
    return len(moved)


def _in_lanes_before(sender: Sender, lane: str, newest: str) -> set[str]:
    """Ids of what is in this host's earlier lanes of orphans, which were ended in between."""
    own, found = f"{LANE}.{sender.host}", set[str]()
    for name in folders_of_lanes(sender.store):
        if name not in (lane, newest) and (name == own or name.startswith(f"{own}.")):
            reader = LaneReader(sender.store, name, 0)
            for batch in reader.poll(read_watermark(lane_folder(sender.store, name)).next_seq):
                found |= {event.event_id for event in codec.decode(batch, name, reader.body)}
    return found


def _orphaned(event: Event) -> Event:
    if isinstance(event.record, EventOrphaned):  # the lane of orphans was ended as well
        return Event(event.record, event.run, event.event_id, event.time_us)
    trajectory_id = getattr(event.record, "trajectory_id", None)
    record = EventOrphaned(trajectory_id, event.lane, event.seq, as_json(event))
    return Event(record, event.run, event.event_id, event.time_us)
