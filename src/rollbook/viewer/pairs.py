"""Two trajectories side by side: where they part, and what each says; a person says which is better.

A recorded rollout beside its repetition, two attempts at a task, the two sides of a preference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from rollbook.store.errors import RequestError
from rollbook.store.events import Logprobs, TokenIds
from rollbook.transcript.facts import TrajectoryFacts, TurnFacts
from rollbook.viewer.pages import Page, Query
from rollbook.viewer.samples import token_texts
from rollbook.viewer.snapshots import Snapshot
from rollbook.viewer.trajectories import facts_at

AROUND = 40
"""Tokens that are shown before two sides part, and behind."""
TURNS, CANDIDATES = 100, 50
"""Turns that are shown side by side, and trajectories that are offered to compare with."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A trajectory that one may be compared with.

    Attributes:
        why: repetition, repeated, group, or task.
    """

    trajectory_id: str
    trajectory: str
    run: str
    split: str
    reward: float | None
    why: str


@dataclass(frozen=True, slots=True)
class Side:
    """What a side has from where the two part; `logprob` is of its first token."""

    text: str
    logprob: float | None


@dataclass(frozen=True, slots=True)
class Parting:
    """The first place where two trajectories differ.

    Attributes:
        turn: its number, from 1.
        kind: prompt, sampled, or turns where one has no such turn, or has no tokens of it.
        place: of the token, in the part of the prompt that is new in the turn, or in what was sampled.
        before: what both have before it.
    """

    turn: int
    kind: str
    place: int
    before: str
    left: Side
    right: Side


@dataclass(frozen=True, slots=True)
class Pair:
    """Two trajectories; without a second one, those that the first may be compared with.

    Attributes:
        parting: None where all tokens are the same.
        turns: of the left and of the right, by their number; more: there are others.
    """

    left: TrajectoryFacts
    right: TrajectoryFacts | None
    candidates: Sequence[Candidate]
    parting: Parting | None
    turns: Sequence[tuple[TurnFacts | None, TurnFacts | None]]
    more: bool


_CANDIDATES = """
    WITH this AS (SELECT * FROM trajectories WHERE trajectory_id = $id)
    SELECT t.trajectory_id, t.trajectory, t.run, t.split, t.reward,
           CASE WHEN t.origin->>'trajectory_id' = $id THEN 'repetition'
                WHEN this.origin->>'trajectory_id' = t.trajectory_id THEN 'repeated'
                WHEN t.run = this.run AND t."group" = this."group" THEN 'group'
                WHEN t.task = this.task THEN 'task' END AS why
    FROM trajectories t, this
    WHERE t.trajectory_id <> $id AND why IS NOT NULL
    ORDER BY why = 'task', why = 'group', t.trajectory_id DESC LIMIT $most"""


def read_pair(snapshot: Snapshot, query: Query) -> Pair:
    """Two trajectories by their ids, or one and what it may be compared with.

    Raises:
        RequestError: 404, the log does not hold them.
    """
    left_id, right_id = query.get("left", ""), query.get("right", "")
    if not left_id:
        raise RequestError(400, "bad_query", "left is empty: give the id of a trajectory")
    left = facts_at(snapshot, left_id)
    if not right_id:
        rows = snapshot.rows(_CANDIDATES, id=left_id, most=CANDIDATES)
        return Pair(left, None, [Candidate(**row) for row in rows], None, (), False)
    right = facts_at(snapshot, right_id)
    turns = list(zip_longest(left.turns, right.turns))
    return Pair(left, right, (), _parting(snapshot, left, right), turns[:TURNS], len(turns) > TURNS)


def _parting(snapshot: Snapshot, left: TrajectoryFacts, right: TrajectoryFacts) -> Parting | None:
    for number, (ours, theirs) in enumerate(zip_longest(left.turns, right.turns), 1):
        if ours is None or theirs is None or ours.answer is None or theirs.answer is None:
            if ours is None or theirs is None or ours.status != theirs.status:
                return Parting(number, "turns", 0, "", _presence(ours), _presence(theirs))
            continue
        for kind, pair, logprobs in (
            ("prompt", (ours.answer.context_ids, theirs.answer.context_ids), (None, None)),
            (
                "sampled",
                (ours.answer.completion_ids, theirs.answer.completion_ids),
                (ours.answer.logprobs, theirs.answer.logprobs),
            ),
        ):
            place = _first_difference(*pair)
            if place is None:
                continue
            runs = (left.run, right.run)
            before = _text(snapshot, left.run, pair[0][max(place - AROUND, 0) : place])
            sides = [
                Side(_text(snapshot, run, ids[place : place + AROUND]), _logprob(values, place))
                for run, ids, values in zip(runs, pair, logprobs, strict=True)
            ]
            return Parting(number, kind, place, before, *sides)
    return None


def _first_difference(ours: TokenIds, theirs: TokenIds) -> int | None:
    common = min(len(ours), len(theirs))
    differ = np.flatnonzero(ours[:common] != theirs[:common])
    if differ.size:
        return int(differ[0])
    return common if len(ours) != len(theirs) else None


def _presence(turn: TurnFacts | None) -> Side:
    return Side("no such turn" if turn is None else turn.status, None)


def _logprob(values: Logprobs | None, place: int) -> float | None:
    if values is None or place >= len(values) or not np.isfinite(values[place]):
        return None
    return float(values[place])


def _text(snapshot: Snapshot, run: str, ids: TokenIds) -> str:
    """The text of tokens; of those without one, their ids."""
    texts = token_texts(snapshot, run, ids)
    return "".join(text if (text := texts.get(token)) is not None else f"[{token}]" for token in ids.tolist())


PAGES = (Page("/compare/trajectories", "pair.html", read_pair),)
