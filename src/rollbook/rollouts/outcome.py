"""How a rollout ended, what that means for its trajectory, and what a scorer gets beside its task.
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from rollbook.store.events import VOID, Json


class Status(StrEnum):
    """How a launch ended. Of the first two alone the trajectory has a reward; of the last two it is void."""

    done = "done"
    truncated = "truncated"
    agent_error = "agent_error"
    timeout = "timeout"
    infra_error = "infra_error"
    cancelled = "cancelled"

    @property
    def rewarded(self) -> bool:
        """Whether its trajectory is scored."""
        return self in (Status.done, Status.truncated)

    @property
    def finish(self) -> str:
        """The status that its trajectory is finished with."""
        return _FINISH[self]


_FINISH: Mapping[Status, str] = {
    Status.done: "completed",
    Status.truncated: "truncated",
    Status.agent_error: "failed",
    Status.timeout: "failed",
    Status.infra_error: VOID,
    Status.cancelled: VOID,
}


def ended_as(finish: str) -> Status:
    """How a launch ended, where only the status is known with which its trajectory was finished."""
    known = {"completed": Status.done, "truncated": Status.truncated, VOID: Status.infra_error}
    return known.get(finish, Status.agent_error)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an agent says of its rollout.

    Attributes:
        reward: of the trajectory; several, by component; None: scored by others, or not at all.
        truncated: whether it was cut short, by its own limit on turns for instance.
        success: whether it solved its task; None: it does not say.
        turn_rewards: one for each reply in order, or by reply id.
        weights: component -> what it counts in the sum of several; absent: 1.
    """

    reward: float | Mapping[str, float] | None = None
    truncated: bool = False
    success: bool | None = None
    turn_rewards: Sequence[float] | Mapping[str, float] | None = None
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ended:
    """How an agent's run ended, as its launcher saw it.

    Attributes:
        code, signal: of a process; an agent in this process has code 0, or 1 with an `error`.
        error: what it raised.
        infrastructure: why it could not run at all.
        stopped: why it was stopped: a clock's name, or `cancelled`.
        outcome: what it says itself.
        answered: whether it is known to have been answered a request.
    """

    code: int | None = 0
    signal: int | None = None
    error: str | None = None
    infrastructure: str | None = None
    stopped: str | None = None
    outcome: Outcome | None = None
    answered: bool = False

    @property
    def failed(self) -> bool:
        """Whether it did not end as it should."""
        return self.error is not None or self.signal is not None or self.code != 0


@dataclass(frozen=True, slots=True)
class Observed:
    """What the proxy saw of a trajectory while its agent ran.

    Attributes:
        requests: turns that were asked for.
        failed: whether the last turn that ended failed, which no agent does.
        away: whether the proxy was away since anything was last seen of it.
        finished: the status that the trajectory was finished with; None: it is not.
    """

    requests: int = 0
    failed: bool = False
    away: bool = False
    finished: str | None = None


_SILENT = ("start", "idle")
"""Clocks that run while an agent asks nothing: where the proxy is away, it cannot."""


def unsure(ended: Ended, seen: Observed) -> bool:
    """Whether more of the log may change the verdict: whose fault it is, or whether the agent asked at
    all."""
    if ended.stopped is not None or ended.infrastructure is not None:
        return False
    return ended.failed or (seen.requests == 0 and not ended.answered)


def verdict(ended: Ended, seen: Observed) -> tuple[Status, str | None]:
    """How a launch ended, and why.

    What the engine or the proxy did to an agent is no fault of the agent: one that gives up after a turn that
    failed did not fail at its task.
    """
    if ended.stopped == "cancelled":
        return Status.cancelled, "nobody waits for it any more"
    if ended.infrastructure is not None:
        return Status.infra_error, ended.infrastructure
    if ended.stopped in _SILENT and seen.away:
        return Status.infra_error, f"the proxy was away; its {ended.stopped} clock ran out"
    if ended.stopped is not None:
        return Status.timeout, f"its {ended.stopped} clock ran out"
    if seen.finished is not None:
        return (Status.truncated if seen.finished == "truncated" else Status.done), None
    if ended.failed and (seen.failed or seen.away):
        why = "its last request failed" if seen.failed else "the proxy was away"
        return Status.infra_error, f"{why}; {_how(ended)}"
    if ended.failed:
        return Status.agent_error, _how(ended)
    if seen.requests == 0 and not ended.answered:
        return Status.agent_error, "it ended without a request"
    return (Status.truncated if ended.outcome is not None and ended.outcome.truncated else Status.done), None


def lost_its_proxy(status: Status, ended: Ended, seen: Observed) -> bool:
    """Whether a launch failed because the proxy was away: it may well come through once that is back."""
    return status is Status.infra_error and seen.away and ended.infrastructure is None


def _how(ended: Ended) -> str:
    if ended.error is not None:
        return ended.error
    return f"signal {ended.signal} ended it" if ended.signal is not None else f"it exited with {ended.code}"


@dataclass(frozen=True, slots=True)
class Attempt:
    """What scorers are given beside the task.

    Attributes:
        trajectory: its name.
        folder: what the agent left there.
        conversations: what was said, each from its beginning to a last reply: objects with `messages` and
            `tools`.
        trajectory_id: of the log.
    """

    trajectory: str
    folder: Path
    conversations: Sequence[Json] = ()
    trajectory_id: str = ""

    @property
    def messages(self) -> list[Json]:
        """The last conversation's, the agent's last reply included; none where nothing was said."""
        return list(self.conversations[-1]["messages"]) if self.conversations else []

    @property
    def answer(self) -> str:
        """The text of the agent's last reply."""
        content = self.messages[-1].get("content") if self.messages else None
        return content if isinstance(content, str) else ""
