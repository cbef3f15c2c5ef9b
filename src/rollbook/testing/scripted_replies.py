"""Sends the replies of a scripted SGLang: chunks, failures, and the abort when the client disconnects."""

from __future__ import annotations

import orjson

from rollbook.testing.asgi import Message, Receive, Send, drop, reply, send_part, until_gone
from rollbook.testing.scripted_job import Failed, Job

DONE = b"data: [DONE]\n\n"


async def end_with_client(receive: Receive, job: Job) -> None:
    """Abort the request if its client disconnects."""
    await until_gone(receive)
    job.abort()


async def show(job: Job, send: Send, content: Message) -> None:
    """Send the next chunk of a stream."""
    await send_part(send, b"data: " + orjson.dumps(content) + b"\n\n", first=not job.streaming)
    job.streaming = True


async def fail(failed: Failed, job: Job, scope: Message, send: Send) -> None:
    """Let a request fail as its script says."""
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
