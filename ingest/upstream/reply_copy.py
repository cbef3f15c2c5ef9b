"""Copies of forwarded replies, kept until they are recorded; each is bounded, and so is their sum."""

from __future__ import annotations


class ReplyRoom:
    """Memory for all copies. When it is full the largest copy is dropped: that reply alone is not recorded.

    Args:
        each: most bytes of one copy.
        most: most bytes of all.
    """

    def __init__(self, each: int, most: int) -> None:
        self.each, self._most = each, most
        self._taken = 0
        self._copies: set[ReplyCopy] = set()

    def take(self, copy: ReplyCopy, size: int) -> None:
        """Account for a copy's growth; drop the largest copies while there is too little room."""
        self._copies.add(copy)
        self._taken += size
        while self._taken > self._most:
            max(self._copies, key=lambda one: one.size).give_up()

    def leave(self, copy: ReplyCopy) -> None:
        """Release a copy's room."""
        if copy in self._copies:
            self._copies.discard(copy)
            self._taken -= copy.size


class ReplyCopy:
    """The bytes of a reply so far; nothing once they are too many."""

    def __init__(self, room: ReplyRoom) -> None:
        self.size = 0
        self.given_up = False
        self._room = room
        self._parts: list[bytes] = []

    def add(self, data: bytes) -> None:
        """Add bytes of the reply."""
        if self.given_up:
            return
        self.size += len(data)
        self._parts.append(data)
        self._room.take(self, len(data))
        if self.size > self._room.each:
            self.give_up()

    def give_up(self) -> None:
        """Drop the copy; the rest of the reply is not kept."""
        self.given_up = True
        self.close()

    def close(self) -> None:
        """Free the copy."""
        self._room.leave(self)
        self._parts.clear()

    def whole(self) -> bytes:
        """All bytes so far."""
        return b"".join(self._parts)
