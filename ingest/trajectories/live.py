"""A trajectory in the proxy's memory: its requests under way, and its contents as the log has them.

Contents may be dropped while nothing is under way; `recording.restore` reads them back from the log.
"""

from __future__ import annotations

import asyncio
import sys
import time
from bisect import insort
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rollbook.ingest.tokens.tree import TreeTurn, TurnTree
from rollbook.ingest.turns.in_flight import InFlightCall
from rollbook.store.events import Json, TrajectoryOpened, TurnCompleted

ARRIVALS_KEPT = 64
"""Requests per trajectory that a retry may ask for again."""
TURN_BYTES = 2048
"""Bytes that a turn takes beside its texts and ids."""


@dataclass(slots=True, eq=False)
class Contents:
    """What the log has of a trajectory, as the proxy needs it to extend it.

    Attributes:
        completed: ids of completed turns, in turn order.
        requests: turn -> the rest of its body, for endpoints that refer to earlier turns.
        items: turn -> its messages as sent, where the endpoint's form is another than chat's.
        replies: id of an upstream's reply -> its turn, the first of several choices.
        outputs: id of an item of an upstream's response -> the item.
        arrivals: digest of a request -> the running call, or the turns it became.
        size: about how many bytes all this takes.
    """

    tree: TurnTree = field(default_factory=TurnTree)
    completed: list[str] = field(default_factory=list)
    delivered: set[str] = field(default_factory=set)
    requests: dict[str, Json] = field(default_factory=dict)
    items: dict[str, list[Any]] = field(default_factory=dict)
    replies: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, Json] = field(default_factory=dict)
    arrivals: dict[str, InFlightCall | tuple[str, ...]] = field(default_factory=dict)  # a cache is larger
    size: int = 0

    def take(self, turn: TreeTurn, request: Json | None = None, items: list[Any] | None = None) -> bytes:
        """Index a completed turn, once. Returns the hash of its conversation.

        Args:
            request, items: for endpoints whose requests refer to earlier turns.
        """
        base, shared = self.tree.base(turn.messages, turn.parent)
        tip, new = self.tree.add(turn)
        if not new:
            return tip
        insort(self.completed, turn.turn_id)  # in turn order: ids sort by when they were asked
        self.size += TURN_BYTES + 16 * len(turn.messages) + turn.ids.nbytes
        self.size += _weight([*turn.messages[shared:], turn.reply])
        if items is not None:
            earlier = [] if base is None else self.items.get(base.turn_id, [])
            self.items[turn.turn_id] = items
            self.requests[turn.turn_id] = request or {}
            self.size += 8 * len(items) + _weight([request, *_new(items, earlier)])
        return tip

    def passed(self, completed: TurnCompleted) -> list[str]:
        """Index the ids that an upstream gave a reply and its items: requests may name them."""
        fields, named = completed.upstream, []
        if isinstance(fields.get("id"), str):
            named.append(fields["id"])
            self.replies.setdefault(fields["id"], completed.turn_id)
        choice = fields.get("choice")
        output = choice.get("output") if isinstance(choice, dict) else None
        for item in output if isinstance(output, list) else ():
            if isinstance(item, dict) and isinstance(item.get("id"), str):
                # Encrypted content is of use to the upstream alone.
                self.outputs[item["id"]] = {k: v for k, v in item.items() if k != "encrypted_content"}
                self.size += _weight(item)
                named.append(item["id"])
        return named

    def arrived(self, digest: str, what: InFlightCall | tuple[str, ...]) -> None:
        """Remember what became of a request, for a retry."""
        self.arrivals.pop(digest, None)
        self.arrivals[digest] = what
        while len(self.arrivals) > ARRIVALS_KEPT:
            del self.arrivals[next(iter(self.arrivals))]


@dataclass(slots=True, eq=False)
class LiveTrajectory:
    """A trajectory the proxy writes, or wrote, or that another one writes.

    Attributes:
        contents: what the log has of it; None while no request needs it, and once it is finished.
        sending: replies whose last byte is on its way.
        holds: others that need its contents.
        active_s: when something last happened, by the monotonic clock.
        opening: the append of its opening; None where that was durable before this process knew of it.
        doubtful: an append about it failed, so that the contents may be more than the log has.
        changes: how often the contents changed in what the log is to have too.
    """

    opened: TrajectoryOpened
    lane: str
    contents: Contents | None = field(default_factory=Contents)
    running: int = 0
    calls: list[InFlightCall] = field(default_factory=list)
    sending: int = 0
    settled: asyncio.Event | None = None
    holds: int = 0
    finished: bool = False
    active_s: float = field(default_factory=time.monotonic)
    opening: Future[int] | None = None
    doubtful: bool = False
    changes: int = 0

    @property
    def known(self) -> Contents:
        """Its contents. The caller has recalled the trajectory, and awaited nothing since."""
        assert self.contents is not None, f"trajectory {self.opened.name!r} was used without being recalled"
        return self.contents

    @property
    def tree(self) -> TurnTree:
        """Its completed turns."""
        return self.known.tree

    @property
    def idle(self) -> bool:
        """Whether its contents may be dropped: nothing under way needs them."""
        opening = self.opening is not None and not self.opening.done()
        return not (self.running or self.sending or self.holds or self.finished or opening)

    def begun(self, in_flight: InFlightCall, digest: str) -> None:
        """Note a request that begins."""
        self.running += 1
        self.calls.append(in_flight)
        self.active_s = time.monotonic()
        self.known.arrived(digest, in_flight)

    def ended(self, in_flight: InFlightCall) -> None:
        """Note that a request was answered, or failed."""
        self.running -= 1
        self.calls.remove(in_flight)
        self.active_s = time.monotonic()
        arrivals = self.known.arrivals
        digest = next((d for d, what in arrivals.items() if what is in_flight), None)
        if digest is None:
            return
        answered = [] if in_flight.done.exception() else in_flight.done.result()
        if answered and all(turn.completed.finish_reason != "abort" for turn in answered):
            arrivals[digest] = tuple(turn.turn_id for turn in answered)
        else:
            del arrivals[digest]  # a retry of it is a new attempt

    def sent(self) -> None:
        """Note that a reply's last byte is sent, or its client is gone."""
        self.sending -= 1
        if not self.sending and self.settled is not None:
            self.settled.set()

    async def all_sent(self) -> None:
        """Return once no reply is being sent."""
        while self.sending:
            self.settled = asyncio.Event()
            await self.settled.wait()


def _new(items: Sequence[Any], earlier: Sequence[Any]) -> Sequence[Any]:
    """The items after the common beginning of two lists."""
    shared = 0
    for item, other in zip(items, earlier, strict=False):
        if item is not other:
            break
        shared += 1
    return items[shared:]


def _weight(value: Any) -> int:
    """About how many bytes a JSON value takes in memory; keys are interned, so they are not counted."""
    if isinstance(value, dict):
        return sys.getsizeof(value) + sum(map(_weight, value.values()))
    if isinstance(value, list):
        return sys.getsizeof(value) + sum(map(_weight, value))
    return sys.getsizeof(value)
