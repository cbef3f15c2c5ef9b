"""What a client was answered when a recorded turn failed, read from the recorded error. Pure.

The log keeps an error's text. An upstream's begins with the status that it answered with; one of the proxy's
own is the error as Python writes it, and the proxy answers each kind of error in one way.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

import orjson

from rollbook.ingest.http.error_replies import describe
from rollbook.store import errors
from rollbook.store.events import Json

_UPSTREAM = re.compile(r"the upstream answers (?P<status>\d{3}): (?P<body>.*)", re.DOTALL)
_RAISED = re.compile(r"(?P<kind>\w+)\((?P<said>.*)\)", re.DOTALL)
_NO_REPLY = 502


@dataclass(frozen=True, slots=True)
class Failure:
    """A recorded failure, as a client saw it.

    Attributes:
        body: as the upstream gave it; None: to be made in the form of the API.
    """

    status: int
    code: str
    message: str
    body: Json | None = None


NEVER_ENDED = Failure(_NO_REPLY, "never_answered", "the recording ends before this request was answered")


def failure_of(error: str) -> Failure:
    """The failure that an error in the log tells of."""
    upstream = _UPSTREAM.fullmatch(error)
    if upstream is not None:
        try:
            body = orjson.loads(upstream["body"])
        except orjson.JSONDecodeError:
            body = None
        whole = body if isinstance(body, dict) else None
        return Failure(int(upstream["status"]), "recorded_error", upstream["body"], whole)
    raised = _RAISED.fullmatch(error)
    kind = getattr(errors, raised["kind"], None) if raised else None
    if raised and isinstance(kind, type) and issubclass(kind, errors.RollbookError):
        return Failure(*_described(kind, raised["said"]))
    if raised:
        return Failure(500, "internal_error", f"{raised['kind']} in the proxy; its log says more")
    return Failure(_NO_REPLY, "engine_failed", error)


def _described(kind: type[errors.RollbookError], said: str) -> tuple[int, str, str]:
    """What the proxy answers to an error of this kind."""
    try:
        given = ast.literal_eval(f"({said},)") if said else ()
        return describe(kind(*given))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return describe(errors.EngineError(said))
