"""Attacks through HTTP itself, valid or not: headers, framing, time, connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection

import orjson

from rollbook.bench.hostile.attack import OK, RECORD, REFUSED, TOKENS, Ground, attack
from rollbook.bench.hostile.sender import Wire, request

BOTH = (TOKENS, RECORD)
CHAT_BODY = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
IDLE = 1_100
"""More connections than the descriptors that many systems give a process by default."""


async def _many(ground: Ground, what: str, requests: Collection[bytes], allowed: Collection[int]) -> None:
    for data in requests:
        ground.check(f"{what} {data[:60]!r}", await ground.send(data), allowed)


@attack(proxies=BOTH)
async def long_headers(ground: Ground) -> None:
    """A header of 64 KB or of a megabyte, and a thousand of them, are refused or end the connection."""
    name = ground.name()
    path, key = f"/t/{name}/v1/chat/completions", await ground.key(name)
    await ground.ask(path, CHAT_BODY, {"X-Long": "a" * 65_536}, key=key, allowed=(*OK, *REFUSED))
    await ground.ask(path, CHAT_BODY, {"X-Long": "a" * (1 << 20)}, key=key, allowed=REFUSED)
    await ground.ask(path, CHAT_BODY, {f"X-{n}": "a" for n in range(1_000)}, key=key, allowed=REFUSED)
    await ground.ask("/" + "a" * (1 << 20), CHAT_BODY, key=key, allowed=REFUSED)
    labels = {"X-Rollbook-Labels": orjson.dumps({"a": "b" * 60_000}).decode()}
    await ground.ask(path, CHAT_BODY, labels, key=key, allowed=(*OK, *REFUSED))


@attack(proxies=BOTH)
async def smuggling(ground: Ground) -> None:
    """Two lengths, a length beside chunks, folded headers, bare line feeds: one request at most is seen."""
    hidden = request("POST", "/v1/trajectories/smuggled/finish", ground.host, {}, b"{}")
    size = len(CHAT_BODY)
    lines = {
        "CL.TE": f"Content-Length: {size + len(hidden)}\r\nTransfer-Encoding: chunked\r\n",
        "two lengths": f"Content-Length: {size}\r\nContent-Length: {size + len(hidden)}\r\n",
        "a list of lengths": f"Content-Length: {size}, {size + len(hidden)}\r\n",
        "folded": f"X-A: b\r\n  c\r\nContent-Length: {size}\r\nTransfer-Encoding:\r\n chunked\r\n",
        "chunked twice": "Transfer-Encoding: chunked, chunked\r\n",
        "a space": f"Content-Length : {size}\r\nTransfer-Encoding: chunked\r\n",
        "signed": f"Content-Length: +{size}\r\n",
        "negative": "Content-Length: -1\r\n",
        "huge": f"Content-Length: 1{'0' * 30}\r\n",
    }
    path = f"/t/{ground.name()}/v1/chat/completions"
    for what, fields in lines.items():
        head = f"POST {path} HTTP/1.1\r\nHost: {ground.host}\r\n{fields}\r\n".encode()
        body = b"0\r\n\r\n" + hidden if "chunked" in fields else CHAT_BODY + hidden
        ground.check(what, await ground.send(head + body, 3.0), REFUSED)
    bare = f"POST {path} HTTP/1.1\nHost: {ground.host}\nContent-Length: {size}\n\n".encode() + CHAT_BODY
    ground.check("bare line feeds", await ground.send(bare, 3.0), REFUSED)


@attack(proxies=BOTH)
async def broken_requests(ground: Ground) -> None:
    """Bytes that are no HTTP, other versions, methods and targets are refused or closed."""
    await _many(
        ground,
        "broken",
        [
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 512,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"\r\n" * 2_000 + b"\0",
            request("TRACE", "/healthz", ground.host),
            request("CONNECT", "127.0.0.1:22", ground.host),
            request("POST", "*", ground.host, {}, b"{}"),
            request("GET", "http://169.254.169.254/v1/models", "169.254.169.254"),
            request("POST", "/v1/chat/completions\r\nX: y", ground.host, {}, CHAT_BODY),
            request("GET", "/v1/events", ground.host, {"Upgrade": "websocket", "Connection": "Upgrade"}),
        ],
        REFUSED,
    )


@attack(proxies=BOTH, at_once=1)
async def slow_headers(ground: Ground) -> None:
    """Two hundred connections that send a header's byte a second are ended by the server, and stop nobody."""
    async with contextlib.AsyncExitStack() as stack:
        wires = []
        for _ in range(200):
            with contextlib.suppress(OSError):
                wires.append(await stack.enter_async_context(ground.wire()))
        for byte in request("POST", "/v1/chat/completions", ground.host)[:400]:
            for wire in wires:
                await wire.send(bytes([byte]))
            if await _over(ground, 1.0):
                return


@attack(proxies=BOTH, at_once=1)
async def slow_bodies(ground: Ground) -> None:
    """Sixteen connections that declare 64 MiB and send nothing keep no room that others wait for."""
    name = ground.name()
    key = await ground.key(name)
    head = {"Authorization": f"Bearer {key}", "Content-Length": str(64 << 20)}
    data = request("POST", f"/t/{name}/v1/chat/completions", ground.host, head)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(16):
            with contextlib.suppress(OSError):
                await (await stack.enter_async_context(ground.wire())).send(data)
        await _over(ground, 60.0)


@attack(proxies=BOTH, at_once=1)
async def slow_bodies_of_no_length(ground: Ground) -> None:
    """Sixteen connections that send chunks without an end, a byte at a time, likewise."""
    name = ground.name()
    head = {"Authorization": f"Bearer {await ground.key(name)}", "Transfer-Encoding": "chunked"}
    data = request("POST", f"/t/{name}/v1/chat/completions", ground.host, head)
    async with contextlib.AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(ground.wire()) for _ in range(16)]
        for wire in wires:
            await wire.send(data)
        while not await _over(ground, 0.5):
            for wire in wires:
                await wire.send(b"1\r\n \r\n")


@attack(proxies=BOTH, at_once=1)
async def idle_connections(ground: Ground) -> None:
    """1,100 connections that say nothing exhaust no descriptors that others need."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(IDLE):
            if ground.over.is_set():
                return
            with contextlib.suppress(OSError):
                await stack.enter_async_context(ground.wire())
        await _over(ground, 60.0)


@attack(proxies=BOTH, at_once=4, pause_s=0.05)
async def connections_that_reset(ground: Ground) -> None:
    """Connections that are reset at every place of a request are no error of the proxy's."""
    name = ground.name()
    data = request("POST", f"/t/{name}/v1/chat/completions", ground.host, {"X-A": "b"}, CHAT_BODY)
    for _ in range(10):
        with contextlib.suppress(OSError):
            async with ground.wire() as wire:
                await wire.send(data[: ground.rng.randrange(len(data))])
                await asyncio.sleep(ground.rng.uniform(0, 0.005))


@attack(at_once=1)
async def bodies_over_the_limit(ground: Ground) -> None:
    """A body beyond the limit is a 413, declared or chunked, before it is in memory, on every route."""
    name = ground.name()
    key = await ground.key(name)
    for path in (f"/t/{name}/v1/chat/completions", f"/v1/trajectories/{name}/finish"):
        await ground.ask(path, None, {"Content-Length": str(1 << 40)}, key=key, allowed=REFUSED)
    head = {"Authorization": f"Bearer {key}", "Transfer-Encoding": "chunked"}
    async with ground.wire() as wire:
        await wire.send(request("POST", f"/t/{name}/v1/chat/completions", ground.host, head))
        block = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        sending = asyncio.create_task(_blocks(wire, block, 80))
        ground.check("80 MB in chunks", await wire.answer(), REFUSED)
        sending.cancel()


async def _blocks(wire: Wire, block: bytes, count: int) -> None:
    for _ in range(count):
        await wire.send(block)


async def _over(ground: Ground, seconds: float) -> bool:
    """Wait; whether the attack is over."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ground.over.wait(), seconds)
    return ground.over.is_set()
