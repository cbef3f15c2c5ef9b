"""SGLang over its native `/generate`: ids in, ids, logprobs and weight versions out.

Nothing here goes through text: SGLang's OpenAI routes render and parse by themselves, and their streams leave
logprobs out. One server, or a router in front of several. It is asked with aiohttp: with 50 requests at once
httpx takes 27 times the CPU.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
from fastapi import APIRouter

from rollbook.ingest.engines.engine import Activated, Generation, Heard, Prompt, Sampling, unheard
from rollbook.ingest.engines.sglang_wire import generation, news, policy_version_of, request_body
from rollbook.store.errors import EngineError
from rollbook.store.events import Json

CONNECT_S = 10.0
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
        takes_images: whether its model does.
        key: sent as a bearer token, for servers started with --api-key.
    """

    name = "sglang"
    honoured = _HONOURED

    def __init__(
        self, url: str, *, policy: str = "actor", takes_images: bool = False, key: str | None = None
    ) -> None:
        self.url, self.policy, self.takes_images = url.rstrip("/"), policy, takes_images
        self._headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {key}"} if key else {}
        )
        self._version: int | None = None
        self._asked: set[str] = set()
        self._aborts: set[asyncio.Task[None]] = set()

    async def start(self, activated: Activated) -> None:
        """Connect, and see which weights are served.

        Raises:
            EngineError: nothing answers there, or not as SGLang does.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        try:
            self._version = policy_version_of((await self._model_info()).get("weight_version"))
        except BaseException:
            await self._session.close()
            raise

    async def _model_info(self) -> Json:
        try:
            async with self._session.get(f"{self.url}/model_info") as reply:
                info = orjson.loads(await reply.read())
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
            text = f"no SGLang server answers at {self.url} ({error!r}): start one, or correct --engine-url"
            raise EngineError(text) from error
        if reply.status != 200 or not isinstance(info, dict):
            raise EngineError(f"{self.url}/model_info answers {reply.status}: is it an SGLang server?")
        return info

    async def close(self) -> None:
        """Let go of the server; it runs on."""
        for task in self._aborts:
            task.cancel()
        await self._session.close()

    async def ready(self) -> None:
        """A server holds requests itself while its weights are being replaced."""

    async def generate(self, prompt: Prompt, sampling: Sampling, heard: Heard = unheard) -> Generation:
        """Sample a completion.

        Raises:
            EngineError: the server cannot be reached, or says why it cannot answer.
        """
        stream = heard is not unheard
        body = orjson.dumps(request_body(prompt, sampling, stream), option=orjson.OPT_SERIALIZE_NUMPY)
        begun = time.perf_counter()
        self._asked.add(prompt.request_id)
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
            raise EngineError(f"{self.url}/generate failed: {error!r}") from error
        finally:
            self._asked.discard(prompt.request_id)
        took = {"engine_us": int((time.perf_counter() - begun) * 1e6)}
        made = generation(answer, sampling, self.policy, took)
        if made.version_spans:
            self._version = made.version_spans[-1].version
        return made

    async def abort(self, request_id: str) -> None:
        """Have a request ended; its own reply says what there is, and when."""
        if request_id in self._asked:
            task = asyncio.create_task(self._abort(request_id))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _abort(self, request_id: str) -> None:
        """Say so until it has ended: a server that the request has not reached yet forgets the abort."""
        body = orjson.dumps({"rid": request_id})
        while request_id in self._asked:
            try:
                async with self._session.post(f"{self.url}/abort_request", data=body) as reply:
                    await reply.read()
            except (TimeoutError, OSError, aiohttp.ClientError):
                return  # the request itself will fail likewise, and say so
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
        raise EngineError("the server's stream ended before its last chunk")
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
