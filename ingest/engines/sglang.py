"""SGLang over its native `/generate`: ids in, ids, logprobs and weight versions out.

Nothing here goes through text: SGLang's OpenAI routes render and parse by themselves, and their streams leave
logprobs out. One server, or a router in front of several.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import orjson
from fastapi import APIRouter

from rollbook.ingest.engines.engine import Activated, Generation, Heard, Prompt, Sampling, unheard
from rollbook.store.errors import EngineError
from rollbook.store.events import Json, VersionSpan, token_ids

SEMANTICS = {"kind": "sampled", "of": "softmax(logits / temperature)", "filters": []}
FIRST_VERSION = "default"
"""What SGLang calls the weights it was started with, unless it was told a name."""
CONNECT_S = 10.0
ALTERING = (
    "constraint",
    "frequency_penalty",
    "logit_bias",
    "min_new_tokens",
    "presence_penalty",
    "repetition_penalty",
)
"""Sampling parameters that change the logits before the softmax that logprobs are of."""
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
        self._failure: str | None = None

    async def start(self, activated: Activated) -> None:
        """Connect, and see which weights are served.

        Raises:
            EngineError: nothing answers there, or not as SGLang does.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=self._headers
        )
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
        await self._session.close()

    async def ready(self) -> None:
        """A server holds requests itself while its weights are being replaced."""

    async def generate(self, prompt: Prompt, sampling: Sampling, heard: Heard = unheard) -> Generation:
        """Sample a completion.

        Raises:
            EngineError: the server cannot be reached, or says why it cannot answer.
        """
        stream = heard is not unheard
        body = orjson.dumps(_request(prompt, sampling, stream), option=orjson.OPT_SERIALIZE_NUMPY)
        begun = time.perf_counter()
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
        took = {"engine_us": int((time.perf_counter() - begun) * 1e6)}
        made = generation(answer, sampling, self.policy, took)
        if made.version_spans:
            self._version = made.version_spans[-1].version
        return made

    async def abort(self, request_id: str) -> None:
        """End a request; its own reply says what there is."""
        try:
            async with self._session.post(
                f"{self.url}/abort_request", data=orjson.dumps({"rid": request_id})
            ) as reply:
                await reply.read()
        except (TimeoutError, aiohttp.ClientError):
            return  # the request itself will fail likewise, and say so

    def policy_version(self) -> int | None:
        """The version that was last seen."""
        return self._version

    def failure(self) -> str | None:
        """None: a server that is away now may come back."""
        return None

    def control(self) -> APIRouter | None:
        """None: it is controlled at its own address."""
        return None


def _request(prompt: Prompt, sampling: Sampling, stream: bool) -> Json:
    body: Json = {
        "rid": prompt.request_id,
        "input_ids": prompt.ids,
        "sampling_params": sampling_params(sampling),
        "return_logprob": True,
        "stream": stream,
    }
    return body | ({"image_data": list(prompt.images)} if prompt.images else {})


def sampling_params(sampling: Sampling) -> Json:
    """SGLang's sampling parameters; what is as by default is left out.

    `no_stop_trim` and the two below keep the ids and what they spell untouched.
    """
    params: Json = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "sampling_seed": sampling.seed & (2**31 - 1),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    asked = sampling.as_json()
    for name in ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
        if name in asked:
            params[name] = asked[name]
    for name in ("min_new_tokens", "stop", "logit_bias"):
        if asked.get(name):
            params[name] = asked[name]
    for kind, value in (sampling.constraint or {}).items():
        params[kind] = orjson.dumps(value).decode() if kind == "json_schema" else value
    return params


async def _heard_out(reply: aiohttp.ClientResponse, heard: Heard) -> Json:
    """The last chunk of a stream, which ends with all ids: chunks hold all so far, or what is new.

    Raises:
        EngineError: the server reports an error, or the stream ends early.
    """
    ids: list[int] = []
    logprobs: list[Any] = []
    last: Json | None = None
    async for chunk in _chunks(reply):
        if "error" in chunk:
            raise EngineError(f"the server ends the stream: {chunk['error']}")
        meta = chunk["meta_info"]
        new = int(meta["completion_tokens"]) - len(ids)
        if new > 0:
            fresh = chunk["output_ids"][-new:]
            told = (meta.get("output_token_logprobs") or [])[-new:]
            ids += fresh
            logprobs += told
            heard(fresh, [entry[0] for entry in told] or None)
        last = chunk
    if last is None or last["meta_info"].get("finish_reason") is None:
        raise EngineError("the server's stream ended before its last chunk")
    meta = last["meta_info"] | {"output_token_logprobs": logprobs}
    return last | {"output_ids": ids, "meta_info": meta}


async def _chunks(reply: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    """The events of a stream, however they are cut into packets."""
    rest = b""
    async for data in reply.content.iter_any():
        *whole, rest = (rest + data).split(b"\n\n")
        for part in whole:
            text = part.strip().removeprefix(b"data:").strip()
            if text and text != b"[DONE]" and not text.startswith(b":"):
                yield orjson.loads(text)


def generation(answer: Json, sampling: Sampling, policy: str, timings: Json) -> Generation:
    """A server's answer in our terms. Pure.

    Raises:
        EngineError: it is not what was asked for.
    """
    try:
        meta = answer["meta_info"]
        entries = meta["output_token_logprobs"]
        ids = [entry[1] for entry in entries]
        reason = meta["finish_reason"]["type"]
        if ids != list(answer["output_ids"]):
            raise EngineError("the server's output_ids and output_token_logprobs are not of the same tokens")
        spans = _spans(meta, policy, len(ids))
    except (KeyError, TypeError, IndexError) as error:
        raise EngineError(f"the server's answer is not SGLang's: {error!r}") from error
    if not ids:
        raise EngineError(f"the server answered without a token: {meta['finish_reason']}")
    semantics: Json = SEMANTICS | {"temperature": sampling.temperature}
    altered = [name for name in ALTERING if name in sampling.as_json()]
    if altered:
        semantics["altered"] = altered
    for name in ("cached_tokens", "num_retractions"):
        if meta.get(name):
            timings = timings | {name: meta[name]}
    logprobs = np.asarray([entry[0] for entry in entries], dtype=np.float32)
    return Generation(token_ids(ids), logprobs, spans, reason, semantics, timings)


def _spans(meta: Json, policy: str, length: int) -> tuple[VersionSpan, ...]:
    """Which version made which tokens; none where the server names no version that is a number."""
    told = meta.get("weight_versions")
    if not told:
        told = [{"version": meta.get("weight_version"), "start": 0, "end": length}]
    spans = []
    for span in told:
        version = policy_version_of(span["version"])
        if version is not None and span["end"] > span["start"]:
            spans.append(VersionSpan(policy, version, int(span["start"]), int(span["end"])))
    return tuple(spans)


def policy_version_of(name: Any) -> int | None:
    """The policy version that SGLang's name of its weights says; the first weights are version 0."""
    if name == FIRST_VERSION:
        return 0
    text = str(name)
    return int(text) if text.isascii() and text.isdigit() else None
