"""The lineage of a trajectory, of one of its samples, or of one sampled token.

What attempts at steps did with the samples of a trajectory, read from their manifests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rollbook.lineage.line import Lines
from rollbook.lineage.records import (
    Drop,
    Place,
    RewardComparison,
    RewardGiven,
    Share,
    StepAttempt,
    TokenLineage,
    TokenUse,
    TrajectoryLineage,
    TurnOrigin,
    Use,
)
from rollbook.store.cut import Cut, holds, parse_cut
from rollbook.store.errors import CutError, ReplayError
from rollbook.store.events import (
    Event,
    Json,
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
from rollbook.train.select.samples import Sample, samples_of

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
    log: Store,
    connection: Connection,
    cut: Cut,
    trajectory_id: str,
    leaf_turn_id: str | None = None,
    lines: Lines | None = None,
    shares: bool = True,
) -> TrajectoryLineage:
    """Where a trajectory comes from and what it led to; of one sample of it, if its leaf is named.

    Args:
        connection: over the store at the cut.
        lines: at the cut, if at hand; shares: whether to read its part of the ledger, which takes longest.

    Raises:
        CutError: the trajectory's opening is not in the cut.
        ReplayError: the turn is no leaf, and no step consumed or dropped a sample by its name.
        CorruptionError: a file that may hold the trajectory is damaged.
    """
    snapshot = read_snapshot(log, connection, cut, trajectory_id, shares=shares)
    turns, drops = tuple(snapshot.turns.values()), snapshot.drops
    uses = tuple(consumed.use for consumed in snapshot.consumed)
    if leaf_turn_id is not None:
        _check_leaf(snapshot, leaf_turn_id)
        path = path_to(snapshot.trajectory, leaf_turn_id)
        turns = tuple(turn for turn in turns if turn.turn_id in path)
        uses = tuple(use for use in uses if use.leaf_turn_id == leaf_turn_id)
        drops = tuple(drop for drop in drops if drop.leaf_turn_id == leaf_turn_id)
    lines = lines or Lines.over(connection)
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


def read_snapshot(
    log: Store, connection: Connection, cut: Cut, trajectory_id: str, *, shares: bool
) -> TrajectorySnapshot:
    """A trajectory as the log has it; reads only what holds its events, and the manifests that name it.

    Args:
        shares: whether to read where its tokens went in the ledger.

    Raises:
        CutError: its opening is not in the cut.
        CorruptionError: a file that may hold it is damaged.
    """
    events = log.events_about([trajectory_id], cut)
    trajectory = fold(events).get(trajectory_id)
    if trajectory is None:
        raise CutError("the cut holds events of the trajectory, but not its opening: take a later one")
    rows = connection.execute(_SHARES, {"id": trajectory_id}).fetchall() if shares else ()
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
    by_turn: dict[str | None, list[tuple[Any, ...]]] = {}
    for row in rows:
        by_turn.setdefault(row[0], []).append(row)
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
            shares=_shares(turn, [*by_turn.get(turn_id, ()), *by_turn.get(None, ())]),
        )
        for turn_id, turn in trajectory.turns.items()
    }


def _shares(turn: Turn, rows: Sequence[tuple[Any, ...]]) -> tuple[Share, ...]:
    """Where the tokens of a turn went, by the rows about it and about all turns."""
    done = turn.completed
    if done is None:
        return ()
    result = []
    for turn_id, policy, version, tokens, term, rule in rows:
        if turn_id is not None:
            result.append(Share(policy, version, tokens, term, rule))
        elif (policy, version) == (done.policy, done.policy_version):
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
    log: Store,
    connection: Connection,
    cut: Cut,
    trajectory_id: str,
    turn_id: str | None,
    index: int,
    lines: Lines | None = None,
    shares: bool = True,
) -> TokenLineage:
    """Where a sampled token comes from, and which steps trained on it.

    Args:
        turn_id: the token's turn, with `index` its place in the completion, from 0; without a turn, its place
            among all sampled tokens, turns in order. `lines` and `shares` are as of `trajectory_lineage`.

    Raises:
        CutError: the trajectory's opening is not in the cut.
        ReplayError: the turn sampled no such token.
        CorruptionError: a file that may hold the trajectory is damaged.
    """
    snapshot = read_snapshot(log, connection, cut, trajectory_id, shares=shares)
    turn, index = _find_token(snapshot.trajectory, turn_id, index)
    done, origin = turn.completed, snapshot.turns[turn.turn_id]
    assert done is not None
    span = next((s for s in done.version_spans if s.start <= index < s.end), None)
    policy, number = (None, None) if span is None else (span.policy, span.version)
    share = next((s for s in origin.shares if (s.policy, s.version) == (policy, number)), None)
    token_id = int(done.completion_ids[index])
    [(text,)] = connection.execute(_TEXT, {"run": snapshot.trajectory.run, "token": token_id}).fetchall()
    uses = [_token_use(use, turn.turn_id, index) for use in snapshot.consumed]
    versions = (lines or Lines.over(connection)).versions([(snapshot.trajectory.run, policy, number)])
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


_NAMING = """
    SELECT run, policy, step, attempt, status, policy_version, output_version, manifest FROM steps
    WHERE contains(manifest, $named) ORDER BY run, policy, step, attempt"""
"""Manifests that name a trajectory. They are JSON without spaces, so that its id is there between quotes."""
_DROPS = """
    SELECT run, policy, step, attempt, steps.status, turn_id, rule, detail
    FROM (SELECT * FROM drops WHERE trajectory_id = $id)
    LEFT JOIN (SELECT run, policy, step, attempt, status FROM steps) steps USING (run, policy, step, attempt)
    ORDER BY run, policy, step, attempt, turn_id"""


@dataclass(frozen=True, slots=True, eq=False)
class Consumed:
    """A use of a sample, the cut that its step was planned at, and the sample as the step had it.

    Attributes:
        sample, trajectory: null where the log does not hold it at that cut any more.
    """

    use: Use
    cut: Cut
    trajectory: Trajectory | None
    sample: Sample | None


@dataclass(frozen=True, slots=True)
class NamingAttempt(StepAttempt):
    """A manifest that names a trajectory, and the columns of its attempt."""

    input_version: int
    output_version: int | None
    manifest: Json


def read_naming(connection: Connection, trajectory_id: str) -> list[NamingAttempt]:
    """The attempts whose manifests name a trajectory."""
    named = orjson.dumps(trajectory_id).decode()
    rows: list[tuple[Any, ...]] = connection.execute(_NAMING, {"named": named}).fetchall()
    return [NamingAttempt(*(*row[:-1], orjson.loads(row[-1]))) for row in rows]


def consumed_by(attempt: NamingAttempt, trajectory_id: str, events: Sequence[Event]) -> Iterator[Consumed]:
    """The samples of a trajectory that an attempt consumed, each made again from the trajectory's events.

    Pure. It is what the trainer does: the events of the manifest's cut, the recipe's paths and rewards.
    """
    refs = [
        (position, ref)
        for position, ref in enumerate(attempt.manifest["samples"])
        if ref["trajectory_id"] == trajectory_id
    ]
    if not refs:
        return
    cut = parse_cut(attempt.manifest["cut"])
    held = [event for event in events if holds(cut, event.lane, event.seq)]
    trajectory = fold(held).get(trajectory_id)
    recipe = attempt.manifest["recipe"]
    paths, source = recipe.get("paths", "all"), recipe.get("reward_source", "agent")
    samples = [] if trajectory is None else samples_of(trajectory, source, paths)
    by_leaf = {sample.leaf_turn_id: sample for sample in samples}
    places = places_of(attempt.manifest["partition"])
    for position, ref in refs:
        sample = by_leaf.get(ref["turn_id"])
        if sample is not None and "tokens" in ref:
            sample = sample.within(ref["tokens"])
        known = sample is not None and not sample.erased
        use = Use(
            *(attempt.run, attempt.policy, attempt.step, attempt.attempt, attempt.status, ref["turn_id"]),
            *(position, *places.get(position, (0, 0)), attempt.input_version, attempt.output_version),
            sample.trained if sample is not None and known else None,
        )
        yield Consumed(use, cut, trajectory, sample)


def places_of(partition: Sequence[Sequence[Sequence[int]]]) -> dict[int, tuple[int, int]]:
    """Position in the batch -> (rank, micro-batch) that it was given to."""
    return {
        position: (rank, number)
        for rank, micro_batches in enumerate(partition)
        for number, positions in enumerate(micro_batches)
        for position in positions
    }


def compared_by(attempt: NamingAttempt, trajectory_id: str) -> Iterator[RewardComparison]:
    """The comparison of an attempt's samples with a trajectory that it did not train on, if there was one."""
    for other in attempt.manifest.get("others") or ():
        if other["trajectory_id"] == trajectory_id:
            yield RewardComparison(
                *(attempt.run, attempt.policy, attempt.step, attempt.attempt, attempt.status),
                other.get("reward"),
            )


def read_drops(connection: Connection, trajectory_id: str) -> tuple[Drop, ...]:
    """The samples of a trajectory that rules kept out of attempts."""
    rows: list[tuple[Any, ...]] = connection.execute(_DROPS, {"id": trajectory_id}).fetchall()
    return tuple(Drop(*(*row[:-1], orjson.loads(row[-1] or "{}"))) for row in rows)
