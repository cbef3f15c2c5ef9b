"""The embedded engine: transformers continuous batching in this process, on CPU or GPU.

It computes in float32, the trainer's type, so that its logprobs are the trainer's; other
checkpoints are widened. An update while it runs holds new requests, lets the running ones
finish, loads, digests the loaded tensors against the checkpoint's, drops every cached prefix and
resumes: each turn then has one policy version. If it was paused, requests survive the update,
and a turn has a span for each version that made some of its tokens.

SGLang's own control routes over the embedded engine, served under `/engine`.

The guard before the application decides who may use them. Each call that changes something is
recorded before it is answered, whether done or refused: the log shows who set which weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol, cast, get_args

import numpy as np
import orjson
import torch
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Strict
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from rollbook import __version__
from rollbook.edge.bounds import Temperature, Whole
from rollbook.engines.embedded.adapters import Adapters
from rollbook.engines.embedded.batching import LiveRequest, make_manager
from rollbook.engines.embedded.held_weights import HeldWeights
from rollbook.engines.embedded.scoring import Scorer
from rollbook.engines.embedded.weight_control import Gate, Mode, WeightControl
from rollbook.engines.engine import Activated, Generation, OnTokens, Prompt, Sampling, Scores, ignore_tokens
from rollbook.engines.model_files import read_json, weight_files
from rollbook.engines.weights.name import version_in
from rollbook.engines.weights.peft import read_peft
from rollbook.store.digest import is_tree
from rollbook.store.errors import EngineError, ModelError, RequestError
from rollbook.store.events import Json, Logprobs, TokenIds, token_ids
from rollbook.store.ids import new_id

SEMANTICS = {"kind": "sampled", "of": "softmax(logits / temperature)", "filters": []}


class EmbeddedEngine:
    """Serves one model directory; its weights may be replaced while it serves.

    Args:
        model: a Hugging Face model directory.
        policy: name of the line of weights that it serves.
        device: cpu or cuda.
        threads: torch threads on the CPU.
        batch_tokens: most tokens of one forward pass.
        cache_blocks: size of the KV cache in blocks of 256 tokens; None lets transformers choose.
        adapters: whether requests may name low-rank adapters; then none reads what another left in the cache.

    Attributes:
        weights: what it serves, and whether that is whole.
        updates: pauses it and changes its weights.
    """

    name = "embedded"
    honoured = frozenset({"temperature", "seed", "logprobs"})
    takes_images = False

    def __init__(
        self,
        model: Path,
        *,
        policy: str = "actor",
        device: str = "cpu",
        threads: int | None = None,
        batch_tokens: int = 1024,
        cache_blocks: int | None = 64,
        adapters: bool = False,
    ) -> None:
        self.policy, self.device = policy, device
        if threads:
            torch.set_num_threads(threads)
        logging.disable_progress_bar()
        self._model = _loaded(model, device)
        self.vocabulary = int(self._model.config.vocab_size)
        self.context_length = int(getattr(self._model.config, "max_position_embeddings", 2**31))
        self.weights = HeldWeights(self._model, model)
        self._adapters = Adapters()
        self._scorer = Scorer(self._model, self._adapters) if adapters else None
        if adapters:
            self._adapters.attach(self._model)
        self._manager = make_manager(
            self._model, batch_tokens, cache_blocks, self._adapters, share_prefixes=not adapters
        )
        stop = self._model.generation_config.eos_token_id
        self._stop_ids = tuple(stop) if isinstance(stop, list) else () if stop is None else (stop,)
        self._live: dict[str, LiveRequest] = {}
        self.gate = Gate()
        self.updates = WeightControl(self._manager, self.weights, self.gate, self._live)

    async def start(self, activated: Activated) -> None:
        """Start the generation thread, and report which weights are served."""
        self._manager.start()
        await self.updates.start(activated)

    async def close(self) -> None:
        """Stop the generation thread; what waits for weights or for the end of a pause fails."""
        await self.updates.close()
        await asyncio.to_thread(self._manager.stop, block=True)

    def failure(self) -> str | None:
        """The error that ended the generation loop, or why its weights are of no one version."""
        error = self._manager.background_thread_status.fatal_error
        if error is not None:
            return f"the generation loop ended: {error!r}"
        fault = self.weights.fault
        return None if fault is None else f"the weights are mixed: {fault}"

    def policy_version(self) -> int | None:
        """The version of the weights in memory."""
        return self.weights.version

    async def look(self) -> list[tuple[str, Any]]:
        """Nothing: it is made of the model that the tokenizer is of."""
        return []

    def held(self) -> tuple[int, str] | None:
        """(version, digest) of the weights in memory."""
        return self.weights.version, self.weights.digest

    async def verify(self) -> None:
        """Nothing: whatever is loaded is digested then."""

    def unverified(self) -> str | None:
        """None: it knows which weights it holds."""
        return None

    def doubtful(self) -> bool:
        """False: it knows which weights it holds."""
        return False

    def synced(self, version: int) -> None:
        """Nothing: the sync went through its own routes."""

    async def ready(self) -> None:
        """Return once requests are let in."""
        await self.gate.passed()

    async def generate(
        self, prompt: Prompt, sampling: Sampling, on_tokens: OnTokens = ignore_tokens
    ) -> Generation:
        """Sample a completion; waits while weights are being replaced or generation is paused.

        Raises:
            EngineError: generation failed, or the weights are of no one version.
        """
        if len(prompt.ids) and int(prompt.ids.max()) >= self.vocabulary:
            # It would end the generation loop for everybody.
            raise EngineError(
                f"the tokenizer made id {int(prompt.ids.max())}, but the model's vocabulary is "
                f"{self.vocabulary}: they are not of one model"
            )
        request_id = prompt.request_id or new_id()
        stop_ids = self._stop_ids if sampling.stop_ids is None else sampling.stop_ids
        live = LiveRequest(self._manager, request_id, prompt, sampling, stop_ids, on_tokens)
        self._live[request_id] = live
        try:
            while not live.ended.is_set():
                async with self._inside(live) as let_in:
                    if let_in:
                        await live.run()
        finally:
            del self._live[request_id]
        took = time.perf_counter() - live.arrived - live.held_s
        return self._generation(live, sampling, {"engine_us": int(took * 1e6)})

    @asynccontextmanager
    async def _inside(self, live: LiveRequest) -> AsyncIterator[bool]:
        """Context: a place in the manager, once the gate is open; False if the request was aborted
        before that."""
        while not self.gate.open.is_set() and not live.ended.is_set():
            await live.wait(self.gate.open)
        if live.ended.is_set():
            yield False
            return
        if (failure := self.failure()) is not None:
            raise EngineError(failure)
        self.gate.enter()
        try:
            yield True
        finally:
            self.gate.leave()

    def _generation(self, live: LiveRequest, sampling: Sampling, timings: dict[str, int]) -> Generation:
        if live.error is not None or not live.ids:
            why = "aborted before a token came" if live.aborted else live.error
            raise EngineError(f"generation failed: {why or 'no token came back'}")
        ids = token_ids(live.ids)
        logprobs: Logprobs = np.asarray(live.logprobs, dtype=np.float32)
        stopped = int(ids[-1]) in live.stop_ids
        assert live.first_token_s is not None
        waits = {"held_us": int(live.held_s * 1e6), "first_token_us": int(live.first_token_s * 1e6)}
        return Generation(
            ids,
            logprobs,
            live.spans(self.policy, self.weights.version),
            "stop" if stopped else "abort" if live.aborted else "length",
            SEMANTICS | {"temperature": sampling.temperature},
            waits | timings,
        )

    # Adapters -----------------------------------------------------------------------------------

    async def load_adapter(self, name: str, folder: Path, digest: str) -> None:
        """Hold a low-rank adapter, as `ServesAdapters`.

        Raises:
            EngineError: it cannot be read, does not fit, or is another than the digest says.
        """
        if self._adapters.held(name) is None:
            factors, scale = await asyncio.to_thread(read_peft, folder)
            own = {key: tensor.to(self.device) for key, tensor in factors.items()}
            adapter = await asyncio.to_thread(self._adapters.put, name, own, scale)
            if adapter.digest != digest:
                self._adapters.drop(name)
                raise EngineError(
                    f"{folder}: its factors have the digest {adapter.digest[:16]}, not {digest[:16]}"
                )

    async def unload_adapter(self, name: str) -> None:
        """Hold an adapter no more; no request uses it."""
        self._adapters.drop(name)

    async def load_weights(self, folder: Path, version: int, digest: str) -> None:
        """Serve other weights from here on, as `ServesWeights`.

        Raises:
            EngineError: they cannot be read or do not fit, or are others than the digest says.
        """
        self.weights.trees = is_tree(digest)
        try:
            loaded = await self.updates.update_from_disk(folder, version)
        except ModelError as error:
            raise EngineError(str(error)) from error
        if loaded != digest:
            raise EngineError(f"{folder}: its weights have the digest {loaded[:16]}, not {digest[:16]}")

    async def score(self, ids: TokenIds, adapter: str, temperature: float, top: int) -> Scores:
        """The logprobs of tokens, as `ServesAdapters`."""
        assert self._scorer is not None
        return await asyncio.to_thread(self._scorer.score, ids, adapter, temperature, top)

    async def abort(self, request_id: str) -> None:
        """End a request with what it has."""
        live = self._live.get(request_id)
        if live is not None:
            live.abort()

    def load(self) -> tuple[int, int]:
        """(requests that are running, requests that wait for weights or for the end of a pause)"""
        running = sum(request.running is not None for request in self._live.values())
        return running, len(self._live) - running

    def control(self) -> APIRouter | None:
        """SGLang's control routes."""
        return control_routes(self)


_WITH_SINKS = ("gpt_oss",)
"""Architectures whose attention torch's own, which is faster, does not compute."""


def _loaded(model: Path, device: str) -> Any:
    """The model, from only the safetensors and the configuration of its directory: none of its code runs.

    Raises:
        ModelError: it cannot be loaded.
    """
    read_json(model, "config.json")
    if not weight_files(model):
        raise ModelError(f"{model}: holds no safetensors weights")
    own: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(model, **own)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model,
            config=config,
            dtype=torch.float32,
            attn_implementation="eager" if config.model_type in _WITH_SINKS else "sdpa",
            use_safetensors=True,
            **own,
        )
    except Exception as error:  # transformers checks little before it computes with what it read
        raise ModelError(f"{model}: cannot be loaded as a causal language model: {error}") from error
    return loaded.to(device).eval()


KIND = "rollbook-embedded"
"""What /server_info calls this engine; SGLang's own says nothing there."""


CHANGES = frozenset(
    {
        "pause_generation",
        "continue_generation",
        "flush_cache",
        "release_memory_occupation",
        "resume_memory_occupation",
        "update_weights_from_disk",
        "begin_weight_update",
        "update_weights_from_tensor",
        "end_weight_update",
        "update_weight_version",
    }
)
"""Routes that change what the engine does."""
_TOLD = ("mode", "model_path", "weight_version", "new_version", "flush_cache", "abort_all_requests")
_ERROR_LENGTH = 500
_LARGE_BYTES = 1 << 16


class Controlled(Protocol):
    """The interface that these routes need of an engine."""

    vocabulary: int
    context_length: int
    device: str
    weights: HeldWeights
    updates: WeightControl

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation: ...
    def failure(self) -> str | None: ...
    def load(self) -> tuple[int, int]: ...


class PauseGeneration(BaseModel):
    """Body of /pause_generation."""

    model_config = ConfigDict(extra="allow")
    mode: str = "abort"


class MemoryParts(BaseModel):
    """Body of /release_memory_occupation and /resume_memory_occupation; no tags are all of them."""

    model_config = ConfigDict(extra="allow")
    tags: list[str] | None = None


def _has_cache(body: MemoryParts | None) -> bool:
    return body is None or not body.tags or "kv_cache" in body.tags


class SamplingParams(BaseModel):
    """SGLang's sampling_params, as far as the embedded engine acts on them."""

    model_config = ConfigDict(extra="allow")
    max_new_tokens: Whole = 128
    temperature: Temperature = 1.0
    sampling_seed: Whole = 0


class GenerateBody(BaseModel):
    """Body of /generate."""

    model_config = ConfigDict(extra="allow")
    input_ids: list[Annotated[int, Strict()]]
    sampling_params: SamplingParams = SamplingParams()


def _check(body: GenerateBody, engine: Controlled) -> None:
    """Refuse input that would end the generation loop, and with it every request."""
    ids, new = body.input_ids, body.sampling_params.max_new_tokens
    if not ids or min(ids) < 0 or max(ids) >= engine.vocabulary:
        text = f"input_ids must hold at least one id, each from 0 to {engine.vocabulary - 1}"
        raise RequestError(400, "bad_request", text)
    if new < 1 or len(ids) + new > engine.context_length:
        text = f"max_new_tokens is {new}: send at least 1, and with {len(ids)} input_ids at most "
        raise RequestError(400, "bad_request", text + f"{engine.context_length} in all")


class Controlling(APIRoute):
    """A route that, if its name is in `CHANGES`, records its calls through the application's
    `state.controlled`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of the route's requests."""
        answer = super().get_route_handler()
        action = self.path.rpartition("/")[2]
        if action not in CHANGES:
            return answer

        async def recorded(request: Request) -> Response:
            arguments = _told_of(await request.body())
            try:
                reply = await answer(request)
            except Exception as error:
                await request.app.state.controlled(request, action, arguments, repr(error)[:_ERROR_LENGTH])
                raise
            await request.app.state.controlled(request, action, arguments, _refusal_of(reply))
            return reply

        return recorded


def _refusal_of(reply: Response) -> str | None:
    """Why the engine refused; None if it did not."""
    if reply.status_code == 200:
        return None
    text = bytes(reply.body).decode()
    message = orjson.loads(text)["message"] if isinstance(reply, JSONResponse) else text
    return str(message).strip()[:_ERROR_LENGTH]


def _told_of(raw: bytes) -> Json:
    """The part of a request's body that is logged: no tensors."""
    if len(raw) > _LARGE_BYTES:
        return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(body, dict):
        return {}
    return {k: v for k, v in body.items() if k in _TOLD and isinstance(v, str | int | float | bool | None)}


def control_routes(engine: Controlled) -> APIRouter:
    """The routes, to be mounted under /engine."""
    routes = APIRouter(route_class=Controlling)

    @routes.get("/health")
    async def health() -> Json:
        return {"status": "ok"}

    @routes.get("/model_info")
    @routes.get("/get_model_info")
    async def model_info() -> Json:
        weights = engine.weights
        info = {"model_path": str(weights.path), "weight_version": weights.label}
        return info | {"is_generation": True, "weights": weights.state, "failure": engine.failure()}

    @routes.get("/server_info")
    @routes.get("/get_server_info")
    async def server_info() -> Json:
        ranks = {"tp_size": 1, "dp_size": 1, "pp_size": 1}
        own: Json = {"version": __version__, "engine": KIND, "device": engine.device} | ranks
        paths = {"model_path": str(engine.weights.path), "weight_version": engine.weights.label}
        return own | paths | {"paused": engine.updates.paused, "asleep": engine.updates.asleep}

    @routes.get("/v1/loads")
    async def loads() -> Json:
        running, waiting = engine.load()
        load = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting}
        return {"timestamp": time.time(), "version": __version__, "loads": [load]}

    @routes.post("/generate")
    async def generate(body: GenerateBody) -> Json:
        _check(body, engine)
        params = body.sampling_params
        sampling = Sampling(params.max_new_tokens, params.temperature, params.sampling_seed)
        generation = await engine.generate(Prompt(token_ids(body.input_ids), (), None), sampling)
        return _generated(generation, len(body.input_ids))

    add_weight_routes(routes, engine.weights, engine.updates)
    _add_flow_routes(routes, engine.updates)
    _add_memory_routes(routes, engine.updates)
    return routes


def _add_flow_routes(routes: APIRouter, updates: WeightControl) -> None:
    @routes.post("/pause_generation")
    async def pause(body: PauseGeneration | None = None) -> Json:
        mode = "abort" if body is None else body.mode
        if mode not in get_args(Mode):
            text = f"mode is {mode!r}: send one of {', '.join(get_args(Mode))}"
            raise RequestError(400, "bad_request", text)
        await updates.pause(cast(Mode, mode))
        return {"message": "Generation paused successfully.", "status": "ok"}

    @routes.post("/continue_generation", response_model=None)
    async def resume() -> Json | JSONResponse:
        try:
            await updates.resume()
        except ModelError as error:
            return refused(error)
        return {"message": "Generation continued successfully.", "status": "ok"}

    # SGLang takes a GET too. Here none changes anything: a link could have it sent.
    @routes.post("/flush_cache", response_model=None)
    async def flush() -> PlainTextResponse:
        if await updates.flush_cache():
            return PlainTextResponse("Cache flushed.\n")
        text = "Flush cache failed.\nRequests stand still in the batch: pause with mode retract to flush.\n"
        return PlainTextResponse(text, 400)


def _add_memory_routes(routes: APIRouter, updates: WeightControl) -> None:
    # Of SGLang's parts this engine gives its KV cache: weights are read where they are served.
    @routes.post("/release_memory_occupation", response_model=None)
    async def release(body: MemoryParts | None = None) -> Json | JSONResponse:
        if _has_cache(body):
            try:
                await updates.release_cache()
            except ModelError as error:
                return refused(error)
        return {"success": True, "message": "Success"}

    @routes.post("/resume_memory_occupation", response_model=None)
    async def take(body: MemoryParts | None = None) -> Json:
        if _has_cache(body):
            await updates.take_cache()
        return {"success": True, "message": "Success"}


def _generated(generation: Generation, prompt_tokens: int) -> Json:
    """A generation in SGLang's form."""
    ids = generation.completion_ids.tolist()
    numbers = [] if generation.logprobs is None else generation.logprobs.tolist()
    spans = [{"version": str(s.version), "start": s.start, "end": s.end} for s in generation.version_spans]
    reason: Json = {"type": generation.finish_reason}
    reason |= {"matched": ids[-1]} if generation.finish_reason == "stop" else {"length": len(ids)}
    meta = {
        "finish_reason": reason,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(ids),
        "output_token_logprobs": [[p, i, None] for p, i in zip(numbers, ids, strict=True)],
        "weight_versions": spans,
        "weight_version": spans[-1]["version"],
    }
    return {"output_ids": ids, "meta_info": meta}


NOT_SERVED = (
    "init_weights_update_group",
    "destroy_weights_update_group",
    "update_weights_from_distributed",
    "update_weights_from_ipc",
)


class UpdateFromDisk(BaseModel):
    """Body of /update_weights_from_disk; SGLang's other fields are accepted."""

    model_config = ConfigDict(extra="allow")
    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True


class UpdateFromTensors(BaseModel):
    """Body of /update_weights_from_tensor; SGLang's other fields are accepted."""

    model_config = ConfigDict(extra="allow")
    serialized_named_tensors: list[str]
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True


class UpdateWeightVersion(BaseModel):
    """Body of /update_weight_version."""

    model_config = ConfigDict(extra="allow")
    new_version: str
    abort_all_requests: bool = True


class CheckWeights(BaseModel):
    """Body of /weights_checker."""

    model_config = ConfigDict(extra="allow")
    action: str = "checksum"


def refused(error: Exception) -> JSONResponse:
    """The reply for a failed update, in SGLang's form and in the proxy's."""
    shown = {"message": str(error), "type": "invalid_request_error", "param": None, "code": "update_failed"}
    return JSONResponse({"success": False, "message": str(error), "error": shown}, 400)


def add_weight_routes(routes: APIRouter, weights: HeldWeights, updates: WeightControl) -> None:
    """The routes that change weights, and the one that reports them."""
    _add_disk_route(routes, weights, updates)
    _add_session_routes(routes, updates)
    _add_version_route(routes, updates)

    @routes.api_route("/weights_checker", methods=["GET", "POST"], response_model=None)
    async def weights_checker(body: CheckWeights | None = None) -> Json | JSONResponse:
        if body is not None and body.action != "checksum":
            return refused(ModelError(f"action is {body.action!r}: this engine computes only checksum"))
        rank = _rank(await updates.checksums())
        engine = hashlib.sha256(rank["per_gpu_checksum"].encode()).hexdigest()
        report: Json = {
            "success": True,
            "message": "Success.",
            "ranks": [rank],
            "per_engine_checksum": engine,
        }
        return report | {"digest": weights.digest if weights.state in ("whole", "unnamed") else None}

    async def not_served(request: Request) -> JSONResponse:
        name = request.url.path.rpartition("/")[2]
        return refused(ModelError(f"{name}: the embedded engine loads weights from disk or from tensors"))

    for name in NOT_SERVED:
        routes.add_api_route(f"/{name}", not_served, methods=["POST"], response_model=None)


def _add_disk_route(routes: APIRouter, weights: HeldWeights, updates: WeightControl) -> None:
    @routes.post("/update_weights_from_disk", response_model=None)
    async def update_from_disk(body: UpdateFromDisk) -> Json | JSONResponse:
        path, version = Path(body.model_path), _maybe_version(body.weight_version)
        try:
            digest = await updates.update_from_disk(path, version, flush=body.flush_cache)
        except ModelError as error:
            return refused(error)
        version = weights.version if weights.named else None
        message = f"serving {body.model_path} as version {version}"
        return {"success": True, "message": message, "num_paused_requests": 0, "digest": digest}


def _add_version_route(routes: APIRouter, updates: WeightControl) -> None:
    @routes.post("/update_weight_version", response_model=None)
    async def update_weight_version(body: UpdateWeightVersion) -> Json | JSONResponse:
        version = _version(body.new_version)
        if body.abort_all_requests:
            updates.abort_all()
        try:
            await updates.name(version, body.new_version)
        except ModelError as error:
            return refused(error)
        message = f"Weight version updated to {version}"
        return {"success": True, "message": message, "new_version": body.new_version}


def _add_session_routes(routes: APIRouter, updates: WeightControl) -> None:
    @routes.post("/begin_weight_update", response_model=None)
    async def begin() -> Json | JSONResponse:
        try:
            await updates.begin_update()
        except ModelError as error:
            return refused(error)
        return {"success": True, "message": "Success"}

    @routes.post("/update_weights_from_tensor", response_model=None)
    async def update_from_tensors(body: UpdateFromTensors) -> Json | JSONResponse:
        version = _maybe_version(body.weight_version)
        try:
            if body.load_format is not None:
                raise ModelError(f"load_format is {body.load_format!r}: this engine reads null only")
            sent = body.serialized_named_tensors
            await updates.update_from_tensors(sent, version, flush=body.flush_cache)
        except ModelError as error:
            return refused(error)
        return {"success": True, "message": "Success"}

    @routes.post("/end_weight_update", response_model=None)
    async def end() -> Json | JSONResponse:
        try:
            await updates.end_update()
        except ModelError as error:
            return refused(error)
        return {"success": True, "message": "Success"}


def _rank(checksums: dict[str, str]) -> Json:
    """The one rank's part of an answer of /weights_checker."""
    names = b"".join(name.encode() + checksums[name].encode() for name in sorted(checksums))
    sizes = {"tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1}
    return {
        "checksums": checksums,
        "per_gpu_checksum": hashlib.sha256(names).hexdigest(),
        "parallelism_info": [{"role": "target"} | sizes | {"rank": 0, "size": 1}],
    }


def _version(text: str) -> int:
    version = version_in(text)
    if version is None:
        message = f"weight_version {text!r} names no policy version: send one as N or run/policy/N/MARK"
        raise RequestError(400, "bad_version", message)
    return version


def _maybe_version(text: str | None) -> int | None:
    return None if text is None else _version(text)
