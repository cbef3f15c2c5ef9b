"""Answers of engines are read within bounds, however they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.engines.sglang.http import read_answer, read_stream
from rollbook.store.errors import EngineError


def _reply(parts: list[bytes]) -> Any:
    async def iter_any() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return SimpleNamespace(content=SimpleNamespace(iter_any=iter_any), url=SimpleNamespace(path="/generate"))


async def _data(parts: list[bytes], most: int) -> list[bytes]:
    return [message.data async for message in read_stream(_reply(parts), most)]


@given(st.lists(st.text("ab", max_size=6).map(str.encode)), st.integers(1, 9))
def test_messages_are_found_in_any_packets(texts: list[bytes], size: int) -> None:
    """All that end, in order; the whole is the whole."""
    whole = b"".join(b"data: %s\n\n" % text for text in texts) + b"data: cut"
    parts = [whole[i : i + size] for i in range(0, len(whole), size)]
    assert asyncio.run(_data(parts, 1000)) == texts
    assert asyncio.run(read_answer(_reply(parts), len(whole))) == whole


def test_what_never_ends_is_an_error() -> None:
    """It is given up at the bound, and named."""
    endless = [b"x" * 100] * 1000
    with pytest.raises(EngineError, match="/generate goes on after 5000 bytes"):
        asyncio.run(read_answer(_reply(endless), 5000))
    for endless in ([b"data: " + b"x" * 100] * 1000, [b"data: x\n"] * 10_000):
        with pytest.raises(EngineError, match="/generate goes on after 5000 bytes"):
            asyncio.run(_data(endless, 5000))
    assert len(asyncio.run(_data([b"data: " + b"x" * 100 + b"\n\n"] * 1000, 5000))) == 1000
