"""The lineage of one sampled token."""

from __future__ import annotations

from rollbook.replay.lineage.line import Lines
from rollbook.replay.lineage.records import TokenLineage, TokenUse
from rollbook.replay.lineage.trajectories import path_to, read_told
from rollbook.replay.lineage.uses import Consumed
from rollbook.store.cut import Cut
from rollbook.store.errors import ReplayError
from rollbook.store.fold.trajectory import Trajectory, Turn
from rollbook.store.log.store import Store
from rollbook.store.sql.sandbox import Connection

UNDELIVERED, ALTERED, ERASED = "undelivered", "altered", "erased"
CUT_OFF, OTHER_SAMPLE = "cut off", "other sample"
_TEXT = "SELECT token_text($run, $token::INTEGER)"


def token_lineage(
    log: Store, connection: Connection, cut: Cut, trajectory_id: str, turn_id: str | None, index: int
) -> TokenLineage:
    """Where a sampled token comes from, and which steps trained on it.

    Args:
        turn_id: its turn, `index` its place in the completion; without a turn it is that among all sampled
            tokens of the trajectory, turns in order. Both count from 0.

    Raises:
        CutError: the trajectory's opening is not in the cut.
        ReplayError: the turn sampled no such token.
        CorruptionError: a file that may hold the trajectory is damaged.
    """
    told = read_told(log, connection, cut, trajectory_id)
    turn, index = _find_token(told.trajectory, turn_id, index)
    done, origin = turn.completed, told.turns[turn.turn_id]
    assert done is not None
    span = next((s for s in done.version_spans if s.start <= index < s.end), None)
    policy, number = (None, None) if span is None else (span.policy, span.version)
    share = next((s for s in origin.shares if (s.policy, s.version) == (policy, number)), None)
    token_id = int(done.completion_ids[index])
    [(text,)] = connection.execute(_TEXT, {"run": told.trajectory.run, "token": token_id}).fetchall()
    uses = [_token_use(one, turn.turn_id, index) for one in told.consumed]
    versions = Lines(connection).versions([(told.trajectory.run, policy, number)])
    return TokenLineage(
        run=told.trajectory.run,
        trajectory_id=trajectory_id,
        trajectory=told.trajectory.opened.name,
        turn=origin,
        index=index,
        place=done.prompt_length + index,
        token_id=token_id,
        text=text,
        logprob=None if done.logprobs is None else float(done.logprobs[index]),
        version=versions[0] if versions else None,
        share=share,
        reached=any(one.trained and one.use.status == "committed" for one in uses if one),
        uses=tuple(one for one in uses if one is not None),
        drops=tuple(d for d in told.drops if turn.turn_id in path_to(told.trajectory, d.leaf_turn_id)),
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


def _token_use(one: Consumed, turn_id: str, index: int) -> TokenUse | None:
    """What an attempt made of a token; None if its turn is not on the path of the sample."""
    trajectory, sample = one.trajectory, one.sample
    if trajectory is None or sample is None:
        return None
    turn = trajectory.turns.get(turn_id)
    if turn is None or turn.completed is None or turn_id not in path_to(trajectory, sample.leaf_turn_id):
        return None
    place = turn.completed.prompt_length + index
    if place >= len(sample):
        return TokenUse(one.use, False, CUT_OFF)
    if sample.loss_mask[place]:
        return TokenUse(one.use, True, None)
    if sample.erased:
        return TokenUse(one.use, False, ERASED)
    if not turn.delivered:
        return TokenUse(one.use, False, UNDELIVERED)
    altered = bool(turn.completed.logprob_semantics.get("altered"))
    return TokenUse(one.use, False, ALTERED if altered else OTHER_SAMPLE)
