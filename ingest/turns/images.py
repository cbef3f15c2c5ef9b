"""Links to images are fetched from hosts that the operator allows; other links pass on unchanged.

A fetched image takes the link's place in the message, and the link stays beside it: so the log holds what the
model saw, whatever becomes of the link.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from cachetools import LRUCache

from rollbook.store.errors import RequestError
from rollbook.store.events import Json

MOST_BYTES = 20 * 2**20
KEPT = 64
TIMEOUT_S = 20.0


class ImageLinks:
    """Replaces links in messages. A conversation repeats its links: the newest images are kept.

    Args:
        hosts: names of hosts to fetch from, such as images.example.com; no port, no pattern.
    """

    def __init__(self, hosts: Collection[str] = ()) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._kept: LRUCache[str, str] = LRUCache(KEPT)

    async def resolved(self, messages: list[Json]) -> list[Json]:
        """The messages with the images that their links lead to; the same list where there are none to fetch.

        Raises:
            RequestError: 400, a link to an allowed host leads to no image.
        """
        links = sorted({link for message in messages for link in _links(message) if self._allowed(link)})
        if not links:
            return messages
        fetched = await asyncio.gather(*(self._image(link) for link in links))
        images = dict(zip(links, fetched, strict=True))
        return [_replaced(message, images) for message in messages]

    def _allowed(self, link: str) -> bool:
        if not self._hosts or link[:5].lower() == "data:":
            return False  # not by `urlsplit`, which keeps the last 128 texts it was given, images too
        try:
            parts = urlsplit(link)
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and (parts.hostname or "") in self._hosts

    async def _image(self, link: str) -> str:
        image = self._kept.get(link)
        if image is None:
            image = self._kept[link] = await _fetched(link)
        return image


def _parts(message: Json) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _link(part: Any) -> str | None:
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return None
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    return url if isinstance(url, str) else None


def _links(message: Json) -> list[str]:
    return [link for part in _parts(message) if (link := _link(part)) is not None]


def _replaced(message: Json, images: dict[str, str]) -> Json:
    if not any(link in images for link in _links(message)):
        return message
    parts = []
    for part in _parts(message):
        link = _link(part)
        if link in images:
            part = part | {"image_url": {"url": images[link], "link": link}}
        parts.append(part)
    return message | {"content": parts}


async def _fetched(link: str) -> str:
    """The image as a data URL. Redirects are not followed: they could lead to any host.

    Raises:
        RequestError: 400, there is none.
    """
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(link, allow_redirects=False) as reply,
        ):
            kind = reply.content_type
            data = await reply.content.read(MOST_BYTES + 1)
            while len(data) <= MOST_BYTES and not reply.content.at_eof():
                data += await reply.content.read(MOST_BYTES + 1 - len(data))
            status = reply.status
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise RequestError(400, "image_not_fetched", f"{link} cannot be fetched: {error!r}") from error
    if status != 200 or not kind.startswith("image/") or len(data) > MOST_BYTES:
        what = f"status {status}, {kind}, {len(data)} bytes"
        text = f"{link} is no image of at most {MOST_BYTES} bytes ({what})"
        raise RequestError(400, "image_not_fetched", text)
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
