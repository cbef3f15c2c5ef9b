"""Weights that change while a request runs, in every mode of pausing: which version made which token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.sglang.conftest import (
    PROMPT,
    ROUTING,
    TIE,
    TOLERANCE,
    Client,
    Reference,
    Weights,
    amid,
    greatest_difference,
)
from tests.sglang.server import SglangServer

from rollbook.engines.engine import Generation, Sampling
from rollbook.store.events.routed_experts import unpack

LENGTH = 1000
"""Tokens of a request: two seconds or three, so that what is to change in its middle does so everywhere."""
LONG = Sampling(LENGTH, 1.0, 3)
MODES = ("abort", "in_place", "retract")


def _cut(generation: Generation, before: int | None, after: int) -> int:
    """Where the spans change from one version to the other; they cover all tokens."""
    first, second = generation.version_spans
    assert (first.start, first.end, second.end) == (0, second.start, len(generation.completion_ids))
    assert (first.version, second.version) == (before, after)
    return first.end


@pytest.mark.parametrize("mode", MODES)
def test_weights_loaded_in_the_middle(
    server: SglangServer,
    client: Callable[..., Client],
    weights: Callable[[SglangServer], Weights],
    reference: Reference,
    mode: str,
) -> None:
    """Each token's logprob is that of the weights that its span names; none is lost or heard twice.

    In place, keys and values of the old weights stay, so what comes after the change is of neither model.
    """
    changing, session = weights(server), client(server)
    versions: list[int] = []

    def act() -> None:
        server.post("/pause_generation", {"mode": mode})
        versions.append(changing.load(changing.next_model(), flush=mode != "in_place"))
        server.post("/continue_generation")

    def attempt() -> tuple[Generation, list[int]]:
        versions[:] = [changing.load(server.model)]
        return session.meanwhile(LONG, act)

    generation, heard = amid(attempt)
    before, after = versions
    ids = generation.completion_ids.tolist()
    assert heard == ids
    assert (generation.finish_reason, len(ids)) == ("length", LENGTH)
    cut = _cut(generation, before, after)
    assert 60 <= cut < LENGTH
    old = reference.logprobs(server.model, PROMPT, ids[:cut], 1.0)
    assert greatest_difference(generation, old) <= TOLERANCE
    new = reference.logprobs(changing.next_model(), [*PROMPT, *ids[:cut]], ids[cut:], 1.0)
    difference = greatest_difference(generation, new, cut)
    if mode == "in_place":
        assert difference > 0.01
    elif difference > TOLERANCE:
        assert reference.nearest_tie(changing.next_model(), [*PROMPT, *ids]) < TIE, difference
    assert generation.timings.get("resumed") == (1 if mode == "abort" else None)
    assert generation.timings.get("num_retractions") == (1 if mode == "retract" else None)


@pytest.mark.parametrize("mode", [*MODES, None])
def test_a_version_that_is_only_renamed(
    dense: SglangServer,
    client: Callable[..., Client],
    weights: Callable[[SglangServer], Weights],
    reference: Reference,
    mode: Any,
) -> None:
    """In the middle of a request, paused or not: two spans, and logprobs of the one model throughout."""
    changing, session = weights(dense), client(dense)
    versions: list[int] = []

    def act() -> None:
        if mode:
            dense.post("/pause_generation", {"mode": mode})
        versions.append(changing.rename())
        if mode:
            dense.post("/continue_generation")

    def attempt() -> tuple[Generation, list[int]]:
        versions[:] = [changing.rename()]
        return session.meanwhile(LONG, act)

    generation, heard = amid(attempt)
    ids = generation.completion_ids.tolist()
    assert heard == ids
    assert len(ids) == LENGTH
    assert 60 <= _cut(generation, *versions) < LENGTH
    assert greatest_difference(generation, reference.logprobs(dense.model, PROMPT, ids, 1.0)) <= TOLERANCE


@pytest.mark.parametrize("stream", [False, True])
def test_what_goes_on_runs_to_its_end(
    dense: SglangServer, client: Callable[..., Client], stream: bool
) -> None:
    """Two seconds after a stream's end the server aborts what has its id: what goes on has another."""
    session = client(dense)
    heard: list[int] = []

    async def scenario() -> Generation:
        arguments = (lambda ids, _: heard.extend(ids),) if stream else ()
        task = asyncio.create_task(
            session.engine.generate(session.prompt(), Sampling(1200, 1.0, 1), *arguments)
        )
        await asyncio.sleep(0.5)
        await asyncio.to_thread(dense.post, "/pause_generation", {"mode": "abort"})
        await asyncio.to_thread(dense.post, "/continue_generation")
        return await task

    generation = session.run(scenario())
    assert heard == (generation.completion_ids.tolist() if stream else [])
    assert (generation.finish_reason, len(generation.completion_ids), generation.timings["resumed"]) == (
        "length",
        1200,
        1,
    )
    assert generation.timings["engine_us"] > 3e6, "it was too quick for this test"


def test_a_version_whose_naming_aborts(
    dense: SglangServer,
    client: Callable[..., Client],
    weights: Callable[[SglangServer], Weights],
    reference: Reference,
) -> None:
    """SGLang's default: all requests end, and go on from here."""
    changing, session = weights(dense), client(dense)
    versions: list[int] = []

    def attempt() -> tuple[Generation, list[int]]:
        versions[:] = [changing.rename()]
        return session.meanwhile(LONG, lambda: versions.append(changing.rename(abort=True)))

    generation, heard = amid(attempt)
    ids = generation.completion_ids.tolist()
    assert heard == ids
    assert (len(ids), generation.timings.get("resumed"), len(generation.version_spans)) == (LENGTH, 1, 2)
    _cut(generation, *versions)
    assert greatest_difference(generation, reference.logprobs(dense.model, PROMPT, ids, 1.0)) <= TOLERANCE


def test_several_pauses_of_one_request(
    moe: SglangServer,
    client: Callable[..., Client],
    weights: Callable[[SglangServer], Weights],
    reference: Reference,
) -> None:
    """Every part under its own weights, with its own experts, and one turn of all."""
    changing = weights(moe)
    paths = [moe.model, changing.next_model(), moe.model]
    versions: list[int] = []
    session = client(moe, routed_experts=ROUTING)

    def act() -> None:
        for path in paths[1:]:
            moe.post("/pause_generation", {"mode": "abort"})
            versions.append(changing.load(path))
            heard = len(session.heard)
            moe.post("/continue_generation")
            session.hears_more(heard)

    def attempt() -> tuple[Generation, list[int]]:
        versions[:] = [changing.load(moe.model)]
        return session.meanwhile(LONG, act)

    generation, heard = amid(attempt, spans=3)
    ids = generation.completion_ids.tolist()
    assert heard == ids
    spans = generation.version_spans
    assert generation.timings["resumed"] == 2
    assert [span.version for span in spans] == versions
    experts = unpack(generation.routed_experts)
    assert experts.shape == (len(PROMPT) + len(ids) - 1, *experts.shape[1:])
    for span in spans:
        path = paths[versions.index(span.version)]
        new = reference.logprobs(path, [*PROMPT, *ids[: span.start]], ids[span.start : span.end], 1.0)
        assert greatest_difference(generation, new, span.start) <= TOLERANCE
        # The token that ends a span passes through the model only under the next weights.
        there = slice(len(PROMPT) + span.start - 1 if span.start else 0, len(PROMPT) + span.end - 1)
        wanted = reference.experts(path, [*PROMPT, *ids[: span.end]])[there]
        assert np.array_equal(np.sort(experts[there], -1), np.sort(wanted, -1))
