"""A recorded failure is answered as it was: as the proxy answers each error, or by an upstream's own."""

from __future__ import annotations

import pytest

from rollbook.cassettes.tape import Failure, failure_of
from rollbook.edge.errors import describe
from rollbook.store.errors import (
    EngineError,
    EngineHeldError,
    EngineLostError,
    LimitError,
    RequestError,
    UnstorableError,
    WriteFailedError,
)

RAISED = [
    EngineError("the script failed: ValueError('it''s (so)')"),
    EngineLostError("gone"),
    EngineHeldError("held\nfor long"),
    RequestError(503, "engine_held", "the engine's weights are being replaced"),
    LimitError(413, "reply_too_large", "a reply"),
    UnstorableError("no stored form"),
    WriteFailedError("the disk is full"),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_an_error_of_the_proxy_is_the_one_it_answered_with(error: Exception) -> None:
    """The log holds `repr(error)`; status, code and message are those that its client got."""
    assert failure_of(repr(error)) == Failure(*describe(error))


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        (
            'the upstream answers 429: {"error": 1}',
            Failure(429, "recorded_error", '{"error": 1}', {"error": 1}),
        ),
        ("the upstream answers 503: <html>", Failure(503, "recorded_error", "<html>")),
        ("the upstream gave no reply: x", Failure(502, "engine_failed", "the upstream gave no reply: x")),
        ("EngineError(never closed", Failure(502, "engine_failed", "EngineError(never closed")),
        ("EngineError(lambda: 1)", Failure(502, "engine_failed", "lambda: 1")),
        ("ValueError('x')", Failure(500, "internal_error", "ValueError in the proxy; its log says more")),
    ],
)
def test_other_texts(text: str, failure: Failure) -> None:
    """An upstream's own status and body; no text is run."""
    assert failure_of(text) == failure
