"""How rollouts of verifiers ended, as its worker tells it."""

from __future__ import annotations

from typing import Any

import pytest

from rollbook.rollouts.agents.verifiers import ended_of
from rollbook.rollouts.outcome import Observed, Status, verdict

REWARDS = {"right": {"score": 1.0, "weight": 1.0}, "brief": {"score": -4.0, "weight": 0.25}}
GOOD = {"ok": True, "errors": [], "timeout": None, "truncated": False, "rewards": REWARDS, "traces": []}


def _failed(kind: str, status: int | None = None) -> dict[str, Any]:
    return GOOD | {"ok": False, "errors": [{"type": kind, "message": "why", "status_code": status}]}


def test_rewards_keep_their_names_and_weights() -> None:
    """A weight is no part of a component's number."""
    outcome = ended_of(GOOD).outcome
    assert outcome is not None
    assert (outcome.reward, outcome.weights) == (
        {"right": 1.0, "brief": -4.0},
        {"right": 1.0, "brief": 0.25},
    )


@pytest.mark.parametrize(
    ("told", "status", "why"),
    [
        (GOOD, Status.done, None),
        (GOOD | {"truncated": True}, Status.truncated, None),
        (GOOD | {"ok": False, "timeout": "agent_timeout"}, Status.timeout, "its agent clock ran out"),
        (_failed("HarnessError"), Status.agent_error, "HarnessError: why"),
        (_failed("ProviderError", 400), Status.agent_error, "ProviderError: why"),
        (_failed("ProviderError", 503), Status.infra_error, "verifiers: ProviderError: why"),
        (_failed("ProviderError", 429), Status.infra_error, "verifiers: ProviderError: why"),
        (_failed("TaskError"), Status.infra_error, "verifiers: TaskError: why"),
        ({"failed": "IndexError: no such task"}, Status.infra_error, "verifiers: IndexError: no such task"),
    ],
    ids=lambda value: str(value) if isinstance(value, Status) else None,
)
def test_statuses(told: dict[str, Any], status: Status, why: str | None) -> None:
    """What is not the agent's doing is not counted against it."""
    assert verdict(ended_of(told), Observed(requests=1)) == (status, why)
