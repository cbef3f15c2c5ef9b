"""What an upstream's reply says, whole or as a stream, in chat form. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollbook.ingest.endpoints.api import UpstreamForm
from rollbook.ingest.endpoints.upstream_reply import NO_REPLY, UpstreamReply
from rollbook.store.errors import RequestError
from rollbook.store.events import Json


def read_reply(form: UpstreamForm, body: Json) -> UpstreamReply:
    """A reply that came whole; without choices where it is none that is known."""
    error = body.get("error")
    try:
        reply = form.reply(body)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RequestError):
        reply = NO_REPLY
    return replace(reply, error=error) if error else reply


def gathered(form: UpstreamForm, events: Sequence[Json]) -> Json | None:
    """The whole reply, in the form in which the API gives it unstreamed; None where there is none.

    An error within the stream is in it as `error`.
    """
    try:
        whole = form.gather(events)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError):
        return None
    error = next((e["error"] for e in events if e.get("error")), None)
    if error is None:
        error = next((e for e in events if e.get("type", e.get("object")) == "error"), None)
    return whole if error is None else (whole or {}) | {"error": error}
