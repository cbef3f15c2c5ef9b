"""SGLang over its native `/generate`: ids in, ids, logprobs and weight versions out.

Nothing here goes through text: SGLang's OpenAI routes render and parse by themselves, and their
streams omit logprobs. It talks to one server, or to a router in front of several, with aiohttp:
with 50 requests at once httpx takes 27 times the CPU.

A completion may come in parts, since a pause in mode `abort`, the usual one, ends all requests
with the tokens they have. These are kept: the prompt and the sampled ids are sent again, as ids,
and sampling continues from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
from fastapi import APIRouter

from rollbook.engines.address import EngineAddress
from rollbook.engines.engine import (
    Activated,
    Generation,
    OnTokens,
    Prompt,
    Sampling,
    TopTokens,
    ignore_tokens,
)
from rollbook.engines.sglang.http import (
    ASK_S,
    CONNECT_S,
    TOLD_BYTES,
    Keys,
    SglangServer,
    read_answer,
    read_stream,
)
from rollbook.engines.sglang.protocol import (
    SEMANTICS,
    Part,
    Routing,
    experts_start,
    is_early,
    is_greedy,
    moved,
    new_tokens,
    part,
    request_body,
    weight_names,
)
from rollbook.engines.sglang.servers import Servers, Weights
from rollbook.store.errors import EngineError, EngineLostError, ModelError
from rollbook.store.events import Json, VersionSpan, token_ids
from rollbook.store.events.routed_experts import pack

KEEP_ALIVE_S = 4.0
"""A connection that was idle for longer is not used again: servers close theirs after five."""
ABORT_AGAIN_S = 0.5
LOOK_AGAIN_S = 5.0
"""How often a server whose weights are of no known version is looked at: it may have been started anew."""
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


class _UnansweredError(EngineLostError):
    """The connection ended before a byte of the answer came."""


class SglangEngine:
    """Samples from a server at `url`.

    Args:
        weights: maps a name of weights to a version, and identifies unknown ones.
        policy: name of the line of weights that it serves.
        takes_images: whether its model does.
        key: sent as a bearer token, for servers started with --api-key.
        admin_key: sent instead to control routes, for servers started with --admin-api-key.
        routed_experts: the model's routing shape, if tokens' experts are to be recorded.
    """

    name = "sglang"
    honoured = _HONOURED

    def __init__(
        self,
        url: str | EngineAddress,
        weights: Weights,
        *,
        policy: str = "actor",
        takes_images: bool = False,
        key: str | None = None,
        admin_key: str | None = None,
        routed_experts: Routing | None = None,
    ) -> None:
        address = EngineAddress.of(url).plain
        self.url, self.policy, self.takes_images = address.url, policy, takes_images
        self._keys, self._weights, self._routing = Keys(address, key, admin_key), weights, routed_experts
        self._keys.headers()  # or an error: there is a login and a key too
        self._version: int | None = None
        self._strange: str | None = None
        """What the last answer called weights of no known version."""
        self._looked = 0.0
        self._asked: dict[str, str] = {}  # of each request, the id that its part has at the server
        self._ended: set[str] = set()
        self._aborts: set[asyncio.Task[None]] = set()
        self._servers: Servers | None = None
        self._sessions: list[aiohttp.ClientSession] = []

    async def start(self, activated: Activated) -> None:
        """Connect, check that the server can be used, and find out which weights it serves.

        Raises:
            EngineError: nothing answers there, or not as SGLang does; the SGLang is too old,
                samples with parameters of its own, or does not return the experts, which are to
                be recorded.
            VersionError: it holds a version's files, but the log binds that version to other
                weights.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        pooled = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        fresh = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=pooled, timeout=timeout)
        self._fresh = aiohttp.ClientSession(connector=fresh, timeout=timeout)
        self._sessions += [self._session, self._fresh]
        try:
            server = SglangServer(self.url, self._session, self._keys)
            if self._servers is None:
                self._servers = Servers(server, self._weights)
            self._servers.first = server
            await self._servers.check(self._routing)
            await self.verify()
        except BaseException:
            await self._disconnect()
            raise

    async def look(self) -> list[tuple[str, Json]]:
        """Connect once and disconnect, before anything is recorded; returns each server's model info.

        Raises:
            EngineError, VersionError: it cannot be used, as `start` would find out.
        """

        async def activated(*_: Any) -> None:
            """None: a server holds the weights."""

        try:
            await self.start(activated)
            return await self.servers.models()
        finally:
            await self.close()

    def held(self) -> tuple[int, str] | None:
        """None: a server has the weights."""
        return None

    @property
    def servers(self) -> Servers:
        """Those behind its address, once it was started."""
        assert self._servers is not None
        return self._servers

    async def close(self) -> None:
        """Disconnect from the server; it keeps running."""
        for task in self._aborts:
            task.cancel()
        await self._disconnect()

    async def _disconnect(self) -> None:
        while self._sessions:
            await self._sessions.pop().close()

    # Which weights it serves ------------------------------------------------------------------

    async def verify(self) -> None:
        """Find out which version its weights are; `unverified` says why where that cannot be known.

        Raises:
            EngineLostError: it cannot be reached.
            VersionError: it holds a version's files, and the log says that the version is other weights.
        """
        self._looked = time.monotonic()
        await self.servers.verify()
        self._strange, self._version = None, self.servers.version

    def unverified(self) -> str | None:
        """Why its tokens have no version now, or None."""
        if self._servers is not None and self._servers.doubts:
            return "; ".join(self._servers.doubts.values())
        strange = self._strange
        return None if strange is None else f"it calls its weights {strange}, and they are not compared yet"

    def doubtful(self) -> bool:
        """Whether `verify` is due: the last answer named weights that are bound to no version."""
        if self._strange is None:
            return False
        return not self.servers.refutes(self._strange) or time.monotonic() > self._looked + LOOK_AGAIN_S

    def synced(self, version: int) -> None:
        """Note a verified version from a sync: earlier doubts are gone."""
        self._strange, self._version = None, version
        if self._servers is not None:
            self._servers.doubts.clear()

    async def _spoken_of(self, names: Sequence[str]) -> None:
        """Note the name by which an answer called the weights that made its tokens."""
        if any(self._weights.version_of(name) is None for name in names):
            with contextlib.suppress(EngineError):  # then they have none for now
                await self._weights.refresh()  # a sync may have bound it a moment ago
        if not names:
            return
        self._version = self._weights.version_of(names[-1])
        self._strange = names[-1] if self._version is None else None
        if self._strange is None and not self.servers.routed:
            self.servers.doubts.clear()

    async def ready(self) -> None:
        """A server holds requests itself while its weights are being replaced."""

    async def generate(
        self, prompt: Prompt, sampling: Sampling, on_tokens: OnTokens = ignore_tokens
    ) -> Generation:
        """Sample a completion. One that the server aborts by itself is continued.

        Raises:
            EngineError: the server cannot be reached, or says why it cannot answer.
        """
        begun = time.perf_counter()
        timings: Json = {}
        stream = on_tokens is not ignore_tokens

        def timed(ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
            timings.setdefault("first_token_us", int((time.perf_counter() - begun) * 1e6))
            on_tokens(ids, logprobs)

        parts: list[Part] = []
        rest = prompt, sampling
        try:
            while True:
                parts.append(await self._part(prompt.request_id, *rest, timed if stream else on_tokens))
                if prompt.request_id in self._ended or not can_continue(parts, sampling):
                    break
                rest = remaining_request(prompt, sampling, parts)
        finally:
            self._asked.pop(prompt.request_id, None)
            self._ended.discard(prompt.request_id)
        timings["engine_us"] = int((time.perf_counter() - begun) * 1e6)
        return join_parts(prompt, sampling, parts, timings)

    async def _part(self, request_id: str, prompt: Prompt, sampling: Sampling, on_tokens: OnTokens) -> Part:
        """One request and its result; sent once more if a connection ends before any answer.

        The server may have closed a kept connection just then, which is no reason to give it up.
        The second time the request has another id, since the server may know the first.
        """
        try:
            answer = await self._answer(self._session, request_id, prompt, sampling, on_tokens)
        except _UnansweredError:
            again = replace(prompt, request_id=f"again-{prompt.request_id}")
            try:
                answer = await self._answer(self._fresh, request_id, again, sampling, on_tokens)
            except _UnansweredError as error:
                raise EngineLostError(str(error)) from error
        await self._spoken_of(weight_names(answer))
        return part(answer, prompt, self.policy, self._routing, self._weights.version_of)

    async def _answer(
        self,
        session: aiohttp.ClientSession,
        request_id: str,
        prompt: Prompt,
        sampling: Sampling,
        on_tokens: OnTokens,
    ) -> Json:
        stream = on_tokens is not ignore_tokens
        request = request_body(prompt, sampling, stream, self._routing)
        body = orjson.dumps(request, option=orjson.OPT_SERIALIZE_NUMPY)
        self._asked[request_id] = prompt.request_id
        answered = False
        try:
            async with session.post(f"{self.url}/generate", data=body, headers=self._keys.headers()) as reply:
                answered = True
                if reply.status != 200:
                    text = (await read_answer(reply, TOLD_BYTES))[:500].decode(errors="replace")
                    raise EngineError(f"{self.url}/generate answers {reply.status}: {text}")
                if stream:
                    return await _streamed(reply, on_tokens)
                answer: Json = orjson.loads(await read_answer(reply))
                return answer
        except (aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError) as error:
            ended = isinstance(error, aiohttp.ClientConnectionError)
            ended = ended and not isinstance(error, aiohttp.ClientConnectorError | TimeoutError)
            lost = _UnansweredError if ended and not answered else EngineLostError
            raise lost(f"{self.url}/generate failed: {str(error) or type(error).__name__}") from error

    async def abort(self, request_id: str) -> None:
        """Abort a request; its own reply then returns what was sampled."""
        if request_id in self._asked:
            self._ended.add(request_id)
            task = asyncio.create_task(self._abort(request_id))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _abort(self, request_id: str) -> None:
        """Repeat the abort until the request has ended: a server that it has not reached yet
        forgets an abort."""
        timeout = aiohttp.ClientTimeout(total=ASK_S, sock_connect=CONNECT_S)
        while (rid := self._asked.get(request_id)) is not None:
            try:
                # Of several servers the others do not know the request, and pass over it.
                for server in await self.servers.all():
                    body, headers = orjson.dumps({"rid": rid}), self._keys.headers(control=True)
                    async with self._session.post(
                        f"{server.url}/abort_request", data=body, headers=headers, timeout=timeout
                    ) as reply:
                        await read_answer(reply, TOLD_BYTES)
            except (TimeoutError, OSError, aiohttp.ClientError, EngineError):
                return  # the request itself will fail in the same way, or runs to its end
            await asyncio.sleep(ABORT_AGAIN_S)

    def policy_version(self) -> int | None:
        """The version that was last seen, None if its weights are of no known version."""
        return self._version

    def failure(self) -> str | None:
        """None: a server that is away now may come back."""
        return None

    def control(self) -> APIRouter | None:
        """None: it is controlled at its own address."""
        return None


async def _streamed(reply: aiohttp.ClientResponse, on_tokens: OnTokens) -> Json:
    """The last chunk of a stream, completed to hold all ids: chunks hold all ids so far, or only new ones.

    Raises:
        EngineError: the server reports an error, or the stream ends early.
    """
    ids: list[int] = []
    logprobs: list[Any] = []
    last: Json | None = None
    async for chunk in _chunks(reply):
        fresh, entries = new_tokens(chunk, len(ids))
        if fresh:
            ids += fresh
            logprobs += entries
            on_tokens(fresh, [entry[0] for entry in entries] or None)
        last = chunk
    if last is None or last["meta_info"].get("finish_reason") is None:
        raise EngineLostError("the server's stream ended before its last chunk")
    meta = last["meta_info"] | {"output_token_logprobs": logprobs}
    return last | {"output_ids": ids, "meta_info": meta}


async def _chunks(reply: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    """The chunks of a stream, without the mark of its end."""
    async for message in read_stream(reply):
        if message.data != b"[DONE]":
            yield orjson.loads(message.data)


ALTERING = (
    "constraint",
    "frequency_penalty",
    "logit_bias",
    "min_new_tokens",
    "presence_penalty",
    "repetition_penalty",
)
"""Sampling parameters that change the logits before the softmax that logprobs are of."""
BARREN_PARTS = 3
"""So many parts without a token, one behind the other, are given up."""


def can_continue(parts: Sequence[Part], sampling: Sampling) -> bool:
    """Whether a completion goes on behind its last part, which was aborted from outside or ended early.

    Not under a constraint: its grammar would begin anew with each request, in the middle of a
    text.

    Raises:
        EngineError: the last parts were all without a token.
    """
    goes_on = parts[-1].aborted or is_early(parts[-1], sampling)
    if not goes_on or sampling.constraint or _made(parts) >= sampling.max_new_tokens:
        return False
    if len(parts) >= BARREN_PARTS and not any(len(piece.ids) for piece in parts[-BARREN_PARTS:]):
        raise EngineError(
            f"the server has aborted the request {BARREN_PARTS} times without a token: is it up?"
        )
    return True


def remaining_request(prompt: Prompt, sampling: Sampling, parts: Sequence[Part]) -> tuple[Prompt, Sampling]:
    """The request for the rest of a completion.

    The server now counts the sampled tokens as prompt, so it looks for a stop string in new text
    only: one that spans the cut does not stop it, though the reply, where it is read, still ends
    there. Frequency and presence penalties start counting anew, so they are weaker than was
    asked for. Logprobs are of penalized logits either way, and the turn says so: it is not
    trained.

    The request has a new id: two seconds after a stream's end SGLang aborts whatever has the
    stream's id then.
    """
    sampled = _made(parts)
    prompt = replace(prompt, request_id=f"{len(parts)}-{prompt.request_id}")
    if not sampled:
        return prompt, sampling
    ids = token_ids(np.concatenate([prompt.ids, *(piece.ids for piece in parts)]))
    return replace(prompt, ids=ids, known_tokens=len(ids)), replace(
        sampling,
        max_new_tokens=sampling.max_new_tokens - sampled,
        min_new_tokens=max(sampling.min_new_tokens - sampled, 0),
    )


def join_parts(prompt: Prompt, sampling: Sampling, parts: Sequence[Part], timings: Json) -> Generation:
    """The whole completion as a `Generation`.

    Raises:
        EngineError: it has no token, or expert ids that are none.
    """
    if not _made(parts):
        raise EngineError(f"the server answered without a token: {parts[-1].finish}")
    spans: list[VersionSpan] = []
    at = 0
    for piece in parts:
        for span in piece.version_spans:
            here = moved(span, at)
            if spans and (spans[-1].version, spans[-1].end) == (here.version, here.start):
                here = replace(spans.pop(), end=here.end)
            spans.append(here)
        at += len(piece.ids)
    reason = parts[-1].finish["type"]
    if (parts[-1].aborted or is_early(parts[-1], sampling)) and at >= sampling.max_new_tokens:
        reason = "length"
    return Generation(
        token_ids(np.concatenate([piece.ids for piece in parts])),
        np.concatenate([piece.logprobs for piece in parts]),
        tuple(spans),
        reason,
        _semantics(sampling),
        timings | _numbers(parts),
        _experts(prompt, parts),
        _top(sampling, parts),
    )


def _made(parts: Sequence[Part]) -> int:
    return sum(len(piece.ids) for piece in parts)


def _semantics(sampling: Sampling) -> Json:
    semantics: Json = SEMANTICS | {"temperature": 0.0 if is_greedy(sampling) else sampling.temperature}
    params = sampling.as_json()
    altered = [name for name in ALTERING if name in params]
    return semantics | ({"altered": altered} if altered else {})


def _numbers(parts: Sequence[Part]) -> Json:
    """The first request's cached tokens, all retractions, and how many requests continued it."""
    numbers: Json = {}
    if cached := parts[0].numbers.get("cached_tokens"):
        numbers["cached_tokens"] = cached
    if retractions := sum(piece.numbers.get("num_retractions", 0) for piece in parts):
        numbers["num_retractions"] = retractions
    return numbers | ({"resumed": len(parts) - 1} if len(parts) > 1 else {})


def _top(sampling: Sampling, parts: Sequence[Part]) -> TopTokens | None:
    """The likeliest tokens in all places; None if they were not asked for.

    Raises:
        EngineError: a part has none.
    """
    if not sampling.top:
        return None
    told = [piece.top for piece in parts if len(piece.ids)]
    if any(top is None or top.ids.shape[1] != sampling.top for top in told):
        raise EngineError(f"the server does not tell the {sampling.top} likeliest tokens of each place")
    whole = [top for top in told if top is not None]
    return TopTokens(np.concatenate([t.ids for t in whole]), np.concatenate([t.logprobs for t in whole]))


def _experts(prompt: Prompt, parts: Sequence[Part]) -> Json:
    """All positions' experts, packed; empty if a part has none."""
    experts = [piece.experts for piece in parts if len(piece.ids)]
    arrays = [piece for piece in experts if piece is not None]
    if not arrays or len(arrays) < len(experts):
        return {}
    try:
        return pack(np.concatenate(arrays), experts_start(prompt))
    except ValueError as error:
        raise EngineError(f"the server's routed_experts are not expert ids: {error}") from error


def routing_of(model: Path) -> Routing | None:
    """How many layers and experts per token a model directory has; None where it is no mixture of experts.

    Raises:
        ModelError: its configuration cannot be read.
    """
    file = model / "config.json"
    try:
        config = json.loads(file.read_bytes())
        config = config.get("text_config", config)
        topk = config.get("num_experts_per_tok")
        return None if topk is None else Routing(int(config["num_hidden_layers"]), int(topk))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} does not say what its model is made of: {error!r}") from error
