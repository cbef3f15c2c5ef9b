"""Proxies that are given secrets in every way, and which of these are on disk afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import quote
from urllib.request import Request, urlopen

import orjson

from rollbook import store
from rollbook.bench.hostile.attack import RECORD, TOKENS
from rollbook.bench.hostile.secrets import (
    KNOWN,
    OPERATORS,
    PLACES,
    Planted,
    conversation,
    found_in,
    haystacks,
    known,
    pem,
    unknown,
)
from rollbook.bench.hostile.sender import Answer, connected, request
from rollbook.bench.hostile.stage import OPERATOR, Proxy, Stage
from rollbook.bench.hostile.upstream import REPEATS
from rollbook.store.upkeep.sealer import Sealer

SEGMENT = 4096
"""So small that some is sealed and some is not."""


@dataclass(slots=True)
class Searched:
    """What was found.

    Attributes:
        planted: outside the conversation.
        inside: within it, with `--redact known`.
        found: secret -> its place, and where it was seen first.
        unanswered: requests that were refused: their secrets were not tried.
    """

    planted: int = 0
    inside: int = 0
    found: dict[str, str] = field(default_factory=dict)
    unanswered: list[str] = field(default_factory=list)


def search(stage: Stage, seed: int = 0) -> Searched:
    """Plant secrets in every place, twice each, and look for them."""
    rng, searched = random.Random(seed), Searched()
    _by_clients(stage, rng, searched)
    for number, make in enumerate((known, unknown)):
        _by_operators(stage, number, [make(rng) for _ in OPERATORS], searched)
    _inside(stage, rng, searched)
    return searched


def _by_clients(stage: Stage, rng: random.Random, searched: Searched) -> None:
    """Clients' places, each with a secret of a known and of an unknown format."""
    proxy = _started(stage.proxy(TOKENS, "secrets-of-clients"))
    planted, numbers = [], itertools.count()
    for place, plant in PLACES.items():
        for make in (known, unknown):
            name, secret = f"s{next(numbers)}", make(rng)
            planted.append(Planted(place, secret))
            _send(proxy, f"/t/{name}/v1/chat/completions", _HELLO, {}, place, searched)
            sent = plant(name, secret)
            _send(proxy, sent.path, sent.body, sent.headers, place, searched)
    searched.planted += len(planted)
    _look(proxy, planted, searched)


def _by_operators(stage: Stage, number: int, secrets: Sequence[str], searched: Searched) -> None:
    """Operators' places; one upstream repeats its input in an error, another is away."""
    planted = [Planted(place, secret) for place, secret in zip(OPERATORS, secrets, strict=True)]
    client, login, query, key, ask = secrets
    upstream = stage.upstream(f"secrets-{number}").url().partition("//")[2]
    extra = {"api_key": ask, "headers": {"Authorization": ask}}
    ways = {
        "login": ["--engine-url", _address(upstream, login, query)],
        "key": ["--engine-url", _address(upstream, None, query), "--engine-key", key],
        "away": ["--engine-url", _address("127.0.0.1:1", login, query)],
    }
    for way, words in ways.items():
        words += ["--engine-ask", orjson.dumps(extra).decode()]
        proxy = _started(stage.proxy(RECORD, f"secrets-of-operators-{number}-{way}", words))
        for model in ("m", REPEATS):
            headers = {"Cookie": f"session={client}", "X-Rollbook-Trajectory": f"t-{model}"}
            _send(proxy, "/v1/chat/completions", _HELLO | {"model": model}, headers, "", searched)
        _look(proxy, planted, searched)
    searched.planted += len(planted)


def _address(host: str, login: str | None, query: str) -> str:
    """An engine's address with a login, and with a signed parameter."""
    user = "" if login is None else f"user:{quote(login, safe='')}@"
    return f"http://{user}{host}/v1?sig={quote(query, safe='')}"


def _inside(stage: Stage, rng: random.Random, searched: Searched) -> None:
    """Known formats within messages, texts and calls, with `--redact known`."""
    words = ["--redact", "known"]
    upstream = ["--engine-url", f"{stage.upstream('inside').url()}/v1"]
    for kind, more in ((TOKENS, []), (RECORD, upstream)):
        proxy = _started(stage.proxy(kind, f"secrets-inside-{kind}", [*words, *more]))
        planted = [Planted(f"conversation: {name}", make(rng)) for name, make in KNOWN.items()]
        planted.append(Planted("conversation: PEM", pem(rng)))
        for number, item in enumerate(planted):
            path = f"/t/i{number}/v1/chat/completions"
            _send(
                proxy, path, {"model": "m", "messages": conversation(item.secret)}, {}, item.place, searched
            )
        searched.inside += len(planted)
        _look(proxy, planted, searched)


_HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def _started(proxy: Proxy) -> Proxy:
    settings = proxy.store / "store.toml"
    settings.write_text(f"[append]\nsegment_bytes = {SEGMENT}\n[seal]\nkeep_wal_bytes = {4 * SEGMENT}\n")
    proxy.start()
    return proxy


def _send(proxy: Proxy, path: str, body: object, headers: object, place: str, searched: Searched) -> None:
    """Send a request with the operator's key unless it has one; one that is refused tries nothing."""
    fields = {"Content-Type": "application/json", "Authorization": f"Bearer {OPERATOR}"}
    fields |= dict(headers)  # type: ignore[call-overload]
    host = proxy.url.partition("//")[2]
    answer = asyncio.run(_sent(host, request("POST", path, host, fields, orjson.dumps(body))))
    if place and answer.status not in (200, 201):
        searched.unanswered.append(f"{place}: {answer.status} {answer.body[:200]!r}")


async def _sent(host: str, data: bytes) -> Answer:
    name, _, port = host.rpartition(":")
    async with connected(name, int(port)) as wire:
        await wire.send(data)
        return await wire.answer()


def _look(proxy: Proxy, planted: Sequence[Planted], searched: Searched) -> None:
    """End the proxy, seal what can be sealed, and search everywhere."""
    pages = [("/healthz", _page(proxy, "/healthz")), ("/metrics", _page(proxy, "/metrics"))]
    proxy.end()
    Sealer(store.open(proxy.store)).run_once()
    pages.append(("what it printed", proxy.log().encode()))
    places = found_in(planted, haystacks(proxy.store, pages))
    for item, where in places.items():
        searched.found.setdefault(item.secret, f"{item.place} ({item.secret[:8]}...) in {where}")


def _page(proxy: Proxy, path: str) -> bytes:
    with contextlib.suppress(OSError):
        http_request = Request(proxy.url + path, headers={"Authorization": f"Bearer {OPERATOR}"})
        with urlopen(http_request, timeout=5) as page:
            body: bytes = page.read()
            return body
    return b""
