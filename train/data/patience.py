"""How long a source waits for samples, and what it says meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rollbook.store import patience as store
from rollbook.store.errors import IdleError


@dataclass(frozen=True, slots=True)
class Awaited:
    """What a source waits for.

    Attributes:
        groups: that the next step takes; complete: that are there.
        unrewarded: of the complete ones, those that lack a reward.
        short, missing: groups that lack trajectories, and how many they lack.
        running: trajectories that run.
    """

    groups: int
    complete: int
    unrewarded: int
    short: int
    missing: int
    running: int

    def said(self) -> str:
        """In words."""
        parts = [f"{self.complete} of {self.groups} groups are complete"]
        if self.unrewarded:
            parts.append(f"{self.unrewarded} of these lack a reward (a judge's?)")
        lack = f" and lack {self.missing} trajectories" if self.missing else ""
        parts.append(f"{self.short} groups are incomplete{lack}")
        parts.append(f"{self.running} trajectories run" if self.running else "none runs")
        if not self.running and not self.unrewarded:
            parts.append(
                "agents have ended, or proxies hold new trajectories (max_staleness, or no engine serves)"
            )
        return "; ".join(parts)


class Patience:
    """Of one wait for groups.

    Args:
        idle_s: after so long without a new one it ends.
        stall_s: after each so long it is said what is waited for; the first time after 10 s, if that is less.
        say: what takes that.
    """

    def __init__(self, run: str, idle_s: float, stall_s: float, say: Callable[[str], None]) -> None:
        self._run, self._idle_s, self._stall_s, self._say = run, idle_s, stall_s, say
        self._said: store.Patience | None = None

    def check(self, since: float, awaited: Callable[[], Awaited]) -> None:
        """Look at the clock.

        Args:
            since: when the last group came, by the monotonic clock.

        Raises:
            IdleError: nothing came for too long.
        """
        waited = time.monotonic() - since
        if waited > self._idle_s:
            found = awaited()
            raise IdleError(
                f"no complete batch for {self._idle_s:g} s: are agents finishing trajectories of run "
                f"{self._run!r}? ({found.said()})"
            )
        if self._said is None or self._said.began != since:
            self._said = store.Patience(since, min(store.SAY_AFTER_S, self._stall_s), self._stall_s)
        if self._said.due(time.monotonic()):
            until = store.clock(time.time() + self._idle_s - waited)
            self._say(
                f"no new group for {waited:.0f} s: {awaited().said()}; waiting until {until} at most "
                "(idle_timeout_s)"
            )
