"""Attacks through the contents of a body."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import orjson

from rollbook.bench.hostile.attack import ANYTHING, OK, RECORD, REFUSED, TOKENS, Ground, attack
from rollbook.bench.hostile.sender import request
from rollbook.bench.hostile.upstream import BOMB, bomb

DEEP = 300
"""Deeper than JSON is written here, though it is read."""


def deep_json(depth: int) -> bytes:
    """Lists within lists, to any depth."""
    return b"[" * depth + b"1" + b"]" * depth


DEEP_LABELS = {"X-Rollbook-Labels": f'{{"a": {deep_json(DEEP).decode()}}}'}


@attack(proxies=(TOKENS, RECORD))
async def labels_nested_deep(ground: Ground) -> None:
    """Labels nested 300 deep are a 400 and not recorded; what others send at that moment is."""
    name = ground.name()
    await ground.chat(name, "an honest first request")
    await ground.chat(name, "labels come with a later one", headers=DEEP_LABELS, allowed=REFUSED)


@attack(proxies=(TOKENS, RECORD))
async def labels_nested_deep_first(ground: Ground) -> None:
    """Labels nested 300 deep in a first request open nothing: no later turn or finish goes into nothing."""
    name = ground.name()
    key = ground.operator
    path = f"/t/{name}/v1/chat/completions"
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    await ground.ask(path, body, DEEP_LABELS, key=key)
    await ground.ask(f"/v1/trajectories/{name}/finish", {"reward": 1.0}, key=key)


@attack(at_once=1, pause_s=0.3)
async def siblings_times_megabytes(ground: Ground) -> None:
    """128 siblings of a request of 4 MB of small fields: it is kept once, or refused."""
    metadata = {f"field-{number}": "x" * 400 for number in range(10_000)}
    await ground.chat(ground.name(), "hi", n=128, metadata=metadata, allowed=(*OK, *REFUSED))


@attack(at_once=1, pause_s=0.5)
async def siblings_times_many_megabytes(ground: Ground) -> None:
    """128 siblings of a request of 17.5 MB of small fields, likewise."""
    extra = {f"field-{number}": "x" * 400 for number in range(42_000)}
    await ground.chat(ground.name(), "hi", n=128, allowed=(*OK, *REFUSED), **extra)


@attack(proxies=(TOKENS, RECORD))
async def broken_unicode(ground: Ground) -> None:
    """Halves of surrogate pairs, and bytes that are no UTF-8, in bodies, paths and headers: 400, or kept."""
    name, surrogate = ground.name(), rb"\ud800"
    key = await ground.key(name)
    path = f"/t/{name}/v1/chat/completions"
    for body in (
        rb'{"messages": [{"role": "user", "content": "%b"}]}' % surrogate,
        rb'{"messages": [{"role": "user", "content": "a"}], "user": "%b"}' % surrogate,
        rb'{"messages": [{"role": "user", "content": "a"}], "%b": 1}' % surrogate,
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b"\xff\xfe\x00{",
    ):
        await ground.ask(path, body, key=key, allowed=REFUSED)
    allowed = (*OK, *REFUSED)
    await ground.chat(
        name, "hi", headers={"X-Session-ID": "\udcff\udcfe", "X-Rollbook-Task": "\udcff"}, allowed=allowed
    )
    await ground.ask(b"/t/%ed%a0%80/v1/chat/completions", b"{}", key=ground.operator)
    await ground.ask(b"/t/\xff\xfe/v1/chat/completions", b"{}", key=ground.operator)
    labels = {"X-Rollbook-Labels": '{"a": "\\ud800"}'}
    await ground.chat(name, "hi", headers=labels, allowed=REFUSED)
    await ground.ask("/v1/trajectories", rb'{"id": "x", "task": "%b"}' % surrogate, key=ground.operator)


@attack(proxies=(TOKENS, RECORD), at_once=1, pause_s=0.3)
async def gzip_bombs(ground: Ground) -> None:
    """Kilobytes that unpack into a gigabyte, once or twice packed: refused before they are unpacked whole."""
    name = ground.name()
    path, key = f"/t/{name}/v1/chat/completions", await ground.key(name)
    twice = bomb(1 << 28)
    for data, encoding in ((gzip.decompress(twice), "gzip"), (twice, "gzip, gzip"), (twice, "gzip")):
        await ground.ask(path, data, {"Content-Encoding": encoding}, key=key)
    for encoding in ("deflate", "br", "zstd", "nonsense"):
        await ground.ask(path, b"{}", {"Content-Encoding": encoding}, key=key)


@attack(proxies=(RECORD,), at_once=1, pause_s=0.3)
async def gzip_bomb_of_an_upstream(ground: Ground) -> None:
    """A reply that unpacks from kilobytes to a gigabyte passes, and is not unpacked for the log."""
    await ground.chat(ground.name(), "hi", model=BOMB, allowed=ANYTHING)


@attack(proxies=(TOKENS, RECORD))
async def deep_json_anywhere(ground: Ground) -> None:
    """JSON nested deep in a schema, a template's arguments, a tool, a content or an id of a call is a 400."""
    name = ground.name()
    key, path = await ground.key(name), f"/t/{name}/v1/chat/completions"
    message = [{"role": "user", "content": "hi"}]
    allowed = (*OK, *REFUSED) if not ground.makes_ids else REFUSED
    for depth in (DEEP, 20_000):
        deep = b"@"
        for body in (
            {"messages": message, "response_format": {"type": "json_schema", "json_schema": {"schema": "@"}}},
            {"messages": message, "chat_template_kwargs": {"a": "@"}},
            {
                "messages": message,
                "tools": [{"type": "function", "function": {"name": "f", "parameters": "@"}}],
            },
            {"messages": [{"role": "user", "content": "@"}]},
            {"messages": message, "metadata": {"a": "@"}},
        ):
            raw = orjson.dumps(body).replace(b'"%b"' % deep, deep_json(depth))
            await ground.ask(path, raw, key=key, allowed=allowed)
    call = {"id": ["a", "list"], "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assistant = {"role": "assistant", "content": None, "tool_calls": [call]}
    await ground.ask(path, {"messages": [*message, assistant, *message]}, key=key, allowed=allowed)


@attack()
async def template_arguments(ground: Ground) -> None:
    """Template arguments named as the proxy's own, and Jinja within messages, reach nothing."""
    name = ground.name()
    for word in ("messages", "tools", "generate", "self", "add_generation_prompt", "bos_token"):
        await ground.chat(name, "hi", chat_template_kwargs={word: "x"}, allowed=(*OK, *REFUSED))
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for i in range(10**9) %}x{% endfor %}"
    await ground.chat(name, escape, allowed=OK)
    await ground.chat(name, "hi", chat_template_kwargs={"x": escape}, allowed=(*OK, *REFUSED))


@attack(proxies=(TOKENS,))
async def numbers_beyond(ground: Ground) -> None:
    """Numbers beyond 64 bits, not finite, negative or of another kind are a 400."""
    name = ground.name()
    key, path = await ground.key(name), f"/t/{name}/v1/chat/completions"
    head = b'{"messages": [{"role": "user", "content": "hi"}], '
    for field in (
        b'"seed": 1%b' % (b"0" * 400),
        b'"n": -1',
        b'"n": 1e9',
        b'"temperature": 1e999',
        b'"max_tokens": 0',
        b'"top_p": "x"',
        b'"n": [1]',
        b'"max_tokens": 1%b' % (b"0" * 30),
    ):
        await ground.ask(path, head + field + b"}", key=key, allowed=REFUSED)
    for reward in (b"1e999", b"NaN", b'"1"x', b"[1]", b"1" * 5000):
        await ground.ask(f"/v1/trajectories/{name}/rewards", b'{"reward": %b}' % reward, key=key)


@attack()
async def ids_beyond_the_vocabulary(ground: Ground) -> None:
    """Token ids that the model does not have are the client's mistake, a 400."""
    name = ground.name()
    key = await ground.key(name)
    prompts: list[list[Any]] = [[10**6], [-1], [2**31], [2**63], [1.5], [[]]]
    for ids in prompts:
        await ground.ask(f"/t/{name}/v1/completions", {"model": "m", "prompt": ids}, key=key)


@attack(at_once=2, pause_s=0.2)
async def counting_megabytes(ground: Ground) -> None:
    """`count_tokens` of megabytes of text is bounded, and never stops the event loop."""
    name = ground.name()
    text = "word " * 800_000
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    key = await ground.key(name)
    await ground.ask(f"/t/{name}/v1/messages/count_tokens", body, key=key, allowed=(*OK, *REFUSED))


@attack(at_once=2, pause_s=0.2)
async def prompts_of_megabytes(ground: Ground) -> None:
    """A prompt of megabytes, of words and of one word, is tokenized away from the event loop."""
    await ground.chat(ground.name(), "word " * 400_000, allowed=(*OK, *REFUSED))
    await ground.chat(ground.name(), "a" * 1_000_000, allowed=(*OK, *REFUSED))


@attack()
async def shapes_of_content(ground: Ground) -> None:
    """Content of a shape that no template renders is a 400 that names it."""
    name = ground.name()
    parts: list[Any] = [
        [{"type": "video_url", "video_url": {"url": "x"}}],
        [{"type": "unknown"}],
        [{}],
        [1],
        7,
        [{"type": "text", "text": None}],
        {"type": "text"},
        True,
    ]
    for content in parts:
        await ground.chat(name, content, allowed=REFUSED)


@attack(at_once=1)
async def image_links(ground: Ground) -> None:
    """A link to an image is never followed to this host or another, however it is written."""
    name = ground.name()
    for url in (
        f"{ground.url}/metrics",
        "http://127.1:1/",
        "http://0/",
        "http://[::1]/",
        "file:///etc/passwd",
        "http://169.254.169.254/latest/meta-data",
        "gopher://127.0.0.1/",
        "data:text/html,x",
    ):
        part = {"type": "image_url", "image_url": {"url": url}}
        await ground.chat(name, [part, {"type": "text", "text": "look"}], allowed=(*OK, *REFUSED))


@attack(at_once=1)
async def names_that_print(ground: Ground) -> None:
    """Control characters and terminal escapes in names, tasks, labels and texts are data, or refused."""
    escape = "\x1b]0;owned\x07\x1b[2J\x00\u202e"
    await ground.ask(
        "/v1/trajectories",
        {"id": ground.name() + escape, "task": escape},
        key=ground.operator,
        allowed=(*OK, *REFUSED),
    )
    name = ground.name()
    await ground.chat(name, escape, user=escape, allowed=(*OK, *REFUSED))
    label = {"name": escape, "value": {escape: escape}}
    await ground.ask(
        f"/v1/trajectories/{name}/labels", label, key=await ground.key(name), allowed=(*OK, *REFUSED)
    )


@attack(at_once=1, pause_s=0.3)
async def cursor_bodies(ground: Ground) -> None:
    """A cursor's body of 100 MB is refused before it is read, also from an operator."""
    head = request(
        "PUT",
        "/v1/cursors/mine",
        ground.host,
        {"Authorization": f"Bearer {ground.operator}", "Content-Length": str(100 << 20)},
    )
    async with ground.wire() as wire:
        await wire.send(head)
        block = b" " * (1 << 20)
        sending = asyncio.create_task(_blocks(wire, block, 100))
        ground.check("PUT a cursor of 100 MB", await wire.answer(), REFUSED)
        sending.cancel()


async def _blocks(wire: Any, block: bytes, count: int) -> None:
    for _ in range(count):
        await wire.send(block)
