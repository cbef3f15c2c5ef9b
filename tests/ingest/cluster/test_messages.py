"""What has the proxies' token and no form of theirs is a 400 and one line, never a traceback."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest

from rollbook.ingest.cluster.messages import PREFIX, TOKEN_HEADER, check_answer, check_question
from rollbook.ingest.cluster.peers import PeerBus
from rollbook.ingest.cluster.setup import OfPeers
from rollbook.store.errors import RequestError

BEGUN = {"from": 1, "process": "p"}
ENTER = {"token": 1, "name": "t", "group": None, "split": "train"}
SOUND: list[tuple[str, Any]] = [
    ("holds", BEGUN | {"holds": [0, 1], "proxies": ["a"], "lanes": ["b"]}),
    ("give-back", BEGUN | {"seat": 1}),
    ("enter", BEGUN | {"seat": 0, "words": ENTER}),
    ("kept", BEGUN | {"seat": 0, "words": ENTER}),
    ("left", BEGUN | {"seat": 0, "words": {"token": 4}}),
    ("knows", BEGUN | {"seat": 0, "words": {"replies": ["r"]}}),
]
MALFORMED: list[tuple[str, Any]] = [
    ("holds", []),
    ("holds", None),
    ("holds", {}),
    ("holds", {"from": "1", "process": "p", "holds": []}),
    ("holds", BEGUN | {"holds": [9]}),
    ("holds", BEGUN | {"holds": [-1]}),
    ("holds", BEGUN | {"holds": {"0": 1}}),
    ("holds", {"from": True, "process": "p", "holds": []}),
    ("give-back", BEGUN),
    ("enter", BEGUN | {"seat": 0}),
    ("enter", BEGUN | {"seat": 0, "words": []}),
    ("enter", BEGUN | {"seat": 2, "words": ENTER}),
    ("enter", BEGUN | {"seat": 0, "words": ENTER | {"name": 3}}),
    ("began", BEGUN | {"seat": 0, "words": {"token": [1]}}),
    ("knows", BEGUN | {"seat": 0, "words": {"replies": "r"}}),
    ("unheard-of", BEGUN | {"seat": 0, "words": {}}),
]


@pytest.mark.parametrize(("kind", "asked"), SOUND)
def test_what_proxies_ask_is_read(kind: str, asked: Any) -> None:
    """As it is sent, with what a later release may add."""
    assert check_question(kind, asked | {"more": 1}, 2)["from"] == 1


@pytest.mark.parametrize(("kind", "asked"), MALFORMED, ids=str)
def test_a_malformed_message(kind: str, asked: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Is refused before anything of it is read; one line of the log says why."""

    async def sent() -> httpx.Response:
        wire = SimpleNamespace(knows=lambda token: token == "secret", addresses=["http://a", "http://b"])
        bus = PeerBus(SimpleNamespace(wire=wire))  # type: ignore[arg-type]
        peers: Any = SimpleNamespace(bus=bus, seats=bus.seats)
        transport = httpx.ASGITransport(OfPeers(None, peers))
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            headers = {TOKEN_HEADER: "secret"}
            return await client.post(f"{PREFIX}{kind}", content=orjson.dumps(asked), headers=headers)

    with caplog.at_level(logging.WARNING):
        reply = asyncio.run(sent())
    assert (reply.status_code, reply.json()["error"][1]) == (400, "bad_message")
    [line] = caplog.records
    assert "\n" not in line.getMessage()
    assert line.exc_info is None


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("holds", {"holds": "all", "number": 0, "process": "p"}),
        ("holds", []),
        ("enter", {"words": {"reserved": "yes"}}),
        ("left", {"words": None}),
        ("left", {"error": ["a", "b", "c"]}),
        ("left", {"error": [400]}),
        ("left", {}),
    ],
)
def test_a_malformed_answer(kind: str, answer: Any) -> None:
    """Of whoever has a proxy's address is no answer."""
    with pytest.raises(RequestError, match=f"^{kind}: "):
        check_answer(kind, answer)


def test_answers() -> None:
    """Words, errors, and that it is for another one to say."""
    for answer in ({"words": {}}, {"moved": True}, {"error": [503, "away", "it is away"]}):
        assert check_answer("left", answer) == answer
    held = {"holds": [1], "number": 1, "process": "p"}
    assert check_answer("holds", held) == held
