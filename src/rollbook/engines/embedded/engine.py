"""The embedded engine: transformers continuous batching in this process, on CPU or GPU.

It computes in float32, the trainer's type, so that its logprobs are the trainer's; other
checkpoints are widened. An update while it runs holds new requests, lets the running ones
finish, loads, digests the loaded tensors against the checkpoint's, drops every cached prefix and
resumes: each turn then has one policy version. If it was paused, requests survive the update,
and a turn has a span for each version that made some of its tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fastapi import APIRouter
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from rollbook.engines.embedded.batching import LiveRequest, make_manager
from rollbook.engines.embedded.control import control_routes
from rollbook.engines.embedded.held_weights import HeldWeights
from rollbook.engines.embedded.weight_control import Gate, WeightControl
from rollbook.engines.engine import Activated, Generation, OnTokens, Prompt, Sampling, ignore_tokens
from rollbook.engines.model_files import read_json, weight_files
from rollbook.store.errors import EngineError, ModelError
from rollbook.store.events import Logprobs, token_ids
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
    ) -> None:
        self.policy, self.device = policy, device
        if threads:
            torch.set_num_threads(threads)
        logging.disable_progress_bar()
        self._model = _loaded(model, device)
        self.vocabulary = int(self._model.config.vocab_size)
        self.context_length = int(getattr(self._model.config, "max_position_embeddings", 2**31))
        self.weights = HeldWeights(self._model, model)
        self._manager = make_manager(self._model, batch_tokens, cache_blocks)
        stop = self._model.generation_config.eos_token_id
        self._stop_ids = set(stop) if isinstance(stop, list) else {stop}
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
        arrived = time.perf_counter()
        request_id = prompt.request_id or new_id()
        live = LiveRequest(self._manager, request_id, prompt, sampling, on_tokens)
        self._live[request_id] = live
        try:
            while not live.ended.is_set():
                async with self._inside(live) as let_in:
                    if let_in:
                        await live.run()
        finally:
            del self._live[request_id]
        took = time.perf_counter() - arrived - live.held_s
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
        stopped = int(ids[-1]) in self._stop_ids
        return Generation(
            ids,
            logprobs,
            live.spans(self.policy, self.weights.version),
            "stop" if stopped else "abort" if live.aborted else "length",
            SEMANTICS | {"temperature": sampling.temperature},
            {"held_us": int(live.held_s * 1e6)} | timings,
        )

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
