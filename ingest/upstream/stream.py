"""Where an upstream's stream ends. Pure.

No event is read here as `ingest.server_sent_events` reads it: one of any length passes on, and of a long one
only whether it is the last is held.
"""

from __future__ import annotations

import re

_LONG_EVENT, _LONG_PATTERN = 1 << 20, 64
_BLANK = re.compile(rb"\r?\n\r?\n|\r\r")


class EndFinder:
    """Finds a stream's last event in its bytes, however they are cut into packets."""

    def __init__(self, last_event: re.Pattern[bytes]) -> None:
        self._end, self._tail = last_event, bytearray()
        self._seen = 0
        self._named = False

    def feed(self, data: bytes) -> bool:
        """Whether the stream is complete with these bytes."""
        self._tail += data
        behind = 0
        for blank in _BLANK.finditer(self._tail, max(self._seen - 3, 0)):
            behind = blank.end()
        if behind:
            ended = self._named or self._end.search(self._tail, 0, behind) is not None
            del self._tail[:behind]
            self._named = False
        else:
            ended = False
            self._shorten()
        self._seen = len(self._tail)
        return ended

    def _shorten(self) -> None:
        """Of a long unfinished event keep only whether it is the last one, and its end."""
        if len(self._tail) > _LONG_EVENT:
            self._named = self._named or self._end.search(self._tail) is not None
            self._tail[:-_LONG_PATTERN] = b"."  # lest what follows look like a line's beginning
