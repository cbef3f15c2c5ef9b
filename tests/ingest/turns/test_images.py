"""Images in messages: links are fetched from allowed hosts only, and the log keeps image and link."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from rollbook.ingest.turns.images import ImageLinks
from rollbook.store.errors import RequestError
from rollbook.testing.asgi import free_port

PIXEL = bytes.fromhex("89504e470d0a1a0a0000000d49484452")
DATA = "data:image/png;base64," + base64.b64encode(PIXEL).decode()
ANSWERS: dict[str, tuple[int, str, bytes]] = {
    "/one.png": (200, "image/png", PIXEL),
    "/page": (200, "text/html", b"<p>"),
    "/gone.png": (404, "image/png", b""),
    "/moved.png": (302, "image/png", b""),
    "/huge.png": (200, "image/png", b"x" * (20 * 2**20 + 1)),
}


class _Host(BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        status, kind, data = ANSWERS[self.path]
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.send_header("location", "/one.png")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def host() -> Iterator[tuple[str, list[str]]]:
    """A host of images, and what it was asked for."""
    handler = type("Host", (_Host,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler.asked
    server.shutdown()
    server.server_close()


def _message(*links: str) -> dict[str, Any]:
    parts: list[Any] = [{"type": "text", "text": "see"}]
    return {
        "role": "user",
        "content": parts + [{"type": "image_url", "image_url": {"url": u}} for u in links],
    }


def _resolved(links: ImageLinks, *messages: dict[str, Any]) -> list[Any]:
    return asyncio.run(links.resolved(list(messages)))


def test_a_link_to_an_allowed_host_is_fetched_once(host: tuple[str, list[str]]) -> None:
    """The image takes its place, the link stays beside it; a conversation that repeats it asks no more."""
    url, requested = host
    links = ImageLinks(["127.0.0.1"])
    sent = _message(f"{url}/one.png")
    first, second = _resolved(links, sent, {"role": "user", "content": "text"})
    assert first["content"][1]["image_url"] == {"url": DATA, "link": f"{url}/one.png"}
    assert first["content"][0] == {"type": "text", "text": "see"}
    assert second == {"role": "user", "content": "text"}
    assert sent["content"][1]["image_url"] == {"url": f"{url}/one.png"}  # what was sent is not touched
    assert _resolved(links, sent) == [first]
    assert requested == ["/one.png"]


@pytest.mark.parametrize("allowed", [[], ["images.example.com"], ["127.0.0.2"]])
def test_other_links_pass_as_they_are(host: tuple[str, list[str]], allowed: list[str]) -> None:
    """Nothing is fetched from a host that the operator did not name, and data URLs are images already."""
    url, requested = host
    messages = [_message(f"{url}/one.png", DATA, "ftp://127.0.0.1/x", "http://[", "file:///etc/passwd")]
    assert _resolved(ImageLinks(allowed), *messages) == messages
    assert requested == []


@pytest.mark.parametrize("path", ["page", "gone.png", "moved.png", "huge.png"])
def test_a_link_that_leads_to_no_image_is_refused(host: tuple[str, list[str]], path: str) -> None:
    """Also a redirect: it could lead to any host."""
    url, requested = host
    with pytest.raises(RequestError) as refused:
        _resolved(ImageLinks(["127.0.0.1"]), _message(f"{url}/{path}"))
    assert (refused.value.status, refused.value.code) == (400, "image_not_fetched")
    assert f"{url}/{path}" in refused.value.message
    assert requested == [f"/{path}"]


def test_a_host_that_is_away_is_told() -> None:
    """The link is named."""
    link = f"http://127.0.0.1:{free_port()}/one.png"
    with pytest.raises(RequestError, match="cannot be fetched") as refused:
        _resolved(ImageLinks(["127.0.0.1"]), _message(link))
    assert link in refused.value.message
