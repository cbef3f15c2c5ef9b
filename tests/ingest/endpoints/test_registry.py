"""The registry of agents' APIs: a new API is one object, and all that depends on an API serves it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.proxies.in_process import InProcess
from tests.fakes.proxies.tiny_api import PATH, TINY

from rollbook.ingest.endpoints import registry
from rollbook.store.errors import EngineError


@pytest.fixture
def proxy(played: Callable[..., InProcess], monkeypatch: pytest.MonkeyPatch) -> InProcess:
    """A proxy that serves a fifth API, though no module of it knows of one."""
    monkeypatch.setitem(registry.APIS, PATH, TINY)
    return played()


@pytest.mark.parametrize("prefix", ["", "/t/named"])
def test_a_new_api_is_answered_and_recorded(proxy: Any, prefix: str) -> None:
    """On both of its routes, whole; the turn says through which endpoint it came."""
    reply = proxy.ask(prefix + PATH, {"ask": "Hi?"})
    assert (reply.status, reply.json) == (200, {"answer": "Hello"})
    [trajectory] = proxy.trajectories().values()
    [turn] = trajectory.turns.values()
    assert turn.requested.wire["endpoint"] == PATH
    assert trajectory.messages(turn) == [{"role": "user", "content": "Hi?"}]
    assert turn.completed.reply["content"] == "Hello"


def test_a_new_api_streams(proxy: InProcess) -> None:
    """In its own form, piece by piece, its end last."""
    reply = proxy.ask(f"/t/streamed{PATH}", {"ask": "Hi?", "stream": True})
    lines = [json.loads(line) for line in reply.data.splitlines()]
    assert "".join(line.get("more", "") for line in lines) == "Hello"
    assert lines[-1] == {"over": True}


def test_a_new_api_has_errors_of_its_own_form(proxy: InProcess) -> None:
    """For its own refusals and for those of the proxy; another API keeps its form."""
    assert proxy.ask(PATH, {}).json == {"wrong": "no_question"}
    assert proxy.ask(PATH, b"{").json["wrong"]
    proxy.engine.answer = lambda *_: EngineError("broken")
    assert proxy.ask(PATH, {"ask": "Hi?"}).json == {"wrong": "engine_failed"}
    assert set(proxy.ask("/v1/chat/completions", {}).json) == {"error"}


def test_fields_of_a_new_api_are_its_own(proxy: InProcess) -> None:
    """What its reader acts on is honoured; chat's names mean nothing to it."""
    reply = proxy.ask(f"/t/fields{PATH}", {"ask": "Hi?", "messages": [1]})
    assert reply.headers["x-rollbook-not-honoured"] == "messages"


def test_apis_are_switched_on_in_the_registry_alone(root: Path) -> None:
    """No module but an API's own names its path."""
    named = {
        path.relative_to(root / "ingest").as_posix()
        for path in (root / "ingest").rglob("*.py")
        if any(f'"{api}' in path.read_text() for api in registry.APIS)
    }
    own = ("chat", "completions", "responses_form", "messages")
    assert named == {f"endpoints/{name}.py" for name in own}
