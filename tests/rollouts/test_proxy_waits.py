"""What rollouts say of a proxy that is away, or holds what they would begin."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import orjson
import pytest

from rollbook.rollouts.proxy import Answer, Proxy
from rollbook.store.errors import RolloutError

OPENED = Answer(201, orjson.dumps({"id": "t", "trajectory_id": "t-1"}))
HELD = Answer(503, orjson.dumps({"error": {"code": "trajectory_held", "message": "at version 3"}}))


class Answers:
    """Stands in for HTTP: gives one answer after the other, the last for ever."""

    def __init__(self, *answers: Answer | Exception, after_s: float = 0.0) -> None:
        self._answers, self._after_s = list(answers), after_s

    async def send(self, *_: Any) -> Answer:
        """The next."""
        await asyncio.sleep(self._after_s)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was said; a wait is said after a moment."""
    monkeypatch.setattr("rollbook.store.patience.SAY_AFTER_S", 0.05)
    monkeypatch.setattr("rollbook.rollouts.proxy.PAUSE_S", 0.02)
    return []


def _open(answers: Answers, messages: list[str], count: int = 3) -> list[Any]:
    async def opened() -> list[Any]:
        proxy = Proxy("http://here")
        proxy.http, proxy.say = answers, messages.append  # type: ignore[assignment]

        async def look() -> None:
            while True:
                await asyncio.sleep(0.02)
                proxy.look()

        looking = asyncio.create_task(look())
        requests = [proxy.open(f"t{at}", "g", "task", "train", {}) for at in range(count)]
        try:
            return await asyncio.gather(*requests, return_exceptions=True)
        finally:
            looking.cancel()

    return asyncio.run(opened())


def test_a_proxy_that_comes_back(lines: list[str]) -> None:
    """All that wait for it are said in one line, and that it is there again."""
    away = [aiohttp.ClientConnectionError("refused")] * 24
    trajectories = _open(Answers(*away, OPENED), lines)
    assert [trajectory.trajectory_id for trajectory in trajectories] == ["t-1"] * 3
    first, *_, last = lines
    assert first.startswith("waiting for the proxy at http://here (3 requests): it does not answer (Client")
    assert " at most)" in first
    assert last == "the proxy at http://here answers again"


def test_a_proxy_that_stays_away(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Is given up after a while, and nothing says that it is back."""
    monkeypatch.setattr("rollbook.rollouts.proxy.AWAY_S", 0.3)
    proxy_away = aiohttp.ClientConnectionError("refused")

    async def asked() -> None:
        proxy = Proxy("http://here")
        proxy.http, proxy.say = Answers(proxy_away), lines.append  # type: ignore[assignment]
        await proxy._sent("GET", "/v1", away_s=0.3)

    with pytest.raises(RolloutError, match="does not answer"):
        asyncio.run(asked())
    assert len([line for line in lines if line.startswith("waiting for the proxy")]) == 1
    assert not any("again" in line for line in lines)


def test_what_admission_holds(lines: list[str]) -> None:
    """How many are held, and what the proxy says of it, as long as it takes."""
    trajectories = _open(Answers(*[HELD] * 9, OPENED, after_s=0.02), lines)
    assert len(trajectories) == 3
    assert lines[0].startswith("waiting for room for 3 new trajectories, which the proxy holds: ")
    assert lines[0].endswith("as long as it takes)")
