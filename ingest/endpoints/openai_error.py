"""Errors in the form that OpenAI's clients read. Pure."""

from __future__ import annotations

from rollbook.store.events import Json

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def openai_error(status: int, code: str, message: str) -> Json:
    """{"error": ...}"""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}
