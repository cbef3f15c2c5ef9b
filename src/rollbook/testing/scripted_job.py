"""One request at a scripted SGLang, from its first token to how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollbook.testing.scripted_answers import Draft, Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Start options of a scripted server.

    Attributes:
        eos_ids: end every request that does not set `ignore_eos`, as the model's own do.
        incremental: stream chunks hold what is new, not all so far (--incremental-streaming-output).
        interval: tokens that come at a time, and so a chunk.
        tokenizer: a tokenizer.json: with it there is text, and stop strings stop.
        log: requests to remember, with their answers.
        late_abort_s: so long after a stream's end the real server aborts whatever has its id by then.
        weights: keep checksums of the weights at `model_path`, as held in this torch type (`float32`); empty:
            keep none.
        preferred: what /model_info says of --preferred-sampling-params; it changes no answer.
    """

    model_path: str = "scripted"
    weight_version: str = "default"
    eos_ids: frozenset[int] = frozenset()
    incremental: bool = False
    interval: int = 1
    images: bool = False
    tokenizer: Path | None = None
    log: int = 0
    late_abort_s: float = 2.0
    weights: str = ""
    preferred: Any = None


class Failed(Exception):
    """The script lets this request fail here."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(slots=True, eq=False)
class Job:
    """A running request: `made` of the draft's ids have come, `spans` say under which weights.

    `held` while it waits, not begun, for a pause to end; `finish` is set when nothing more will come.
    """

    rid: str
    prompt_tokens: int
    draft: Draft
    body: dict[str, Any]
    held: bool
    made: int = 0
    spans: list[dict[str, Any]] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    abort_message: str | None = None
    retractions: int = 0
    streaming: bool = False
    begun: float = field(default_factory=time.perf_counter)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def stream(self) -> bool:
        """Whether the client wants the tokens as they come."""
        return bool(self.body.get("stream"))

    @property
    def slow(self) -> bool:
        """Whether its tokens take time: only then can anything happen between them."""
        return bool(self.draft.answer.first_s or self.draft.answer.token_s)

    @property
    def total(self) -> int:
        """How many tokens may come: all, or those before it fails."""
        failure = self.draft.answer.failure
        return len(self.draft.ids) if failure is None else min(failure.after, len(self.draft.ids))

    def emit(self, end: int, version: str) -> None:
        """The tokens up to `end` have come, under these weights."""
        if end <= self.made:
            return
        if self.spans and self.spans[-1]["version"] == version:
            self.spans[-1]["end"] = end
        else:
            self.spans.append({"version": version, "start": self.made, "end": end})
        self.made = end

    def settle(self) -> None:
        """Set `finish` if it has ended."""
        if self.made == len(self.draft.ids):
            self.finish = self.draft.finish
        elif self.abort_message is not None:
            message = self.abort_message
            self.finish = {"type": "abort", "message": message, "status_code": None, "err_type": None}

    def abort(self) -> None:
        """End it with what there is. One that is held does not hear it, as in the real server."""
        if not self.held:
            self.abort_message = "Aborted"
            self.wake.set()

    async def woken(self) -> None:
        """Wait for an abort or the end of a pause."""
        self.wake.clear()
        await self.wake.wait()

    async def sleep(self, seconds: float) -> None:
        """Sleep, unless it is aborted."""
        deadline = time.perf_counter() + seconds
        while self.abort_message is None and (left := deadline - time.perf_counter()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self.woken()
