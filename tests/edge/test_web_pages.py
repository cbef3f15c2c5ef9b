"""What a foreign web page could have a browser send is refused, and what other clients send is not."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.clients.streamed import PATHS, asked
from tests.fakes.proxies.in_process import InProcess

from rollbook.edge.web_pages import (
    AllowedHosts,
    WebPages,
    allowed_hosts,
    check_page,
    host_of,
    is_loopback,
    origin_of,
)
from rollbook.ingest.endpoints.registry import error_body
from rollbook.ingest.serve.serve import forwarding
from rollbook.store.errors import ConfigError, RequestError

LOOPBACK = allowed_hosts(
    "127.0.0.1", "Machine.example", ["Proxy.example.", "[2001:db8::1]"], ["http://localhost:3000"]
)
BEYOND = allowed_hosts("0.0.0.0", "machine")


def _refused(
    mine: AllowedHosts,
    *headers: tuple[str, str],
    method: str = "POST",
    path: str = "/v1/x",
    version: str = "1.1",
) -> int | None:
    """The status that refuses a request of these headers; None: it passes."""
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    try:
        check_page(mine, method, path, raw, version)
    except RequestError as error:
        return error.status
    return None


# Hosts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "loopback", "beyond"),
    [
        ("127.0.0.1", None, None),
        ("127.0.0.1:8000", None, None),
        ("127.9.9.9:1", None, None),
        ("localhost:8000", None, None),
        ("LOCALHOST", None, None),
        ("localhost.", None, None),
        ("[::1]:8000", None, None),
        ("[::1]", None, None),
        ("[::ffff:127.0.0.1]", None, None),
        ("machine.example:8000", None, 421),
        ("machine", None, None),
        ("proxy.example", None, 421),
        ("PROXY.EXAMPLE.:443", None, 421),
        ("[2001:db8::1]:8000", None, None),
        ("192.0.2.7:8000", 421, None),
        ("[2001:db8::2]", 421, None),
        ("0.0.0.0:8000", 421, None),
        ("evil.test:8000", 421, 421),
        ("evil.test", 421, 421),
        ("localhost.evil.test", 421, 421),
        ("127.0.0.1.evil.test:8000", 421, 421),
        ("evil-localhost", 421, 421),
        ("2130706433", 421, 421),
        ("0x7f000001", 421, 421),
        ("127.1", 421, 421),
        ("localhost..", 421, 421),
        ("", 400, 400),
        (":8000", 400, 400),
        (".", 400, 400),
        ("::1", 400, 400),
        ("[::1", 400, 400),
        ("localhost:port", 400, 400),
        ("user@localhost", 400, 400),
        ("localhost evil.test", 400, 400),
        ("localhost/evil.test", 400, 400),
        ("localhost, evil.test", 400, 400),
    ],
)
def test_only_known_host_names_are_served(host: str, loopback: int | None, beyond: int | None) -> None:
    """Names lead where their owner says, which may be here; addresses and our own names do not."""
    assert _refused(LOOPBACK, ("host", host)) == loopback
    assert _refused(BEYOND, ("host", host)) == beyond


def test_a_host_is_needed_once() -> None:
    """HTTP/1.0 knew no Host; later versions send one, and of two nobody knows which is meant."""
    assert _refused(LOOPBACK, version="1.0") is None
    assert _refused(LOOPBACK) == 400
    for version in ("1.0", "1.1"):
        assert _refused(LOOPBACK, ("host", "localhost"), ("host", "evil.test"), version=version) == 400
        assert _refused(LOOPBACK, ("host", "evil.test"), version=version) == 421
    assert _refused(LOOPBACK, ("origin", "http://localhost:8000"), version="1.0") == 403


@given(st.text(max_size=40))
def test_any_host_is_ours_or_refused(host: str) -> None:
    """No other error comes out of it, and what is ours is short."""
    address = host_of(host)
    assert address is None or (address[0] and not set(address[0]) & set("/@?#\n "))
    assert (origin_of(f"http://{host}") is None) == (address is None)


# Origins --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", None),
        ("HTTP://LocalHost:8000", "localhost:8000", None),
        ("http://localhost", "localhost", None),
        ("http://localhost:80", "localhost", None),
        ("https://proxy.example", "proxy.example", None),
        ("https://proxy.example", "proxy.example:443", None),
        ("http://[::1]:8000", "[::1]:8000", None),
        ("http://localhost:3000", "127.0.0.1:8000", None),
        ("http://localhost:3001", "127.0.0.1:8000", 403),
        ("https://localhost:3000", "127.0.0.1:8000", 403),
        ("http://localhost:8000", "127.0.0.1:8000", 403),
        ("http://127.0.0.1:9000", "127.0.0.1:8000", 403),
        ("http://127.0.0.1", "127.0.0.1:8000", 403),
        ("http://evil.test:8000", "127.0.0.1:8000", 403),
        ("http://evil.test", "localhost", 403),
        ("null", "127.0.0.1:8000", 403),
        ("", "127.0.0.1:8000", 403),
        ("file://", "127.0.0.1:8000", 403),
        ("chrome-extension://abc", "127.0.0.1:8000", 403),
        ("ftp://127.0.0.1:8000", "127.0.0.1:8000", 403),
        ("http://127.0.0.1:8000/", "127.0.0.1:8000", 403),
        ("http://127.0.0.1:8000@evil.test", "127.0.0.1:8000", 403),
        ("http://[", "127.0.0.1:8000", 403),
    ],
)
def test_foreign_origins_are_refused(origin: str, host: str, status: int | None) -> None:
    """A page of our own, or of an origin that is allowed; any other is foreign, whatever it is."""
    for method in ("GET", "POST", "OPTIONS"):
        assert _refused(LOOPBACK, ("host", host), ("origin", origin), method=method) == status


def test_one_foreign_origin_among_several_is_foreign() -> None:
    """Two lines of the header are no way around it."""
    ours, foreign = ("origin", "http://localhost"), ("origin", "http://evil.test")
    for pair in ((ours, foreign), (foreign, ours)):
        assert _refused(LOOPBACK, ("host", "localhost"), *pair) == 403


SITES = [
    ("none", "navigate", "document", "GET", None),
    ("same-origin", "cors", "empty", "POST", None),
    ("cross-site", "navigate", "document", "GET", None),  # a link that somebody clicked on
    ("cross-site", "navigate", "document", "HEAD", None),
    ("cross-site", "navigate", "document", "POST", 403),
    ("cross-site", "navigate", "iframe", "GET", 403),
    ("cross-site", "no-cors", "image", "GET", 403),
    ("cross-site", "no-cors", "script", "GET", 403),
    ("same-site", "no-cors", "script", "GET", 403),  # another port of this host
    ("same-site", "cors", "empty", "GET", 403),
    ("cross-site", "websocket", "websocket", "GET", 403),
]


@pytest.mark.parametrize(("site", "mode", "dest", "method", "status"), SITES)
def test_requests_of_foreign_sites_are_refused(
    site: str, mode: str, dest: str, method: str, status: int | None
) -> None:
    """Where there is no Origin, a browser still says whose page asks."""
    sent = [
        ("host", "localhost"),
        ("sec-fetch-site", site),
        ("sec-fetch-mode", mode),
        ("sec-fetch-dest", dest),
    ]
    assert _refused(LOOPBACK, *sent, method=method) == status
    engine = None if site in ("none", "same-origin") else 403
    assert _refused(LOOPBACK, *sent, method=method, path="/engine/flush_cache") == engine


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", None),
        ("Application/JSON; charset=utf-8", None),
        ("text/plain", 415),
        ("TEXT/PLAIN;charset=utf-8", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("", 415),
        (None, 415),
    ],
)
def test_bodies_that_pages_send_unasked_are_refused(kind: str | None, status: int | None) -> None:
    """A page of our own asks first, or says JSON; a client that is no browser may send what it likes."""
    typed = [] if kind is None else [("content-type", kind)]
    length, ours = ("content-length", "2"), ("origin", "http://localhost")
    assert _refused(LOOPBACK, ("host", "localhost"), ours, length, *typed) == status
    assert _refused(LOOPBACK, ("host", "localhost"), ours, ("transfer-encoding", "chunked"), *typed) == status
    assert _refused(LOOPBACK, ("host", "localhost"), ours, ("content-length", "0"), *typed) is None
    assert _refused(LOOPBACK, ("host", "localhost"), length, *typed) is None
    two = [*typed, ("content-type", "text/plain")]
    assert _refused(LOOPBACK, ("host", "localhost"), ours, length, *two) == 415


@pytest.mark.parametrize(
    ("hosts", "origins"),
    [(["a b"], []), ([""], []), (["http://x"], []), ([], ["localhost:3000"]), ([], ["null"]), ([], ["*"])],
)
def test_settings_that_cannot_be_meant(hosts: list[str], origins: list[str]) -> None:
    """Refused at the start, with an example."""
    with pytest.raises(ConfigError, match="such as"):
        allowed_hosts("127.0.0.1", "m", hosts, origins)


def test_loopback_addresses_are_known_in_any_form() -> None:
    """Addresses of this host's own, in any form."""
    assert [a for a in ("127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1") if not is_loopback(a)] == []
    assert [a for a in ("192.0.2.1", "::", "0.0.0.0", "", "localhost", "testclient") if is_loopback(a)] == []


# The proxy ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proxy(played: Callable[..., InProcess]) -> InProcess:
    """A proxy with one origin of its own."""
    return played(own=allowed_hosts("127.0.0.1", "m", [], ["http://localhost:3000"]))


ROUTES = [("POST", p) for p in PATHS.values()] + [
    ("POST", "/v1/trajectories"),
    ("POST", "/engine/pause_generation"),
    ("GET", "/v1/events"),
    ("GET", "/healthz"),
    ("GET", "/nowhere"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_is_behind_it(proxy: InProcess, method: str, path: str) -> None:
    """Refusals have the API's own form, are final, and nothing is recorded of them."""
    for headers, status, code in (
        ({"host": "evil.test:8000"}, 421, "foreign_host"),
        ({"origin": "http://evil.test"}, 403, "foreign_origin"),
        ({"host": ""}, 400, "bad_host"),
        ({"sec-fetch-site": "cross-site"}, 403, "foreign_origin"),
    ):
        reply = proxy.ask(path, {"id": "x"}, headers=headers, method=method)
        assert (reply.status, reply.json["error"]["code"]) == (status, code)
        assert reply.headers["x-should-retry"] == "false"
    assert proxy.trajectories() == {}


def test_an_allowed_page_may_send_and_read(proxy: InProcess) -> None:
    """It may ask first, send, and read; its browser is told so, and no other's."""
    page = {"origin": "http://localhost:3000"}
    preflight = page | {"access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    asked_first = proxy.ask(PATHS["chat"], headers=preflight, method="OPTIONS")
    assert asked_first.status == 200
    assert asked_first.headers["access-control-allow-origin"] == "http://localhost:3000"
    typed = page | {"content-type": "application/json"}
    reply = proxy.ask("/t/own" + PATHS["chat"], asked("chat"), headers=typed)
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "http://localhost:3000")
    for form in ("text/plain", "application/x-www-form-urlencoded"):
        refused = proxy.ask(PATHS["chat"], asked("chat"), headers=page | {"content-type": form})
        assert (refused.status, refused.json["error"]["code"]) == (415, "unasked_body")
    foreign = proxy.ask(PATHS["chat"], headers=preflight | {"origin": "http://evil.test"}, method="OPTIONS")
    assert (foreign.status, "access-control-allow-origin" in foreign.headers) == (403, False)


def test_refusals_are_counted(proxy: InProcess) -> None:
    """By their codes, at /metrics."""
    page = proxy.ask("/metrics", method="GET").data.decode()
    assert 'rollbook_failures_total{code="foreign_host"}' in page


def test_websockets_and_lifespans() -> None:
    """A foreign page opens none; what is neither is no page's."""
    sent: list[Any] = []
    reached: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    async def send(message: Any) -> None:
        sent.append(message)

    pages = WebPages(app, AllowedHosts(), lambda error: None, error_body)
    headers = [(b"host", b"localhost"), (b"origin", b"http://evil.test")]
    asyncio.run(pages({"type": "websocket", "path": "/", "headers": headers}, None, send))
    assert (reached, sent) == ([], [{"type": "websocket.close", "code": 1008}])
    asyncio.run(pages({"type": "websocket", "path": "/", "headers": headers[:1]}, None, send))
    asyncio.run(pages({"type": "lifespan"}, None, send))
    assert reached == ["websocket", "lifespan"]


# Forwarded headers, over a real server ----------------------------------------------------------------


def _echo(settings: dict[str, Any]) -> Iterator[str]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        text = f"{scope['client'][0]} {scope['scheme']}".encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": text})

    config = uvicorn.Config(app, log_level="critical", lifespan="off", **settings)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + 30
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)


@pytest.mark.parametrize(
    ("believed", "seen"),
    [((), "127.0.0.1 http"), (("192.0.2.0/24",), "127.0.0.1 http"), (("127.0.0.1",), "192.0.2.9 https")],
)
def test_who_asks_is_who_connected(
    believed: tuple[str, ...], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a proxy that was named passes it on; uvicorn's own variable changes nothing."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    spoofed = {"x-forwarded-for": "192.0.2.9", "x-forwarded-proto": "https"}
    for url in _echo(forwarding(believed)):
        assert httpx.get(url).text == "127.0.0.1 http"
        assert httpx.get(url, headers=spoofed).text == seen


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "x-real-ip", "via"])
def test_without_keys_what_was_passed_on_is_not_from_here(proxy: InProcess, header: str) -> None:
    """A proxy on this host makes everybody look local: `/engine` is then for an operator's key."""
    assert proxy.ask("/engine/health", method="GET").status == 404  # this engine has no such route
    reply = proxy.ask("/engine/health", method="GET", headers={header: "127.0.0.1"})
    assert (reply.status, reply.json["error"]["code"]) == (403, "loopback_only")
    assert "--keys" in reply.json["error"]["message"]
    assert proxy.ask("/v1/models", method="GET", headers={header: "127.0.0.1"}).status == 200
