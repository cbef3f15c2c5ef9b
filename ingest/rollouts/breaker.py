"""Watches how many launches fail: warns, and stops rollouts whose infrastructure is gone, before they use up
every attempt on it. Pure."""

from __future__ import annotations

from collections import deque

from rollbook.ingest.rollouts.outcome import Status


class Breaker:
    """Looks at launches, and above all at the latest.

    Args:
        window: so many are the latest, and none is judged by fewer.
        stop_share: this share of the latest failed by their infrastructure: then it is open.
        warn_share: this share of all did: then it warns, once.
    """

    def __init__(self, window: int, stop_share: float, warn_share: float = 1.0) -> None:
        self._window, self._share, self._warn_share = window, stop_share, warn_share
        self._latest: deque[tuple[Status, str | None]] = deque(maxlen=window)
        self._ended = self._failed = self._rewarded = 0
        self._warned = self._warned_of_agents = False

    def add(self, status: Status, why: str | None) -> str | None:
        """A launch ended; a warning, if it is time for one. Those that were cancelled say nothing."""
        if status is Status.cancelled:
            return None
        self._latest.append((status, why))
        self._ended += 1
        self._failed += status is Status.infra_error
        self._rewarded += status.rewarded
        return self._of_agents(why) or self._of_infrastructure()

    def _of_agents(self, why: str | None) -> str | None:
        """A warning if no agent ever came through: a mistake in a CONFIG looks so."""
        failed = self._ended - self._failed
        if self._warned_of_agents or self._rewarded or failed < self._window:
            return None
        self._warned_of_agents = True
        return f"each of {failed} agents failed, the last: {why}; stderr.log in a launch's folder may say why"

    def _of_infrastructure(self) -> str | None:
        if self._warned or self._ended < self._window or self._failed < self._warn_share * self._ended:
            return None
        self._warned = True
        failed = [why for status, why in self._latest if status is Status.infra_error]
        last = f", the last: {failed[-1]}" if failed else ""
        return f"{self._failed} of {self._ended} launches failed by their infrastructure{last}"

    @property
    def failed_rate(self) -> float | None:
        """The share of all launches that failed by their infrastructure; None: none ended."""
        return self._failed / self._ended if self._ended else None

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
