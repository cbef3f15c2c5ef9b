"""Transformers' continuous batching with a generator per request, and a loop that can stand still.

While the loop stands still no forward pass runs, so weights and the scheduler may be changed. Who made it
stand still lets it go on again, from the same thread.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from rollbook.ingest.engines.embedded.sampling import Draws, Temperature, sample


class SeededManager(ContinuousBatchingManager):  # type: ignore[misc]
    """Continuous batching whose sampler draws per request."""

    def __init__(self, model: Any, generation_config: Any, config: Any) -> None:
        self._draws = Draws()
        self._stale: set[str] = set()
        self._cache_bytes = 0
        super().__init__(model, generation_config, config)
        self.logit_processor.logits_processor = LogitsProcessorList([Temperature(), self._draws])
        self.logit_processor.tensors_required = 2
        self.logit_processor.do_processing = True
        self.logit_processor._retrieve_processors_kwargs()

    def _create_batch_processor(self) -> Any:
        processor = super()._create_batch_processor()
        draws = self._draws

        def write_samples(scores: torch.Tensor, output_ids: torch.Tensor) -> None:
            tokens, logprobs = sample(scores[0].float(), draws.rows)
            count = tokens.size(0)
            output_ids[0, :count].copy_(tokens)
            # Logprobs travel in the int32 output tensor as their own bits.
            output_ids[1, :count].copy_(logprobs.float().view(dtype=torch.int32))

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
        """Take every request out, with its KV cache: `request_ids` are all that were put in.

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
        """No later request reads what is cached now. Running requests keep their own keys and values."""
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


def make_manager(model: Any, batch_tokens: int, cache_blocks: int | None) -> SeededManager:
    """Continuous batching of a model, not started.

    Args:
        batch_tokens: most tokens of one forward pass.
        cache_blocks: size of the KV cache in blocks of 256 tokens; None lets transformers choose.
    """
    config = ContinuousBatchingConfig(
        max_batch_tokens=batch_tokens,
        num_blocks=cache_blocks,
        return_logprobs=True,
        per_request_processors=True,
        use_cuda_graph=False,
        use_async_batching=False,
    )
    stop = model.generation_config.eos_token_id
    generation = GenerationConfig(do_sample=True, eos_token_id=stop, pad_token_id=0)
    return SeededManager(model, generation, config)
