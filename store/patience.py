"""When a waiting process says so: what it waits for, how much of it has come, and until when. Pure."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

SAY_AFTER_S, SAY_AGAIN_S = 10.0, 60.0


@dataclass(slots=True)
class Patience:
    """One wait: reported after 10 s, and then every minute.

    Attributes:
        began: when, by the clock that `due` is called with.
        after_s, again_s: other times than these.
        reported: when it was last reported; None: never.
    """

    began: float
    after_s: float = SAY_AFTER_S
    again_s: float = SAY_AGAIN_S
    reported: float | None = None

    def due(self, now: float) -> bool:
        """Whether it is to be reported now, which then counts as reported."""
        last, pause = (self.began, self.after_s) if self.reported is None else (self.reported, self.again_s)
        if now - last < pause:
            return False
        self.reported = now
        return True


@dataclass(slots=True)
class Waiting:
    """Several who wait for the same thing, reported together.

    Attributes:
        since: who waits -> since when.
        reported: when it was last reported; None: not since the present waiting began.
    """

    since: dict[object, float] = field(default_factory=dict)
    reported: float | None = None

    @property
    def oldest(self) -> float:
        """Since when the first of them waits."""
        return min(self.since.values())

    def begin(self, who: object, now: float) -> None:
        """Note that one waits: from now on, if not before."""
        self.since.setdefault(who, now)

    def end(self, who: object) -> bool:
        """Note that one no longer waits; whether that ends a wait that was reported."""
        self.since.pop(who, None)
        if self.since or self.reported is None:
            return False
        self.reported = None
        return True

    def due(self, now: float) -> int:
        """How many of them have waited for 10 s, if that is to be reported now; otherwise 0."""
        count = sum(now - since >= SAY_AFTER_S for since in self.since.values())
        if not count or (self.reported is not None and now - self.reported < SAY_AGAIN_S):
            return 0
        self.reported = now
        return count


def waits(what: str, since_s: float, left_s: float | None, now_s: float) -> str:
    """The log line of a wait.

    Args:
        what: what is waited for, and how much of it has come.
        since_s: how long it took; left_s: how long it may take at most from now on; None:
            without limit.
        now_s: the time, in seconds since 1970.
    """
    until = "as long as it takes" if left_s is None else f"until {clock(now_s + max(left_s, 0))} at most"
    return f"waiting for {what} (for {since_s:.0f} s, {until})"


def clock(seconds: float) -> str:
    """A time of day, as the lines of a log have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
