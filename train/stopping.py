"""SIGINT and SIGTERM end a training after the current step, with a checkpoint to resume from."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """A signal came while the training was waiting."""


class Stopping:
    """Handles the first signal; a second one ends the process as it would by default.

    Only the main thread can handle signals; in other threads this does nothing.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """The signal that was received, or None."""
        self._waits = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._heard) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def came(self) -> bool:
        """Whether a signal has come."""
        return self.number is not None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context for waiting, which a signal interrupts, even one that came before.

        Raises:
            Stopped: one came.
        """
        self._waits = True
        try:
            if self.number is not None:
                raise Stopped
            yield
        finally:
            self._waits = False

    def in_hand(self, work: Callable[P, T]) -> Callable[P, T]:
        """The same work, protected from interruption within a wait: a signal ends the wait after
        it."""

        def done(*args: P.args, **kwargs: P.kwargs) -> T:
            waits, self._waits = self._waits, False
            try:
                result = work(*args, **kwargs)
            finally:
                self._waits = waits
            if waits and self.number is not None:
                raise Stopped
            return result

        return done

    def end(self) -> None:
        """End the process as the signal would have."""
        if self.number is not None:
            signal.signal(self.number, self._before[self.number])
            signal.raise_signal(self.number)

    def _heard(self, number: int, _: FrameType | None) -> None:
        if self.number is not None:
            self.number = number
            self.end()
            return
        self.number = number
        if self._waits:
            raise Stopped
        # Not by print, because the signal may have interrupted a print.
        name = signal.Signals(number).name
        os.write(2, f"{name}: finishing the current step; repeat the signal to end now\n".encode())
