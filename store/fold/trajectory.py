"""Trajectories as a fold of events: a forest of turns with rewards and an outcome. Pure.

A turn's whole prompt is its parent's prompt, its parent's completion and its own prompt delta, so
ids are only ever appended: what the engine was sent comes back exactly (checked by sha256).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollbook.store.errors import CorruptionError
from rollbook.store.events import (
    VOID,
    Event,
    Json,
    RewardAssigned,
    TokenIds,
    TrajectoryAdopted,
    TrajectoryErased,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnCompleted,
    TurnDelivered,
    TurnFailed,
    TurnRequested,
)
from rollbook.store.events.erased import ERASED_TOKEN, TOKENS_ERASED
from rollbook.store.fold.ownership import OwnershipChain, Position
from rollbook.store.fold.paths import owned_paths
from rollbook.store.fold.siblings import whole


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One model call, as far as it got. `position` is its place among the trajectory's turns."""

    position: int
    requested: TurnRequested
    completed: TurnCompleted | None
    failed: TurnFailed | None
    delivered: str | None

    @property
    def turn_id(self) -> str:
        """The turn's id."""
        return self.requested.turn_id

    @property
    def tokens_erased(self) -> bool:
        """Whether its token ids and logprobs were erased; each id is then -1."""
        return self.completed is not None and TOKENS_ERASED in self.completed.flags


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """Everything one agent run sent and got, up to the events it was folded from."""

    run: str
    opened: TrajectoryOpened
    turns: Mapping[str, Turn]
    finished: TrajectoryFinished | None
    rewards: tuple[tuple[str, RewardAssigned], ...]
    lane: str = ""
    """The lane that writes it, or wrote it last."""
    last_event_id: str = ""
    """Id of its last event in that lane."""

    @property
    def split(self) -> str:
        """The split that it was opened in; `void` if it was finished as void."""
        return VOID if self.finished is not None and self.finished.status == VOID else self.opened.split

    def reward(self, source: str = "agent", turn_id: str | None = None) -> float | None:
        """The reward in force of the trajectory, or of one turn: the last one not superseded."""
        superseded = {r.supersedes for _, r in self.rewards if r.supersedes}
        values = [
            r.reward
            for event_id, r in self.rewards
            if r.source == source and r.turn_id == turn_id and event_id not in superseded
        ]
        return values[-1] if values else None

    def prompt_ids(self, turn: Turn) -> TokenIds:
        """The ids of a turn's prompt, int32; -1 where they were erased.

        Of a completed turn they are what the engine was sent, of a failed one what it was or
        would have been sent. A turn that has not ended has none, nor has one that failed before
        such prompts were kept.

        Raises:
            CorruptionError: they are not the ids that were sent (their sha256 differs).
        """
        own = self._prompt_delta(turn)
        if own is None:
            return np.empty(0, np.int32)
        parts, node = [own], self.parent(turn)
        while node is not None and node.completed is not None:
            parts += [node.completed.completion_ids, node.completed.prompt_ids]
            node = self.parent(node)
        ids = np.concatenate(parts[::-1])
        ended = turn.completed or turn.failed
        if (ids == ERASED_TOKEN).any() or ended is None or not ended.prompt_sha256:
            return ids
        if prompt_sha256(ids) != ended.prompt_sha256:
            raise CorruptionError(f"turn {turn.turn_id}: its prompt does not fold to the ids sent")
        return ids

    def _prompt_delta(self, turn: Turn) -> TokenIds | None:
        """The ids that a turn's prompt adds to its parent's; None where they were not kept."""
        if turn.completed is not None:
            return turn.completed.prompt_ids
        if turn.failed is None or not turn.failed.prompt_sha256:
            return None
        # Of several turns of one request the first alone holds it.
        for sibling in self.turns.values():
            if sibling.requested.request_id == turn.requested.request_id:
                if sibling.completed is not None:
                    return sibling.completed.prompt_ids
                if sibling.failed is not None and sibling.failed.prompt_ids is not None:
                    return sibling.failed.prompt_ids
        return None

    def parent(self, turn: Turn) -> Turn | None:
        """The turn this one extends, or None for a root."""
        parent_id = turn.requested.parent_turn_id
        return None if parent_id is None else self.turns[parent_id]

    def paths(self) -> Iterator[tuple[Turn, ...]]:
        """Every root-to-leaf path of completed turns, leaves in turn order."""
        for turns, _ in self.owned_paths():
            yield turns

    def owned_paths(self, before: str | None = None) -> Iterator[tuple[tuple[Turn, ...], tuple[bool, ...]]]:
        """The same, with whether each turn's tokens count for this path: `store.fold.paths`.

        Args:
            before: a leaf that owns all of its path.
        """
        done, parents = self.completed()
        place = next((at for at, turn in enumerate(done) if turn.turn_id == before), None)
        for path in owned_paths(parents, place):
            yield tuple(done[node] for node in path.nodes), path.owned

    def completed(self) -> tuple[list[Turn], list[int]]:
        """Its completed turns, in order, and the place of each one's parent among them, -1 for a root."""
        done = [turn for turn in self.turns.values() if turn.completed is not None]
        places = {turn.turn_id: place for place, turn in enumerate(done)}
        return done, [places.get(turn.requested.parent_turn_id or "", -1) for turn in done]

    def messages(self, turn: Turn) -> list[Json]:
        """The request's messages exactly as the client sent them."""
        return self._rebuilt(turn, lambda request: (request.shared_messages, request.messages))

    def items(self, turn: Turn) -> list[Any] | None:
        """The messages in the form of the endpoint they came to, if it differs from `messages`."""
        if "items" not in turn.requested.wire:
            return None
        return self._rebuilt(
            turn, lambda request: (request.wire.get("shared_items", 0), request.wire["items"])
        )

    def _rebuilt(self, turn: Turn, part: Callable[[TurnRequested], tuple[int, list[Any]]]) -> list[Any]:
        """A list, rebuilt: each request stores how much it shares with its base, and its own part."""
        chain = [part(turn.requested)]
        request = turn.requested
        while chain[-1][0] and request.base_turn_id is not None:
            request = self.turns[request.base_turn_id].requested
            chain.append(part(request))
        whole: list[Any] = []
        for shared, own in chain[::-1]:
            whole[shared:] = own
        return whole


def prompt_sha256(ids: TokenIds) -> str:
    """sha256 (hex) over ids as little-endian int32."""
    return hashlib.sha256(np.ascontiguousarray(ids, dtype="<i4").data).hexdigest()


class _Builder:
    """Collects the events of one trajectory, in any order of lanes."""

    def __init__(self, event: Event, opened: TrajectoryOpened) -> None:
        self.run, self.opened = event.run, opened
        self.requested: dict[str, TurnRequested] = {}
        self.completed: dict[str, TurnCompleted] = {}
        self.failed: dict[str, TurnFailed] = {}
        self.delivered: dict[str, str] = {}
        self.finished: TrajectoryFinished | None = None
        self.rewards: list[tuple[Position, str, RewardAssigned]] = []
        self._asked_at: dict[str, Position] = {}
        place = (event.lane, event.seq)
        self._ownership = OwnershipChain(place, places={event.event_id: place})

    def add(self, event: Event) -> None:
        place = self._ownership.places[event.event_id] = (event.lane, event.seq)
        match event.record:
            case TurnRequested() as record:
                self.requested[record.turn_id] = record
                self._asked_at[record.turn_id] = place
            case TurnCompleted() as record:
                self.completed[record.turn_id] = record
            case TurnFailed() as record:
                self.failed[record.turn_id] = record
            case TurnDelivered() as record:
                self.delivered.setdefault(record.turn_id, record.how)
            case RewardAssigned() as record:
                self.rewards.append((place, event.event_id, record))
            case TrajectoryFinished() as record:
                self.finished = record
            case TrajectoryAdopted() as record:
                self._ownership.adoptions[place] = record.last_event_id
            case TrajectoryErased(tokens_kept=False):
                self._erase()

    def _erase(self) -> None:
        """Discard tokens and text that were folded before the trajectory's files were erased."""
        for turn_id, done in self.completed.items():
            if TOKENS_ERASED not in done.flags:
                self.completed[turn_id] = replace(done, flags=[*done.flags, TOKENS_ERASED])

    def _asked(self, turn_id: str) -> TurnRequested:
        """A turn's whole request: one stored as a sibling is completed from its first turn."""
        request = self.requested[turn_id]
        first = None if request.sibling_of is None else self.requested.get(request.sibling_of)
        return request if first is None else whole(request, first)

    def build(self) -> Trajectory:
        ownership = self._ownership
        order = list(self.requested)
        if ownership.adoptions:
            order.sort(key=lambda turn_id: ownership.key(self._asked_at[turn_id]))
        turns = {
            turn_id: Turn(
                position,
                self._asked(turn_id),
                self.completed.get(turn_id),
                self.failed.get(turn_id),
                self.delivered.get(turn_id),
            )
            for position, turn_id in enumerate(order)
        }
        # Lanes may be read in any order: which reward came last must not depend on it.
        rewards = sorted(self.rewards, key=lambda reward: ownership.key(reward[0]))
        records = tuple((event_id, record) for _, event_id, record in rewards)
        return Trajectory(self.run, self.opened, turns, self.finished, records, *ownership.last())


class TrajectoryFold:
    """Folds events into trajectories as they come.

    Events of one lane must come in order. Lanes may come in any: what another lane holds of a trajectory
    (a judge's reward, or what was written after an adoption) is kept until its opening comes. A trajectory
    is whole once every event of a closed cut was added.
    """

    def __init__(self) -> None:
        self._builders: dict[str, _Builder] = {}
        self._early: dict[str, list[Event]] = {}

    def add(self, event: Event) -> str | None:
        """Fold one event; returns the id of its trajectory, if that has been opened."""
        record: Any = event.record
        trajectory_id: str | None = getattr(record, "trajectory_id", None)
        if trajectory_id is None:
            return None
        if isinstance(record, TrajectoryOpened):
            builder = self._builders[trajectory_id] = _Builder(event, record)
            for early in self._early.pop(trajectory_id, ()):
                builder.add(early)
        elif trajectory_id in self._builders:
            self._builders[trajectory_id].add(event)
        else:
            self._early.setdefault(trajectory_id, []).append(event)
            return None
        return trajectory_id

    def forget(self, trajectory_id: str) -> None:
        """Drop a trajectory. Later events of it are discarded by the next `close`."""
        self._builders.pop(trajectory_id, None)

    def close(self) -> None:
        """Note that every event of a closed cut was added: events that belong to no trajectory by now are
        discarded."""
        self._early.clear()

    def __getitem__(self, trajectory_id: str) -> Trajectory:
        return self._builders[trajectory_id].build()

    def __contains__(self, trajectory_id: str) -> bool:
        return trajectory_id in self._builders

    def __iter__(self) -> Iterator[str]:
        return iter(self._builders)


def fold(events: Iterable[Event]) -> dict[str, Trajectory]:
    """All trajectories in the events, by id, in the order they were opened."""
    folding = TrajectoryFold()
    for event in events:
        folding.add(event)
    return {trajectory_id: folding[trajectory_id] for trajectory_id in folding}
