"""Server-sent events as bytes, written and read: the one reader for engines, upstreams' replies and
a tail. Pure.

No library's reader would suffice: httpx-sse reads the text of an httpx response, while engines
are queried with aiohttp and an upstream's reply is read from the bytes that passed; and it
buffers lines of any length, while a stranger's stream must be given up at a bound.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Message:
    """One event: its type (`message` where none is named), its own id, and its lines of data as one."""

    type: str
    id: str | None
    data: bytes


class MessageReader:
    """Finds messages in bytes, however they are cut into packets.

    Lines end with LF, CRLF or CR. Other characters that Python would split at may stand in JSON.
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []
        self._line_bytes = self._kept_bytes = 0
        self._fields: dict[bytes, bytes] = {}
        self._data: list[bytes] = []
        self._begun = self._behind_cr = False

    @property
    def waiting(self) -> int:
        """Bytes held of a message that has not ended: readers of an untrusted stream bound it."""
        return self._line_bytes + self._kept_bytes

    def feed(self, data: bytes) -> list[Message]:
        """The messages that end in these bytes."""
        if self._behind_cr and data:
            data = data.removeprefix(b"\n")
            self._behind_cr = False
        if b"\r" in data:
            self._behind_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        messages = []
        *lines, rest = data.split(b"\n")
        for line in lines:
            whole = b"".join([*self._line, line]) if self._line else line
            self._line, self._line_bytes = [], 0
            if whole:
                self._take(whole)
            elif (message := self._ended()) is not None:
                messages.append(message)
        if rest:
            self._line.append(rest)
            self._line_bytes += len(rest)
        return messages

    def end(self) -> list[Message]:
        """The message that the stream ended in, if it has data; its last line may have been cut short."""
        messages = [*self.feed(b"\n"), *self.feed(b"\n")]
        self._behind_cr = False
        return messages

    def _take(self, line: bytes) -> None:
        if not self._begun:
            line, self._begun = line.removeprefix(_BYTE_ORDER_MARK), True
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._kept_bytes += len(line)
        elif name in (b"event", b"id"):
            self._fields[name] = value
            self._kept_bytes += len(line)

    def _ended(self) -> Message | None:
        self._begun = True
        fields, data = self._fields, self._data
        self._fields, self._data, self._kept_bytes = {}, [], 0
        if not data:
            return None
        kind, identity = fields.get(b"event", b"message"), fields.get(b"id")
        return Message(
            kind.decode(errors="replace"),
            None if identity is None else identity.decode(errors="replace"),
            b"\n".join(data),
        )


def read_messages(chunks: Iterable[bytes]) -> Iterator[Message]:
    """The messages in a stream of bytes; one that is cut short at the end is dropped."""
    reader = MessageReader()
    for chunk in chunks:
        yield from reader.feed(chunk)


def messages_of(stream: bytes) -> list[Message]:
    """The messages in a complete stream, including the last one if it was not terminated."""
    reader = MessageReader()
    return [*reader.feed(stream), *reader.end()]


DONE = b"data: [DONE]\n\n"
"""What ends a stream of OpenAI's chat completions and completions."""


def event(data: Any, name: str | None = None) -> bytes:
    """One event; JSON holds no line feed, so it is one line."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


def json_of(data: bytes) -> Any:
    """A JSON value, also with the NaN that some servers write; None if the data is no JSON."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The JSON events of a stream's bytes; not its comments, its end, or an event that was cut off."""
    values = (json_of(message.data) for message in messages_of(data))
    return [event for event in values if isinstance(event, dict)]
