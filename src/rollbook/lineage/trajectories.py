"""The lineage of a trajectory, of one of its samples, or of one sampled token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rollbook.lineage.line import Lines
from rollbook.lineage.records import (
    Drop,
    Place,
    RewardComparison,
    RewardGiven,
    Share,
    TokenLineage,
    TokenUse,
    TrajectoryLineage,
    TurnOrigin,
)
from rollbook.lineage.uses import Consumed, compared_by, consumed_by, read_drops, read_naming
from rollbook.store.cut import Cut, holds
from rollbook.store.errors import CutError, ReplayError
from rollbook.store.events import (
    Event,
    RewardAssigned,
    TrajectoryAdopted,
    TrajectoryOpened,
    TurnCompleted,
    TurnFailed,
    TurnRequested,
)
from rollbook.store.fold.ownership import OwnershipChain
from rollbook.store.fold.trajectory import Trajectory, Turn, fold
from rollbook.store.log.store import Store
from rollbook.store.sql.ledger_view import shares
from rollbook.store.sql.sandbox import Connection
from rollbook.train.select.samples import Sample

_SHARES = f"""
    SELECT turn_id, policy, policy_version, tokens, term, rule FROM ({shares("trajectory_id = $id")})
    ORDER BY turn_id, policy, policy_version"""


@dataclass(frozen=True, slots=True, eq=False)
class TrajectorySnapshot:
    """A trajectory at a cut, with its events, and what became of its turns and samples."""

    trajectory: Trajectory
    events: list[Event]
    turns: dict[str, TurnOrigin]
    consumed: list[Consumed]
    compared: tuple[RewardComparison, ...]
    drops: tuple[Drop, ...]


def trajectory_lineage(
    log: Store, connection: Connection, cut: Cut, trajectory_id: str, leaf_turn_id: str | None = None
) -> TrajectoryLineage:
    """Where a trajectory comes from and what it led to; of one sample of it, if its leaf is named.

    Args:
        connection: over the store at the cut.

    Raises:
        CutError: the trajectory's opening is not in the cut.
        ReplayError: the turn is no leaf, and no step consumed or dropped a sample by its name.
        CorruptionError: a file that may hold the trajectory is damaged.
    """
    snapshot = read_snapshot(log, connection, cut, trajectory_id)
    turns, drops = tuple(snapshot.turns.values()), snapshot.drops
    uses = tuple(consumed.use for consumed in snapshot.consumed)
    if leaf_turn_id is not None:
        _check_leaf(snapshot, leaf_turn_id)
        path = path_to(snapshot.trajectory, leaf_turn_id)
        turns = tuple(turn for turn in turns if turn.turn_id in path)
        uses = tuple(use for use in uses if use.leaf_turn_id == leaf_turn_id)
        drops = tuple(drop for drop in drops if drop.leaf_turn_id == leaf_turn_id)
    lines = Lines(connection)
    sampled = {(share.policy, share.version) for turn in turns for share in turn.shares}
    run, opened, finished = snapshot.trajectory.run, snapshot.trajectory.opened, snapshot.trajectory.finished
    outputs = {(use.run, use.policy, use.output_version) for use in uses if use.status == "committed"}
    return TrajectoryLineage(
        run=run,
        trajectory_id=trajectory_id,
        trajectory=opened.name,
        sample=leaf_turn_id,
        split=snapshot.trajectory.split,
        status=finished.status if finished else "open",
        lanes=_lanes(snapshot.events),
        rewards=_rewards(snapshot),
        turns=turns,
        sampled_by=lines.versions((run, policy, version) for policy, version in sampled),
        uses=uses,
        compared=snapshot.compared,
        drops=drops,
        made=lines.versions(outputs),
        descendants=lines.descendants(outputs),
    )


def read_snapshot(log: Store, connection: Connection, cut: Cut, trajectory_id: str) -> TrajectorySnapshot:
    """A trajectory as the log has it; reads only what holds its events, and the manifests that name it.

    Raises:
        CutError: its opening is not in the cut.
        CorruptionError: a file that may hold it is damaged.
    """
    events = log.events_about([trajectory_id], cut)
    trajectory = fold(events).get(trajectory_id)
    if trajectory is None:
        raise CutError("the cut holds events of the trajectory, but not its opening: take a later one")
    rows = connection.execute(_SHARES, {"id": trajectory_id}).fetchall()
    named = read_naming(connection, trajectory_id)
    return TrajectorySnapshot(
        trajectory,
        events,
        _turns(trajectory, events, rows),
        [record for attempt in named for record in consumed_by(attempt, trajectory_id, events)],
        tuple(record for attempt in named for record in compared_by(attempt, trajectory_id)),
        read_drops(connection, trajectory_id),
    )


def path_to(trajectory: Trajectory, leaf: str) -> frozenset[str]:
    """The turns of the sample with this leaf; none if the trajectory has no such turn."""
    turns, node = set[str](), trajectory.turns.get(leaf)
    while node is not None:
        turns.add(node.turn_id)
        node = trajectory.parent(node)
    return frozenset(turns)


def _check_leaf(snapshot: TrajectorySnapshot, turn_id: str) -> None:
    """Check that this turn names a sample: as a leaf now, or as that of a sample that an attempt named.

    Raises:
        ReplayError: it names none; the message names the leaves above the turn.
    """
    paths = [[turn.turn_id for turn in path] for path in snapshot.trajectory.paths()]
    named = {consumed.use.leaf_turn_id for consumed in snapshot.consumed} | {
        drop.leaf_turn_id for drop in snapshot.drops
    }
    if turn_id in named or turn_id in {path[-1] for path in paths}:
        return
    leaves = [path[-1] for path in paths if turn_id in path] or [path[-1] for path in paths]
    listed = ", ".join(leaves) or "none: no turn completed"
    raise ReplayError(f"turn {turn_id} is the leaf of no sample; the leaves of its samples are: {listed}")


def _turns(
    trajectory: Trajectory, events: Iterable[Event], rows: Sequence[tuple[Any, ...]]
) -> dict[str, TurnOrigin]:
    """Turn id -> its origin.

    Args:
        rows: of `ledger_view.shares`.
    """
    requested: dict[str, Place] = {}
    answered: dict[str, Place] = {}
    for event in events:
        match event.record:
            case TurnRequested(turn_id=turn_id):
                requested[turn_id] = Place(event.lane, event.seq, event.event_id)
            case TurnCompleted(turn_id=turn_id) | TurnFailed(turn_id=turn_id):
                answered[turn_id] = Place(event.lane, event.seq, event.event_id)
    return {
        turn_id: TurnOrigin(
            turn_id=turn_id,
            number=turn.position + 1,
            parent=turn.requested.parent_turn_id,
            request_id=turn.requested.request_id,
            requested=requested[turn_id],
            answered=answered.get(turn_id),
            status="completed" if turn.completed else "failed" if turn.failed else "running",
            delivered=turn.delivered,
            shares=_shares(turn, rows),
        )
        for turn_id, turn in trajectory.turns.items()
    }


def _shares(turn: Turn, rows: Sequence[tuple[Any, ...]]) -> tuple[Share, ...]:
    done = turn.completed
    if done is None:
        return ()
    result = []
    for turn_id, policy, version, tokens, term, rule in rows:
        if turn_id == turn.turn_id:
            result.append(Share(policy, version, tokens, term, rule))
        elif turn_id is None and (policy, version) == (done.policy, done.policy_version):
            # Of a trajectory of one path: the row is of all its turns by this version.
            result.append(Share(policy, version, len(done.completion_ids), term, rule))
    return tuple(result)


def _lanes(events: Iterable[Event]) -> tuple[str, ...]:
    """The lanes that wrote a trajectory, one after the other."""
    places = {event.event_id: (event.lane, event.seq) for event in events}
    starts = [e for e in events if isinstance(e.record, TrajectoryOpened | TrajectoryAdopted)]
    adopted = {
        (e.lane, e.seq): e.record.last_event_id for e in starts if isinstance(e.record, TrajectoryAdopted)
    }
    [opened] = [(e.lane, e.seq) for e in starts if isinstance(e.record, TrajectoryOpened)]
    chain = OwnershipChain(opened, adopted, places)
    return tuple(lane for lane, _ in sorted((opened, *adopted), key=lambda start: chain.rank(start) or 0))


def _rewards(snapshot: TrajectorySnapshot) -> tuple[RewardGiven, ...]:
    places = {e.event_id: e for e in snapshot.events if isinstance(e.record, RewardAssigned)}
    superseded = {record.supersedes for _, record in snapshot.trajectory.rewards if record.supersedes}
    committed = [consumed for consumed in snapshot.consumed if consumed.use.status == "committed"]
    rewards = []
    for event_id, record in snapshot.trajectory.rewards:
        event = places[event_id]
        seen = {(c.use.run, c.use.step) for c in committed if holds(c.cut, event.lane, event.seq)}
        place = Place(event.lane, event.seq, event_id)
        rewards.append(
            RewardGiven(
                *(record.reward, record.source, record.turn_id, place, event_id in superseded),
                tuple(sorted(seen)),
            )
        )
    return tuple(rewards)


UNDELIVERED, ALTERED, ERASED = "undelivered", "altered", "erased"
CUT_OFF, OTHER_SAMPLE = "cut off", "other sample"
_TEXT = "SELECT token_text($run, $token::INTEGER)"


def token_lineage(
    log: Store, connection: Connection, cut: Cut, trajectory_id: str, turn_id: str | None, index: int
) -> TokenLineage:
    """Where a sampled token comes from, and which steps trained on it.

    Args:
        turn_id: the token's turn, with `index` its place in the completion; without a turn, `index` is
            its place among all sampled tokens of the trajectory, turns in order. Both count from 0.

    Raises:
        CutError: the trajectory's opening is not in the cut.
        ReplayError: the turn sampled no such token.
        CorruptionError: a file that may hold the trajectory is damaged.
    """
    snapshot = read_snapshot(log, connection, cut, trajectory_id)
    turn, index = _find_token(snapshot.trajectory, turn_id, index)
    done, origin = turn.completed, snapshot.turns[turn.turn_id]
    assert done is not None
    span = next((s for s in done.version_spans if s.start <= index < s.end), None)
    policy, number = (None, None) if span is None else (span.policy, span.version)
    share = next((s for s in origin.shares if (s.policy, s.version) == (policy, number)), None)
    token_id = int(done.completion_ids[index])
    [(text,)] = connection.execute(_TEXT, {"run": snapshot.trajectory.run, "token": token_id}).fetchall()
    uses = [_token_use(use, turn.turn_id, index) for use in snapshot.consumed]
    versions = Lines(connection).versions([(snapshot.trajectory.run, policy, number)])
    return TokenLineage(
        run=snapshot.trajectory.run,
        trajectory_id=trajectory_id,
        trajectory=snapshot.trajectory.opened.name,
        turn=origin,
        index=index,
        place=done.prompt_length + index,
        token_id=token_id,
        text=text,
        logprob=None if done.logprobs is None else float(done.logprobs[index]),
        version=versions[0] if versions else None,
        share=share,
        reached=any(use.trained and use.use.status == "committed" for use in uses if use),
        uses=tuple(use for use in uses if use is not None),
        drops=tuple(
            d for d in snapshot.drops if turn.turn_id in path_to(snapshot.trajectory, d.leaf_turn_id)
        ),
    )


def _find_token(trajectory: Trajectory, turn_id: str | None, index: int) -> tuple[Turn, int]:
    turns = [turn for turn in trajectory.turns.values() if turn_id in (None, turn.turn_id)]
    left = index
    for turn in turns:
        count = 0 if turn.completed is None else len(turn.completed.completion_ids)
        if 0 <= left < count:
            return turn, left
        left -= count
    sampled = index - left
    what = f"trajectory {trajectory.opened.name!r}" if turn_id is None else f"turn {turn_id}"
    there = f"its tokens are 0 to {sampled - 1}" if sampled else "it has no sampled tokens with ids"
    raise ReplayError(f"{what} has no sampled token {index}: {there}")


def _token_use(consumed: Consumed, turn_id: str, index: int) -> TokenUse | None:
    """What an attempt made of a token; None if its turn is not on the path of the sample."""
    trajectory, sample = consumed.trajectory, consumed.sample
    if trajectory is None or sample is None:
        return None
    turn = trajectory.turns.get(turn_id)
    if turn is None or turn.completed is None or turn_id not in path_to(trajectory, sample.leaf_turn_id):
        return None
    place = turn.completed.prompt_length + index
    if place >= len(sample):
        return TokenUse(consumed.use, False, CUT_OFF)
    if sample.loss_mask[place]:
        return TokenUse(consumed.use, True, None)
    return TokenUse(consumed.use, False, why_untrained(turn, sample))


def why_untrained(turn: Turn, sample: Sample) -> str:
    """Why what a completed turn sampled has no loss in a sample with the turn on its path."""
    if sample.erased:
        return ERASED
    if not turn.delivered:
        return UNDELIVERED
    altered = turn.completed is not None and turn.completed.logprob_semantics.get("altered")
    return ALTERED if altered else OTHER_SAMPLE
