"""Requests to a proxy, over connections that are kept: hundreds of agents ask through one client at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from yarl import URL

from rollbook.store.errors import ConfigError

FAILURES = (aiohttp.ClientError, TimeoutError, OSError)
"""What a request raises that is not answered."""
CONNECT_S = 30.0


def failure(error: BaseException) -> str:
    """What kept a request from being answered, in a line."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        """The body, whatever it is."""
        return self.body.decode(errors="replace")

    def json(self) -> Any:
        """What it says.

        Raises:
            ValueError: it is no JSON.
        """
        return orjson.loads(self.body)


class Http:
    """A client.

    Args:
        headers: of every request.
    """

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        self._headers = dict(headers or {})
        self._made: aiohttp.ClientSession | None = None

    async def send(
        self, method: str, url: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """The answer to a request, whose body is sent as JSON; it is waited for as long as it takes.

        Raises:
            aiohttp.ClientError, TimeoutError, OSError: nothing answers.
        """
        data, more = None, dict(headers or {})
        if body is not None:
            data, more["content-type"] = orjson.dumps(body, default=str), "application/json"
        async with self._session.request(
            method, URL(url, encoded=True), data=data, headers=more, allow_redirects=False
        ) as reply:
            return Answer(reply.status, await reply.read())

    @contextlib.asynccontextmanager
    async def stream(self, url: str, silence_s: float | None = None) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to a GET, to be read as it comes.

        Args:
            silence_s: how long it may say nothing.

        Raises:
            aiohttp.ClientError, TimeoutError, OSError: nothing answers, or no more.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silence_s)
        async with self._session.get(URL(url, encoded=True), timeout=timeout) as reply:
            yield reply

    async def close(self) -> None:
        """End its connections."""
        if self._made is not None:
            await self._made.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._made is None:  # which a running loop is needed for
            self._made = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            )
        return self._made


def bearer(variable: str | None, key: str) -> dict[str, str]:
    """The headers of requests to somebody's service.

    Args:
        variable: of this process, which holds a token; None: no token is sent.
        key: of the CONFIG, which names the variable.

    Raises:
        ConfigError: the variable is not set.
    """
    if variable is None:
        return {}
    token = os.environ.get(variable)
    if not token:
        raise ConfigError(f"{key}: the variable {variable!r} is not set: give it the service's token")
    return {"authorization": f"Bearer {token}"}
