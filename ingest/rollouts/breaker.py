"""Stops rollouts whose infrastructure is gone, before they use up every attempt on it. Pure."""

from __future__ import annotations

from collections import deque

from rollbook.ingest.rollouts.outcome import Status


class Breaker:
    """Looks at the latest launches.

    Args:
        window: at how many.
        stop_share: this share of them failed by their infrastructure: then it is open.
    """

    def __init__(self, window: int, stop_share: float) -> None:
        self._window, self._share = window, stop_share
        self._latest: deque[tuple[Status, str | None]] = deque(maxlen=window)

    def add(self, status: Status, why: str | None) -> None:
        """A launch ended. Those that were cancelled say nothing."""
        if status is not Status.cancelled:
            self._latest.append((status, why))

    @property
    def open(self) -> str | None:
        """Why no more is to be launched; None: go on."""
        failed = [why for status, why in self._latest if status is Status.infra_error]
        if len(self._latest) < self._window or len(failed) < self._share * self._window:
            return None
        return (
            f"{len(failed)} of the last {self._window} launches failed by their infrastructure, the last: "
            f"{failed[-1]}; mend it, and start the rollouts again: they go on where they were"
        )
