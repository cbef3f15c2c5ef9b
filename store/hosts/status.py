"""How far each lane of each host is, in the medium and here, for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollbook.store.hosts.carrier import Carrier
from rollbook.store.ids import now_us
from rollbook.store.medium.medium import LANES, lane_of, newest_chunk
from rollbook.store.wal.files import closed_head


def statuses(store: Path, carrier: Carrier) -> list[dict[str, Any]]:
    """A row for each lane in the medium: its host, events there and here, its state, and when it last grew.

    Raises:
        MediumError: the medium does not answer.
        CorruptionError: what it holds is damaged.
    """
    here, rows = closed_head(store), list[dict[str, Any]]()
    for sequence in carrier.medium.sequences(LANES):
        host, lane = lane_of(sequence)
        chunk = newest_chunk(carrier.medium, sequence)
        if chunk is None:
            continue
        ago = None if not chunk.sent_us else round(max(now_us() - chunk.sent_us, 0) / 1e6, 1)
        rows.append(
            {
                "lane": lane,
                "host": host,
                "events": chunk.next_seq,
                "here": here.get(lane, 0),
                "chunks": chunk.number + 1,
                "state": "ended" if chunk.kind == "fence" else carrier.state_of(chunk.session),
                "grew_s_ago": ago,
            }
        )
    return rows
