"""Trajectories that `bench view` adds to its store: turn after turn, with text and tokens as given."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollbook.bench.corpus import model_logprobs
from rollbook.bench.scale_turns import POLICY, RUN
from rollbook.store import Event
from rollbook.store import events as kinds
from rollbook.store.events import TokenIds
from rollbook.store.ids import new_id

SAMPLING = {"temperature": 1.0, "top_p": 1.0}


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn adds to its conversation: a message and a reply, as text and as tokens."""

    message: str
    reply: str
    prompt: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))
    completion: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class Written:
    """A trajectory's events, its id and that of its last turn."""

    events: Sequence[Event]
    trajectory_id: str
    leaf: str


def trajectory(name: str, turns: Sequence[Turn], *, version: int = 0, seed: int = 0) -> Written:
    """A trajectory of these turns, rewarded and finished; each turn of the next policy version."""
    rng = np.random.default_rng(seed)
    trajectory_id, turn_ids = new_id(), [new_id() for _ in turns]
    records: list[kinds.Record] = [kinds.TrajectoryOpened(trajectory_id, name, task="read-the-code")]
    parent, length, digest = None, 0, hashlib.sha256()
    for number, (turn_id, turn) in enumerate(zip(turn_ids, turns, strict=True)):
        before = [{"role": "assistant", "content": turns[number - 1].reply}] if number else []
        requested = kinds.TurnRequested(
            *(trajectory_id, turn_id, new_id(), parent, None if parent else "first", parent),
            shared_messages=2 * number - 1 if number else 0,
            messages=[*before, {"role": "tool" if number else "user", "content": turn.message}],
            request={"model": POLICY} | SAMPLING,
            requested_model=POLICY,
            sampling=SAMPLING,
            honoured={},
            context_key=hashlib.sha256(name.encode()).hexdigest(),
        )
        digest.update(turn.prompt.data)
        length += len(turn.prompt)
        completed = kinds.TurnCompleted(
            *(trajectory_id, turn_id, POLICY, version + number, turn.prompt, turn.completion),
            model_logprobs(rng, len(turn.completion)),
            (kinds.VersionSpan(POLICY, version + number, 0, len(turn.completion)),),
            *(length, digest.hexdigest(), "stop"),
            reply={"role": "assistant", "content": turn.reply},
            logprob_semantics={"kind": "sampled", "of": "softmax(logits / temperature)", "temperature": 1.0},
            flags=[],
            timings={"held_us": 0, "engine_us": 1_500_000},
        )
        digest.update(turn.completion.data)
        length += len(turn.completion)
        records += [requested, completed, kinds.TurnDelivered(trajectory_id, turn_id, "sent")]
        parent = turn_id
    records += [
        kinds.RewardAssigned(trajectory_id, None, 1.0),
        kinds.TrajectoryFinished(trajectory_id, success=True),
    ]
    return Written([Event(record, RUN) for record in records], trajectory_id, turn_ids[-1])
