"""Records of a turn and of a step, by keyword: a test names what it is about, the rest is plain. And the
records that a store holds, by kind."""

from __future__ import annotations

from typing import Any

from rollbook.store import Store
from rollbook.store.events import StepPlanned, TurnCompleted, TurnRequested, token_ids


def turn_requested(trajectory_id: str, turn_id: str, **fields: Any) -> TurnRequested:
    """A request of no text, in no particular way."""
    plain: dict[str, Any] = {
        "request_id": "r",
        "parent_turn_id": None,
        "root_reason": None,
        "base_turn_id": None,
        "shared_messages": 0,
        "messages": [],
        "request": {},
        "requested_model": None,
        "sampling": {},
        "honoured": {},
        "context_key": "c",
    }
    return TurnRequested(trajectory_id, turn_id, **(plain | fields))


def turn_completed(trajectory_id: str, turn_id: str, **fields: Any) -> TurnCompleted:
    """A reply without tokens that ended by itself."""
    plain: dict[str, Any] = {
        "policy": "actor",
        "policy_version": None,
        "prompt_ids": token_ids([]),
        "completion_ids": token_ids([]),
        "logprobs": None,
        "version_spans": (),
        "prompt_length": 0,
        "prompt_sha256": "",
        "finish_reason": "stop",
        "reply": {},
        "logprob_semantics": {},
        "flags": [],
        "timings": {},
    }
    return TurnCompleted(trajectory_id, turn_id, **(plain | fields))


def step_planned(step: int, **fields: Any) -> StepPlanned:
    """The first attempt at a step of nothing, from version 0."""
    plain: dict[str, Any] = {
        "attempt": 1,
        "policy": "actor",
        "policy_version": 0,
        "phase": "p",
        "cut": "serve=1",
        "recipe": {},
        "recipe_digest": "r",
        "samples": [],
        "partition": [],
        "algorithm": {},
        "optimizer": {},
        "learning_rate": 0.1,
        "seed": 0,
        "input_digests": {},
        "environment": {},
    }
    return StepPlanned(step, **(plain | fields))


def records_of(log: Store, *kinds: type[Any]) -> list[Any]:
    """The records of these kinds, in order."""
    return [event.record for event in log.events() if isinstance(event.record, kinds)]


def trainer_records(log: Store, *kinds: type[Any]) -> list[Any]:
    """The trainer's records of these kinds, in order."""
    return [e.record for e in log.events() if e.lane == "train" and isinstance(e.record, kinds)]
