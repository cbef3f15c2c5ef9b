"""A session: the lease of one process, on which all that it holds in a medium stands.

A process renews its session by an entry every third of the lease. It counts from before each renewal was
sent, and acknowledges nothing once three quarters of the lease have gone by without one. Another host that
has seen no renewal for a lease and a quarter, by its own clock, may end the session: it puts the next entry,
a fence. As an entry is put only where there is none, either the owner's renewal or the fence is the next one,
whatever their clocks say; and no clock of one host is ever compared with one of another.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollbook.store.errors import FencedError, MediumError
from rollbook.store.ids import new_id, now_us
from rollbook.store.medium.medium import Medium, session_sequence
from rollbook.store.medium.register import Register
from rollbook.store.permissions import open_file
from rollbook.store.wal.files import take_lock, try_lock

RENEWALS, OWN_SHARE, OTHERS_SHARE = 3, 0.75, 1.25
"""Renewals in a lease; when its owner stops, and when others may end it, as shares of it."""
RETRY_S = 0.2

logger = logging.getLogger(__name__)


def seconds() -> float:
    """A clock that goes on while the machine sleeps, and that nobody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Session:
    """This process's lease. Threads may share it.

    Args:
        lease_s: how long the others wait; 0: they never end it, and it is always valid.
        locks: the store's folder of claims, where a lock says to others of this host that the process runs.

    Raises:
        MediumError: the medium does not take its first entry.

    Attributes:
        name: the host's name and an id.
    """

    def __init__(self, medium: Medium, host: str, lease_s: float, locks: Path | None = None) -> None:
        self.name = f"{host}.{new_id()}"
        self._lock_file = None if locks is None else _lock_file(locks, self.name)
        self._lock = None if self._lock_file is None else take_lock(self._lock_file, "its session", "wait")
        self._register = Register(medium, session_sequence(self.name))
        self._host, self._lease_s = host, lease_s
        self._lanes: set[str] = set()
        self._until = 0.0
        self._fenced: str | None = None
        self._unanswered: Any = None
        self._changed = threading.Condition()
        self._closing = False
        self._left: deque[Callable[[], None]] = deque()
        self._renew()
        self._thread = threading.Thread(target=self._run, name="session", daemon=True)
        self._thread.start()

    @property
    def valid(self) -> bool:
        """Whether nobody can have ended it yet."""
        return self._fenced is None and (self._lease_s == 0 or seconds() < self._until)

    @property
    def fenced(self) -> str | None:
        """Who ended it, or None."""
        return self._fenced

    def add_lane(self, sequence: str) -> None:
        """Note a lane that this session writes, in the medium, before anything of it is put there.

        Raises:
            MediumError: the medium does not answer.
            FencedError: the session was ended.
        """
        with self._changed:
            self._lanes.add(sequence)
        self._renew()
        if self._fenced is not None:
            raise FencedError(f"this process's lease was ended by {self._fenced}: start it again")

    def later(self, work: Callable[[], None]) -> None:
        """Have something done as soon as the medium answers again, while the session lasts.

        Args:
            work: raises `MediumError` where that does not answer, and is called again then.
        """
        with self._changed:
            self._left.append(work)
            self._changed.notify_all()

    def close(self) -> None:
        """End it: all that it holds is free at once. Safe to call twice."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._fenced is None:
            try:
                self._renew(ended=True)
            except MediumError as error:
                logger.warning("what this process held is free when its lease has run out: %s", error)
        if self._lock is not None and self._lock_file is not None:
            self._lock_file.unlink(missing_ok=True)
            os.close(self._lock)

    def _run(self) -> None:
        pause = self._lease_s / RENEWALS if self._lease_s else 3600.0
        due, told = seconds() + pause, False
        while True:
            with self._changed:
                wanted = min(due, seconds() + RETRY_S) if self._left else due
                self._changed.wait_for(lambda: self._closing, max(wanted - seconds(), 0.0))
                if self._closing or self._fenced is not None:
                    return
            try:
                if seconds() >= due:
                    self._renew()
                    due, told = seconds() + pause, False
                self._do_left()
            except MediumError as error:
                due = seconds() + RETRY_S if seconds() >= due else due
                if not self.valid and not told:
                    logger.warning("the lease cannot be renewed, and nothing is acknowledged: %s", error)
                    told = True

    def _do_left(self) -> None:
        while self._left:
            self._left[0]()
            self._left.popleft()

    def _renew(self, *, ended: bool = False) -> None:
        with self._changed:
            begun = seconds()
            value = self._unanswered or self._value(ended)
            # The same bytes until there is an answer: an entry that was made without one is recognized.
            self._unanswered = value
            renewed = self._register.replace(value)
            self._unanswered = None
            if renewed:
                self._until = begun + OWN_SHARE * self._lease_s
                if set(value["lanes"]) != self._lanes or (ended and not value["ended"]):
                    self._register.replace(self._value(ended))
            else:
                now = self._register.read() or {}
                self._fenced = str(now.get("fenced_by") or "another process that has its name")
                logger.error("this process's lease was ended by %s", self._fenced)
            self._changed.notify_all()

    def _value(self, ended: bool) -> dict[str, Any]:
        return {
            "host": self._host,
            "process": os.getpid(),
            "lease_s": self._lease_s,
            "lanes": sorted(self._lanes),
            "ended": ended,
            "renewed_us": now_us(),
        }


def _lock_file(locks: Path, session: str) -> Path:
    return locks / f"{session}.session"


def _has_ended_here(locks: Path, host: str, session: str) -> bool:
    """Whether a session was one of this host's, and its process has ended."""
    if not session.startswith(f"{host}."):
        return False
    path = _lock_file(locks, session)
    try:
        fd = open_file(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        if not try_lock(fd, fcntl.LOCK_EX):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)


@dataclass(slots=True)
class _Seen:
    """What was seen of another session: its newest entry, and since when that is the newest."""

    register: Register
    value: Any = None
    number: int = -2
    since: float = 0.0
    renewed: bool = False


@dataclass(slots=True)
class Witness:
    """Watches sessions of others, and ends those that are silent. One thread at a time uses it.

    Attributes:
        name: of whoever ends a session, for its owner.
        host, locks: this host, and the folder where its own sessions have locks.
    """

    medium: Medium
    name: str
    host: str = ""
    locks: Path | None = None
    _seen: dict[str, _Seen] = field(default_factory=dict)

    def gone(self, session: str) -> bool:
        """Whether a session has ended, by its owner, a fence, or one that is put now because it is silent.

        A session that was not seen before is watched from now on: ask again.

        Raises:
            MediumError: the medium does not answer.
        """
        seen = self._look(session)
        value = seen.value
        if value is None or value["ended"]:
            return True
        if self.locks is not None and _has_ended_here(self.locks, self.host, session):
            return self.fence(session)
        if not value["lease_s"] or seconds() - seen.since < OTHERS_SHARE * value["lease_s"]:
            return False
        return self.fence(session)

    def runs(self, session: str) -> bool:
        """Whether a session is known to be alive: it was renewed since it was first looked at, or nobody may
        ever end it."""
        seen = self._seen[session]
        return seen.renewed or not (seen.value or {}).get("lease_s")

    def has_ended(self, session: str) -> bool:
        """Whether a session has ended; one that is only silent has not.

        Raises:
            MediumError: the medium does not answer.
        """
        value = self._look(session).value
        return value is None or bool(value["ended"])

    def fence(self, session: str) -> bool:
        """End a session; False: it was renewed meanwhile.

        Raises:
            MediumError: the medium does not answer.
        """
        seen = self._look(session)
        if seen.value is None or seen.value["ended"]:
            return True
        if not seen.register.replace({**seen.value, "ended": True, "fenced_by": self.name}):
            return False
        logger.warning("%s was silent for its lease: %s ends it", session, self.name)
        return True

    def lanes(self, session: str) -> list[str]:
        """The sequences of the lanes that a session has written."""
        value = self._look(session).value
        return [] if value is None else list(value["lanes"])

    def described(self, session: str) -> str:
        """The host of a session and its process there, for people."""
        value = self._look(session).value
        return session if value is None else f"{value['host']}, process {value['process']}"

    def _look(self, session: str) -> _Seen:
        seen = self._seen.get(session)
        if seen is None:
            seen = self._seen[session] = _Seen(Register(self.medium, session_sequence(session)))
        value = seen.register.read()
        if seen.register.number != seen.number:
            seen.renewed = seen.number >= 0
            seen.value, seen.number, seen.since = value, seen.register.number, seconds()
        return seen
