"""An upstream for the record-only proxy: it replies as the scripted engine does, and also as it
should not.

Serves chat completions, streamed or not. Some model names ask for more: `repeats` is refused
with an error that repeats every header it was sent; `gzip-of-gzip` is answered with a small body
that unpacks into a huge one.
"""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import orjson

from rollbook.bench.hostile.script import PIECE_S, PIECES, SLOWLY, question_of, reply_to
from rollbook.bench.scripted.asgi import Message, Receive, Send, read_body, reply, run_alone, send_part
from rollbook.bench.tied import end_with_parent

COOKIE = b"session=set-by-the-upstream; HttpOnly"
BOMB_BYTES = 1 << 30
REPEATS, BOMB = "repeats", "gzip-of-gzip"


def bomb(size: int = BOMB_BYTES) -> bytes:
    """A gzip of a gzip of so many spaces: kilobytes."""
    inner = b"".join(_packed(b" " * (1 << 20), size >> 20))
    return gzip.compress(inner, 9)


def _packed(block: bytes, times: int) -> list[bytes]:
    """One gzip member each: members one after another are a gzip file."""
    return [gzip.compress(block, 9)] * times


class Upstream:
    """An OpenAI-compatible API as an ASGI application."""

    def __init__(self) -> None:
        self._bomb = bomb()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One HTTP request."""
        raw = await read_body(receive)
        if not scope["path"].endswith("/chat/completions"):
            return await reply(send, 404, {"error": {"message": f"no {scope['path']}"}})
        try:
            body = orjson.loads(raw)
            text = reply_to(question_of(body["messages"]))
        except (ValueError, LookupError, TypeError, AttributeError):
            return await reply(send, 400, {"error": {"message": "the body is no chat request"}})
        if body.get("model") == REPEATS:
            return await self._repeat(scope, send)
        if body.get("model") == BOMB:
            return await self._blow(send)
        if body.get("stream"):
            return await _stream(send, text, PIECES if SLOWLY in question_of(body["messages"]) else 1)
        await reply(send, 200, _completion(text, body.get("n") or 1))

    async def _repeat(self, scope: Message, send: Send) -> None:
        headers_sent = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        where = f"{scope['path']}?{scope['query_string'].decode('latin-1')}"
        body = orjson.dumps(
            {"error": {"message": f"cannot serve {where} to {headers_sent}, Cookie {COOKIE!r}"}}
        )
        headers = [(b"content-type", b"application/json"), (b"set-cookie", COOKIE)]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _blow(self, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-encoding", b"gzip, gzip")]
        headers.append((b"content-length", b"%d" % len(self._bomb)))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self._bomb})


def _completion(text: str, count: int) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choices = [{"index": n, "message": message, "finish_reason": "stop"} for n in range(count)]
    usage = {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    return {"id": "up", "object": "chat.completion", "model": "m", "choices": choices, "usage": usage}


async def _stream(send: Send, text: str, pieces: int) -> None:
    for number in range(pieces):
        delta = {"role": "assistant", "content": text if pieces == 1 else f"{text} {number} "}
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        chunk = {"id": "up", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}
        await send_part(send, b"data: " + orjson.dumps(chunk) + b"\n\n", first=number == 0)
        await asyncio.sleep(PIECE_S if pieces > 1 else 0)
    end = {"index": 0, "delta": {}, "finish_reason": "stop"}
    chunk = {"id": "up", "object": "chat.completion.chunk", "model": "m", "choices": [end]}
    await send_part(send, b"data: " + orjson.dumps(chunk) + b"\n\ndata: [DONE]\n\n", first=False)
    await send({"type": "http.response.body", "body": b""})


def main() -> None:
    """Serve on a free port, which is printed, until the parent ends."""
    end_with_parent()
    run_alone(Upstream())


if __name__ == "__main__":
    main()
