"""Bounds of HTTP input: JSON's depth and weight, numbers, and work that grows with a body.

Work whose time grows with a body leaves the event loop if the body is large. It has threads of
its own, one fewer than there are cores: however much of it there is, the loop keeps a core, and
small work that needs a thread does not queue behind it.

Values that are no numbers are refused; numbers that no engine can compute with are refused or
clamped.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field

from rollbook.store.errors import LimitError

MOST_DEPTH = 100
"""Lists and objects within one another. What is behind may recurse; events are written 254 deep at most."""
MOST_WEIGHT = 2 << 20
"""Of a body's values, by the memory and the time that they take: a number or text weighs 1, a key 2, a list
8, an object 32. It lets a million token ids in, or 60,000 objects."""
_WEIGHTS = {b",": 1, b":": 2, b"[": 8, b"{": 32}
_SMALL = MOST_WEIGHT // max(_WEIGHTS.values())
_CHUNK = 1 << 20
_NESTING = (dict, list)


def check_depth(value: Any, what: str = "the body") -> None:
    """Refuse a value that is nested too deep.

    Raises:
        LimitError: 400.
    """
    level = [value] if type(value) in _NESTING else []
    for _ in range(MOST_DEPTH):
        below: list[Any] = []
        for parent in level:
            children = parent.values() if type(parent) is dict else parent
            below += [child for child in children if type(child) in _NESTING]
        level = below
        if not level:
            return
    text = f"{what} is nested more than {MOST_DEPTH} deep: send less deep lists and objects"
    raise LimitError(400, "json_too_deep", text)


def check_weight(raw: bytes) -> None:
    """Refuse JSON text whose values would take far more memory and time than the text does.

    Raises:
        LimitError: 413.
    """
    if len(raw) <= _SMALL:
        return  # whatever it holds
    weight = 0
    inside = 0
    for part in _chunks(raw):
        quoted = np.bitwise_xor.accumulate((part == ord('"')).view(np.uint8)) ^ inside
        inside = int(quoted[-1]) if len(quoted) else inside
        counts = np.bincount(part[quoted == 0], minlength=256)
        weight += int(sum(own * counts[sign[0]] for sign, own in _WEIGHTS.items()))
        if weight > MOST_WEIGHT:
            text = (
                f"the body's values weigh more than {MOST_WEIGHT} (a number or text 1, a key 2, a list 8, "
                "an object 32): send fewer of them at once"
            )
            raise LimitError(413, "json_too_large", text)


def _chunks(raw: bytes) -> Iterator[Any]:
    """JSON text in parts, as arrays of bytes, without the escaped characters in its strings.

    numpy works on each without the interpreter's lock, and none holds it for long.
    """
    start = 0
    while start < len(raw):
        end = min(start + _CHUNK, len(raw))
        while end < len(raw) and raw[end - 1] == ord("\\"):
            end += 1  # an escape is not cut in two
        plain = raw[start:end].replace(rb"\\", b"").replace(rb"\"", b"")
        yield np.frombuffer(plain, np.uint8)
        start = end


T = TypeVar("T")

LARGE_BYTES = 256 * 2**10
"""Tokenizing a megabyte takes a third of a second; what is below takes less than others notice."""
_THREADS = ThreadPoolExecutor(max((os.cpu_count() or 2) - 1, 1), thread_name_prefix="large-work")


def started(work: Callable[..., object], *args: Any) -> None:
    """Submit work that no request waits for to a thread."""
    _THREADS.submit(work, *args)


async def run_in_thread(work: Callable[..., T], *args: Any, **options: Any) -> T:
    """The result of work that is done in a thread."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, partial(work, *args, **options))


async def run_by_size(size: int, work: Callable[..., T], *args: Any) -> T:
    """The result of work on so many bytes, done in a thread if they are many."""
    return await run_in_thread(work, *args) if size > LARGE_BYTES else work(*args)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


def _number(value: object) -> object:
    """Refuses texts such as "1.0", and true, which Python would take for 1."""
    if isinstance(value, bool | str | bytes):
        raise ValueError("must be a number")
    return value


Finite = Annotated[float, AfterValidator(_finite), BeforeValidator(_number)]
Whole = Annotated[int, BeforeValidator(_number)]
"""An integer, as JSON has it: 5, or 5.0."""


def _greedy_if_tiny(value: float) -> float:
    """0 for a temperature below 1e-6, with which logits overflow: greedy is what such a value means."""
    return 0.0 if value < 1e-6 else value


Temperature = Annotated[Finite, Field(ge=0, le=1e4), AfterValidator(_greedy_if_tiny)]
