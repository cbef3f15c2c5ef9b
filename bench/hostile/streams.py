"""Attacks through the course of a conversation: streams that nobody reads, retries, races,
abandoned trajectories."""

from __future__ import annotations

import asyncio
import contextlib

import orjson

from rollbook.bench.hostile.attack import ANYTHING, OK, RECORD, REFUSED, TOKENS, Ground, attack
from rollbook.bench.hostile.script import SLOWLY
from rollbook.bench.hostile.sender import request

BOTH = (TOKENS, RECORD)


async def _stream(ground: Ground, name: str, content: str) -> bytes:
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": content}]}
    headers = {"Authorization": f"Bearer {await ground.key(name)}", "Content-Type": "application/json"}
    path = f"/t/{name}/v1/chat/completions"
    return request("POST", path, ground.host, headers, orjson.dumps(body))


@attack(proxies=BOTH, at_once=8)
async def leaving_in_mid_stream(ground: Ground) -> None:
    """Clients that leave at every place of a stream harm nobody, and leave no error behind."""
    data = await _stream(ground, ground.name(), SLOWLY)
    with contextlib.suppress(OSError):
        async with ground.wire() as wire:
            await wire.send(data)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wire.reader.read(1 << 16), ground.rng.uniform(0.0, 0.5))


@attack(proxies=BOTH, at_once=16)
async def reading_a_byte_at_a_time(ground: Ground) -> None:
    """Clients that read a byte a second hold up nobody else."""
    with contextlib.suppress(OSError):
        async with ground.wire(small_window=True) as wire:
            await wire.send(await _stream(ground, ground.name(), SLOWLY))
            for _ in range(60):
                await wire.reader.read(1)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ground.over.wait(), 1.0)
                if ground.over.is_set():
                    return


@attack(at_once=1)
async def consumers_that_do_not_read(ground: Ground) -> None:
    """Twenty readers of the whole log that never read it cost a bounded buffer each, and give it back."""
    query = "/v1/events?from=empty&kinds=*"
    data = request("GET", query, ground.host, {"Authorization": f"Bearer {ground.operator}"})
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(20):
            with contextlib.suppress(OSError):
                wire = await stack.enter_async_context(ground.wire(small_window=True))
                wire.reader._transport.pause_reading()  # type: ignore[attr-defined]
                await wire.send(data)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ground.over.wait(), 60.0)


@attack(proxies=BOTH, at_once=1)
async def storms_of_retries(ground: Ground) -> None:
    """Fifty retries of one request at once join it; none is a 500."""
    name = ground.name()
    await ground.key(name)
    retry = {"x-stainless-retry-count": "1"}
    asks = [ground.chat(name, "again", headers=retry, allowed=(*OK, *REFUSED)) for _ in range(50)]
    await asyncio.gather(*asks)


@attack(proxies=BOTH, at_once=4)
async def opening_and_leaving(ground: Ground) -> None:
    """Trajectories that are opened, used once and left cost the others nothing."""
    for _ in range(20):
        name = ground.name()
        body = {"model": "m", "messages": [{"role": "user", "content": "a" * 2_000}]}
        await ground.ask(f"/t/{name}/v1/chat/completions", body, key=ground.operator, allowed=OK)


@attack(proxies=BOTH, at_once=1)
async def races_to_the_finish(ground: Ground) -> None:
    """Turns, rewards and finishes of one trajectory at once: one finish counts, what is late is a 409."""
    name = ground.name()
    key, path = await ground.key(name), f"/v1/trajectories/{name}"
    await ground.chat(name, "begin")
    may = (*OK, *REFUSED)
    finishes = [ground.ask(f"{path}/finish", {"reward": n}, key=key, allowed=may) for n in range(5)]
    turns = [ground.chat(name, f"{n}", allowed=may) for n in range(5)]
    rewards = [ground.ask(f"{path}/rewards", {"reward": n}, key=key, allowed=may) for n in range(5)]
    answers = await asyncio.gather(*finishes, *turns, *rewards)
    first = [answer.status for answer in answers[:5]]
    if first.count(200) != 1:
        ground.tally.strange.append(f"{first.count(200)} of 5 finishes were taken: {first}")


@attack(at_once=2)
async def foreign_cuts(ground: Ground) -> None:
    """Cuts, kinds and cursors that are none are a 400, a 404 or a 409, never a 500."""
    for query in (
        "from=serve%3D99999999999",
        "from=%00",
        "kinds=nonsense",
        "limit=0",
        "limit=" + "9" * 40,
        "format=x",
        "from=step:99999999999999999999",
        "from=" + "a%3D1," * 5_000,
        "nonsense=1",
        "from=../../etc%3D1",
        "format=arrow&follow=true",
    ):
        path = f"/v1/events?follow=false&{query}"
        await ground.ask(path, method="GET", key=ground.operator)
    for name in ("..%2f..%2fx", "%00", "a" * 5_000, "%ed%a0%80"):
        await ground.ask(f"/v1/cursors/{name}", {"cut": "x=1"}, method="PUT", key=ground.operator)


@attack(at_once=32, pause_s=0.0)
async def a_flood(ground: Ground) -> None:
    """32 clients that ask without a pause are a busy day: nobody is refused wrongly."""
    await ground.chat(ground.name(), "hi", allowed=ANYTHING)
    await asyncio.sleep(0.2)
