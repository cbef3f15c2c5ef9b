"""sglang-router between the client and real servers, with one worker and with two."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.sglang.conftest import PROMPT, TOLERANCE, Client, Reference, Weights, amid, greatest_difference
from tests.sglang.server import ENVIRONMENT, Process, SglangServer, environment

from rollbook.engines.engine import Generation, Sampling
from rollbook.store.errors import EngineError
from rollbook.testing.asgi import free_port

LONG = Sampling(900, 1.0, 3)


class Router(Process):
    """A router that gives each request to the next of its workers."""

    def __init__(self, folder: Path, *workers: SglangServer) -> None:
        port, metrics = free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.ready = f"{self.url}/get_model_info"  # it is healthy before it knows a worker
        self.workers = workers
        words = [str(ENVIRONMENT / "bin" / "python"), "-m", "sglang_router.launch_router"]
        words += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
        words += ["--policy", "round_robin", "--worker-urls", *(worker.url for worker in workers)]
        model = workers[0].model
        words += ["--model-path", str(model), "--tokenizer-path", str(model / "tokenizer.json")]
        super().__init__(folder, f"router-{port}", words, environment(folder))


@pytest.fixture(scope="module")
def routers(
    servers: dict[str, SglangServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, Router]]:
    """Number of workers -> a router."""
    folder = tmp_path_factory.mktemp("routers")
    both = (servers["dense"], servers["second"])
    by_count = {count: Router(folder, *both[:count]) for count in (1, 2)}
    try:
        for router in by_count.values():
            router.wait(router.ready, 60)
        yield by_count
    finally:
        for router in by_count.values():
            router.stop()


@pytest.fixture(params=[1, 2])
def router(request: pytest.FixtureRequest, routers: dict[int, Router]) -> Router:
    """A router with one worker, and one with two."""
    return routers[request.param]


def test_generating_through_a_router(
    router: Router,
    client: Callable[..., Client],
    weights: Callable[[SglangServer], Weights],
    reference: Reference,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whole and streamed, logprobs and spans as the workers say them; every worker is asked, and known."""
    versions = {weights(worker).rename() for worker in router.workers}
    with caplog.at_level(logging.WARNING):
        session = client(router.url)
    assert caplog.messages == []  # the workers' versions are known
    seen = set()
    for stream in (False, True, False, True):
        heard: list[int] = []
        arguments = [lambda ids, _, into=heard: into.extend(ids)] if stream else []
        generation = session.generate(Sampling(40, 1.0, 7), *arguments)
        ids = generation.completion_ids.tolist()
        assert heard == (ids if stream else [])
        wanted = reference.logprobs(router.workers[0].model, PROMPT, ids, 1.0)
        assert greatest_difference(generation, wanted) <= TOLERANCE
        [span] = generation.version_spans
        assert (span.start, span.end) == (0, 40)
        seen.add(span.version)
    assert seen == versions


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_through_a_router(router: Router, client: Callable[..., Client], stream: bool) -> None:
    """A router has no such route: the workers are told, and what there is comes back through it."""
    session = client(router.url)

    async def scenario() -> tuple[Generation, list[int]]:
        heard: list[int] = []
        prompt = session.prompt()
        arguments = (lambda ids, _: heard.extend(ids),) if stream else ()
        task = asyncio.create_task(session.engine.generate(prompt, Sampling(3000, 1.0, 1), *arguments))
        await asyncio.sleep(0.5)
        await session.engine.abort(prompt.request_id)
        return await task, heard

    generation, heard = session.run(scenario())
    assert generation.finish_reason == "abort"
    assert 1 <= len(generation.completion_ids) < 3000
    assert heard == (generation.completion_ids.tolist() if stream else [])
    assert generation.version_spans[0].end == len(generation.completion_ids)


def test_a_pause_of_the_workers(
    router: Router,
    client: Callable[..., Client],
    weights: Callable[[SglangServer], Weights],
    reference: Reference,
) -> None:
    """Each is paused and given new weights by itself; the request goes on, maybe elsewhere with old ones."""
    changing = [weights(worker) for worker in router.workers]
    served: dict[int, Path] = {}

    def act() -> None:
        with ThreadPoolExecutor() as pool:  # at once: a request must not end where no pause has come yet
            list(pool.map(lambda target: target.post("/pause_generation", {"mode": "abort"}), router.workers))
        for target in changing:
            served[target.load(target.next_model())] = target.next_model()
        for worker in router.workers:
            worker.post("/continue_generation")

    asking = client(router.url)

    def attempt() -> Any:
        served.clear()
        served.update({target.load(target.server.model): target.server.model for target in changing})
        return asking.meanwhile(LONG, act)

    generation, heard = amid(attempt)
    ids = generation.completion_ids.tolist()
    assert heard == ids
    assert len(ids) == 900
    spans = generation.version_spans
    assert generation.timings["resumed"] >= len(spans) - 1 >= 1
    if len(router.workers) == 1:
        assert [span.version for span in spans] == list(served)
    at = 0
    for span in spans:
        assert span.start == at
        at = span.end
        prompt = [*PROMPT, *ids[: span.start]]
        wanted = reference.logprobs(served[span.version], prompt, ids[span.start : span.end], 1.0)
        assert greatest_difference(generation, wanted, span.start) <= TOLERANCE
    assert at == 900


@pytest.mark.parametrize("stream", [False, True])
def test_a_router_that_dies(
    servers: dict[str, SglangServer], client: Callable[..., Client], tmp_path: Path, stream: bool
) -> None:
    """In the middle of a request: an error at once, and no half turn."""
    router = Router(tmp_path, servers["dense"])
    try:
        router.wait(router.ready, 60)
        session = client(router.url)

        async def scenario() -> float:
            arguments = (lambda *_: None,) if stream else ()
            task = asyncio.create_task(
                session.engine.generate(session.prompt(), Sampling(3000, 1.0, 1), *arguments)
            )
            await asyncio.sleep(0.5)
            router.process.kill()
            begun = time.monotonic()
            with pytest.raises(EngineError, match="/generate failed"):
                await task
            return time.monotonic() - begun

        assert session.run(scenario()) < 20
    finally:
        router.stop()
