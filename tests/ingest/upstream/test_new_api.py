"""An API that is in the registry alone passes in record-only mode, and is read there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.fakes.proxies.tiny_api import PATH, TINY
from tests.fakes.upstreams.server import HttpUpstream, sse, streamed, whole
from tests.ingest.upstream.conftest import Passed

from rollbook.ingest.endpoints import registry


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.APIS, PATH, TINY)


def test_a_new_api_is_recorded_whole_and_streamed(passed: Passed, upstream: HttpUpstream) -> None:
    """Every byte passes, and the log has both turns."""
    events = sse({"more": "Hel"}, {"more": "lo"}, {"over": True})
    upstream.answers += [whole({"answer": "Hello"}), streamed(events)]
    assert passed.post(PATH, {"ask": "Hi?"}).json() == {"answer": "Hello"}
    assert passed.post(PATH, {"ask": "Hi?", "stream": True}).content == events
    for turn in passed.turns(count=2):
        assert turn.requested.wire["endpoint"] == PATH
        assert turn.completed.reply["content"] == "Hello"


def test_a_new_api_passes_with_the_engines_key(
    passing: Callable[..., Passed], upstream: HttpUpstream
) -> None:
    """Its path is among those that are allowed, and the key goes where it expects it."""
    upstream.answers.append(whole({"answer": "Hello"}))
    assert passing(key="engine").post(PATH, {"ask": "Hi?"}).status_code == 200
    assert upstream.asked[-1].header("x-api-key") == "engine"


def test_an_error_on_the_way_has_the_new_apis_form(passing: Callable[..., Passed]) -> None:
    """An upstream that cannot be reached."""
    reply = passing(url="http://127.0.0.1:1").post(PATH, {"ask": "Hi?"})
    assert (reply.status_code, reply.json()) == (502, {"wrong": "engine_failed"})
