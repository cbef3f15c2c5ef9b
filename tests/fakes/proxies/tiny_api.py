"""An API that no agent speaks: a question and an answer, as small as one can be that is served everywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rollbook.ingest.endpoints.api import AgentApi, UpstreamForm
from rollbook.ingest.endpoints.upstream_reply import UpstreamChoice, UpstreamReply
from rollbook.ingest.fields import SamplingFields, validated
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store.errors import RequestError

PATH = "/v1/tiny/ask"


def read(body: Any, history: Any) -> ModelCall:
    """A question."""
    if not isinstance(body.get("ask"), str):
        raise RequestError(400, "no_question", "ask: send a text")
    messages = [{"role": "user", "content": body["ask"]}]
    fields = validated(SamplingFields, {k: v for k, v in body.items() if k == "stream"})
    rest = {k: v for k, v in body.items() if k != "ask"}
    return ModelCall(PATH, messages, None, fields, rest, items=[body["ask"]], own_fields=frozenset(["ask"]))


def reply(call: ModelCall, turns: Any, tokenizer: Any) -> Any:
    """The answer."""
    return {"answer": turns[0].reply["content"]}


class TinyWriter:
    """A line of JSON for each piece."""

    keep_alive = b"\n"

    def __init__(self, call: ModelCall, turn_ids: Sequence[str], tokenizer: Any) -> None:
        pass

    def begin(self) -> bytes:
        """Nothing."""
        return b""

    def piece(self, choice: int, reasoning: str, content: str, tokens: Any) -> bytes:
        """More of the answer."""
        return json.dumps({"more": content}).encode() + b"\n"

    def end(self, turns: Any) -> bytes:
        """The last line."""
        return b'{"over": true}\n'

    def failed(self, error: Any) -> bytes:
        """An error as the last line."""
        return json.dumps(error).encode() + b"\n"


def error(status: int, code: str, message: str) -> Any:
    """An error's body."""
    return {"wrong": code}


def gather(events: Any) -> Any:
    """The answer of a stream."""
    return {"answer": "".join(e["more"] for e in events if "more" in e)}


TINY = AgentApi(
    path=PATH,
    conversation="ask",
    read=read,
    reply=reply,
    writer=TinyWriter,
    error=error,
    upstream=UpstreamForm(
        read=lambda body, known: read(body, None),
        reply=lambda body: UpstreamReply(
            (UpstreamChoice({"role": "assistant", "content": body["answer"]}, "stop"),), None, {}
        ),
        gather=gather,
        last_event=re.compile(rb'data: \{"over"'),
        paths=(f"POST {PATH}",),
        key_header="x-api-key",
    ),
)
