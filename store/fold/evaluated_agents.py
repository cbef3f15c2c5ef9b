"""Agents that are evaluated at a version: a fold of what the log says while they are awaited. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollbook.store.events import EvalStarted, LaunchEnded, LaunchStarted, Record, TrajectoryOpened

KINDS = frozenset(record.KIND for record in (EvalStarted, TrajectoryOpened, LaunchStarted, LaunchEnded))
CAME_TO_AN_END = ("done", "truncated", "agent_error", "timeout")
"""How launches end that are not tried again: the others say nothing of their agent."""


@dataclass(slots=True)
class EvaluatedAgents:
    """Those since the last `eval.started`.

    Attributes:
        rollout: the name of their launches; None: none was launched.
        expected: how many there are to be; None: nobody said.
        ended: places whose agent came to an end.
    """

    rollout: str | None = None
    expected: int | None = None
    ended: set[tuple[int, str | None, int]] = field(default_factory=set)
    _opened: set[str] = field(default_factory=set)
    _launched: dict[str, tuple[int, str | None, int]] = field(default_factory=dict)

    def take(self, record: Record) -> None:
        """Fold what an event says."""
        match record:
            case EvalStarted():
                self.rollout = self.expected = None
                self.ended, self._opened, self._launched = set(), set(), {}
            case TrajectoryOpened(split="eval"):
                self._opened.add(record.trajectory_id)
            case LaunchStarted() if record.trajectory_id in self._opened:
                self._opened.discard(record.trajectory_id)
                said = record.place
                self.rollout, self.expected = record.rollout, record.places or self.expected
                self._launched[record.launch_id] = (said["epoch"], said.get("task"), said["sample"])
            case LaunchEnded() if record.launch_id in self._launched:
                place = self._launched.pop(record.launch_id)
                if record.status in CAME_TO_AN_END:
                    self.ended.add(place)

    @property
    def said(self) -> str:
        """How far they are."""
        if self.rollout is None:
            return "none was launched yet"
        of = "" if self.expected is None else f" of {self.expected}"
        return f"{len(self.ended)}{of} trajectories ended, {len(self._launched)} run"
