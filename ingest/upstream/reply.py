"""What an upstream's reply says, whole or as a stream, in chat form. Pure.

Ids and logprobs are kept where the upstream gives them (vLLM's and SGLang's `return_token_ids`); nothing is
ever tokenized here. A reply without them is text, and marked so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollbook.ingest.endpoints.messages import assistant_message
from rollbook.ingest.endpoints.responses_input import chat_messages
from rollbook.ingest.upstream.stream import gathered
from rollbook.store.events import Json


@dataclass(frozen=True, slots=True)
class UpstreamChoice:
    """One completion of a reply.

    Attributes:
        message: in chat form.
        finish_reason: OpenAI's; null where the reply ended early.
        ids: sampled token ids, or None.
        logprobs: one for each of them, or None.
        told: what the upstream says of the choice besides.
    """

    message: Json
    finish_reason: str | None
    ids: list[int] | None = None
    logprobs: list[float] | None = None
    told: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UpstreamReply:
    """A whole reply: its choices, the prompt's ids where they are told, and the rest as it came."""

    choices: tuple[UpstreamChoice, ...]
    prompt_ids: list[int] | None
    rest: Json


_EMPTY = UpstreamReply((), None, {})


def read_reply(endpoint: str, body: Json) -> UpstreamReply:
    """A reply that came whole; without choices where it is none that is known."""
    reader = _READERS.get(endpoint)
    try:
        return _EMPTY if reader is None else reader(body)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError):
        return _EMPTY


def read_stream(endpoint: str, events: Sequence[Json]) -> UpstreamReply:
    """A reply that came as events, whether it ended or not."""
    body = gathered(endpoint, events)
    return _EMPTY if body is None else read_reply(endpoint, body)


# Whole replies ------------------------------------------------------------------------------

_CHAT_PARTS = ("index", "message", "text", "finish_reason", "token_ids", "response_token_ids", "logprobs")


def _openai(body: Json) -> UpstreamReply:
    """Chat completions and completions."""
    choices = tuple(_openai_choice(choice) for choice in body["choices"])
    prompt_ids = body.get("prompt_token_ids") or next(
        (c["prompt_token_ids"] for c in body["choices"] if c.get("prompt_token_ids")), None
    )
    rest = {k: v for k, v in body.items() if k not in ("choices", "prompt_token_ids")}
    return UpstreamReply(choices, prompt_ids, rest)


def _openai_choice(choice: Json) -> UpstreamChoice:
    message = choice.get("message")
    if message is None:
        message = {"role": "assistant", "content": choice.get("text", "")}
    message = {k: v for k, v in message.items() if v is not None or k == "content"}
    ids = choice.get("token_ids") or choice.get("response_token_ids")
    logprobs = _logprobs(choice.get("logprobs"))
    fits = ids is not None and logprobs is not None and len(ids) == len(logprobs)
    told = {k: v for k, v in choice.items() if k not in (*_CHAT_PARTS, "prompt_token_ids") and v is not None}
    if choice.get("logprobs") and not fits:
        told["logprobs"] = choice["logprobs"]
    return UpstreamChoice(message, choice.get("finish_reason"), ids, logprobs if fits else None, told)


def _logprobs(told: Any) -> list[float] | None:
    """Logprobs in either of OpenAI's forms."""
    if not isinstance(told, dict):
        return None
    if isinstance(told.get("content"), list):
        return [entry["logprob"] for entry in told["content"]]
    numbers = told.get("token_logprobs")
    return numbers if isinstance(numbers, list) and None not in numbers else None


_ANTHROPIC_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
}


def _anthropic(body: Json) -> UpstreamReply:
    known = [
        b for b in body["content"] if b.get("type") in ("text", "thinking", "redacted_thinking", "tool_use")
    ]
    message = assistant_message("content", known)
    odd = [b for b in body["content"] if b not in known]
    reason = _ANTHROPIC_REASONS.get(body.get("stop_reason") or "", body.get("stop_reason"))
    rest = {k: v for k, v in body.items() if k not in ("content", "role", "type")}
    choice = UpstreamChoice(message, reason, told={"content": odd} if odd else {})
    return UpstreamReply((choice,), None, rest)


_RESPONSE_ITEMS = ("message", "reasoning", "function_call")


def _response(body: Json) -> UpstreamReply:
    known = [item for item in body["output"] if item.get("type") in _RESPONSE_ITEMS]
    odd = [item for item in body["output"] if item not in known]
    said = chat_messages(known, lambda _: None)
    message: Json = {"role": "assistant", "content": None}
    for part in said:
        message |= {k: v for k, v in part.items() if v is not None}
    calls = [call for part in said for call in part.get("tool_calls") or ()]
    if calls:
        message["tool_calls"] = calls
    ended = {"completed": "tool_calls" if calls else "stop", "incomplete": "length"}
    rest = {k: v for k, v in body.items() if k != "output"}
    choice = UpstreamChoice(message, ended.get(body.get("status", "")), told={"output": odd} if odd else {})
    return UpstreamReply((choice,), None, rest)


_READERS: Mapping[str, Callable[[Json], UpstreamReply]] = {
    "/v1/chat/completions": _openai,
    "/v1/completions": _openai,
    "/v1/responses": _response,
    "/v1/messages": _anthropic,
}
