"""One request inside transformers' continuous batching, from the event loop's side."""

from __future__ import annotations

import asyncio
from typing import Any

from rollbook.ingest.engines.engine import Heard


class WaitingRequest:
    """A request inside the manager. Its outputs hold everything sampled so far."""

    def __init__(self, manager: Any, request_id: str, heard: Heard) -> None:
        self._manager, self._request_id, self._heard = manager, request_id, heard
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.aborted = False
        self._output: Any = None
        self._told = 0

    def deliver(self, output: Any) -> None:
        """Take an output, which the manager gives on this loop."""
        if self.done.done():
            return
        self._output = output
        ids = output.generated_tokens or []
        if len(ids) > self._told:
            self._heard(ids[self._told :], (output.logprobs or [])[self._told :])
            self._told = len(ids)
        if output.is_finished() or output.error is not None:
            self.done.set_result(output)

    def abort(self) -> None:
        """End it here; a token that is on its way no longer counts."""
        if not self.done.done():
            self.aborted = True
            self._manager.cancel_request(self._request_id)
            self.done.set_result(self._output)
