"""The embedded engine: transformers continuous batching in this process, on CPU or GPU.

It computes in float32, the trainer's type, so that its logprobs are the trainer's; other checkpoints
are widened. Weights change between requests, never within one: an update holds new requests, lets the running
ones end, loads, digests the loaded tensors against the checkpoint's, forgets every cached prefix and
goes on. So each turn has one policy version, and it is the one that made its tokens.
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
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils import logging

from rollbook.ingest.engines.control import control_routes
from rollbook.ingest.engines.embedded_request import WaitingRequest
from rollbook.ingest.engines.engine import Activated, Generation, Heard, Prompt, Sampling, unheard
from rollbook.ingest.engines.sampling import SeededManager
from rollbook.ingest.engines.weights import digest_tensors, published_version, read_weights, widened
from rollbook.store.errors import EngineError, ModelError
from rollbook.store.events import Logprobs, VersionSpan, token_ids
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
        self.path = model
        self.policy = policy
        if threads:
            torch.set_num_threads(threads)
        logging.disable_progress_bar()
        try:
            config = AutoConfig.from_pretrained(model)
            loaded = AutoModelForCausalLM.from_pretrained(
                model, config=config, dtype=torch.float32, attn_implementation="sdpa"
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{model}: cannot be loaded as a causal language model: {error}") from error
        self._model: Any = loaded.to(device).eval()
        self.vocabulary = int(loaded.config.vocab_size)
        self.context_length = int(getattr(loaded.config, "max_position_embeddings", 2**31))
        self._version, expected = published_version(model)
        if expected is None:
            expected = digest_tensors(widened(read_weights(model)))
        self.weights_digest = self._verified(model, expected)
        self._manager = self._make_manager(batch_tokens, cache_blocks)
        self._open = asyncio.Event()
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._changing = asyncio.Lock()
        self._waiting: dict[str, WaitingRequest] = {}

    def _make_manager(self, batch_tokens: int, cache_blocks: int | None) -> SeededManager:
        config = ContinuousBatchingConfig(
            max_batch_tokens=batch_tokens,
            num_blocks=cache_blocks,
            return_logprobs=True,
            per_request_processors=True,
            use_cuda_graph=False,
            use_async_batching=False,
        )
        stop = self._model.generation_config.eos_token_id
        generation = GenerationConfig(do_sample=True, eos_token_id=stop, pad_token_id=0)
        return SeededManager(self._model, generation, config)

    async def start(self, activated: Activated) -> None:
        """Start the generation thread, and say which weights are served."""
        self._activated = activated
        self._manager.start()
        await activated(self._version, self.weights_digest, self.path)
        self._open.set()

    async def close(self) -> None:
        """Stop the generation thread; what still runs fails."""
        self._open.clear()
        await asyncio.to_thread(self._manager.stop, block=True)

    def failure(self) -> str | None:
        """The error that ended the generation loop, if one did."""
        error = self._manager.background_thread_status.fatal_error
        return None if error is None else f"the generation loop ended: {error!r}"

    def policy_version(self) -> int | None:
        """The version of the weights in memory."""
        return self._version

    async def ready(self) -> None:
        """Return once requests are let in."""
        while not self._open.is_set():  # it may have closed again before this task woke
            await self._open.wait()

    async def generate(self, prompt: Prompt, sampling: Sampling, heard: Heard = unheard) -> Generation:
        """Sample a completion; waits while weights are being replaced.

        Raises:
            EngineError: generation failed.
        """
        if len(prompt.ids) and int(prompt.ids.max()) >= self.vocabulary:
            # It would end the generation loop for everybody.
            raise EngineError(
                f"the tokenizer made id {int(prompt.ids.max())}, but the model's vocabulary is "
                f"{self.vocabulary}: they are not of one model"
            )
        arrived = time.perf_counter()
        await self.ready()
        self._running += 1
        self._idle.clear()
        try:
            version, begun = self._version, time.perf_counter()
            output, aborted = await self._run(prompt, sampling, heard)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
        if output is None or output.error is not None or not output.generated_tokens:
            why = "aborted before a token came" if aborted else getattr(output, "error", None)
            raise EngineError(f"generation failed: {why or 'no token came back'}")
        ids = token_ids(output.generated_tokens)
        logprobs: Logprobs = np.asarray(output.logprobs, dtype=np.float32)
        stopped = int(ids[-1]) in self._stop_ids()
        return Generation(
            ids,
            logprobs,
            (VersionSpan(self.policy, version, 0, len(ids)),),
            "stop" if stopped else "abort" if aborted else "length",
            SEMANTICS | {"temperature": sampling.temperature},
            {
                "held_us": int((begun - arrived) * 1e6),
                "engine_us": int((time.perf_counter() - begun) * 1e6),
            },
        )

    async def abort(self, request_id: str) -> None:
        """End a request with what it has."""
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            waiting.abort()

    def _stop_ids(self) -> set[int]:
        stop = self._model.generation_config.eos_token_id
        return set(stop) if isinstance(stop, list) else {stop}

    async def _run(self, prompt: Prompt, sampling: Sampling, heard: Heard) -> tuple[Any, bool]:
        """(the manager's last output, whether the request was aborted)"""
        request_id = prompt.request_id or new_id()
        waiting = WaitingRequest(self._manager, request_id, heard)
        self._waiting[request_id] = waiting
        try:
            self._manager.register_result_handler(request_id, waiting.deliver)
            accepted = self._manager.add_request(
                prompt.ids.tolist(),
                request_id=request_id,
                max_new_tokens=sampling.max_new_tokens,
                temperature=float(sampling.temperature),
                seed=int(sampling.seed),
                streaming=True,
            )
            if accepted is None:
                raise EngineError("the engine's generation loop has stopped")
            return await waiting.done, waiting.aborted
        finally:
            del self._waiting[request_id]

    # Control ----------------------------------------------------------------------------------

    def control(self) -> APIRouter | None:
        """SGLang's control routes."""
        return control_routes(self)

    async def pause(self) -> None:
        """Hold new requests and wait until the running ones have ended."""
        self._open.clear()
        await self._idle.wait()

    async def resume(self) -> None:
        """Let requests in again; not before an update or a flush that is under way has ended."""
        async with self._changing:
            self._open.set()

    async def flush_cache(self) -> None:
        """Forget every cached prefix. Waits for running requests first."""
        async with self._held():
            await asyncio.to_thread(self._forget_prefixes)

    @asynccontextmanager
    async def _held(self) -> AsyncIterator[None]:
        """No request runs inside; one change at a time; afterwards requests flow if they did before."""
        async with self._changing:
            was_open = self._open.is_set()
            await self.pause()
            try:
                yield
            finally:
                if was_open:
                    self._open.set()

    def _forget_prefixes(self) -> None:
        with self._manager.pause():
            if self._manager.batch_processor is not None:
                self._manager.batch_processor.cache.reset()

    async def update_weights(self, path: Path, version: int | None) -> str:
        """Load the weights of a checkpoint of the same architecture; the digest of what was loaded.

        Raises:
            ModelError: the checkpoint is another architecture's, damaged, or not what it says it is;
                the old weights stay in place.
        """
        own_version, own_digest = published_version(path)
        if own_digest is not None and version not in (None, own_version):
            raise ModelError(f"{path} is version {own_version} of its policy, not {version}")
        async with self._held():
            digest = await asyncio.to_thread(self._load, path)
            self._version = own_version if version is None else version
            self.path, self.weights_digest = path, digest
            await self._activated(self._version, digest, path)
        return digest

    def _load(self, path: Path) -> str:
        stored = read_weights(path)
        own = self._own_tensors()
        shapes = [{n: t.shape for n, t in held.items()} for held in (stored, own)]
        if shapes[0] != shapes[1]:
            odd = sorted(n for n in shapes[0] | shapes[1] if shapes[0].get(n) != shapes[1].get(n))
            raise ModelError(f"{path}: another architecture's checkpoint (differs in {odd[:3]})")
        expected = published_version(path)[1]
        if expected is not None and digest_tensors(stored) != expected:
            raise ModelError(f"{path}: the weights are not those its manifest names; copy it anew")
        tensors = widened(stored)
        with self._manager.pause(), torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])
            if self._manager.batch_processor is not None:
                self._manager.batch_processor.cache.reset()
        return self._verified(path, digest_tensors(tensors))

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        tensors = dict(self._model.state_dict())
        if self._model.config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        return tensors

    def _verified(self, path: Path, expected: str) -> str:
        """Digest of the tensors in memory, equal to the checkpoint's."""
        own = digest_tensors(self._own_tensors())
        if own != expected:
            raise ModelError(
                f"{path}: after loading, the weights digest is {own[:16]}, not {expected[:16]}: the "
                "checkpoint is damaged, or not of this architecture"
            )
        return own
