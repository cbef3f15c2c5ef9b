"""How a launch ended: whose fault it was, and what becomes of its trajectory."""

from __future__ import annotations

import pytest

from rollbook.rollouts.outcome import Ended, Observed, Outcome, Status, unsure, verdict
from rollbook.rollouts.rollouts import Breaker

ASKED = Observed(requests=2)
AWAY = "the proxy was away"


@pytest.mark.parametrize(
    ("ended", "seen", "status", "why"),
    [
        (Ended(), ASKED, "done", None),
        (Ended(outcome=Outcome(truncated=True)), ASKED, "truncated", None),
        (Ended(), Observed(), "agent_error", "it ended without a request"),
        (Ended(), Observed(finished="completed"), "done", None),
        (Ended(code=3), ASKED, "agent_error", "it exited with 3"),
        (Ended(code=None, signal=11), ASKED, "agent_error", "signal 11 ended it"),
        (Ended(code=1, error="KeyError('x')"), ASKED, "agent_error", "KeyError('x')"),
        # What failed under it is no fault of its own.
        (Ended(code=1), Observed(2, failed=True), "infra_error", "its last request failed; it exited with 1"),
        (Ended(), Observed(2, failed=True), "done", None),
        (Ended(infrastructure="no such host"), ASKED, "infra_error", "no such host"),
        # It had finished: what came later changes nothing.
        (Ended(code=1), Observed(2, failed=True, finished="completed"), "done", None),
        (Ended(code=1), Observed(2, finished="truncated"), "truncated", None),
        (Ended(code=None, signal=15, stopped="idle"), ASKED, "timeout", "its idle clock ran out"),
        (Ended(stopped="total"), Observed(2, failed=True), "timeout", "its total clock ran out"),
        # Where nobody answers, nobody can ask.
        (
            Ended(stopped="idle"),
            Observed(2, away=True),
            "infra_error",
            f"{AWAY}; its idle clock ran out",
        ),
        (
            Ended(stopped="start"),
            Observed(away=True),
            "infra_error",
            f"{AWAY}; its start clock ran out",
        ),
        (Ended(stopped="total"), Observed(2, away=True), "timeout", "its total clock ran out"),
        (Ended(stopped="cancelled"), ASKED, "cancelled", "nobody waits for it any more"),
    ],
)
def test_a_verdict(ended: Ended, seen: Observed, status: str, why: str | None) -> None:
    """By how it ended, and by what the proxy saw of it."""
    assert verdict(ended, seen) == (status, why)


def test_what_more_of_the_log_may_change() -> None:
    """A failure may be the engine's, and who seems not to have asked may have; nothing else."""
    observed = Observed(requests=1)
    assert unsure(Ended(), Observed())
    assert unsure(Ended(code=3), observed)
    assert unsure(Ended(code=None, signal=6), observed)
    assert unsure(Ended(error="KeyError"), observed)
    assert not unsure(Ended(), observed)
    assert not unsure(Ended(answered=True), Observed())
    assert not unsure(Ended(code=1, infrastructure="no node"), Observed())
    assert not unsure(Ended(code=None, signal=9, stopped="idle"), observed)
    assert verdict(Ended(answered=True), Observed()) == (Status.done, None)


def test_only_what_ended_well_has_a_reward() -> None:
    """And what never counted is void."""
    assert {status.value for status in Status if status.rewarded} == {"done", "truncated"}
    assert {status.value: status.finish for status in Status} == {
        **{"done": "completed", "truncated": "truncated"},
        **{"agent_error": "failed", "timeout": "failed"},
        **{"infra_error": "void", "cancelled": "void"},
    }


def test_the_breaker_opens_when_the_infrastructure_is_gone() -> None:
    """Once half of the latest four launches failed so, however many went well before; agents' own errors and
    what was cancelled do not count."""
    breaker = Breaker(4, 0.5)
    for _ in range(9):
        breaker.add(Status.done, None)
    for status in (Status.infra_error, Status.agent_error, Status.cancelled, Status.timeout):
        breaker.add(status, "gone")
    assert breaker.open is None
    breaker.add(Status.infra_error, "no proxy")
    assert breaker.open is not None
    assert "2 of the last 4 launches failed by their infrastructure, the last: no proxy" in breaker.open
    for _ in range(3):
        breaker.add(Status.done, None)
    assert breaker.open is None


def test_it_warns_once_of_a_share_of_all() -> None:
    """Once there are as many as its window; whatever the latest were."""
    breaker = Breaker(4, 1.0, warn_share=0.25)
    statuses = [Status.infra_error, Status.cancelled, *[Status.done] * 2]
    assert [breaker.add(status, "no proxy") for status in statuses] == [None] * 4
    assert breaker.failed_rate == pytest.approx(1 / 3)
    assert breaker.add(Status.timeout, None) == (
        "1 of 4 launches failed by their infrastructure, the last: no proxy"
    )
    assert breaker.add(Status.infra_error, "again") is None
    assert (breaker.failed_rate, Breaker(4, 1.0).failed_rate) == (0.4, None)


def test_it_warns_once_if_no_agent_comes_through() -> None:
    """A mistake in a CONFIG looks so; one that has a reward shows that there is none."""
    breaker = Breaker(3, 1.0)
    statuses = [Status.agent_error, Status.infra_error, Status.timeout]
    assert [breaker.add(status, "it exited with 1") for status in statuses] == [None] * 3
    assert breaker.add(Status.agent_error, "it exited with 1") == (
        "each of 3 agents failed, the last: it exited with 1; stderr.log in a launch's folder may say why"
    )
    assert breaker.add(Status.agent_error, "it exited with 1") is None
    breaker = Breaker(2, 1.0)
    statuses = [Status.done, *[Status.agent_error] * 9]
    assert [breaker.add(status, "it exited with 1") for status in statuses] == [None] * 10


def test_a_few_launches_open_no_breaker() -> None:
    """It waits until there are as many as it looks at."""
    breaker = Breaker(4, 0.5)
    for _ in range(3):
        breaker.add(Status.infra_error, "gone")
    assert breaker.open is None
