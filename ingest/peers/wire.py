"""How proxies of one run speak with each other: small POSTs, with a token that the store's folder gives."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from rollbook.ingest.http.forwarding import plain_session
from rollbook.ingest.peers.messages import check_answer
from rollbook.store.errors import RequestError
from rollbook.store.events import Json
from rollbook.store.ids import new_id
from rollbook.store.secret import store_secret

PREFIX = "/peers/"
TOKEN_HEADER = "x-rollbook-peer"
CONNECT_S = 3.0
ANSWER_S = 2.0
"""A proxy that takes longer to say how it is does not answer."""
MESSAGE_BYTES = 1 << 20


class UnreachableError(Exception):
    """A proxy does not answer."""


class MovedError(Exception):
    """What a proxy was asked as the holder of a number is another's to answer."""


def token_of(store: Path, run: str) -> str:
    """What the proxies of a run know each other by: who has the store's folder knows it."""
    return hmac.new(store_secret(store, "peers"), run.encode(), hashlib.sha256).hexdigest()


@dataclass(slots=True, eq=False)
class Wire:
    """One proxy's way to the others.

    Attributes:
        addresses: of all, by number, without a path.
        lanes: of all, by number.
        number: its own.
    """

    addresses: Sequence[str]
    lanes: Sequence[str]
    number: int
    token: str = field(repr=False)
    process: str = field(default_factory=new_id)
    """Tells this process from those that had its number before."""
    _session: aiohttp.ClientSession | None = None
    _closed: bool = False

    @property
    def session(self) -> aiohttp.ClientSession:
        """The connections to the others; made on the loop that uses them.

        Raises:
            UnreachableError: this proxy has ended.
        """
        if self._closed:
            raise UnreachableError("this proxy has ended")
        if self._session is None:
            # On a connection that is kept, a request to a proxy that ends has come, or has not.
            self._session = plain_session(CONNECT_S, None)
        return self._session

    async def disconnect(self) -> None:
        """Let go of the connections; more may be made."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def close(self) -> None:
        """Let go of the connections for good."""
        self._closed = True
        await self.disconnect()

    @property
    def same(self) -> Json:
        """What all proxies of a run have in common."""
        return {"proxies": list(self.addresses), "lanes": list(self.lanes)}

    def check_same(self, asked: Json) -> None:
        """See that another proxy has the same list.

        Raises:
            RequestError: 409, it has not.
        """
        for name, own in self.same.items():
            if asked.get(name) != own:
                text = (
                    f"the proxy at {self.addresses[self.number]} has {name} = {own}, and that of number "
                    f"{asked['from']} has {asked.get(name)}: all proxies of a run need the same list"
                )
                raise RequestError(409, "other_proxies", text)

    @property
    def others(self) -> list[int]:
        """The numbers of the others."""
        return [number for number in range(len(self.addresses)) if number != self.number]

    def knows(self, token: str) -> bool:
        """Whether a token is that of this run's proxies."""
        return hmac.compare_digest(token.encode(errors="replace"), self.token.encode())

    async def post(self, to: int, kind: str, words: Json, patience_s: float = ANSWER_S) -> Json:
        """What another proxy answers.

        Raises:
            UnreachableError: it does not, in time or as one of this run's proxies.
            MovedError: it is not for it to answer.
            RequestError: what it raised.
        """
        body = orjson.dumps({"from": self.number, "process": self.process, **words})
        timeout = aiohttp.ClientTimeout(total=patience_s, sock_connect=min(patience_s, CONNECT_S))
        headers = {TOKEN_HEADER: self.token, "content-type": "application/json"}
        url = f"{self.addresses[to]}{PREFIX}{kind}"
        try:
            async with self.session.post(url, data=body, headers=headers, timeout=timeout) as reply:
                said = check_answer(kind, orjson.loads(await reply.read())) if reply.status == 200 else {}
        except (aiohttp.ClientError, OSError, TimeoutError, orjson.JSONDecodeError) as error:
            raise UnreachableError(f"{url}: {error or type(error).__name__}") from error
        except RequestError as error:
            raise UnreachableError(f"{url} answers what no proxy does: {error.message}") from error
        if reply.status != 200:
            raise UnreachableError(f"{url} answers {reply.status}: is it a proxy of this store and run?")
        if "error" in said:
            raise RequestError(*said["error"])
        if said.get("moved"):
            raise MovedError
        return said


def answer_of(found: Any) -> bytes:
    """The body of an answer: words, or what was raised instead of them."""
    match found:
        case MovedError():
            return orjson.dumps({"moved": True})
        case RequestError():
            return orjson.dumps({"error": [found.status, found.code, found.message]})
    return orjson.dumps(found)
