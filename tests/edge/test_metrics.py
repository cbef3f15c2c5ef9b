"""What Prometheus is told: each turn once, by how it came out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.fakes.clients.streamed import KINDS, PATHS, asked
from tests.fakes.proxies.in_process import InProcess

from rollbook.store.errors import EngineError

CHAT = PATHS["chat"]
AGAIN = {"x-stainless-retry-count": "1"}


@pytest.fixture
def proxy(played: Callable[..., InProcess]) -> InProcess:
    """A proxy with counters of its own."""
    return played(max_running=8)


def _page(proxy: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    reply = proxy.ask("/metrics", method="GET")
    assert reply.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(reply.data.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def _sum(page: Any, name: str, **labels: str) -> float:
    return sum(v for (n, pairs), v in page.items() if n == name and labels.items() <= dict(pairs).items())


def test_turns_tokens_and_times(proxy: InProcess) -> None:
    """By endpoint, link and finish; the tokens that were sent and sampled."""
    for kind in KINDS:
        assert proxy.ask(f"/t/m-{kind}{PATHS[kind]}", asked(kind)).status == 200
    assert proxy.ask(f"/t/m-n{CHAT}", asked("chat", n=3, stream=True)).status == 200
    page = _page(proxy)
    for kind in KINDS[1:]:
        assert _sum(page, "rollbook_turns_total", endpoint=PATHS[kind], finish="stop", delivered="true") == 1
    assert _sum(page, "rollbook_turns_total", endpoint=CHAT, link="first_turn") == 4
    assert _sum(page, "rollbook_turns_total") == 7
    generations = proxy.engine.made
    assert _sum(page, "rollbook_tokens_total", kind="completion") == sum(
        len(m.completion_ids) for m in generations
    )
    assert _sum(page, "rollbook_tokens_total", kind="prompt") == sum(len(p.ids) for p in proxy.engine.prompts)
    assert page["rollbook_policy_version", ()] == 5
    assert page["rollbook_open_trajectories", ()] == 5
    assert page["rollbook_running", ()] == 0
    proxy.ask("/v1/trajectories/m-n/finish", {})
    assert _page(proxy)["rollbook_open_trajectories", ()] == 4


def test_a_turn_counts_once_however_often_it_is_asked_for(proxy: InProcess) -> None:
    """Replays and joined retries are counted as such, and the turn not again."""
    engine = proxy.engine
    for headers in ({}, AGAIN, AGAIN):
        proxy.ask(f"/t/once{CHAT}", asked("chat"), headers=headers)
    engine.prompts.clear()
    engine.pace = asyncio.Semaphore(0)

    async def scenario() -> float:
        first = proxy.exchange(f"/t/joined{CHAT}", asked("chat"))
        await first.until(lambda: engine.prompts)
        second = proxy.exchange(f"/t/joined{CHAT}", asked("chat"), headers=AGAIN)
        page = await proxy.exchange("/metrics", method="GET").end()
        for _ in range(50):
            engine.pace.release()
        await first.end()
        await second.end()
        families = text_string_to_metric_families(page.data.decode())
        return next(s.value for f in families for s in f.samples if s.name == "rollbook_running")

    assert proxy.run(scenario()) == 1
    page = _page(proxy)
    assert _sum(page, "rollbook_turns_total", delivered="true") == 2
    assert _sum(page, "rollbook_turns_total") == 2
    assert _sum(page, "rollbook_retries_total", how="replayed") == 2
    assert _sum(page, "rollbook_retries_total", how="joined") == 1


def test_what_nobody_took_is_counted_too(proxy: InProcess) -> None:
    """An aborted turn is a turn, undelivered."""
    engine = proxy.engine
    engine.pace = asyncio.Semaphore(1)

    async def scenario() -> None:
        exchange = proxy.exchange(f"/t/gone{CHAT}", asked("chat"))
        await exchange.until(lambda: engine.prompts)
        await asyncio.sleep(0.01)
        exchange.leave()
        await exchange.end()
        await proxy.turn_runner.drained()

    proxy.run(scenario())
    page = _page(proxy)
    assert _sum(page, "rollbook_turns_total", finish="abort", delivered="false") == 1
    assert _sum(page, "rollbook_turns_total") == 1


def test_failures_by_code(proxy: InProcess) -> None:
    """Refused, failed in the engine, and faults: each request once."""
    proxy.engine.answer = lambda *_: EngineError("gone")
    proxy.ask(f"/t/f{CHAT}", asked("chat"))
    proxy.ask(f"/t/f{CHAT}", asked("chat", stream=True, n=2))
    proxy.engine.answer = lambda *_: KeyError("bug")
    proxy.ask(f"/t/f{CHAT}", asked("chat"))
    proxy.ask(f"/t/f{CHAT}", b"{")
    proxy.ask(f"/t/f{CHAT}", {"messages": []})
    page = _page(proxy)
    wanted = {"engine_failed": 2, "internal_error": 1, "bad_json": 1, "empty_messages": 1}
    for code, count in wanted.items():
        assert _sum(page, "rollbook_failures_total", code=code) == count, code
    assert _sum(page, "rollbook_failures_total") == 5
    assert _sum(page, "rollbook_turns_total") == 0


def test_two_proxies_count_apart(played: Callable[..., InProcess]) -> None:
    """Counters belong to a proxy, not to the process."""
    first, second = played(), played()
    first.ask(f"/t/a{CHAT}", asked("chat"))
    assert _sum(_page(first), "rollbook_turns_total") == 1
    assert _sum(_page(second), "rollbook_turns_total") == 0
