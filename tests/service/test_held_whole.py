"""Which whole model the engine for them holds: one at a time, those who ask in order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollbook.service.sampling import HeldWhole
from rollbook.store.errors import EngineError
from rollbook.store.events import SamplerOpened


class Engine:
    """An engine that notes what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.broken = ""

    async def start(self, activated: Any) -> None:
        """Begin."""
        self.told.append("start")

    async def load_weights(self, folder: Path, version: int, digest: str) -> None:
        """Serve other weights, unless they are broken."""
        await asyncio.sleep(0)
        if digest == self.broken:
            raise EngineError("another digest")
        self.told.append(digest)


def _sampler(digest: str) -> SamplerOpened:
    return SamplerOpened("s1:sample:0", "s1", "tiny", "m", None, 3, digest, f"checkpoints/{digest}")


def _held(engine: Engine, tmp_path: Path) -> HeldWhole:
    journal = SimpleNamespace(log=SimpleNamespace(path=tmp_path))
    return HeldWhole(lambda: cast(Any, engine), cast(Any, journal))


def test_others_come_in_once_nobody_uses_the_weights(tmp_path: Path) -> None:
    """And before those who come later for the first ones; the engine is made for the first of all."""
    engine = Engine()

    async def ask() -> None:
        whole, leave = _held(engine, tmp_path), asyncio.Event()

        async def use(digest: str, name: str) -> None:
            async with whole.use(_sampler(digest)):
                engine.told.append(f"{name} in")
                await leave.wait()
                engine.told.append(f"{name} out")

        asks = []
        for digest, name in (("a", "1st"), ("a", "2nd"), ("b", "3rd"), ("a", "4th")):
            asks.append(asyncio.create_task(use(digest, name)))
            await asyncio.sleep(0.05)
        assert engine.told == ["start", "a", "1st in", "2nd in"]
        leave.set()
        await asyncio.gather(*asks)

    asyncio.run(ask())
    assert engine.told[4:] == ["1st out", "2nd out", "b", "3rd in", "3rd out", "a", "4th in", "4th out"]


def test_weights_that_cannot_be_loaded_are_not_sampled_from(tmp_path: Path) -> None:
    """Nor are those before them, of which some may be written over; both may be asked for again."""
    engine = Engine()

    async def ask() -> None:
        whole = _held(engine, tmp_path)
        async with whole.use(_sampler("a")):
            pass
        engine.broken = "b"
        with pytest.raises(EngineError, match="another digest"):
            async with whole.use(_sampler("b")):
                pass
        async with whole.use(_sampler("a")):
            pass

    asyncio.run(ask())
    assert engine.told == ["start", "a", "a"]
