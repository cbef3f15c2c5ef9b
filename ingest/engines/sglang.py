"""SGLang over its native `/generate`: ids in, ids, logprobs and weight versions out.

Nothing here goes through text: SGLang's OpenAI routes render and parse by themselves, and their streams leave
logprobs out. One server, or a router in front of several. It is asked with aiohttp: with 50 requests at once
httpx takes 27 times the CPU.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
from fastapi import APIRouter

from rollbook.ingest.engines.address import EngineAddress
from rollbook.ingest.engines.engine import Activated, Generation, Heard, Prompt, Sampling, unheard
from rollbook.ingest.engines.sglang_parts import joined, may_go_on, the_rest
from rollbook.ingest.engines.sglang_wire import (
    Part,
    Routing,
    check_preferred,
    check_version,
    news,
    part,
    request_body,
)
from rollbook.ingest.engines.weight_name import policy_version_of
from rollbook.store.errors import EngineError, EngineLostError
from rollbook.store.events import Json

CONNECT_S = 10.0
ASK_S = 30.0
"""For questions that need no model. A completion may take as long as it takes."""
KEEP_ALIVE_S = 4.0
"""A connection that was idle for longer is not used again: servers close theirs after five."""
ABORT_AGAIN_S = 0.5
_HONOURED = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "min_tokens",
        "stop",
        "logit_bias",
        "response_format",
        "logprobs",
    }
)


class SglangEngine:
    """Asks a server at `url`.

    Args:
        policy: name of the line of weights that it serves.
        run: whose versions count: weights that are named after another run have none here.
        takes_images: whether its model does.
        key: sent as a bearer token, for servers started with --api-key.
        routed_experts: what its model is made of, where the experts that tokens went to are to be recorded.
    """

    name = "sglang"
    honoured = _HONOURED

    def __init__(
        self,
        url: str | EngineAddress,
        *,
        policy: str = "actor",
        run: str | None = None,
        takes_images: bool = False,
        key: str | None = None,
        routed_experts: Routing | None = None,
    ) -> None:
        address = EngineAddress.of(url).plain
        self.url, self.policy, self.takes_images = address.url, policy, takes_images
        self._headers = {"content-type": "application/json"} | address.headers(key)
        self._run, self._routing = run, routed_experts
        self._version: int | None = None
        self._routed = False
        self._asked: dict[str, str] = {}  # of each request, the id that its part has at the server
        self._ended: set[str] = set()
        self._aborts: set[asyncio.Task[None]] = set()

    async def start(self, activated: Activated) -> None:
        """Connect, and see that the server is new enough and which weights it serves.

        Raises:
            EngineError: nothing answers there, or not as SGLang does; an SGLang that is too old, that samples
                with parameters of its own, or that was not started to tell the experts to be recorded.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        try:
            status, info = await self._ask("/model_info")
            if status == 404:  # a router knows the older name only
                status, info = await self._ask("/get_model_info")
                self._routed = True
            if status != 200 or not isinstance(info, dict):
                raise EngineError(f"{self.url}/model_info answers {status}: is it an SGLang server?")
            self._version = policy_version_of(info.get("weight_version"), self._run, self.policy)
            await self._check_servers()
            check_preferred(info, self.url)
        except BaseException:
            await self._session.close()
            raise

    async def _check_servers(self) -> None:
        for url in await self._servers():
            try:
                _, told = await self._ask("/server_info", url)
                # What a router says is what one of its workers does.
                info = (await self._ask("/model_info", url))[1] if self._routed else None
            except EngineError:
                if not self._routed:
                    raise
                told = info = None  # a worker that only its router reaches
            check_preferred(info, url)
            if note := check_version(told, url):
                logging.getLogger(__name__).warning(note)
            elif self._routing is not None and told.get("enable_return_routed_experts") is False:
                raise EngineError(
                    f"{url} tells no routed experts: start it with --enable-return-routed-experts"
                )

    async def _servers(self) -> list[str]:
        """The servers themselves: those behind a router have routes that it lacks, /abort_request for one."""
        if not self._routed:
            return [self.url]
        _, told = await self._ask("/workers")
        try:
            return [worker["url"].rstrip("/") for worker in told["workers"]]
        except (TypeError, KeyError, AttributeError):
            return [self.url]

    async def _ask(self, path: str, url: str | None = None) -> tuple[int, Any]:
        """(status, the JSON that a GET is answered with, None if it is none)"""
        url = url or self.url
        try:
            timeout = aiohttp.ClientTimeout(total=ASK_S, sock_connect=CONNECT_S)
            async with self._session.get(f"{url}{path}", timeout=timeout) as reply:
                data = await reply.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            text = f"no SGLang server answers at {url} ({error!r}): start one, or correct --engine-url"
            raise EngineLostError(text) from error
        try:
            return reply.status, orjson.loads(data)
        except orjson.JSONDecodeError:
            return reply.status, None

    async def close(self) -> None:
        """Let go of the server; it runs on."""
        for task in self._aborts:
            task.cancel()
        await self._session.close()

    async def ready(self) -> None:
        """A server holds requests itself while its weights are being replaced."""

    async def generate(self, prompt: Prompt, sampling: Sampling, heard: Heard = unheard) -> Generation:
        """Sample a completion; one that the server ends before it is done, though nobody here asked, goes on.

        Raises:
            EngineError: the server cannot be reached, or says why it cannot answer.
        """
        begun = time.perf_counter()
        parts: list[Part] = []
        rest = prompt, sampling
        try:
            while True:
                self._asked[prompt.request_id] = rest[0].request_id
                parts.append(await self._part(*rest, heard))
                if prompt.request_id in self._ended or not may_go_on(parts, sampling):
                    break
                rest = the_rest(prompt, sampling, parts)
        finally:
            self._asked.pop(prompt.request_id, None)
            self._ended.discard(prompt.request_id)
        made = joined(prompt, sampling, parts, {"engine_us": int((time.perf_counter() - begun) * 1e6)})
        if made.version_spans:
            self._version = made.version_spans[-1].version
        return made

    async def _part(self, prompt: Prompt, sampling: Sampling, heard: Heard) -> Part:
        """One request, and what it brings."""
        stream = heard is not unheard
        asked = request_body(prompt, sampling, stream, self._routing)
        body = orjson.dumps(asked, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            async with self._session.post(f"{self.url}/generate", data=body) as reply:
                if reply.status != 200:
                    text = (await reply.text())[:500]
                    raise EngineError(f"{self.url}/generate answers {reply.status}: {text}")
                if stream:
                    answer = await _heard_out(reply, heard)
                else:
                    answer = orjson.loads(await reply.read())
        except (aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError) as error:
            raise EngineLostError(f"{self.url}/generate failed: {error!r}") from error
        return part(answer, prompt, self.policy, self._routing, self._run)

    async def abort(self, request_id: str) -> None:
        """Have a request ended; its own reply says what there is, and when."""
        if request_id in self._asked:
            self._ended.add(request_id)
            task = asyncio.create_task(self._abort(request_id))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _abort(self, request_id: str) -> None:
        """Say so until it has ended: a server that the request has not reached yet forgets the abort."""
        timeout = aiohttp.ClientTimeout(total=ASK_S, sock_connect=CONNECT_S)
        while (rid := self._asked.get(request_id)) is not None:
            try:
                # Of several servers the others do not know the request, and pass over it.
                for url in await self._servers():
                    body = orjson.dumps({"rid": rid})
                    async with self._session.post(
                        f"{url}/abort_request", data=body, timeout=timeout
                    ) as reply:
                        await reply.read()
            except (TimeoutError, OSError, aiohttp.ClientError, EngineError):
                return  # the request itself will fail likewise, and say so; or it runs to its end
            await asyncio.sleep(ABORT_AGAIN_S)

    def policy_version(self) -> int | None:
        """The version that was last seen."""
        return self._version

    def failure(self) -> str | None:
        """None: a server that is away now may come back."""
        return None

    def control(self) -> APIRouter | None:
        """None: it is controlled at its own address."""
        return None


async def _heard_out(reply: aiohttp.ClientResponse, heard: Heard) -> Json:
    """The last chunk of a stream, which ends with all ids: chunks hold all so far, or what is new.

    Raises:
        EngineError: the server reports an error, or the stream ends early.
    """
    ids: list[int] = []
    logprobs: list[Any] = []
    last: Json | None = None
    async for chunk in _chunks(reply):
        fresh, told = news(chunk, len(ids))
        if fresh:
            ids += fresh
            logprobs += told
            heard(fresh, [entry[0] for entry in told] or None)
        last = chunk
    if last is None or last["meta_info"].get("finish_reason") is None:
        raise EngineLostError("the server's stream ended before its last chunk")
    meta = last["meta_info"] | {"output_token_logprobs": logprobs}
    return last | {"output_ids": ids, "meta_info": meta}


async def _chunks(reply: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    """The events of a stream, however they are cut into packets. SGLang's hold one line of data each."""
    rest = b""
    async for data in reply.content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            text = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and text != b"[DONE]":
                yield orjson.loads(text)
