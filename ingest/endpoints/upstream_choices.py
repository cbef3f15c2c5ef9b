"""The `choices` of an upstream's chat completions and completions, whole or streamed, in chat form. Pure.

Ids and logprobs are kept where the upstream gives them (vLLM's and SGLang's `return_token_ids`); nothing is
ever tokenized here. A reply without them is text, and marked so.

A request that passes to an upstream may hold what this proxy does not know.

What cannot be read strictly is read leniently, for the sake of its messages alone; what cannot be read at all
is kept as it was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from rollbook.ingest.endpoints.api import History, line_of, no_history
from rollbook.ingest.endpoints.upstream_reply import UpstreamChoice, UpstreamReply, are_ids, without_nulls
from rollbook.ingest.fields import SamplingFields, validated
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store.errors import RequestError
from rollbook.store.events import Json

LAST_EVENT = line_of(rb"data: ?\[DONE\]")
_CHAT_PARTS = ("index", "message", "text", "finish_reason", "logprobs")
_IDS = ("token_ids", "response_token_ids")


def read_reply(body: Json) -> UpstreamReply:
    """Chat completions and completions."""
    choices = tuple(_openai_choice(place, choice) for place, choice in enumerate(body["choices"]))
    indices = [choice.get("index") for choice in body["choices"]]
    placed = len({c.index for c in choices}) == len(choices) and (None not in indices or len(indices) == 1)
    if not placed:
        choices = tuple(replace(choice, index=place) for place, choice in enumerate(choices))
    rest = without_nulls(body, "choices", "prompt_token_ids")
    return UpstreamReply(choices, body.get("prompt_token_ids"), rest, placed=placed)


def _openai_choice(place: int, choice: Json) -> UpstreamChoice:
    ids = next((choice[name] for name in _IDS if choice.get(name)), None)
    ids = ids if are_ids(ids) else None
    raw = choice.get("logprobs")
    logprobs = _logprobs(raw)
    fits = ids is not None and logprobs is not None and len(ids) == len(logprobs)
    extra = without_nulls(choice, *_CHAT_PARTS, "prompt_token_ids", *(_IDS if ids is not None else ()))
    if raw and (not fits or _says_more(raw)):
        extra["logprobs"] = without_nulls(raw) if isinstance(raw, dict) else raw
    message = _message(choice)
    calls = (choice.get("message") or {}).get("tool_calls") or []
    if message.get("tool_calls", []) != calls:
        extra["tool_calls"] = calls
    index = choice.get("index")
    return UpstreamChoice(
        message,
        choice.get("finish_reason"),
        place if index is None else int(index),
        ids,
        logprobs if fits else None,
        extra,
        choice.get("prompt_token_ids"),
    )


def _message(choice: Json) -> Json:
    """The message without nulls and empty lists, so that whole and streamed replies are equal."""
    message = choice.get("message")
    if message is None:
        return {"role": "assistant", "content": choice.get("text") or ""}
    fields = {k: v for k, v in message.items() if v is not None and v != [] and k != "content"}
    calls = function_calls(fields.pop("tool_calls", ()))
    if calls:
        fields["tool_calls"] = calls
    content = message.get("content") or (None if fields.keys() - {"role"} else "")
    return {"role": "assistant"} | fields | {"content": content}


def _logprobs(raw: Any) -> list[float] | None:
    """Logprobs in either of OpenAI's forms, if there is a number for every token."""
    if not isinstance(raw, dict):
        return None
    entries = raw.get("content")
    numbers = (
        [entry.get("logprob") for entry in entries]
        if isinstance(entries, list)
        else raw.get("token_logprobs")
    )
    sound = isinstance(numbers, list) and all(type(n) in (int, float) for n in numbers)
    return [float(n) for n in numbers] if sound and numbers is not None else None


def _says_more(logprobs: Json) -> bool:
    """Whether there is more than a number for each token: what else it could have been."""
    entries = logprobs.get("content")
    if isinstance(entries, list):
        return any(entry.get("top_logprobs") for entry in entries)
    return any(logprobs.get("top_logprobs") or ())


def function_calls(calls: Sequence[Json]) -> list[Json]:
    """Calls of tools as calls of functions; of a custom tool the input is the arguments."""
    functions = []
    for call in calls:
        custom = call.get("custom")
        if isinstance(call.get("function"), dict):
            functions.append(call)
        elif isinstance(custom, dict):
            function = {"name": custom.get("name"), "arguments": custom.get("input")}
            functions.append({"id": call.get("id"), "type": "function", "function": function})
    return functions


def gather(events: Sequence[Json]) -> Json | None:
    """Chunks put together into a whole reply."""
    whole: Json = {}
    choices: dict[int, Json] = {}
    for event in events:
        if not isinstance(event.get("choices"), list):
            continue
        prompt_ids = event.get("prompt_token_ids") if event["choices"] else None
        here = ("choices", "prompt_token_ids") if prompt_ids else ("choices",)
        whole |= {k: v for k, v in event.items() if k not in here and v is not None}
        for chunk in event["choices"]:
            # What an event says of a prompt is of the choices that it holds.
            part = chunk if prompt_ids is None else {"prompt_token_ids": prompt_ids} | chunk
            _add_chunk(choices.setdefault(int(chunk.get("index") or 0), {}), part)
    if not choices:
        return None
    if whole.get("object") == "chat.completion.chunk":
        whole["object"] = "chat.completion"
    for choice in choices.values():
        message = choice.get("message", {})
        if "tool_calls" in message:
            message["tool_calls"] = [call for _, call in sorted(message["tool_calls"].items())]
    return whole | {"choices": [choices[i] | {"index": i} for i in sorted(choices)]}


def _add_chunk(choice: Json, chunk: Json) -> None:
    for name, value in chunk.items():
        if value is None or name == "index":
            continue
        if name == "delta":
            _add_delta(choice.setdefault("message", {"role": "assistant", "content": None}), value)
        elif name == "logprobs":
            logprobs = choice.setdefault("logprobs", {})
            for key, entries in value.items():
                if isinstance(entries, list):
                    logprobs.setdefault(key, []).extend(entries)
        elif name == "prompt_token_ids" and choice.get(name, value) != value:
            choice[name] = [choice[name], value]  # two that disagree are no ids
        elif name == "text" or (isinstance(value, list) and name != "prompt_token_ids"):
            choice[name] = choice.get(name, type(value)()) + value
        else:
            choice[name] = value


def _add_delta(message: Json, delta: Json) -> None:
    for name, value in delta.items():
        if value is None:
            continue
        if name == "tool_calls":
            for part in value:
                _add_call(message.setdefault("tool_calls", {}), part)
        elif name == "function_call":
            _add_function(message.setdefault("function_call", {}), value)
        elif isinstance(value, str) and name != "role":
            message[name] = (message.get(name) or "") + value
        elif isinstance(value, list):
            message[name] = [*(message.get(name) or ()), *value]
        else:
            message[name] = value


def _add_call(calls: dict[int, Json], part: Json) -> None:
    """Add a piece of a call. Without an index it is a whole call with an id, or continues the last one."""
    last = max(calls, default=-1)
    index = part.get("index")
    if index is None:
        goes_on = calls and part.get("id") in (None, "", calls[last].get("id"))
        index = last if goes_on else last + 1
    call = calls.setdefault(int(index), {"id": None, "type": "function"})
    for name, value in part.items():
        if name in ("function", "custom") and isinstance(value, dict):
            _add_function(call.setdefault(name, {}), value)
        elif name != "index" and value not in (None, ""):
            call[name] = value


def _add_function(function: Json, part: Json) -> None:
    for name, value in part.items():
        if isinstance(value, str):
            # A name comes in one piece, though some servers repeat it with every piece of the arguments.
            current = function.get(name, "")
            function[name] = current if name == "name" and current == value else current + value
        elif value is not None:
            function[name] = value


_SHAPING = ("messages", "input", "system", "instructions")
_PLACEHOLDER: Json = {"role": "user", "content": ""}

Soften = Callable[[list[Any]], list[Json]]
"""Messages as sent -> the same in a form that the strict reader takes."""


@dataclass(frozen=True, slots=True)
class LenientReader:
    """Reads an API's requests, strictly where that is possible.

    Attributes:
        path: the endpoint's.
        name: the field that holds the messages.
        read: the strict reader.
        soften: makes messages readable that hold what is not served.
        verbatim: what is recorded in place of the softened messages: for a form that is recorded as sent.
    """

    path: str
    name: str
    read: Callable[[Json, History], ModelCall]
    soften: Soften
    verbatim: Soften | None = None

    def call(self, body: Json) -> ModelCall:
        """The request in our form; where nothing is known of it, without messages and the items as sent."""
        try:
            return self.read(body, no_history)
        except RequestError:
            return self._leniently(body)

    def _leniently(self, body: Json) -> ModelCall:
        known, rest = loose_fields(body), {k: v for k, v in body.items() if k != self.name}
        sent = body.get(self.name, [])
        items = sent if isinstance(sent, list) else [sent]
        try:
            soft, added = self._softened(body)
            call = self.read(soft, no_history)
        except (RequestError, AttributeError, KeyError, TypeError, ValueError):
            return ModelCall(self.path, [], None, known, rest, items=items)
        messages = call.messages[:-1] if added else call.messages
        if self.verbatim is not None:
            messages = self.verbatim(items)
        kept = None if call.items is None and messages == items else items
        return ModelCall(self.path, messages, None, known, rest, items=kept)

    def _softened(self, body: Json) -> tuple[Json, bool]:
        """(what makes the body's messages, in a form that is served; whether a message was added to it).

        If the last message is the assistant's, the reply continues it.
        """
        soft = {k: body[k] for k in _SHAPING if k in body} | {"max_tokens": 1}
        sent = body.get(self.name)
        if not isinstance(sent, list):
            return soft, False
        sent = self.soften(sent)
        added = bool(sent) and sent[-1].get("role") == "assistant"
        return soft | {self.name: [*sent, _PLACEHOLDER] if added else sent}, added


def loose_fields(body: Json) -> SamplingFields:
    """The model and the count of completions, where they can be read; nothing else of the sampling."""
    n = body.get("n")
    fields: Json = {"model": body["model"]} if isinstance(body.get("model"), str) else {}
    fields |= {"n": n} if type(n) is int and 1 <= n <= 128 else {}
    return validated(SamplingFields, fields)


def as_text(value: Any) -> Json:
    """A part of any kind as a part of text."""
    return {"type": "text", "text": orjson.dumps(value).decode()}
