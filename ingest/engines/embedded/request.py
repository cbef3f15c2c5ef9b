"""One request of the embedded engine: it may leave transformers' continuous batching and come back."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rollbook.ingest.engines.engine import OnTokens, Prompt, Sampling
from rollbook.store.errors import EngineError
from rollbook.store.events import VersionSpan


class LiveRequest:
    """A request from its arrival to its answer, and what it has sampled so far.

    It runs in the manager in one go, or in several where the engine was paused: then it waits outside with
    its ids and goes on behind them. Methods are called on the event loop.

    Attributes:
        ids, logprobs: sampled so far; all of them where the manager's loop stands still.
        ended: it will sample no more.
        running: under this id in the manager, or None.
        held_s: seconds that it waited outside.
    """

    def __init__(
        self, manager: Any, request_id: str, prompt: Prompt, sampling: Sampling, on_tokens: OnTokens
    ) -> None:
        self.request_id = request_id
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.aborted = False
        self.running: str | None = None
        self.ended = asyncio.Event()
        self.error: str | None = None
        self.held_s = 0.0
        self._manager, self._prompt, self._sampling, self._on_tokens = manager, prompt, sampling, on_tokens
        self._versions: list[tuple[int, int]] = []
        self._left: asyncio.Future[None] | None = None
        self._visits = self._before = 0

    async def wait(self, gate: asyncio.Event) -> None:
        """Wait outside until the gate opens, or it is aborted."""
        begun = time.perf_counter()
        waits = [asyncio.ensure_future(one.wait()) for one in (gate, self.ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
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
        """What it has sampled so far was sampled from `version`; what follows will not be."""
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
