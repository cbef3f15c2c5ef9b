"""Live pages without a browser: their streams of lines, and the parts that they ask for again and again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Self
from urllib.parse import urlsplit

import httptools
import orjson

from rollbook.bench.http_client import Connection
from rollbook.bench.view_pages import LIVE_PARTS
from rollbook.viewer.app import PREFIX

LINES = f"{PREFIX}/live/lines"
DATA = b"data: "


class LivePage(asyncio.Protocol):
    """The stream of lines of one live page.

    Attributes:
        lines: that came, and that it was told it missed.
        heard: (when it came by the clock, HTML) of each line, the newest last.
        status: of the reply; 0 before it.
    """

    def __init__(self, url: str) -> None:
        self._host = urlsplit(url).netloc
        self.lines = self.status = 0
        self.heard: list[tuple[float, str]] = []
        self._rest = b""
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the stream."""
        assert isinstance(transport, asyncio.Transport)
        head = f"GET {LINES} HTTP/1.1\r\nHost: {self._host}\r\nAccept: text/event-stream\r\n\r\n"
        transport.write(head.encode())
        self._transport = transport

    def close(self) -> None:
        """End the stream."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        """The stream begins."""
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """A part of the stream came."""
        now = time.time()
        *messages, self._rest = (self._rest + body).split(b"\n\n")
        for message in messages:
            _, found, data = message.partition(DATA)
            if found:
                told = orjson.loads(data)
                self.lines += len(told["lines"]) + told["missed"]
                self.heard += [(now, line) for line in told["lines"]]


class LivePages:
    """Context: so many live pages of a viewer are open, and ask for their parts as the page does.

    Their clients are a thread of this process.
    """

    def __init__(self, url: str, count: int) -> None:
        self._url = url
        self.pages = [LivePage(url) for _ in range(count)]
        self.failures: list[str] = []
        self._asked = 0
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._begun = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._begun.wait(30), f"no live page of {self._url} could be opened"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(30)

    def wait(self, lines: int, seconds: float = 60.0) -> None:
        """Wait until each page has had so many lines, and each of its parts once.

        Raises:
            AssertionError: one has not, or got no answer.
        """
        deadline = time.monotonic() + seconds
        parts = len(self.pages) * len(LIVE_PARTS)
        while time.monotonic() < deadline and (min(self.counts) < lines or self._asked < parts):
            time.sleep(0.02)
        assert not self.failures, f"a live page got no answer: {self.failures[:3]}"
        assert min(self.counts) >= lines, f"a live page had {min(self.counts)} lines of {lines}"

    @property
    def counts(self) -> Sequence[int]:
        """Lines of each."""
        return [page.lines for page in self.pages]

    async def _run(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        for page in self.pages:
            await self._open(page)
        asking = [
            asyncio.ensure_future(self._ask(part, every_s, every_s * number / len(self.pages)))
            for part, every_s in LIVE_PARTS.items()
            for number in range(len(self.pages))
        ]
        self._begun.set()
        await self._over.wait()
        for page in self.pages:
            page.close()
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def _open(self, page: LivePage) -> None:
        host, _, port = urlsplit(self._url).netloc.rpartition(":")
        await self._loop.create_connection(lambda: page, host, int(port))

    async def _ask(self, part: str, every_s: float, begin_s: float) -> None:
        """Ask for a part of a page, again and again; pages are not in step with each other."""
        await asyncio.sleep(begin_s)
        async with Connection(self._url) as connection:
            while True:
                try:
                    reply = await connection.get(PREFIX + part)
                    if reply.status != 200:
                        self.failures.append(f"{reply.status} {reply.body[:200]!r}")
                except (OSError, TimeoutError) as error:
                    self.failures.append(repr(error))
                self._asked += 1
                await asyncio.sleep(every_s)
