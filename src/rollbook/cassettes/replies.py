"""Writes a recorded answer as the bytes of the API and the kind of reply that are requested now. Pure.

An answer is written by the same code as the proxy's own. Where it came from an upstream, through
the API that it is requested through now, what else the upstream said replaces what that code
writes: ids, the model's name, usage, a response's items, a message's blocks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import orjson
from tokenizers import Tokenizer, models

from rollbook.cassettes.tape import RecordedRequest, recorded_blocks, recorded_output, upstream_ids
from rollbook.edge.server_sent_events import DONE, event, events_of
from rollbook.ingest.endpoints.api import AgentApi
from rollbook.ingest.endpoints.messages import PATH as MESSAGES
from rollbook.ingest.endpoints.responses_form import PATH as RESPONSES
from rollbook.ingest.tokens.chat_template import ChatTokenizer, compile_template
from rollbook.ingest.tokens.template_traits import TemplateTraits
from rollbook.ingest.turns.in_flight import CompletedTurn
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store.events import Json

MOST_PIECES = 64
"""Pieces in which the text of one choice is streamed: the log does not say how it came."""
_NOT_SAID = frozenset(["choice", "error", "prompt_token_ids", "token_ids", "logprobs"])
"""What is kept of an upstream's reply that is no field of the reply itself."""
_OF_THE_BEGINNING = ("id", "model", "created_at")


def whole_reply(
    api: AgentApi, call: ModelCall, request: RecordedRequest, tokenizer: ChatTokenizer | None
) -> bytes:
    """A recorded answer as one object.

    Args:
        tokenizer: for the texts of tokens; None: logprobs are left out.
    """
    call, words = _spelled(call, tokenizer)
    turns = list(request.turns)
    body = api.reply(call, turns, words)
    if _passed_on(api, request):
        body = _WHOLE.get(api.path, _whole_choices)(body, turns)
    return orjson.dumps(body)


def streamed_reply(
    api: AgentApi, call: ModelCall, request: RecordedRequest, tokenizer: ChatTokenizer | None
) -> Iterator[bytes]:
    """A recorded answer as the packets of a stream: the beginning, each piece of text, and the rest.

    Args:
        tokenizer: as for `whole_reply`.
    """
    call, words = _spelled(call, tokenizer)
    turns = list(request.turns)
    writer = api.writer(call, [turn.turn_id for turn in turns], words)
    packets = [writer.begin()]
    for choice, turn in enumerate(turns):
        tokens = _tokens(turn) if call.logprobs else []
        for reasoning, content in _pieces(turn):
            packets.append(writer.piece(choice, reasoning, content, tokens))
            tokens = []
    packets.append(writer.end(turns))
    named = api.path in (RESPONSES, MESSAGES)
    change = _STREAMED.get(api.path, _chunk)
    for packet in packets:
        if packet and _passed_on(api, request):
            packet = _changed(packet, functools.partial(change, turns), named=named)
        if packet:
            yield packet


@functools.cache
def _no_tokenizer() -> ChatTokenizer:
    """A tokenizer without a vocabulary, for replies that show no tokens."""
    template = compile_template("")
    return ChatTokenizer(Tokenizer(models.BPE()), template, {}, (), 0, TemplateTraits(), "", "")


def _spelled(call: ModelCall, tokenizer: ChatTokenizer | None) -> tuple[ModelCall, ChatTokenizer]:
    return (replace(call, logprobs=False), _no_tokenizer()) if tokenizer is None else (call, tokenizer)


def _tokens(turn: CompletedTurn) -> list[tuple[int, float]]:
    done = turn.completed
    if done.logprobs is None:
        return []
    return list(zip(done.completion_ids.tolist(), done.logprobs.tolist(), strict=True))


def _pieces(turn: CompletedTurn) -> Iterator[tuple[str, str]]:
    """(reasoning, content) piece by piece; a single empty piece where there is neither."""
    reasoning, content = turn.reply.get("reasoning_content") or "", turn.reply.get("content") or ""
    pieces = [*((part, "") for part in _words(reasoning)), *(("", part) for part in _words(content))]
    yield from pieces or [("", "")]


def _words(text: str) -> list[str]:
    words = re.findall(r"\s*\S+|\s+$", text)
    each = -(-len(words) // MOST_PIECES) or 1
    return ["".join(words[at : at + each]) for at in range(0, len(words), each)]


# What an upstream said ---------------------------------------------------------------------------


def _passed_on(api: AgentApi, request: RecordedRequest) -> bool:
    return bool(request.turns[0].completed.upstream) and request.asked.endpoint == api.path


def _facts(turn: CompletedTurn) -> Json:
    return {name: value for name, value in turn.completed.upstream.items() if name not in _NOT_SAID}


def _choice_facts(turn: CompletedTurn) -> Json:
    choice = turn.completed.upstream.get("choice")
    return choice if isinstance(choice, dict) else {}


def _whole_choices(body: Json, turns: list[CompletedTurn]) -> Json:
    for choice, turn in zip(body["choices"], turns, strict=True):
        facts = dict(_choice_facts(turn))
        if "tool_calls" in facts:
            choice["message"]["tool_calls"] = facts.pop("tool_calls")
        choice |= facts
    return {"choices": body["choices"]} | _facts(turns[0])


def _whole_response(body: Json, turns: list[CompletedTurn]) -> Json:
    # An upstream says the request's instructions and tools again, which are not recorded twice.
    echoed = {name: body[name] for name in ("instructions", "tools")}
    output = recorded_output(turns[0].completed) or body["output"]
    return echoed | _facts(turns[0]) | {"output": output}


def _whole_message(body: Json, turns: list[CompletedTurn]) -> Json:
    content = recorded_blocks(turns[0].completed) or body["content"]
    return {"type": "message", "role": "assistant", "content": content} | _facts(turns[0])


_WHOLE: dict[str, Callable[[Json, list[CompletedTurn]], Json]] = {
    RESPONSES: _whole_response,
    MESSAGES: _whole_message,
}


def _changed(packet: bytes, change: Callable[[Json], Json], *, named: bool) -> bytes:
    """Events of a stream, each changed."""
    events = [change(payload) for payload in events_of(packet)]
    written = b"".join(event(payload, payload["type"] if named else None) for payload in events)
    return written + (DONE if packet.endswith(DONE) else b"")


def _chunk(turns: list[CompletedTurn], chunk: Json) -> Json:
    facts = {name: value for name, value in _facts(turns[0]).items() if name not in ("usage", "object")}
    usage = _facts(turns[0]).get("usage")
    if usage is not None and chunk.get("usage") is not None:
        facts["usage"] = usage
    for choice in chunk["choices"]:
        if choice["finish_reason"] is not None:
            choice_facts = _choice_facts(turns[choice["index"]])
            choice |= {name: value for name, value in choice_facts.items() if name != "tool_calls"}
    return chunk | facts


def _response_event(turns: list[CompletedTurn], payload: Json) -> Json:
    done = turns[0].completed
    names = dict(upstream_ids(done))
    payload = _renamed(payload, names)
    items = {item.get("id"): item for item in recorded_output(done)}
    if payload["type"] == "response.output_item.done":
        payload["item"] = items.get(payload["item"]["id"], payload["item"])
    response = payload.get("response")
    if response is not None and response["status"] == "in_progress":
        facts = _facts(turns[0])
        payload["response"] = response | {name: facts[name] for name in _OF_THE_BEGINNING if name in facts}
    elif response is not None:
        payload["response"] = _whole_response(response, turns)
    return payload


def _message_event(turns: list[CompletedTurn], payload: Json) -> Json:
    facts, done = _facts(turns[0]), turns[0].completed
    signatures = [block["signature"] for block in recorded_blocks(done) if block.get("signature")]
    if signatures:
        payload = _renamed(payload, {turns[0].turn_id: signatures[0]})
    if payload["type"] == "message_start":
        begun = {k: v for k, v in facts.items() if k not in ("stop_reason", "stop_sequence")}
        payload["message"] |= begun
    elif payload["type"] == "message_delta":
        payload["delta"] |= {k: facts[k] for k in ("stop_reason", "stop_sequence") if k in facts}
        payload["usage"] = facts.get("usage", payload["usage"])
    return payload


_STREAMED: dict[str, Callable[[list[CompletedTurn], Json], Json]] = {
    RESPONSES: _response_event,
    MESSAGES: _message_event,
}


def _renamed(value: Any, names: dict[str, str]) -> Any:
    """The value, with each text that is a key of `names` replaced."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    if isinstance(value, dict):
        return {name: _renamed(item, names) for name, item in value.items()}
    return value
