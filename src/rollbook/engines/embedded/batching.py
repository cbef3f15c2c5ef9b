"""Transformers' continuous batching with a random generator per request, and a loop that can be
paused.

While the loop is paused no forward pass runs, so weights and the scheduler may be changed. The
thread that paused it must also resume it.

Each draw is a pure function of (request seed, position), so a request's tokens do not depend on
what else is in the batch (up to the engine's floating-point rounding). The token is the inverse
of the cumulative distribution at that draw. Logprobs are those of the distribution sampled from,
softmax(logits / temperature); a greedy turn (temperature 0) reports softmax(logits).

A request may leave the batch and come back.
"""

from __future__ import annotations

import asyncio
import queue
import struct
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import xxhash
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from rollbook.engines.embedded.adapters import Adapters
from rollbook.engines.engine import OnTokens, Prompt, Sampling
from rollbook.store.errors import EngineError
from rollbook.store.events import VersionSpan


class SeededManager(ContinuousBatchingManager):
    """Continuous batching whose sampler draws per request.

    Args:
        adapters: those that requests may name.
    """

    def __init__(self, model: Any, generation_config: Any, config: Any, adapters: Adapters) -> None:
        self._draws, self._adapters = Draws(), adapters
        self._top_k, self._top_p = Number("top_k", 0.0), Number("top_p", 1.0)
        self._stale: set[str] = set()
        self._cache_bytes = 0
        super().__init__(model, generation_config, config)
        self.logit_processor.logits_processor = LogitsProcessorList(
            [Temperature(), self._draws, self._top_k, self._top_p]
        )
        self.logit_processor.tensors_required = 4
        self.logit_processor.do_processing = True
        self.logit_processor._retrieve_processors_kwargs()

    def _create_batch_processor(self) -> Any:
        processor = super()._create_batch_processor()
        compute = processor.model_runner.compute_batch

        def compute_batch(model: Any, batch_data: Any) -> None:
            batch = processor.inputs_and_outputs.requests_in_batch
            names = [str(r.state.logit_processor_kwargs.get("adapter", "")) for r in batch]
            self._adapters.begin([r.query_length for r in batch], names, [r.has_new_token for r in batch])
            compute(model, batch_data)

        def write_samples(scores: torch.Tensor, output_ids: torch.Tensor) -> None:
            rows = self._draws.rows, self._top_k.rows, self._top_p.rows
            tokens, logprobs = sample(scores[0].float(), *rows)
            count = tokens.size(0)
            output_ids[0, :count].copy_(tokens)
            # Logprobs travel in the int32 output tensor as their own bits.
            output_ids[1, :count].copy_(logprobs.float().view(dtype=torch.int32))

        processor.model_runner.compute_batch = compute_batch
        processor.model_runner._sample = write_samples
        self._keep_stale_blocks_private(processor.cache)
        return processor

    def _keep_stale_blocks_private(self, cache: Any) -> None:
        mark, stale = cache.mark_complete_blocks, self._stale

        def mark_complete_blocks(state: Any, complete_blocks: dict[str, int]) -> None:
            # Keys and values of a request that lived through a change of weights are of both: no other
            # request may read them as a cached prefix.
            if state.request_id not in stale:
                mark(state, complete_blocks)

        cache.mark_complete_blocks = mark_complete_blocks

    # The loop ---------------------------------------------------------------------------------

    def stand_still(self) -> None:
        """Return once no forward pass runs, and none will until `go_on`. Nests."""
        if not self.is_running():
            raise RuntimeError("the generation loop has ended")
        self.background_thread_status.acquire_pause(self._wake_up_loop)

    def go_on(self) -> None:
        """Let the loop run again, once all that paused it have released it."""
        self.background_thread_status.release_pause()

    # While it stands still --------------------------------------------------------------------

    def remove(self, request_ids: Iterable[str]) -> None:
        """Take all requests, with their KV cache, out of the batch: `request_ids` are all that were put in.

        Cached prefixes stay.
        """
        while True:
            try:
                self.input_queue.get_nowait()
            except queue.Empty:
                break
        if self.batch_processor is None:
            return
        scheduler: Any = self.batch_processor.scheduler
        for request_id in request_ids:
            scheduler.set_request_cancellation(request_id)
        for state in scheduler.clear_cancelled_requests():
            self.batch_processor.offloading_manager.free_request_cpu_cache(state)
        # The loop may hold requests that it has taken from the queue and not yet put into the scheduler: it
        # looks at these marks right after it has done so.
        for request_id in request_ids:
            scheduler.set_request_cancellation(request_id)
        scheduler.block_new_requests = False
        scheduler.starved_requests = []

    def forget_prefixes(self) -> None:
        """Let no later request read present cache entries. Running requests keep their own keys and
        values."""
        if self.batch_processor is None:
            return
        cache, scheduler = self.batch_processor.cache, self.batch_processor.scheduler
        if not scheduler.active_requests:
            self._stale.clear()
            cache.reset()
            return
        # The same set all along: the cache looks into it.
        self._stale.intersection_update(scheduler.active_requests)
        self._stale.update(scheduler.active_requests)
        cache.evict_cached_blocks()
        for allocator in cache.cache_allocators.values():
            allocator.ledger.hash_to_block.clear()
            allocator.ledger.block_to_hash.clear()

    def release_cache(self) -> None:
        """Give the memory of the KV cache back; no request is in it."""
        if self.batch_processor is not None:
            self.forget_prefixes()
            self._cache_bytes = self.batch_processor.cache.cache_tensor.untyped_storage().nbytes()
            self.batch_processor.cache.cache_tensor.untyped_storage().resize_(0)

    def take_cache(self) -> None:
        """Take as much memory for it again."""
        if self.batch_processor is not None:
            self.batch_processor.cache.cache_tensor.untyped_storage().resize_(self._cache_bytes)
            self.batch_processor.cache.cache_tensor.zero_()

    # Results ----------------------------------------------------------------------------------

    def unregister_result_handler(self, request_id: str) -> None:
        """Send no more callbacks for this request."""
        with self.output_router._lock:
            self.output_router.result_handlers.pop(request_id, None)


def make_manager(
    model: Any, batch_tokens: int, cache_blocks: int | None, adapters: Adapters, *, share_prefixes: bool
) -> SeededManager:
    """Continuous batching of a model, not started.

    Args:
        batch_tokens: most tokens of one forward pass.
        cache_blocks: size of the KV cache in blocks of 256 tokens; None lets transformers choose.
        share_prefixes: whether requests read what others left in the cache of the same tokens, which is
            wrong where they have other adapters.
    """
    config = ContinuousBatchingConfig(
        max_batch_tokens=batch_tokens,
        num_blocks=cache_blocks,
        return_logprobs=True,
        per_request_processors=True,
        use_cuda_graph=False,
        use_async_batching=False,
        allow_block_sharing=share_prefixes,
    )
    stop = model.generation_config.eos_token_id
    generation = GenerationConfig(do_sample=True, eos_token_id=stop, pad_token_id=0)
    return SeededManager(model, generation, config, adapters)


NO_TOKEN = -1
"""An id that is never sampled."""
GREEDY = -1.0
"""Stands for a draw where the most probable token is taken."""


def uniform_draw(seed: int, position: int) -> float:
    """A number in [0, 1) with 24 random bits (exact in float32), from a request's seed and position."""
    key = struct.pack("<QQ", seed & (2**64 - 1), position)
    return (xxhash.xxh3_64_intdigest(key) >> 40) / 2**24


class _PerRequest(ContinuousBatchingLogitsProcessor):
    """A float per row, taken from the requests that get a new token in this forward pass."""

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012  (declared so by transformers)
    ignored_kwargs: tuple[str, ...] = ()
    default = 1.0

    @abstractmethod
    def value(self, state: Any) -> float:
        """The request's number for this forward pass."""

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        filled = torch.full_like(int32_tensor, self.default, dtype=torch.float32)
        int32_tensor.copy_(filled.view(dtype=torch.int32))

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        values = [self.value(request.state) for request in requests_with_new_token]
        return torch.tensor(values, dtype=torch.float32).view(dtype=torch.int32)


class Temperature(_PerRequest):
    """Divides each row's logits by its request's temperature (1 where the request is greedy)."""

    supported_kwargs = {"temperature": float}  # noqa: RUF012

    def value(self, state: Any) -> float:
        temperature = float(state.logit_processor_kwargs.get("temperature", 1.0))
        return temperature if temperature > 0 else 1.0

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        rows = tensor_arg[: scores.size(0)].view(dtype=torch.float32)
        return scores / rows.unsqueeze(-1)


class _Kept(_PerRequest):
    """Leaves the logits alone and keeps the number of each row for the sampler."""

    def __init__(self) -> None:
        self.rows = torch.empty(0)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        self.rows = tensor_arg[: scores.size(0)].view(dtype=torch.float32)
        return scores


class Draws(_Kept):
    """The draw of each row."""

    supported_kwargs = {"seed": int, "prompt_tokens": int, "adapter": str}  # noqa: RUF012
    default = GREEDY

    def value(self, state: Any) -> float:
        kwargs = state.logit_processor_kwargs
        if float(kwargs.get("temperature", 1.0)) <= 0:
            return GREEDY
        # A request that was put back into the queue has its own tokens behind its prompt.
        position = len(state.initial_tokens) - int(kwargs["prompt_tokens"]) + state.generated_len()
        return uniform_draw(int(kwargs["seed"]), position)


class Number(_Kept):
    """A number that each request gives by itself."""

    def __init__(self, key: str, default: float) -> None:
        super().__init__()
        self.key, self.default = key, default
        self.supported_kwargs = {key: float}

    def value(self, state: Any) -> float:
        return float(state.logit_processor_kwargs.get(self.key, self.default))


def sample(
    scores: torch.Tensor, draws: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their logprobs, which are those of all tokens, whichever are kept to be drawn from.

    Args:
        scores: float32 [rows, vocabulary], logits after temperature.
        draws: float32 [rows], in [0, 1), or `GREEDY`.
        top_k: float32 [rows]: so many of the likeliest tokens are kept; 0: all.
        top_p: float32 [rows]: of those the likeliest that have this probability together.

    Returns:
        (int64 [rows], float32 [rows])
    """
    logprobs = torch.log_softmax(scores, dim=-1)
    probabilities = logprobs.double().exp()
    if bool(((top_k > 0) | (top_p < 1)).any()):
        probabilities = likeliest(probabilities, top_k, top_p)
    cumulative = probabilities.cumsum(-1)
    target = draws.double().unsqueeze(-1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    drawn = drawn.clamp_(max=scores.size(-1) - 1)
    tokens = torch.where(draws < 0, logprobs.argmax(-1), drawn)
    return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def likeliest(probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Probabilities [rows, vocabulary] with those 0 that are not kept; arguments as of `sample`."""
    values, order = probabilities.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(values.size(-1), device=values.device)
    values = values.masked_fill((top_k.unsqueeze(-1) > 0) & (ranks >= top_k.unsqueeze(-1)), 0.0)
    before = values.cumsum(-1) - values
    whole = values.sum(-1, keepdim=True)
    bounds = torch.where(top_p < 1, top_p.double(), torch.inf).unsqueeze(-1)
    values = values.masked_fill((before >= bounds * whole) & (ranks > 0), 0.0)
    return torch.zeros_like(values).scatter(-1, order, values)


class LiveRequest:
    """A request from its arrival to its answer, and what it has sampled so far.

    It runs in the manager in one go, or in several if the engine was paused: then it waits
    outside with its ids and later continues after them. Methods are called on the event loop.

    Attributes:
        ids, logprobs: sampled so far; all of them where the manager's loop stands still.
        stop_ids: tokens that end it.
        ended: it will sample no more.
        running: under this id in the manager, or None.
        arrived: when, by the performance counter.
        held_s: seconds that it waited outside.
        first_token_s: seconds from its arrival until its first token, without those that it waited outside.
    """

    def __init__(
        self,
        manager: Any,
        request_id: str,
        prompt: Prompt,
        sampling: Sampling,
        stop_ids: Sequence[int],
        on_tokens: OnTokens,
    ) -> None:
        self.request_id, self.stop_ids = request_id, [*stop_ids]
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.aborted = False
        self.running: str | None = None
        self.ended = asyncio.Event()
        self.error: str | None = None
        self.held_s = 0.0
        self.first_token_s: float | None = None
        self.arrived = time.perf_counter()
        self._manager, self._prompt, self._sampling, self._on_tokens = manager, prompt, sampling, on_tokens
        self._versions: list[tuple[int, int]] = []
        self._left: asyncio.Future[None] | None = None
        self._visits = self._before = 0

    async def wait(self, gate: asyncio.Event) -> None:
        """Wait outside until the gate opens, or it is aborted."""
        begun = time.perf_counter()
        waits = [asyncio.ensure_future(event.wait()) for event in (gate, self.ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for event in waits:
                event.cancel()
            self.held_s += time.perf_counter() - begun

    async def run(self) -> None:
        """Enter the manager, and return when the request has ended, failed or been taken out.

        Raises:
            EngineError: the manager takes no request any more.
        """
        self._visits += 1
        name, self._before = f"{self.request_id}/{self._visits}", len(self.ids)
        self._left = asyncio.get_running_loop().create_future()
        self._manager.register_result_handler(name, self._deliver)
        self.running = name
        try:
            # The manager never sees an id again that it has had: marks of a cancellation may outlive it.
            accepted = self._manager.add_request(
                [*self._prompt.ids.tolist(), *self.ids],
                request_id=name,
                max_new_tokens=self._sampling.max_new_tokens - len(self.ids),
                temperature=float(self._sampling.temperature),
                seed=int(self._sampling.seed),
                prompt_tokens=len(self._prompt.ids),
                top_k=float(max(self._sampling.top_k, 0)),
                top_p=float(self._sampling.top_p),
                adapter=self._prompt.adapter,
                eos_token_id=self.stop_ids or [NO_TOKEN],
                streaming=True,
            )
            if accepted is None:
                raise EngineError("the engine's generation loop has stopped")
            await self._left
        except BaseException:
            self._manager.cancel_request(name)
            raise
        finally:
            self.running = None
            self._manager.unregister_result_handler(name)

    def _deliver(self, output: Any) -> None:
        """Take an output, which the manager gives on this loop; it holds all since `run` began."""
        if self._left is None or self._left.done():
            return
        streamed = len(self.ids) - self._before
        ids, logprobs = (output.generated_tokens or [])[streamed:], (output.logprobs or [])[streamed:]
        if ids:
            if self.first_token_s is None:
                self.first_token_s = time.perf_counter() - self.arrived - self.held_s
            self.ids += ids
            self.logprobs += logprobs
            self._on_tokens(ids, logprobs)
        if output.error is not None or output.is_finished():
            self.error = output.error
            self._end()

    def _end(self) -> None:
        self.ended.set()
        self.leave()

    def leave(self) -> None:
        """Note that the manager no longer holds the request: it waits outside, unless it has ended."""
        if self._left is not None and not self._left.done():
            self._left.set_result(None)

    def abort(self) -> None:
        """End it here; a token that is on its way no longer counts."""
        if not self.ended.is_set():
            self.aborted = True
            if self.running is not None:
                self._manager.cancel_request(self.running)
            self._end()

    def weights_change(self, version: int) -> None:
        """Record that all ids so far were sampled from `version`, and later ones will not be."""
        self._versions.append((version, len(self.ids)))

    def spans(self, policy: str, version: int) -> tuple[VersionSpan, ...]:
        """Which version sampled which ids; `version` is the last one. No span is empty."""
        spans: list[VersionSpan] = []
        for made_by, end in [*self._versions, (version, len(self.ids))]:
            start = spans[-1].end if spans else 0
            if end == start:
                continue
            if spans and spans[-1].version == made_by:
                start = spans.pop().start
            spans.append(VersionSpan(policy, made_by, start, end))
        return tuple(spans)
