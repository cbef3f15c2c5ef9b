"""Reading a request that passes to an upstream, which may take what this proxy does not know. Pure.

What cannot be read strictly is read leniently, for the sake of its messages alone; what cannot be read at all
is kept as it was sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from rollbook.ingest.endpoints.history import History, no_history
from rollbook.ingest.requests.fields import SamplingFields, validated
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store.errors import RequestError
from rollbook.store.events import Json

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
