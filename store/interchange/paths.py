"""A root-to-leaf path of a trajectory as one row: its chat, its turns, its tokens. Pure.

The token arrays are those a trainer would see: each sampled token belongs to one row, the one of the
first leaf in turn order; other rows hold it as context. Turns that were not delivered are context only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rollbook.store.events import Json, TokenIds, VersionSpan
from rollbook.store.trajectory import Trajectory, Turn

ERASED = frozenset({"text_erased", "tokens_erased"})
"""Flags of a turn whose chat is gone: it was erased on purpose, and no path is made of what is left."""

NO_VERSION = -1
"""In `PathTokens.versions`: the token was not sampled, or by an engine without weights."""


@dataclass(frozen=True, slots=True, eq=False)
class PathTokens:
    """A path's tokens, as arrays of one length T.

    Attributes:
        input_ids: int32 [T].
        loss_mask: bool [T]; true where the token was sampled in this path and may be trained.
        logprobs: float32 [T], natural log; 0 where the mask is false, NaN where the engine gave none.
        versions: int64 [T]; policy version that sampled the token, else -1.
    """

    input_ids: TokenIds
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """One path: `messages` as last sent, then the last reply; its turns from the root to the leaf."""

    trajectory: Trajectory
    turns: tuple[Turn, ...]
    messages: list[Json]
    tools: Any
    tokens: PathTokens

    def head(self) -> Json:
        """What is said of the trajectory, as plain JSON values."""
        t = self.trajectory
        return {
            "trajectory": t.opened.name,
            "trajectory_id": t.opened.trajectory_id,
            "run": t.run,
            "group": t.opened.group,
            "task": t.opened.task,
            "split": t.opened.split,
            "status": "open" if t.finished is None else t.finished.status,
            "labels": t.opened.labels,
            "reward": t.reward(),
            "success": None if t.finished is None else t.finished.success,
        }

    def turn_rows(self) -> list[Json]:
        """Its turns as JSON values and arrays; `message` is the place of a turn's reply in `messages`."""
        return [_turn_row(self.trajectory, turn) for turn in self.turns]


def paths(trajectory: Trajectory) -> Iterator[Path]:
    """Every path of completed turns, leaves in turn order; none of an erased turn.

    Raises:
        CorruptionError: a prompt does not fold to the ids that were sent.
    """
    owned: set[str] = set()
    for turns in trajectory.paths():
        leaf = turns[-1]
        assert leaf.completed is not None
        if any(ERASED & set(turn.completed.flags) for turn in turns if turn.completed):
            continue
        messages = [*trajectory.messages(leaf), leaf.completed.reply]
        tokens = _tokens(trajectory, turns, owned)
        yield Path(trajectory, turns, messages, leaf.requested.request.get("tools"), tokens)
        owned.update(turn.turn_id for turn in turns)


def _tokens(trajectory: Trajectory, turns: tuple[Turn, ...], owned: set[str]) -> PathTokens:
    leaf = turns[-1].completed
    assert leaf is not None
    input_ids = np.concatenate([trajectory.prompt_ids(turns[-1]), leaf.completion_ids])
    loss_mask = np.zeros(len(input_ids), np.bool_)
    logprobs = np.zeros(len(input_ids), np.float32)
    versions = np.full(len(input_ids), NO_VERSION, np.int64)
    for turn in turns:
        done = turn.completed
        assert done is not None
        if turn.turn_id in owned or not turn.delivered:
            continue
        start = done.prompt_length
        stop = start + len(done.completion_ids)
        loss_mask[start:stop] = True
        logprobs[start:stop] = np.nan if done.logprobs is None else done.logprobs
        for span in done.version_spans:
            versions[start + span.start : start + span.end] = span.version
    return PathTokens(input_ids, loss_mask, logprobs, versions)


def _turn_row(trajectory: Trajectory, turn: Turn) -> Json:
    done = turn.completed
    assert done is not None
    return {
        "turn_id": turn.turn_id,
        "message": len(trajectory.messages(turn)),
        "reward": trajectory.reward(turn_id=turn.turn_id),
        "delivered": turn.delivered,
        "flags": done.flags,
        "prompt_length": done.prompt_length,
        "completion_ids": done.completion_ids,
        "logprobs": done.logprobs,
        "version_spans": span_rows(done.version_spans),
    }


def span_rows(spans: tuple[VersionSpan, ...]) -> list[Json]:
    """Version spans as JSON values."""
    return [{"policy": s.policy, "version": s.version, "start": s.start, "end": s.end} for s in spans]
