"""Answers of engines are read within bounds, however they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.ingest.engines.sglang.answers import read_answer, read_lines
from rollbook.store.errors import EngineError


def _reply(parts: list[bytes]) -> Any:
    async def iter_any() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return SimpleNamespace(content=SimpleNamespace(iter_any=iter_any), url=SimpleNamespace(path="/generate"))


async def _lines(parts: list[bytes], most: int) -> list[bytes]:
    return [line async for line in read_lines(_reply(parts), most)]


@given(st.lists(st.text("ab\n", max_size=6).map(str.encode)))
def test_lines_are_found_in_any_packets(parts: list[bytes]) -> None:
    """All that end, in order; the whole is the whole."""
    whole = b"".join(parts)
    assert asyncio.run(_lines(parts, 1000)) == whole.split(b"\n")[:-1]
    assert asyncio.run(read_answer(_reply(parts), len(whole))) == whole


def test_what_never_ends_is_an_error() -> None:
    """It is given up at the bound, and named."""
    endless = [b"x" * 100] * 1000
    with pytest.raises(EngineError, match="/generate goes on after 5000 bytes"):
        asyncio.run(read_answer(_reply(endless), 5000))
    with pytest.raises(EngineError, match="/generate goes on after 5000 bytes"):
        asyncio.run(_lines(endless, 5000))
    assert len(asyncio.run(_lines([b"x" * 100 + b"\n"] * 1000, 5000))) == 1000
