"""Errors as HTTP replies, in the form of whichever API the request came to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from rollbook.store.errors import (
    SHORT,
    CatalogError,
    EndingError,
    EngineError,
    LimitError,
    RequestError,
    ShortageError,
    UnstorableError,
    WriteFailedError,
)
from rollbook.store.redaction import shown

FINAL = (400, 401, 403, 404, 405, 409, 413, 414, 415, 421, 422, 431)
"""Statuses that a retry would not change."""
ErrorForm = Callable[[str, int, str, str], dict[str, Any]]
"""(a request's path, status, code, message) -> the body of the reply."""
_OPENAI_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
ENDING_HEADER = "x-rollbook-ending"
"""Of a reply that says that its proxy is ending: another proxy, which sent the request on, asks the next."""
RETRY_AFTER_S = {503: 10, 429: 1, 408: 1}
"""Seconds; some clients give up if asked to wait for a minute or more."""


def describe(error: Exception) -> tuple[int, str, str]:
    """(status, code, message) of an error."""
    match error:
        case RequestError():
            return error.status, error.code, error.message
        case WriteFailedError() | CatalogError():
            return 503, "store_failed", shown(str(error))
        case OSError() if _is_short(error):
            return (
                503,
                "short",
                "there is too little left to answer this now, descriptors or memory: try again",
            )
        case UnstorableError():
            return 400, "not_recordable", f"the request cannot be recorded, so it is not answered: {error}"
        case EngineError():
            return 502, "engine_failed", shown(str(error))
        case ClientDisconnect():
            return 400, "client_gone", "the connection ended in the middle of the body"
        case HTTPException():
            return error.status_code, "not_served", f"{error.detail}: the README lists the routes"
        case _:
            return 500, "internal_error", f"{type(error).__name__} in the proxy; its log says more"


def _is_short(error: OSError) -> bool:
    """Whether the error is a lack of descriptors or memory, which passes."""
    return isinstance(error, ShortageError) or error.errno in SHORT


def openai_error(status: int, code: str, message: str) -> dict[str, Any]:
    """{"error": ...}"""
    kind = _OPENAI_KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}


def error_reply(path: str, error: Exception, form: ErrorForm) -> Response:
    """An error as a reply to a request of this path, with a code and a remedy."""
    status, code, message = describe(error)
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, EndingError):
        headers[ENDING_HEADER] = "true"
    if status in FINAL and code != "trajectory_busy":
        headers["x-should-retry"] = "false"
    if status in RETRY_AFTER_S:
        headers |= {"retry-after": str(RETRY_AFTER_S[status]), "x-should-retry": "true"}
    body = form(path, status, code, message)
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def add_error_replies(app: FastAPI, refused: Callable[[str], None], form: ErrorForm) -> None:
    """Answer every error with `error_reply`. The server also logs unexpected errors.

    Args:
        refused: called with the code of every refusal by a limit.
        form: of the replies.
    """

    async def reply(request: Request, error: Exception) -> Response:
        if isinstance(error, LimitError):
            refused(error.code)
        return error_reply(request.url.path, error, form)

    async def short(request: Request, error: Exception) -> Response:
        if isinstance(error, OSError) and not _is_short(error):
            raise error
        return await reply(request, error)

    app.add_exception_handler(OSError, short)
    ours = (RequestError, EngineError, WriteFailedError, CatalogError, UnstorableError)
    for kind in (*ours, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, reply)
