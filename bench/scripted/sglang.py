"""A scripted server of SGLang's native protocol (0.5.23), for tests and benchmarks: no model, little CPU.

It answers `POST /generate` and the routes that control a server, in the shapes of the real one, with its
chunks, failures, and aborts when the client disconnects; what it "samples" comes from a script
(`bench.scripted.job`). As a process of its own, on a port that it prints:

    python -m rollbook.bench.scripted.serve --port 0 --length 64 --stop-id 2

or in this one: `with serving(ScriptedSGLang(script)) as url`. Differences: one request a body, no prompt
logprobs, and the radix cache, grammar and sampling are not there: `cached_tokens` is the script's.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import orjson
from tokenizers import Tokenizer

from rollbook.bench.scripted.asgi import Message, Receive, Send, drop, read_body, reply, send_part, until_gone
from rollbook.bench.scripted.job import Failed, Job, Options, Script, draft, hashed
from rollbook.bench.scripted.weights import Fault, Faults, ScriptedWeights

VERSION = "0.5.23"


class ScriptedSGLang:
    """The server as an ASGI application.

    Attributes:
        weight_version: of the tokens that come now.
        stale_version: what /model_info says where that is another one.
        seen: what was asked and answered, if `Options.log` is set.
    """

    def __init__(self, script: Script | None = None, options: Options | None = None) -> None:
        self.options = options or Options()
        self.script = script or hashed()
        self.weight_version = self.options.weight_version
        self.stale_version: str | None = None
        self.faults = Faults()
        self.paused: str | None = None
        self.running: dict[str, Job] = {}
        self.released: set[str] = set()
        self.seen: deque[Message] = deque(maxlen=self.options.log)
        self._made, self._started = 0, time.perf_counter()
        file = self.options.tokenizer
        tokenizer = None if file is None else Tokenizer.from_file(str(file))
        self._decode = None if tokenizer is None else (lambda ids: tokenizer.decode(list(ids)))
        self._routes = {
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weight_version": self._update_weight_version,
            "/flush_cache": self._flush_cache,
            "/release_memory_occupation": self._release_memory,
            "/resume_memory_occupation": self._resume_memory,
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/v1/loads": self._loads,
            "/health": self._health,
            "/health_generate": self._health,
            "/scripted/seen": self._seen,
            "/scripted/fault": self._fault,
        }
        self.weights = ScriptedWeights(self)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One HTTP request."""
        if scope["type"] != "http":
            raise ValueError(f"only HTTP is served, not {scope['type']}")
        raw = await read_body(receive)
        try:
            body = orjson.loads(raw) if raw else {}
        except orjson.JSONDecodeError as error:
            return await reply(send, 400, {"error": {"message": f"bad JSON: {error}"}})
        path = scope["path"]
        if self.faults.faults and (fault := await self.faults.befall(path)) is not None:
            return await (drop(scope) if fault == "drop" else reply(send, 500, b"Internal Server Error"))
        if path == "/generate":
            return await self._generate(body, scope, receive, send)
        if path in self.weights.routes:
            return await reply(send, *await self.weights.routes[path](body))
        unknown = 404, {"detail": "Not Found"}
        await reply(send, *(self._routes[path](body) if path in self._routes else unknown))

    # Generation -------------------------------------------------------------------------------

    async def _generate(self, body: Message, scope: Message, receive: Receive, send: Send) -> None:
        ids, params = body.get("input_ids"), body.get("sampling_params") or {}
        self._made += 1
        rid = body.get("rid") or f"scripted-{self._made}"
        if not isinstance(ids, list) or not ids or not isinstance(ids[0], int):
            return await reply(send, 400, {"error": {"message": "input_ids must be a list of ids"}})
        if rid in self.running:
            return await reply(send, 400, {"error": {"message": f"Duplicate request ID detected: {rid}"}})
        drafted = draft(self.script(ids, params), params, self.options.eos_ids, self._decode)
        job = Job(rid, len(ids), drafted, body, held=self.paused is not None)
        self.running[rid] = job
        watch = asyncio.create_task(end_with_client(receive, job)) if job.slow or job.held else None
        try:
            await (self._stream if job.stream else self._whole)(job, send)
        except Failed as failed:
            await fail(failed, job, scope, send)
        finally:
            self.running.pop(rid, None)
            if watch is not None:
                watch.cancel()

    async def _whole(self, job: Job, send: Send) -> None:
        async for _ in self._sampled(job):
            pass
        await reply(send, 200, self._chunk(job, 0))

    async def _stream(self, job: Job, send: Send) -> None:
        shown = 0
        async for _ in self._sampled(job):
            if not job.finish:
                await show(job, send, self._chunk(job, shown))
                shown = job.made if self.options.incremental else 0
        await show(job, send, self._chunk(job, shown))
        await send({"type": "http.response.body", "body": DONE})
        asyncio.get_running_loop().call_later(self.options.late_abort_s, self._abort, {"rid": job.rid})

    async def _sampled(self, job: Job) -> AsyncIterator[None]:
        """Emit the tokens, some at a time; `job.finish` is set with the last ones."""
        step = self.options.interval if job.stream or job.slow else max(job.total, 1)
        answer, delay = job.draft.answer, job.draft.answer.first_s
        while True:
            if delay:
                await job.sleep(delay)
            if self.paused is not None:
                await self._resumed(job)
            if job.abort_message is None:
                self._emit(job, step)
            failure = answer.failure
            if failure is not None and job.made >= job.total:
                self._ended(job)
                raise Failed(failure)
            job.settle()
            if job.finish is not None:
                self._ended(job)
            yield
            if job.finish is not None:
                return
            delay = answer.token_s * min(step, job.total - job.made)

    async def _resumed(self, job: Job) -> None:
        """Wait while generation is paused.

        As in the real one: a request that came in during the pause does not notice an abort; one
        paused in place reports it only with the next step; a retracted one is in a queue and
        ends at once.
        """
        while self.paused is not None:
            if job.abort_message is not None and not job.held and self.paused != "in_place":
                return
            await job.woken()
        job.held = False

    def _emit(self, job: Job, step: int) -> None:
        end = min(job.made + step, job.total)
        for after, version in job.draft.answer.versions:
            if job.made <= after < end:
                job.emit(after, self.weight_version)
                self.weight_version, self.stale_version = version, None
        job.emit(end, self.weight_version)

    def _chunk(self, job: Job, start: int) -> Message:
        """The output from token `start` on, as /generate returns it."""
        shown = slice(start, job.made)
        meta: Message = {
            "id": job.rid,
            "finish_reason": job.finish,
            "prompt_tokens": job.prompt_tokens,
            "weight_version": self.weight_version,
            "num_retractions": job.retractions,
        }
        if job.body.get("return_logprob"):
            pairs = zip(job.draft.logprobs[shown], job.draft.ids[shown], strict=True)
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [(logprob, token, None) for logprob, token in pairs]
            meta["output_token_logprobs_length"] = job.made
        meta["reasoning_tokens"] = 0
        meta["completion_tokens"] = job.made
        meta["cached_tokens"] = job.draft.answer.cached_tokens
        if job.finish is not None:
            meta["weight_versions"] = job.spans or [{"version": self.weight_version, "start": 0, "end": 0}]
            meta["weight_version"] = meta["weight_versions"][-1]["version"]
            meta["e2e_latency"] = time.perf_counter() - job.begun
        chunk: Message = {"output_ids": job.draft.ids[shown], "meta_info": meta}
        if self._decode is not None:
            chunk["text"] = self._decode(job.draft.ids[shown])
        return chunk

    def _ended(self, job: Job) -> None:
        """Log the request, before its client can know that it has ended."""
        self.running.pop(job.rid, None)
        if self.options.log:
            answered: Message = {
                "rid": job.rid,
                "output_ids": job.draft.ids[: job.made],
                "logprobs": job.draft.logprobs[: job.made],
                "weight_versions": job.spans,
                "finish_reason": job.finish,
            }
            self.seen.append(job.body | answered)

    # Control ----------------------------------------------------------------------------------

    def _abort(self, body: Message) -> tuple[int, Any]:
        rid = body.get("rid") or ""
        if body.get("abort_all"):
            self.abort_all()
        elif rid in self.running:
            # The real scheduler ends every request whose id starts so.
            for job in [job for name, job in self.running.items() if name.startswith(rid)]:
                job.abort()
        return 200, b""

    def abort_all(self) -> None:
        """Abort all running requests."""
        for job in self.running.values():
            job.abort()

    def _pause(self, body: Message) -> tuple[int, Any]:
        self.paused = body.get("mode") or "abort"
        if self.paused == "abort":
            self.abort_all()
        elif self.paused == "retract":
            for job in self.running.values():
                job.retractions += not job.held
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def _continue(self, body: Message) -> tuple[int, Any]:
        if self.released:
            return 500, b"the scheduler ended"
        self.paused = None
        for job in self.running.values():
            job.wake.set()
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def _update_weight_version(self, body: Message) -> tuple[int, Any]:
        if body.get("abort_all_requests", True):
            self.abort_all()
        version = body["new_version"]
        self.weight_version, self.stale_version = version, None
        message = f"Weight version updated to {version}"
        return 200, {"success": True, "message": message, "new_version": version}

    def can_flush(self) -> bool:
        """Whether no running request needs the cache."""
        return self.paused == "retract" or all(job.held for job in self.running.values())

    def _flush_cache(self, body: Message) -> tuple[int, Any]:
        if self.can_flush():
            return 200, b"Cache flushed.\n"
        return 400, b"Flush cache failed.\n"

    # The real scheduler ends where these are asked for at the wrong time.

    def _release_memory(self, body: Message) -> tuple[int, Any]:
        if self.paused is None or not self.can_flush() or self.released & set(body["tags"]):
            return 500, b"the scheduler ended"
        self.released |= set(body["tags"])
        return 200, None

    def _resume_memory(self, body: Message) -> tuple[int, Any]:
        if not set(body["tags"]) <= self.released:
            return 500, b"the scheduler ended"
        self.released -= set(body["tags"])
        return 200, None

    def _model_info(self, body: Message) -> tuple[int, Any]:
        path = self.options.model_path
        info = {"model_path": path, "served_model_name": path, "tokenizer_path": path, "is_generation": True}
        return 200, info | {
            "preferred_sampling_params": self.options.preferred,
            "weight_version": self.stale_version or self.weight_version,
            "has_image_understanding": self.options.images,
            "has_audio_understanding": False,
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
        }

    def _server_info(self, body: Message) -> tuple[int, Any]:
        info = {"model_path": self.options.model_path, "dp_size": 1, "tp_size": 1, "version": VERSION}
        info |= {"device": "cpu", "dtype": self.options.weights or "auto"}
        info |= {"startup_time": {"scheduler_e2e": self._started}, "random_seed": 0}
        return 200, info | {
            "incremental_streaming_output": self.options.incremental,
            "weight_version": self.options.weight_version,
        }

    def _loads(self, body: Message) -> tuple[int, Any]:
        queued = sum(job.held or self.paused == "retract" for job in self.running.values())
        load = {"dp_rank": 0, "num_running_reqs": len(self.running) - queued, "num_waiting_reqs": queued}
        return 200, {"timestamp": time.time(), "version": VERSION, "loads": [load]}

    def _health(self, body: Message) -> tuple[int, Any]:
        return 200, b""

    def _seen(self, body: Message) -> tuple[int, Any]:
        return 200, list(self.seen)

    def _fault(self, body: Message) -> tuple[int, Any]:
        self.faults.add(Fault(**body))
        return 200, {"success": True}


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
