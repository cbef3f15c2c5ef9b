"""Counts keys of known formats in conversations, and warns of them: they are recorded as they came.

Only what is new is looked at: the messages that a request adds, and replies. A large one takes a thread.

`housekeeping` is what every proxy does beside its requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter

from rollbook.edge.keys import Keys
from rollbook.ingest.recording.recorder import Recorder, sweep
from rollbook.store import Event
from rollbook.store.events import Record, TurnCompleted, TurnRequested
from rollbook.store.redaction import conversation, find_keys

logger = logging.getLogger(__name__)

LARGE = 1 << 20
"""Texts longer than this are scanned in a thread: a megabyte takes 2 ms."""


_IN_MESSAGES = frozenset({"input", "instructions", "prompt", "system"})
"""Fields of a request that are messages in the record besides."""


class KeyWatch:
    """Looks through what is recorded.

    Args:
        registry: of the counter.
        then: called with the same events.
    """

    def __init__(
        self, registry: CollectorRegistry, then: Callable[[list[Event]], None] | None = None
    ) -> None:
        self.seen = Counter(
            "rollbook_keys_seen",
            "Keys of known formats in recorded conversations.",
            ["format"],
            registry=registry,
        )
        self._then = then
        self._warned: set[str] = set()
        self._aside = ThreadPoolExecutor(1, "keys")

    def take(self, events: list[Event]) -> None:
        """Look through events as they are recorded."""
        for event in events:
            texts = list(_new_texts(event.record))
            if sum(map(len, texts)) > LARGE:
                self._aside.submit(self._look, event.record, texts)
            elif texts:
                self._look(event.record, texts)
        if self._then is not None:
            self._then(events)

    def _look(self, record: Record, texts: list[str]) -> None:
        # Together first, since there is hardly ever one: many small texts take as long as one large one.
        for key in find_keys("\n".join(texts)):
            self.seen.labels(key.format).inc()
            if key.format not in self._warned:
                self._warned.add(key.format)
                self._warn(key.format, record)

    def _warn(self, format_: str, record: Record) -> None:
        logger.warning(
            "a conversation holds a key (format %s, turn %s) and is recorded as it came: `rollbook store "
            "secrets` finds keys, --redact known takes them out",
            format_,
            getattr(record, "turn_id", ""),
        )


def _new_texts(record: Record) -> Iterator[str]:
    """The texts of a conversation that a record adds to it."""
    if isinstance(record, TurnRequested):
        # Behind the base turn comes its reply again, which was looked through when it was made.
        first = record.messages[0] if record.messages else {}
        echoed = record.base_turn_id is not None and first.get("role") == "assistant"
        yield from _texts(record.messages[int(echoed) :])
        if record.base_turn_id is None:
            shown = conversation(record.request)
            yield from _texts([value for name, value in shown.items() if name not in _IN_MESSAGES])
    elif isinstance(record, TurnCompleted):
        yield from _texts(record.reply)


def _texts(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            if not value.startswith("data:"):  # an image
                yield value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


@asynccontextmanager
async def housekeeping(recorder: Recorder, abandon_s: float, keys: Keys) -> AsyncIterator[None]:
    """End what is abandoned, and read keys again as they change, while the context lasts."""
    beside = (sweep(recorder, abandon_s), keys.follow())
    tasks = [asyncio.create_task(coroutine) for coroutine in beside]
    yield
    for task in tasks:
        task.cancel()
