"""Where an upstream's stream ends. Pure."""

from __future__ import annotations

import re

_LONG_EVENT, _LONG_PATTERN = 1 << 20, 64
_BLANK = re.compile(rb"\r?\n\r?\n|\r\r")


class EndFinder:
    """Tells of a stream's bytes, in whatever packets they come, when its last event is there."""

    def __init__(self, last_event: re.Pattern[bytes]) -> None:
        self._end, self._tail = last_event, bytearray()
        self._seen = 0
        self._named = False

    def feed(self, data: bytes) -> bool:
        """Whether the stream has said everything, with these bytes."""
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
        """Of an event that does not end, remember whether it is the last one, and how it goes on."""
        if len(self._tail) > _LONG_EVENT:
            self._named = self._named or self._end.search(self._tail) is not None
            self._tail[:-_LONG_PATTERN] = b"."  # so that what follows is not taken for a line's beginning
