"""A trajectory in the proxy's memory: a fold of its events, and what runs in it now."""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rollbook.ingest.reply import STOP_STRING
from rollbook.ingest.running import RunningCall
from rollbook.ingest.tokens.tree import Plan, TreeTurn, TurnTree
from rollbook.store.events import Json, TrajectoryOpened, TurnCompleted, TurnRequested

ARRIVALS_KEPT = 64
"""Requests per trajectory that a retry may ask for again."""


@dataclass(slots=True, eq=False)
class LiveTrajectory:
    """A trajectory the proxy writes, or wrote: once finished, only its name is kept.

    Attributes:
        completed: ids of completed turns, in turn order.
        sending: replies whose last byte is on its way.
        requests: turn -> the rest of its body, for endpoints that refer to earlier turns.
        items: turn -> its messages as sent, where the endpoint's form is another than chat's.
        replies: id of an upstream's reply -> its turn, the first of several choices.
        outputs: id of an item of an upstream's response -> the item.
        arrivals: digest of a request -> the running call, or the turns it became.
        active_s: when something last happened, by the monotonic clock.
        tips: where a quarantined trajectory says how far it goes; unnamed traffic is told apart by it.
        opening: the append of its opening; None where that was durable before this process knew of it.
    """

    opened: TrajectoryOpened
    lane: str
    tree: TurnTree = field(default_factory=TurnTree)
    completed: list[str] = field(default_factory=list)
    delivered: set[str] = field(default_factory=set)
    running: int = 0
    calls: list[RunningCall] = field(default_factory=list)
    sending: int = 0
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    finished: bool = False
    requests: dict[str, Json] = field(default_factory=dict)
    items: dict[str, list[Any]] = field(default_factory=dict)
    replies: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, Json] = field(default_factory=dict)
    arrivals: dict[str, RunningCall | tuple[str, ...]] = field(default_factory=dict)
    active_s: float = field(default_factory=time.monotonic)
    tips: dict[bytes, LiveTrajectory] | None = None
    opening: Future[int] | None = None

    def begun(self, running: RunningCall, digest: str) -> None:
        """A request is being answered."""
        self.running += 1
        self.calls.append(running)
        self.active_s = time.monotonic()
        self.arrived(digest, running)

    def arrived(self, digest: str, what: RunningCall | tuple[str, ...]) -> None:
        """Remember what became of a request, for a retry."""
        self.arrivals.pop(digest, None)
        self.arrivals[digest] = what
        while len(self.arrivals) > ARRIVALS_KEPT:
            del self.arrivals[next(iter(self.arrivals))]

    def ended(self, running: RunningCall) -> None:
        """A request was answered, or failed."""
        self.running -= 1
        self.calls.remove(running)
        self.active_s = time.monotonic()
        digest = next((d for d, what in self.arrivals.items() if what is running), None)
        if digest is None:
            return
        answered = [] if running.done.exception() else running.done.result()
        if answered and all(turn.completed.finish_reason != "abort" for turn in answered):
            self.arrivals[digest] = tuple(turn.turn_id for turn in answered)
        else:
            del self.arrivals[digest]  # a retry of it is a new attempt

    def completed_turn(
        self, plan: Plan, requested: TurnRequested, completed: TurnCompleted, items: list[Any] | None
    ) -> None:
        """A turn became durable: it may be extended from now on."""
        if self.finished:
            return
        key, ids = requested.context_key, completed.completion_ids
        cut = STOP_STRING in completed.flags
        self.take(plan.completed(requested.turn_id, key, completed.reply, ids, cut=cut))
        if items is not None:
            self.requests[requested.turn_id] = requested.request
            self.items[requested.turn_id] = items

    def take(self, turn: TreeTurn) -> None:
        """Index a completed turn."""
        tip = self.tree.add(turn)
        if self.tips is not None:
            self.tips[tip] = self
        insort(self.completed, turn.turn_id)  # in turn order: ids sort by when they were asked

    def passed(self, completed: TurnCompleted) -> None:
        """Remember by which ids an upstream calls a reply and its items: requests may name them."""
        told = completed.upstream
        if isinstance(told.get("id"), str):
            self.replies.setdefault(told["id"], completed.turn_id)
        choice = told.get("choice")
        output = choice.get("output") if isinstance(choice, dict) else None
        for item in output if isinstance(output, list) else ():
            if isinstance(item, dict) and isinstance(item.get("id"), str):
                # What is encrypted only the upstream can read.
                self.outputs[item["id"]] = {k: v for k, v in item.items() if k != "encrypted_content"}

    def sent(self) -> None:
        """A reply's last byte is out, or its client is gone."""
        self.sending -= 1
        if not self.sending:
            self.settled.set()

    def forget(self) -> None:
        """Drop what only an open trajectory needs."""
        self.finished = True
        self.tree, self.completed, self.delivered = TurnTree(), [], set()
        self.items, self.arrivals, self.requests, self.replies, self.outputs = {}, {}, {}, {}, {}
