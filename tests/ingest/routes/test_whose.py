"""A proxy says whose it is, proves it to who knows the store, and is controlled for its own run alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest
from fastapi import Depends, FastAPI, Request
from tests.fakes.proxies.in_process import InProcess

from rollbook.edge.errors import add_error_replies
from rollbook.ingest.cluster.aggregate import only_for
from rollbook.ingest.endpoints.registry import error_body
from rollbook.store.secret import store_secret
from rollbook.store.whose import ASKS, FOR, PROVES, PROVING, ProxyIdentity, proof

OWN = ProxyIdentity("store-1", "sums", "start-1")


def test_what_is_wanted_and_what_is_there() -> None:
    """Store and run, and the start where one is wanted; the reason has both names."""
    assert ProxyIdentity().refuses(OWN) is None
    assert ProxyIdentity("store-1", "sums").refuses(OWN) is None
    assert ProxyIdentity("store-1", "sums", "start-1").refuses(OWN) is None
    assert ProxyIdentity("store-1", "words").refuses(OWN) == (
        "is of run 'sums' of store store-1, and not of run 'words' of store store-1"
    )
    assert "store store-2" in (ProxyIdentity("store-2", "sums").refuses(OWN) or "")
    assert "another start" in (ProxyIdentity("store-1", "sums", "start-2").refuses(OWN) or "")
    for identity in (OWN, ProxyIdentity(), ProxyIdentity("a/b", "é %2F", "")):
        assert ProxyIdentity.of_header(identity.header) == identity


def test_it_says_and_proves_whose_it_is(played: Callable[..., InProcess]) -> None:
    """The proof is of the word that was sent, and cannot be made without the store's secret."""
    proxy = played()
    reply = proxy.run(proxy.client.get("/healthz", headers={ASKS: "a word"}))
    health = reply.json()
    assert (health["store"], health["run"]) == (proxy.store.store_id, "default")
    secret, own = store_secret(proxy.store.path, PROVING), ProxyIdentity(proxy.store.store_id, "default")
    assert reply.headers[PROVES] == proof(secret, "a word", own)
    assert len({proof(secret, "another", own), proof(b"x" * 32, "a word", own), reply.headers[PROVES]}) == 3
    assert PROVES not in proxy.run(proxy.client.get("/healthz")).headers


@pytest.fixture
def controlled() -> httpx.AsyncClient:
    """A route that is for the proxy's own run alone."""
    app = FastAPI()
    add_error_replies(app, lambda code: None, error_body)

    @app.post("/engine/update_weight_version", dependencies=[Depends(only_for(OWN))])
    async def update(request: Request) -> Any:
        return orjson.loads(await request.body())

    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


@pytest.mark.parametrize(
    ("headers", "name", "status"),
    [
        ({}, "7", 200),
        ({}, "sums/actor/7/0123456789ab", 200),
        ({FOR: OWN.header}, "sums/actor/7/0123456789ab", 200),
        ({}, "words/actor/7/0123456789ab", 409),
        ({FOR: ProxyIdentity("store-1", "words").header}, "7", 409),
        ({FOR: ProxyIdentity("store-2", "sums").header}, "7", 409),
        ({FOR: ProxyIdentity("store-1", "sums", "start-2").header}, "7", 409),
    ],
)
def test_weights_of_another_run_are_refused(
    controlled: httpx.AsyncClient, headers: dict[str, str], name: str, status: int
) -> None:
    """By whom the trainer says that it is for, and by the name that it gives them."""

    async def asked() -> httpx.Response:
        return await controlled.post(
            "/engine/update_weight_version", json={"new_version": name}, headers=headers
        )

    reply = asyncio.run(asked())
    assert reply.status_code == status
    if status == 409:
        assert reply.json()["error"]["code"] == "other_run"
        assert "'sums'" in reply.json()["error"]["message"]
