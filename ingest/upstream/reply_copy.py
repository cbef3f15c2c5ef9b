"""Copies of replies that pass, kept until they are recorded: bounded each, and all together."""

from __future__ import annotations


class ReplyRoom:
    """Room for all copies. Where it is taken, the largest of them is given up: it alone is not recorded.

    Args:
        each: most bytes of one copy.
        most: most bytes of all.
    """

    def __init__(self, each: int, most: int) -> None:
        self.each, self._most = each, most
        self._taken = 0
        self._copies: set[ReplyCopy] = set()

    def take(self, copy: ReplyCopy, size: int) -> None:
        """A copy grows by so many bytes, if it may."""
        self._copies.add(copy)
        self._taken += size
        while self._taken > self._most:
            max(self._copies, key=lambda one: one.size).give_up()

    def leave(self, copy: ReplyCopy) -> None:
        """A copy needs its room no longer."""
        if copy in self._copies:
            self._copies.discard(copy)
            self._taken -= copy.size


class ReplyCopy:
    """What has passed of a reply; nothing, once that was too much."""

    def __init__(self, room: ReplyRoom) -> None:
        self.size = 0
        self.given_up = False
        self._room = room
        self._parts: list[bytes] = []

    def add(self, data: bytes) -> None:
        """More of the reply passes."""
        if self.given_up:
            return
        self.size += len(data)
        self._parts.append(data)
        self._room.take(self, len(data))
        if self.size > self._room.each:
            self.give_up()

    def give_up(self) -> None:
        """The rest passes without being kept."""
        self.given_up = True
        self.close()

    def close(self) -> None:
        """Nothing of it is needed any more."""
        self._room.leave(self)
        self._parts.clear()

    def whole(self) -> bytes:
        """All that has passed."""
        return b"".join(self._parts)
