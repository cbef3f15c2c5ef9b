"""Fields of a protobuf message, counted in its bytes: a field of two bytes costs fifty once it is parsed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from rollbook.store.errors import LimitError

_PLAIN: Mapping[int, Any] = {}
"""Of a message without messages and lists inside."""
_WIDTHS = {1: 8, 5: 4}
"""Wire type of a number of fixed width -> its bytes."""


@dataclass(slots=True, eq=False)
class Room:
    """How many more there may be of what is limited.

    Attributes:
        what: it is, as in "the pass has more ...".
    """

    left: int
    what: str

    def take(self, count: int) -> None:
        """Take room for some.

        Raises:
            LimitError: 400, there is not as much.
        """
        if count > self.left:
            raise LimitError(400, "pass_too_large", f"the pass has more {self.what}: send fewer data at once")
        self.left -= count


def nested_fields(descriptor: Any) -> dict[int, Any]:
    """Number of each field that is a message -> the same of that; of each list of numbers -> None."""
    return {
        field.number: nested_fields(field.message_type) if field.message_type else None
        for field in descriptor.fields
        if field.message_type or field.is_repeated
    }


def count_fields(body: bytes, nested: Mapping[int, Any], room: Room) -> Iterator[int]:
    """The numbers of a message's own fields, one by one; those inside of them take room as well.

    What is no message is not always noticed here: the parser does that, once there is room.

    Raises:
        DecodeError: it is no message, so that what follows cannot be counted.
        LimitError: 400, there is no room for all fields.
    """
    yield from _count(body, 0, len(body), nested, room)


def _count(body: bytes, place: int, end: int, nested: Mapping[int, Any], room: Room) -> Iterator[int]:
    while place < end:
        room.take(1)
        tag, place = _varint(body, place, end)
        if (form := tag & 7) == 2:
            size, place = _varint(body, place, end)
            if size > end - place:
                raise DecodeError("a field is longer than its message")
            inside = nested.get(tag >> 3, _PLAIN)
            if inside is None:  # numbers take a byte or more each
                room.take(size)
            elif inside:
                for _ in _count(body, place, place + size, inside, room):
                    pass
            place += size
        elif form == 0:
            _, place = _varint(body, place, end)
        elif form in _WIDTHS:
            place += _WIDTHS[form]
        else:
            raise DecodeError(f"a field of wire type {form}")
        yield tag >> 3


def _varint(body: bytes, place: int, end: int) -> tuple[int, int]:
    """(a number, where it ends)"""
    value = shift = 0
    while place < end and shift < 70:
        byte = body[place]
        value, place = value | (byte & 127) << shift, place + 1
        if byte < 128:
            return value, place
        shift += 7
    raise DecodeError("a number without an end")
