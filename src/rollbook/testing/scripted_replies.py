"""How a scripted SGLang sends what it says: chunks, failures, and what it does when its client goes."""

from __future__ import annotations

import orjson

from rollbook.testing.asgi import Message, Receive, Send, drop, reply, send_part, until_gone
from rollbook.testing.scripted_job import Failed, Job

DONE = b"data: [DONE]\n\n"


async def end_with_client(receive: Receive, job: Job) -> None:
    """A client that goes away ends its request."""
    await until_gone(receive)
    job.abort()


async def show(job: Job, send: Send, content: Message) -> None:
    """Send the next chunk of a stream."""
    await send_part(send, b"data: " + orjson.dumps(content) + b"\n\n", first=not job.streaming)
    job.streaming = True


async def fail(failed: Failed, job: Job, scope: Message, send: Send) -> None:
    """Let a request end as its script says."""
    failure = failed.failure
    if failure.kind == "drop":
        await drop(scope)
    elif job.streaming:
        error = {"message": failure.message, "type": "invalid_request_error", "code": 500, "retryable": False}
        await show(job, send, {"error": error})
        await send({"type": "http.response.body", "body": DONE})
    else:
        status = 400 if failure.kind == "refuse" else 500
        await reply(send, status, {"error": {"message": failure.message}})
