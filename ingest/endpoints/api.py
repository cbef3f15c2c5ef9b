"""An API that agents speak: everything that the proxy must know of it, in one object.

A module beside this one makes it; `registry` lists them.

`History` is what earlier turns of the same trajectory said, for requests that name them instead of repeating
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollbook.ingest.endpoints.upstream_reply import AskedPrompts, UpstreamReply, one_conversation
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.trajectories.live import Contents
from rollbook.ingest.turns.in_flight import CompletedTurn
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store.events import Json


class StreamWriter(Protocol):
    """Writes one reply as an API's stream. Each method returns the bytes to send."""

    def begin(self) -> bytes:
        """What comes before the first piece."""

    def piece(self, choice: int, reasoning: str, content: str, tokens: list[tuple[int, float]]) -> bytes:
        """More of a choice: text that was added, and ids with logprobs that were sampled."""

    def end(self, turns: list[CompletedTurn]) -> bytes:
        """The rest, once all is durable."""

    def failed(self, error: Json) -> bytes:
        """The end of a stream that fails on the way."""

    keep_alive: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseIds:
    """The ids of an API whose requests may name earlier responses, or items of them.

    Attributes:
        in_body: the ids that a request names.
        in_path: the id that a method and a path are about, or None.
        of_reply: the ids that an upstream's reply gives out.
        turn_of: the turn that one of our own ids stands for; None: it is none of ours.
    """

    in_body: Callable[[Json], Iterator[str]]
    in_path: Callable[[str, str], str | None]
    of_reply: Callable[[UpstreamReply], Iterator[str]]
    turn_of: Callable[[Any], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamForm:
    """How record-only mode reads an API's traffic, which may hold what this proxy does not know.

    Attributes:
        read: a request, given what the log has of its trajectory; it never raises for what it cannot read.
        reply: a whole reply; any error in reading it means that it holds no completion.
        gather: the events of a stream put together into the whole reply, or None.
        last_event: matches the line that begins the last event of a stream.
        paths: methods and paths that pass with the engine's own key; `*` is one part of a path.
        prompts: the prompts of a request.
        key_header: the header in which the upstream expects its key where the agent sent none.
        takes_fields: whether `--engine-ask` adds its fields to these requests.
    """

    read: Callable[[Json, Contents | None], ModelCall]
    reply: Callable[[Json], UpstreamReply]
    gather: Callable[[Sequence[Json]], Json | None]
    last_event: re.Pattern[bytes]
    paths: tuple[str, ...]
    prompts: Callable[[ModelCall], AskedPrompts] = one_conversation
    key_header: str = "authorization"
    takes_fields: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentApi:
    """One of the APIs that agents speak.

    Attributes:
        path: where its requests are posted, such as /v1/chat/completions.
        conversation: the field of a request that holds its messages, or its prompt.
        read: a request in our form. It raises RequestError, 400, where it is none.
        reply: the answer as one object.
        writer: what writes the answer as a stream.
        error: an error's body, of (status, code, message).
        upstream: how record-only mode reads it.
        count: a request to count the tokens of, at `path`/count_tokens; None: the API has no such route.
        ids: for requests that name earlier responses, which are also served at `path`/ID.
    """

    path: str
    conversation: str
    read: Callable[[Json, History], ModelCall]
    reply: Callable[[ModelCall, list[CompletedTurn], ChatTokenizer], Json]
    writer: Callable[[ModelCall, list[str], ChatTokenizer], StreamWriter]
    error: Callable[[int, str, str], Json]
    upstream: UpstreamForm
    count: Callable[[Json], ModelCall] | None = None
    ids: ResponseIds | None = None


def line_of(pattern: bytes) -> re.Pattern[bytes]:
    """A pattern at the beginning of a line."""
    return re.compile(rb"(?:^|[\r\n])" + pattern)


@dataclass(frozen=True, slots=True, eq=False)
class EarlierTurn:
    """A completed turn: the request's messages and the rest of its body, and the reply. In chat form."""

    messages: list[Json]
    request: Json
    reply: Json


History = Callable[[str], EarlierTurn | None]
"""Turn id -> the turn, if the request's trajectory has it."""


def no_history(turn_id: str) -> EarlierTurn | None:
    """The history of a trajectory that is not there yet."""
    return None
