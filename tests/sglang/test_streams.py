"""Streams of a real server, aborts in the middle, and which requests an abort means."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from tests.sglang.conftest import PROMPT, TOLERANCE, Client, Reference, Weights, greatest_difference
from tests.sglang.server import SglangServer

from rollbook.engines.engine import Generation, Prompt, Sampling
from rollbook.store.events import VersionSpan, token_ids

GREEDY = Sampling(80, 0.0, 1)


def test_a_stream_says_the_same_as_the_whole(
    server: SglangServer, client: Callable[..., Client], weights: Callable[[SglangServer], Weights]
) -> None:
    """What is heard on the way, whole or only what is new, adds up to the answer that comes at once."""
    version = weights(server).rename()
    session = client(server)
    whole = session.generate(GREEDY)
    heard: list[tuple[list[int], list[float]]] = []
    generation = session.generate(GREEDY, lambda ids, logprobs: heard.append((list(ids), list(logprobs))))
    assert len(heard) > 1
    ids = list(itertools.chain.from_iterable(ids for ids, _ in heard))
    logprobs = list(itertools.chain.from_iterable(values for _, values in heard))
    assert ids == generation.completion_ids.tolist() == whole.completion_ids.tolist()
    assert generation.logprobs.tolist() == pytest.approx(logprobs, abs=1e-7)
    assert generation.logprobs.tolist() == pytest.approx(whole.logprobs.tolist(), abs=TOLERANCE)
    assert generation.version_spans == whole.version_spans == (VersionSpan("actor", version, 0, 80),)
    assert (generation.finish_reason, session.engine.policy_version()) == ("length", version)


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_in_the_middle(
    server: SglangServer, client: Callable[..., Client], reference: Reference, stream: bool
) -> None:
    """What there is comes back, with its logprobs and span; nobody goes on with it."""
    session = client(server)

    async def scenario() -> tuple[Generation, list[int]]:
        heard: list[int] = []
        enough = asyncio.Event()

        def hear(ids: Any, _: Any) -> None:
            heard.extend(ids)
            if len(heard) >= 30:
                enough.set()

        prompt = session.prompt()
        arguments = (hear,) if stream else ()
        task = asyncio.create_task(session.engine.generate(prompt, Sampling(2000, 1.0, 1), *arguments))
        await asyncio.wait_for(enough.wait(), 60) if stream else await asyncio.sleep(0.3)
        await session.engine.abort(prompt.request_id)
        return await task, heard

    generation, heard = session.run(scenario())
    ids = generation.completion_ids.tolist()
    assert generation.finish_reason == "abort"
    assert 1 <= len(ids) < 2000
    assert heard == (ids if stream else [])
    assert [(span.start, span.end) for span in generation.version_spans] == [(0, len(ids))]
    assert "resumed" not in generation.timings
    assert ("first_token_us" in generation.timings) is stream
    assert greatest_difference(generation, reference.logprobs(server.model, PROMPT, ids, 1.0)) <= TOLERANCE


def test_an_abort_ends_all_whose_ids_begin_so(dense: SglangServer, client: Callable[..., Client]) -> None:
    """So no id of a request may be the beginning of another's; what is ended so goes on by itself."""
    session = client(dense)

    async def scenario() -> list[Generation]:
        prompts = [Prompt(token_ids(PROMPT), (), None, name) for name in ("turn-7", "turn-77", "other")]
        tasks = [asyncio.create_task(session.engine.generate(p, Sampling(300, 1.0, 1))) for p in prompts]
        await asyncio.sleep(0.3)
        await session.engine.abort("turn-7")
        return list(await asyncio.gather(*tasks))

    mine, namesake, other = session.run(scenario())
    assert mine.finish_reason == "abort"
    assert (namesake.finish_reason, namesake.timings["resumed"], len(namesake.completion_ids)) == (
        "length",
        1,
        300,
    )
    assert (other.finish_reason, other.timings.get("resumed")) == ("length", None)
