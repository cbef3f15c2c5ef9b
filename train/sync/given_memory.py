"""The memory of engines that share devices with a trainer: given away while it trains, and taken again.

An engine's state stays with the engine, in what it calls its weights: whoever syncs it next knows what it
must give back, also where the trainer that took it is gone.
"""

from __future__ import annotations

from collections.abc import Callable

from rollbook.engines.weights.name import read_name
from rollbook.train.sync.control import ASLEEP, CACHE, EMBEDDED, WAKING, WEIGHTS, EngineControl, EngineInfo


class EngineOffload:
    """Which engines gave their memory away.

    Attributes:
        woken: those that have the memory of their weights again, and not that of their caches.
    """

    def __init__(self) -> None:
        self.woken: set[str] = set()
        self._given: set[str] = set()
        """Those that gave it to this trainer."""

    def give(self, control: EngineControl, stop: Callable[..., None]) -> None:
        """Stop an engine, and have it give its memory away. One that a trainer left so is so already.

        Args:
            stop: pauses it; `flush` also flushes its cache.
        """
        own = control.info().kind == EMBEDDED
        name = "" if own else control.weight_version()
        self._given.add(control.url)
        if name == ASLEEP:
            return
        stop(flush=not own and name != WAKING)
        control.release_memory(*((WEIGHTS,) if name == WAKING else (CACHE, WEIGHTS)))
        if not own:
            control.activate(ASLEEP)

    def take_weights(self, control: EngineControl, info: EngineInfo) -> None:
        """Have an engine take its weights' memory again, if it gave it away."""
        if info.kind == EMBEDDED:  # which keeps it
            self.woken |= {control.url} if info.asleep else set()
            return
        name, given = control.weight_version(), control.url in self._given
        self._given.discard(control.url)
        # A proxy that was just comparing weights may have named it since; one that was started anew has
        # another name, and all of its memory.
        asleep = name == ASLEEP or (given and read_name(name) is not None)
        if asleep:
            control.resume_memory(WEIGHTS)
            control.activate(WAKING)
        self.woken |= {control.url} if asleep or name == WAKING else set()

    def take_cache(self, control: EngineControl) -> None:
        """And that of its cache."""
        if control.url in self.woken:
            control.resume_memory(CACHE)
            self.woken.discard(control.url)
