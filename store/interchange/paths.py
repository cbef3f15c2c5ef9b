"""A root-to-leaf path of a trajectory as one row: its chat, its turns, its tokens. Pure.

The token arrays are those a trainer would see (`fold.path_tokens`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollbook.store.events import Json, TurnRequested, VersionSpan
from rollbook.store.events.erased import TEXT_ERASED, TOKENS_ERASED
from rollbook.store.fold.path_tokens import PathTokens, path_tokens
from rollbook.store.fold.trajectory import Trajectory, Turn

ERASED = frozenset({TEXT_ERASED, TOKENS_ERASED})
"""Flags of a turn whose chat is gone: it was erased on purpose, and no path is made of what is left."""


@dataclass(frozen=True, slots=True, eq=False)
class PathRow:
    """One path: `messages` as last sent, then the last reply, and the tokens of all of it.

    `template_kwargs` is what the chat template was given besides messages and tools.
    """

    trajectory: Trajectory
    messages: list[Json]
    tools: Any
    template_kwargs: Json
    tokens: PathTokens

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Its turns, from the root to the leaf."""
        return self.tokens.turns

    def head(self) -> Json:
        """The trajectory's own facts, as plain JSON values."""
        t = self.trajectory
        return {
            "trajectory": t.opened.name,
            "trajectory_id": t.opened.trajectory_id,
            "run": t.run,
            "group": t.opened.group,
            "task": t.opened.task,
            "split": t.split,
            "status": "open" if t.finished is None else t.finished.status,
            "labels": t.opened.labels,
            "reward": t.reward(),
            "success": None if t.finished is None else t.finished.success,
        }

    def turn_rows(self) -> list[Json]:
        """Its turns as JSON values and arrays; `message` is the place of a turn's reply in `messages`."""
        return [_turn_row(self.trajectory, turn) for turn in self.turns]


def paths(trajectory: Trajectory) -> Iterator[PathRow]:
    """Every path of completed turns, leaves in turn order; none of an erased turn.

    Raises:
        CorruptionError: a prompt does not fold to the ids that were sent.
    """
    for tokens in path_tokens(trajectory):
        leaf = tokens.turns[-1]
        assert leaf.completed is not None
        if any(ERASED & set(turn.completed.flags) for turn in tokens.turns if turn.completed):
            continue
        messages = [*trajectory.messages(leaf), leaf.completed.reply]
        requested = leaf.requested
        yield PathRow(
            trajectory, messages, requested.request.get("tools"), _template_kwargs(requested), tokens
        )


def _template_kwargs(requested: TurnRequested) -> Json:
    """The chat template's arguments of a request: its own, and the reasoning effort, which each API
    spells differently."""
    request, kwargs = requested.request, requested.request.get("chat_template_kwargs")
    reasoning = request.get("reasoning")
    efforts = {
        "/v1/chat/completions": request.get("reasoning_effort"),
        "/v1/responses": reasoning.get("effort") if isinstance(reasoning, dict) else None,
    }
    effort = efforts.get(requested.wire.get("endpoint", "/v1/chat/completions"))
    effort_kwargs = {} if effort is None else {"reasoning_effort": effort}
    return effort_kwargs | (kwargs if isinstance(kwargs, dict) else {})


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
