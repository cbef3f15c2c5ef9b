"""The scripted engine: a teacher. Answers from a file or a Python callable, tokenized as if sampled.

Its turns have token ids but no logprobs and no policy version: it has no weights. A script is either
`module_or_file.py:function`, called with (messages, tools) and giving the assistant message (or its
text), or a `.jsonl` file of `{"messages": [...], "reply": {...}}`, looked up by the messages.

A function that is an async generator gives the completion itself, piece by piece as a model samples it: no
template shapes it, each piece is tokenized alone, and the end-of-turn token follows the last one.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson
from fastapi import APIRouter

from rollbook.engines.engine import Activated, Generation, OnTokens, Prompt, Sampling, ignore_tokens
from rollbook.store.errors import ConfigError, EngineError, ReplyError, RequestError
from rollbook.store.events import Json, TokenIds, token_ids
from rollbook.store.load_object import load_object

Script = Callable[[Sequence[Json], Sequence[Json] | None], Any]
DigestOf = Callable[[Sequence[Json]], bytes]
"""Digest of a conversation, equal for two that say the same in different JSON."""


class Tokenizer(Protocol):
    """The part of the model's tokenizer that pieces of an answer need."""

    def encode(self, text: str) -> TokenIds: ...


class Sampled(Protocol):
    """A reply as its model would have sampled it."""

    @property
    def ids(self) -> TokenIds: ...


class Writer(Protocol):
    """Turns an answer into the ids that the model would have sampled, its end-of-turn token included."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def end_of_text(self) -> int: ...

    def write(self, messages: Sequence[Json], tools: Sequence[Json] | None, reply: Json) -> Sampled: ...


class ScriptedEngine:
    """Serves a script's answers as the model would have sampled them."""

    name = "scripted"
    honoured: frozenset[str] = frozenset()
    takes_images = False

    def __init__(self, writer: Writer, script: Script) -> None:
        self._writer = writer
        self._tokenizer = writer.tokenizer
        self._script = script
        self._aborted: dict[str, bool] = {}
        """Requests that are being answered piece by piece -> whether each was aborted."""

    async def start(self, activated: Activated) -> None:
        """Nothing to get ready."""

    async def close(self) -> None:
        """Nothing to stop."""

    async def ready(self) -> None:
        """Return at once: a script has no weights to wait for."""

    async def abort(self, request_id: str) -> None:
        """End an answer that is given piece by piece; any other runs to its end."""
        if request_id in self._aborted:
            self._aborted[request_id] = True

    async def generate(
        self, prompt: Prompt, sampling: Sampling, on_tokens: OnTokens = ignore_tokens
    ) -> Generation:
        """The script's answer as ids, its end-of-turn token included.

        Raises:
            EngineError: the script failed, or no model of the chat template says its answer.
        """
        try:
            answer = self._script(prompt.messages, prompt.tools)
            if inspect.isasyncgen(answer):
                return await self._piecewise(answer, prompt.request_id, on_tokens)
            if inspect.isawaitable(answer):
                answer = await answer
            reply = {"role": "assistant", "content": answer} if isinstance(answer, str) else dict(answer)
        except Exception as error:
            raise EngineError(f"the script failed: {error!r}") from error
        try:
            ids = self._writer.write(prompt.messages, prompt.tools, reply).ids
        except (RequestError, ReplyError) as error:
            raise EngineError(f"the script's answer {reply!r} cannot be rendered: {error}") from error
        on_tokens(ids.tolist(), None)
        return _generation(ids.tolist(), "stop")

    async def _piecewise(
        self, pieces: AsyncGenerator[Any, Any], request_id: str, on_tokens: OnTokens
    ) -> Generation:
        self._aborted[request_id] = False
        sampled: list[int] = []
        try:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    ids = self._tokenizer.encode(piece).tolist()
                    sampled += ids
                    on_tokens(ids, None)
                    if self._aborted[request_id]:
                        return _generation(sampled, "abort")
        finally:
            del self._aborted[request_id]
        stop = self._writer.end_of_text
        on_tokens([stop], None)
        return _generation([*sampled, stop], "stop")

    def policy_version(self) -> int | None:
        """None: a script has no weights."""
        return None

    def failure(self) -> str | None:
        """None: a script fails by single requests."""
        return None

    def control(self) -> APIRouter | None:
        """None: there is nothing to control."""
        return None


def _generation(ids: list[int], finish: str) -> Generation:
    return Generation(token_ids(ids), None, (), finish, {"kind": "none", "why": "scripted"})


def load_script(spec: str, digest_of: DigestOf) -> Script:
    """The script that a `--script` option names.

    Args:
        digest_of: the digest of messages by which a file's replies are looked up.

    Raises:
        EngineError: it cannot be loaded; the message says why.
    """
    if spec.endswith(".jsonl"):
        return _from_file(Path(spec), digest_of)
    if ":" not in spec:
        raise EngineError(f"--script {spec!r}: write file.py:function, module:function or file.jsonl")
    try:
        script = load_object(spec, "--script")
    except ConfigError as error:
        raise EngineError(str(error)) from error
    if not callable(script):
        raise EngineError(f"--script {spec!r}: {spec.rpartition(':')[2]} is not callable")
    return script  # type: ignore[no-any-return]


def _from_file(path: Path, digest_of: DigestOf) -> Script:
    replies: dict[bytes, Json] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise EngineError(f"--script {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            row = orjson.loads(line)
            replies[digest_of(row["messages"])] = row["reply"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise EngineError(f"--script {path}: line {number}: {error!r}") from error

    def answer(messages: Sequence[Json], tools: Sequence[Json] | None) -> Json:
        reply = replies.get(digest_of(messages))
        if reply is None:
            raise LookupError(f"{path} has no reply to these {len(messages)} messages")
        return reply

    return answer
