"""The tail of a store on another host: the same events as `Store.tail` gives, over a proxy's HTTP.

One thread reads server-sent events and keeps few of them waiting, so a slow consumer holds the server's
stream up instead of filling memory. When the connection breaks it begins anew after the last message it
has: no event is left out and none comes twice.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any

import httpx
import orjson

from rollbook.edge.server_sent_events import Message, read_messages
from rollbook.store.cut import Cut, format_cut, parse_cut
from rollbook.store.errors import CutError, RequestError, RollbookError, StoreError
from rollbook.store.events import Event
from rollbook.store.events.event_json import from_json

WAITING_MESSAGES = 4
"""Messages read ahead; each has about 1 MiB, or one event."""
SILENCE_S = 45.0
"""A connection that says nothing for so long is dead: the server gives a sign of life every 15 s."""
LONGEST_PAUSE_S = 2.0


class HttpTail(contextlib.AbstractContextManager["HttpTail"]):
    """`Store.tail` over HTTP: `poll`, `wait`, `cut`, and the same events bit for bit.

    Args:
        url: of a proxy, such as http://host:8000.
        start: hand out nothing that this cut holds; also `head` and `step:N`.
        kinds: these kinds only; `*` for all. Default: all but `cursor.moved`.
        run: events of this run only.
        patience_s: how long the server may be away before `poll` and `wait` raise. They go on trying.
        key: API key, for a proxy that lets in only who has one.
    """

    def __init__(
        self,
        url: str,
        start: Cut | str | None = None,
        kinds: Collection[str] | None = None,
        run: str | None = None,
        patience_s: float = 60.0,
        key: str | None = None,
    ) -> None:
        self._url = f"{url.rstrip('/')}/v1/events"
        text = start if isinstance(start, str) else format_cut(start or {})
        # Names of cuts that move with the log are looked up once, by the first answer.
        self._cut = {} if text == "head" or text.startswith("step:") else parse_cut(text)
        self._last_id = text
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._query = {"follow": "true"}
        self._query |= {"kinds": ",".join(kinds)} if kinds else {}
        self._query |= {"run": run} if run is not None else {}
        self._patience_s = patience_s
        self._messages: queue.Queue[Message | RollbookError] = queue.Queue(WAITING_MESSAGES)
        self._next: Message | RollbookError | None = None
        self._closed = threading.Event()
        self._socket: socket.socket | None = None
        self._at_head = False
        self._thread = threading.Thread(target=self._read, name="http-tail", daemon=True)
        self._thread.start()

    def poll(self, limit: int | None = None) -> list[Event]:
        """New events up to the server's head, lane by lane, each lane in order.

        The first poll waits for the server's head, as a local one reads up to it; later ones wait only for
        the rest of what has begun to come.

        Args:
            limit: stop after the message with the limit-th event; the next poll goes on from there.

        Raises:
            CutError: the server's store does not hold the start.
            RequestError: the server refuses the query.
            StoreError: the server is away for longer than `patience_s`, or its log is damaged.
            FormatError: the server sends events that only a newer release reads.
        """
        events: list[Event] = []
        while (limit is None or len(events) < limit) and not (self._at_head and not self._peek(0)):
            self._peek(None)
            message = self._next
            assert message is not None
            try:
                events += _events(message)
            except RollbookError:
                if events:
                    break  # those first: the next poll says what is wrong
                if not isinstance(message, Message):
                    self._next = None
                raise
            assert isinstance(message, Message)
            self._next = None
            self._cut = parse_cut(message.id or "empty")
            self._at_head = message.type == "head"
            if self._at_head:
                break
        return events

    def wait(self, timeout_s: float) -> bool:
        """Wait until `poll` may have events, at most so many seconds; returns whether it may.

        Raises:
            as `poll`
        """
        deadline = time.monotonic() + timeout_s
        while self._peek(max(deadline - time.monotonic(), 0)):
            message = self._next
            if isinstance(message, Exception):
                self._next = None
                raise message
            assert message is not None
            if message.type != "head" or not self._at_head:
                return True
            # Nothing wanted came, but the head moved on.
            self._cut, self._next = parse_cut(message.id or "empty"), None
        return False

    def cut(self) -> dict[str, int]:
        """The cut of all events handed out or skipped so far; a closed cut if `at_head`."""
        return dict(self._cut)

    @property
    def at_head(self) -> bool:
        """Whether the last poll reached the server's head."""
        return self._at_head

    def close(self) -> None:
        """Close the connection and end the thread."""
        self._closed.set()
        if (connection := self._socket) is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _peek(self, timeout_s: float | None) -> bool:
        """Fetch the next message into `_next`, waiting at most so long (None: without limit)."""
        if self._next is None:
            with contextlib.suppress(queue.Empty):
                self._next = self._messages.get(timeout_s != 0, timeout_s or None)
        return self._next is not None

    # The reading thread -----------------------------------------------------------------------

    def _read(self) -> None:
        pause, alive = 0.05, time.monotonic()
        timeout = httpx.Timeout(10.0, read=SILENCE_S)
        with httpx.Client(timeout=timeout, headers=self._headers) as client:
            while not self._closed.is_set():
                reason: object = "the stream ended"
                try:
                    for message in self._connect(client):
                        self._put(message)
                        pause, alive = 0.05, time.monotonic()
                except (CutError, RequestError) as error:
                    self._put(error)
                    return  # what is refused now will be refused again
                except StoreError as error:
                    self._put(error)
                except httpx.HTTPError as error:
                    reason = repr(error)
                if time.monotonic() - alive > self._patience_s:
                    text = (
                        f"{self._url}: nothing for {self._patience_s:g} s ({reason}): is `rollbook serve` up?"
                    )
                    self._put(StoreError(text))
                    alive = time.monotonic()
                self._closed.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)

    def _connect(self, client: httpx.Client) -> Iterator[Message]:
        query = self._query | {"from": self._last_id}
        with client.stream("GET", self._url, params=query) as response:
            if (stream := response.extensions.get("network_stream")) is not None:
                self._socket = stream.get_extra_info("socket")
            if response.status_code != 200:
                raise _refusal(response.status_code, response.read())
            for message in read_messages(response.iter_raw()):
                if message.type == "error":
                    raise StoreError(_text(message.data))
                self._last_id = message.id or self._last_id
                yield message

    def _put(self, item: Message | RollbookError) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._messages.put(item, timeout=0.5)
                return


def _events(message: Message | RollbookError) -> list[Event]:
    if isinstance(message, Exception):
        raise message
    return [from_json(values) for values in orjson.loads(message.data)] if message.type == "message" else []


def _refusal(status: int, body: bytes) -> RollbookError:
    try:
        error: dict[str, Any] = orjson.loads(body)["error"]
        code, text = str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        code, text = "not_rollbook", f"HTTP {status} without an error of Rollbook's: {body[:200]!r}"
    if code in ("bad_cut", "cut_not_held"):
        return CutError(text)
    return StoreError(text) if status >= 500 else RequestError(status, code, text)


def _text(data: bytes) -> str:
    return str(orjson.loads(data)["error"]["message"])
