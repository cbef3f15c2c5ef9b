"""The APIs that agents speak. A new one is a folder beside this module, and a line here."""

from __future__ import annotations

from rollbook.edge.errors import openai_error
from rollbook.ingest.endpoints import chat, completions, messages, responses
from rollbook.ingest.endpoints.api import AgentApi
from rollbook.store.events import Json

APIS: dict[str, AgentApi] = {
    api.path: api for api in (chat.API, completions.API, responses.API, messages.API)
}
"""Path -> API."""


def api_below(path: str) -> AgentApi | None:
    """The API that a path belongs to: its own, or one below it."""
    fitting = [api for api in APIS.values() if path.startswith(api.path)]
    return max(fitting, key=lambda api: len(api.path), default=None)


def error_body(path: str, status: int, code: str, message: str) -> Json:
    """An error in the form of the API whose path a request's path holds; else in OpenAI's."""
    fitting = [api for api in APIS.values() if api.path in path]
    api = max(fitting, key=lambda api: len(api.path), default=None)
    return (openai_error if api is None else api.error)(status, code, message)
