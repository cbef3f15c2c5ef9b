"""What of a cassette was asked for, for machines. Pure."""

from __future__ import annotations

from rollbook.replay.cassettes.cassette import Cassette
from rollbook.replay.cassettes.tape import RecordedRequest
from rollbook.store.events import Json


def state_of(cassette: Cassette) -> Json:
    """The trajectories, how many of their requests were asked for, those that were not, and the misses."""
    unused = cassette.unused
    return {
        "trajectories": [
            {"trajectory_id": t.trajectory_id, "name": t.name, "run": t.run} for t in cassette.tapes
        ],
        "requests": len(cassette.requests),
        "used": len(cassette.requests) - len(unused),
        "unused": [place_of(request) for request in unused],
        "misses": [
            {"endpoint": miss.asked.endpoint, "nearest": miss.near.as_json() if miss.near else None}
            for miss in cassette.misses
        ],
    }


def place_of(request: RecordedRequest) -> Json:
    """Where a recorded request is."""
    return {"trajectory": request.name, "trajectory_id": request.tape, "turn": request.number}
