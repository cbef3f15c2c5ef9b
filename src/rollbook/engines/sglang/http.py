"""Calls an SGLang server's information and control routes, with aiohttp.

An answer is read within bounds: an endless one cannot take endless memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from rollbook.edge.server_sent_events import Message, MessageReader
from rollbook.engines.address import EngineAddress
from rollbook.engines.weights.rank_checksums import QUESTION, RankChecksums, read_ranks
from rollbook.store.errors import EngineError, EngineLostError
from rollbook.store.events import Json

CONNECT_S = 10.0
ASK_S = 30.0
"""For questions that need no model. A completion may take as long as it takes."""
CHECKSUMS_S = 600.0
"""For the checksums of all weights, which stand in the way of whatever runs for seconds."""
ADAPTER_S = 600.0
"""For an adapter: one leaves only when no request uses it any more."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The credentials of a server: the login in its address, or its --api-key; for control its
    --admin-api-key."""

    address: EngineAddress
    api: str | None = field(default=None, repr=False)
    admin: str | None = field(default=None, repr=False)

    def headers(self, *, control: bool = False) -> dict[str, str]:
        """The headers of a request.

        Raises:
            ConfigError: there are both a login and a key for one header.
        """
        key = (self.admin or self.api) if control else self.api
        return {"content-type": "application/json"} | self.address.headers(key)


@dataclass(slots=True, eq=False)
class SglangServer:
    """One server. Every failure is an `EngineError` that names it."""

    url: str
    session: aiohttp.ClientSession
    keys: Keys

    async def ask(self, path: str) -> tuple[int, Any]:
        """(status, JSON answer to a GET, None if it is no JSON)

        Raises:
            EngineLostError: nothing answers.
        """
        return await self._call("GET", path, None, ASK_S)

    async def model_info(self) -> Json:
        """What it says of its model and of its weights.

        Raises:
            EngineError: it is no SGLang server, or does not let us in.
        """
        return self._object("/model_info", *await self.ask("/model_info"))

    async def server_info(self) -> Json:
        """What it says of itself.

        Raises:
            EngineError: it is no SGLang server, or does not let us in.
        """
        return self._object("/server_info", *await self.ask("/server_info"))

    async def checksums(self) -> list[RankChecksums]:
        """Every rank's own checksums of the tensors that it holds now.

        Raises:
            EngineError: it does not report them.
        """
        answer = await self._call("POST", "/weights_checker", QUESTION, CHECKSUMS_S)
        return read_ranks(self._object("/weights_checker", *answer), self.url)

    async def name_weights(self, name: str) -> None:
        """Have it call its weights by this name from now on, also for running requests.

        Raises:
            EngineError: it refuses.
        """
        body = {"new_version": name, "abort_all_requests": False}
        answer = await self._call("POST", "/update_weight_version", body, ASK_S)
        self._object("/update_weight_version", *answer)

    async def adapters(self) -> dict[str, str]:
        """The adapters that it holds: name -> the folder that it read.

        Raises:
            EngineError: it is no SGLang server, or does not let us in.
        """
        answer = self._object("/v1/models", *await self.ask("/v1/models"))
        return {str(one["id"]): str(one["root"]) for one in answer["data"] if one.get("parent")}

    async def load_adapter(self, name: str, folder: str) -> None:
        """Have it read an adapter from a folder that it sees by this path.

        Raises:
            EngineError: it refuses.
        """
        body = {"lora_name": name, "lora_path": folder}
        self._object("/load_lora_adapter", *await self._call("POST", "/load_lora_adapter", body, ADAPTER_S))

    async def unload_adapter(self, name: str) -> None:
        """Have it hold an adapter no more.

        Raises:
            EngineError: it refuses.
        """
        answer = await self._call("POST", "/unload_lora_adapter", {"lora_name": name}, ADAPTER_S)
        self._object("/unload_lora_adapter", *answer)

    async def generate(self, body: Json) -> Json:
        """Its answer to a request for tokens, which may take as long as it takes.

        Raises:
            EngineError: it refuses.
        """
        answer = await self._call("POST", "/generate", body, None, control=False)
        return self._object("/generate", *answer)

    async def _call(
        self, method: str, path: str, body: Json | None, seconds: float | None, *, control: bool = True
    ) -> tuple[int, Any]:
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_S)
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = self.keys.headers(control=control and body is not None)
        try:
            async with self.session.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as reply:
                answer = await read_answer(reply)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = str(error) or type(error).__name__  # a time-out has no text; their repr is long
            text = f"no SGLang server answers at {self.url} ({why}): start one, or correct --engine-url"
            raise EngineLostError(text) from error
        try:
            return reply.status, orjson.loads(answer)
        except orjson.JSONDecodeError:
            return reply.status, None

    def _object(self, path: str, status: int, reply: Any) -> Json:
        if status in (401, 403):
            raise EngineError(
                f"{self.url}{path} answers {status}: give its --api-key by --engine-key, and its "
                "--admin-api-key by --engine-admin-key"
            )
        if status != 200 or not isinstance(reply, dict) or reply.get("success") is False:
            told = reply.get("message") or reply.get("error_message") if isinstance(reply, dict) else None
            why = f": {str(told)[:300]}" if isinstance(reply, dict) else ": is it SGLang?"
            raise EngineError(f"{self.url}{path} answers {status}{why}")
        return reply


MOST_BYTES = 512 << 20
"""Of one answer, or one message of a stream: the experts of a hundred thousand tokens are a third of it."""
TOLD_BYTES = 8 << 20
"""Bytes read of an error's body, or of a body that is not used."""


async def read_answer(reply: aiohttp.ClientResponse, most: int = MOST_BYTES) -> bytes:
    """The whole body.

    Raises:
        EngineError: it is larger than that.
    """
    body = bytearray()
    async for data in reply.content.iter_any():
        body += data
        _check(reply, len(body), most)
    return bytes(body)


async def read_stream(reply: aiohttp.ClientResponse, most: int = MOST_BYTES) -> AsyncIterator[Message]:
    """A stream's messages, however they are cut into packets; one that is cut short at the end is dropped.

    Raises:
        EngineError: one is longer than that.
    """
    reader = MessageReader()
    async for data in reply.content.iter_any():
        for message in reader.feed(data):
            yield message
        _check(reply, reader.waiting, most)


def _check(reply: aiohttp.ClientResponse, size: int, most: int) -> None:
    if size > most:
        path = reply.url.path
        raise EngineError(f"the engine's answer to {path} goes on after {most} bytes: is it one?")
