"""What an upstream's reply says, whole or as a stream, in chat form. Pure.

Ids and logprobs are kept where the upstream gives them (vLLM's and SGLang's `return_token_ids`); nothing is
ever tokenized here. A reply without them is text, and marked so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollbook.ingest.endpoints.messages import assistant_message
from rollbook.ingest.endpoints.responses_input import chat_messages
from rollbook.ingest.upstream.request import function_calls, sound_block
from rollbook.ingest.upstream.stream import gathered
from rollbook.store.errors import RequestError
from rollbook.store.events import Json


@dataclass(frozen=True, slots=True)
class UpstreamChoice:
    """One completion of a reply.

    Attributes:
        message: in chat form.
        finish_reason: OpenAI's; null where the reply ended early.
        index: its place among those of the reply.
        prompt_ids: what is told beside it as the ids of its prompt, whatever that is, or None.
        ids: sampled token ids, or None.
        logprobs: one for each of them, or None.
        extra: the other fields of the choice, as the upstream sent them.
    """

    message: Json
    finish_reason: str | None
    index: int = 0
    ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: Json = field(default_factory=dict)
    prompt_ids: Any = None

    def without_tokens(self) -> UpstreamChoice:
        """The text alone: tokens spell what was taken out of it."""
        told = {k: v for k, v in self.extra.items() if k != "logprobs"}
        return replace(self, ids=None, logprobs=None, extra=told, prompt_ids=None)


@dataclass(frozen=True, slots=True)
class UpstreamReply:
    """A whole reply: its choices, and the rest as it came.

    Attributes:
        prompt_ids: what is told as the ids of the prompt, once for all choices, or None.
        error: what the upstream says went wrong, perhaps after a part of the reply.
        placed: every choice says which one it is, each another; else they are counted as they came.
    """

    choices: tuple[UpstreamChoice, ...]
    prompt_ids: Any
    rest: Json
    error: Any = None
    placed: bool = True

    def without_tokens(self) -> UpstreamReply:
        """The text alone."""
        return replace(self, choices=tuple(c.without_tokens() for c in self.choices), prompt_ids=None)


_EMPTY = UpstreamReply((), None, {})


def read_reply(endpoint: str, body: Json) -> UpstreamReply:
    """A reply that came whole; without choices where it is none that is known."""
    reader = _READERS.get(endpoint)
    error = body.get("error")
    try:
        reply = _EMPTY if reader is None else reader(body)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RequestError):
        reply = _EMPTY
    return replace(reply, error=error) if error else reply


def read_stream(endpoint: str, events: Sequence[Json]) -> UpstreamReply:
    """A reply that came as events, whether it ended or not."""
    body = gathered(endpoint, events)
    return _EMPTY if body is None else read_reply(endpoint, body)


# Whole replies ------------------------------------------------------------------------------

_CHAT_PARTS = ("index", "message", "text", "finish_reason", "logprobs")
_IDS = ("token_ids", "response_token_ids")


def _openai(body: Json) -> UpstreamReply:
    """Chat completions and completions."""
    choices = tuple(_openai_choice(place, choice) for place, choice in enumerate(body["choices"]))
    said = [choice.get("index") for choice in body["choices"]]
    placed = len({c.index for c in choices}) == len(choices) and (None not in said or len(said) == 1)
    if not placed:
        choices = tuple(replace(choice, index=place) for place, choice in enumerate(choices))
    rest = _without(body, "choices", "prompt_token_ids")
    return UpstreamReply(choices, body.get("prompt_token_ids"), rest, placed=placed)


def _without(body: Json, *names: str) -> Json:
    """What else a body says; null is nothing."""
    return {k: v for k, v in body.items() if k not in names and v is not None}


def _openai_choice(place: int, choice: Json) -> UpstreamChoice:
    ids = next((choice[name] for name in _IDS if choice.get(name)), None)
    ids = ids if are_ids(ids) else None
    said = choice.get("logprobs")
    logprobs = _logprobs(said)
    fits = ids is not None and logprobs is not None and len(ids) == len(logprobs)
    told = _without(choice, *_CHAT_PARTS, "prompt_token_ids", *(_IDS if ids is not None else ()))
    if said and (not fits or _says_more(said)):
        told["logprobs"] = _without(said) if isinstance(said, dict) else said
    message = _message(choice)
    calls = (choice.get("message") or {}).get("tool_calls") or []
    if message.get("tool_calls", []) != calls:
        told["tool_calls"] = calls
    index = choice.get("index")
    return UpstreamChoice(
        message,
        choice.get("finish_reason"),
        place if index is None else int(index),
        ids,
        logprobs if fits else None,
        told,
        choice.get("prompt_token_ids"),
    )


def _message(choice: Json) -> Json:
    """The message; what is null or an empty list in it says nothing, whole or streamed."""
    message = choice.get("message")
    if message is None:
        return {"role": "assistant", "content": choice.get("text") or ""}
    said = {k: v for k, v in message.items() if v is not None and v != [] and k != "content"}
    calls = function_calls(said.pop("tool_calls", ()))
    if calls:
        said["tool_calls"] = calls
    content = message.get("content") or (None if said.keys() - {"role"} else "")
    return {"role": "assistant"} | said | {"content": content}


def are_ids(ids: Any) -> bool:
    """Whether these are token ids, as they can be stored."""
    return isinstance(ids, list) and all(type(i) is int and 0 <= i < 2**31 for i in ids)


def _logprobs(told: Any) -> list[float] | None:
    """Logprobs in either of OpenAI's forms, if there is a number for every token."""
    if not isinstance(told, dict):
        return None
    entries = told.get("content")
    numbers = (
        [entry.get("logprob") for entry in entries]
        if isinstance(entries, list)
        else told.get("token_logprobs")
    )
    sound = isinstance(numbers, list) and all(type(n) in (int, float) for n in numbers)
    return [float(n) for n in numbers] if sound and numbers is not None else None


def _says_more(told: Json) -> bool:
    """Whether there is more than a number for each token: what else it could have been."""
    entries = told.get("content")
    if isinstance(entries, list):
        return any(entry.get("top_logprobs") for entry in entries)
    return any(told.get("top_logprobs") or ())


_ANTHROPIC_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
}
_PLAIN_BLOCKS = {"text": {"type", "text"}, "tool_use": {"type", "id", "name", "input"}}
_KNOWN_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use")


def _anthropic(body: Json) -> UpstreamReply:
    blocks = body["content"]
    message = assistant_message("content", [sound_block(b) for b in blocks if b.get("type") in _KNOWN_BLOCKS])
    if message["content"] is None and len(message) == 2:
        message["content"] = ""
    calls = [b for b in blocks if b.get("type") == "tool_use"]
    for call, block in zip(message.get("tool_calls", ()), calls, strict=True):
        if "partial_input" in block:
            call["function"]["arguments"] = block["partial_input"]  # it was cut off
    plain = all(
        _without(b).keys() - {"citations"} <= _PLAIN_BLOCKS.get(b.get("type", ""), set())
        and not b.get("citations")
        and sound_block(b) == b
        for b in blocks
    )
    reason = _ANTHROPIC_REASONS.get(body.get("stop_reason") or "", body.get("stop_reason"))
    choice = UpstreamChoice(message, reason, extra={} if plain else {"content": blocks})
    return UpstreamReply((choice,), None, _without(body, "content", "role", "type"))


_RESPONSE_ITEMS = ("message", "reasoning", "function_call")
_UNANSWERED = ("failed", "cancelled", "queued")


def _response(body: Json) -> UpstreamReply:
    # The instructions and tools are the request's own, said once more.
    rest = _without(body, "output", "instructions", "tools")
    output, status = body["output"], body.get("status")
    if status in _UNANSWERED and not output:
        return UpstreamReply((), None, rest, error=f"the response is {status}")
    said = chat_messages([item for item in output if item.get("type") in _RESPONSE_ITEMS], lambda _: None)
    message: Json = {"role": "assistant", "content": None}
    for name in ("reasoning_content", "content"):
        texts = [part[name] for part in said if part.get(name)]
        message |= {name: "".join(texts)} if texts else {}
    calls = [call for part in said for call in part.get("tool_calls") or ()]
    if calls:
        message["tool_calls"] = calls
    elif len(message) == 2 and message["content"] is None:
        message["content"] = ""
    choice = UpstreamChoice(message, _ended(body, calls), extra={"output": output} if output else {})
    return UpstreamReply((choice,), None, rest)


def _ended(body: Json, calls: Sequence[Json]) -> str | None:
    match body.get("status"):
        case "completed":
            return "tool_calls" if calls else "stop"
        case "incomplete":
            reason = (body.get("incomplete_details") or {}).get("reason")
            return "content_filter" if reason == "content_filter" else "length"
    return None


_READERS: Mapping[str, Callable[[Json], UpstreamReply]] = {
    "/v1/chat/completions": _openai,
    "/v1/completions": _openai,
    "/v1/responses": _response,
    "/v1/messages": _anthropic,
}
