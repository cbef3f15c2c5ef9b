"""Fixtures of the SGLang suite: real servers of tiny models, the engine's client, and transformers' numbers.

This suite has an environment of its own: `make test-sglang` sets it up and runs it, `make test` leaves it
out. Without the environment it fails.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories.weights import ToldWeights
from tests.sglang import model
from tests.sglang.server import ENVIRONMENT, SglangServer

from rollbook.engines.engine import Generation, Prompt, Sampling, ignore_tokens
from rollbook.engines.sglang import client as sglang
from rollbook.engines.sglang.client import SglangEngine
from rollbook.engines.sglang.protocol import Routing
from rollbook.store.events import Logprobs, token_ids

PROMPT = list(range(20, 50))
ROUTING = Routing(model.LAYERS, model.TOP_K)
TOLERANCE = 3e-5
"""Of a logprob: float32 sums in another order, 6e-6 apart on most machines. Of other weights: over 1e-2."""
TIE = 1e-5
"""Of two experts: which one a token goes to is decided by the order of sums."""
Act = Callable[[], Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A server's start is waited for by the first test that needs it: more than one test's usual time."""
    for item in items:
        item.add_marker(pytest.mark.timeout(420))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories: a tied dense and an untied mixture of experts, each with weights to change to."""
    if not (ENVIRONMENT / "bin" / "python").exists():
        pytest.exit("no environment with SGLang: run `make test-sglang`", 2)
    folder = tmp_path_factory.mktemp("models")
    folders = {"dense": model.make(folder / "dense", "dense", 1, tied=True)}
    for name, kind, seed in (("dense-next", "dense", 2), ("moe", "moe", 3), ("moe-next", "moe", 4)):
        folders[name] = model.make(folder / name, kind, seed, tied=kind == "dense", like=folders["dense"])
    return folders


@pytest.fixture(scope="session")
def servers(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, SglangServer]]:
    """The servers, started at once: two of the dense model; one of experts, which streams what is new."""
    folder = tmp_path_factory.mktemp("servers")
    started = {
        "dense": SglangServer(models["dense"], folder),
        "second": SglangServer(models["dense"], folder),
        "moe": SglangServer(
            models["moe"], folder, "--enable-return-routed-experts", "--incremental-streaming-output"
        ),
    }
    try:
        for server in started.values():
            server.start()
        for server in started.values():
            server.ready()
        yield started
    finally:
        for server in started.values():
            server.stop()


@pytest.fixture(params=["dense", "moe"])
def server(request: pytest.FixtureRequest, servers: dict[str, SglangServer]) -> SglangServer:
    """The dense model's server, whose streams hold all so far, and the experts', whose hold what is new."""
    return servers[request.param]


@pytest.fixture
def dense(servers: dict[str, SglangServer]) -> SglangServer:
    """The dense model's server."""
    return servers["dense"]


@pytest.fixture
def moe(servers: dict[str, SglangServer]) -> SglangServer:
    """The mixture of experts' server."""
    return servers["moe"]


_VERSIONS = itertools.count(100)


@dataclass(frozen=True, slots=True)
class Weights:
    """What a server serves, and how it is given something else."""

    server: SglangServer
    models: dict[str, Path]

    def load(self, path: Path, *, flush: bool = True) -> int:
        """Have it load a model directory; the new version."""
        version = next(_VERSIONS)
        body = {"model_path": str(path), "weight_version": str(version), "flush_cache": flush}
        reply = self.server.post("/update_weights_from_disk", body)
        assert reply["success"], reply
        return version

    def rename(self, *, abort: bool = False) -> int:
        """Have it call the weights that it has by the next version."""
        version = next(_VERSIONS)
        body = {"new_version": str(version), "abort_all_requests": abort}
        assert self.server.post("/update_weight_version", body)["success"]
        return version

    def next_model(self) -> Path:
        """Another model directory of the same shape."""
        return self.models[f"{self.server.model.name}-next"]


@pytest.fixture
def weights(
    servers: dict[str, SglangServer], models: dict[str, Path]
) -> Iterator[Callable[[SglangServer], Weights]]:
    """Makes what changes a server's weights; afterwards each has those that it was started with."""
    changed: list[Weights] = []

    def make(server: SglangServer) -> Weights:
        changed.append(Weights(server, models))
        return changed[-1]

    yield make
    for entry in changed:
        entry.server.post("/continue_generation")
        entry.load(entry.server.model)


def amid(attempt: Callable[[], tuple[Generation, Any]], spans: int = 2) -> tuple[Generation, Any]:
    """What `attempt` made, once weights changed in the middle of its answer.

    A busy server may hear of a change only when the answer has ended: then there was no middle.
    """
    for _ in range(5):
        generation, rest = attempt()
        if len(generation.version_spans) >= spans:
            break
    return generation, rest


class Client:
    """An engine's client on a loop of its own."""

    def __init__(self, url: str, **options: Any) -> None:
        self.engine = SglangEngine(url, ToldWeights(), **options)
        self._runner = asyncio.Runner()
        self._made = itertools.count()
        self.heard: list[int] = []
        self.ended = False

        async def activated(*_: Any) -> None:
            return

        self.run(self.engine.start(activated))

    def run(self, coroutine: Any) -> Any:
        """Run a coroutine on the client's loop."""
        return self._runner.run(coroutine)

    def prompt(self, ids: Sequence[int] = PROMPT, known_tokens: int = 0) -> Prompt:
        """A prompt of these ids, under a name of its own."""
        name = f"{id(self)}-{next(self._made):04}"
        return Prompt(token_ids(ids), (), None, name, known_tokens=known_tokens)

    def generate(self, sampling: Sampling, heard: Any = ignore_tokens, **prompt: Any) -> Generation:
        """A completion."""
        generation: Generation = self.run(self.engine.generate(self.prompt(**prompt), sampling, heard))
        return generation

    def meanwhile(self, sampling: Sampling, act: Act, after: int = 60) -> tuple[Generation, list[int]]:
        """(a completion; all that was heard of it); `act` runs in a thread once `after` tokens have come."""
        heard: list[int] = []
        self.heard = heard
        thread = threading.Thread(target=act)

        def hear(ids: Sequence[int], _: Any) -> None:
            heard.extend(ids)
            if len(heard) >= after and thread.ident is None:
                thread.start()

        self.ended = False
        generation = self.generate(sampling, hear)
        self.ended = True
        assert thread.ident is not None, "it ended too soon"
        thread.join()
        return generation, heard

    def hears_more(self, than: int) -> None:
        """Wait until `meanwhile` has heard of more tokens than that, or there are no more."""
        deadline = time.monotonic() + 60
        while len(self.heard) <= than and not self.ended:
            assert time.monotonic() < deadline, f"no token after the first {than}"
            time.sleep(0.002)

    def close(self) -> None:
        """Let go of the server."""
        self.run(self.engine.close())
        self._runner.close()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Client]]:
    """Makes clients. Their completions have the full length: a random model may end its turn at any token."""
    real = sglang.request_body

    def endless(*arguments: Any) -> Any:
        body = real(*arguments)
        return body | {"sampling_params": body["sampling_params"] | {"ignore_eos": True}}

    monkeypatch.setattr(sglang, "request_body", endless)
    clients: list[Client] = []

    def make(server: SglangServer | str, **options: Any) -> Client:
        clients.append(Client(server if isinstance(server, str) else server.url, **options))
        return clients[-1]

    yield make
    for item in clients:
        item.close()


class Reference:
    """The same models in transformers, float32."""

    def __init__(self) -> None:
        self._loaded: dict[Path, Any] = {}

    def _of(self, path: Path) -> Any:
        if path not in self._loaded:
            import torch
            from transformers import AutoModelForCausalLM

            self._loaded[path] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return self._loaded[path]

    def logprobs(self, path: Path, prompt: Sequence[int], ids: Sequence[int], temperature: float) -> Logprobs:
        """Logprob of each id after the prompt and the ids before it, of softmax(logits / temperature)."""
        import torch

        whole = torch.tensor([[*prompt, *ids]])
        with torch.no_grad():
            logits = self._of(path)(whole).logits[0, len(prompt) - 1 : -1] / temperature
        logprobs = torch.log_softmax(logits, -1)[torch.arange(len(ids)), whole[0, len(prompt) :]]
        return logprobs.numpy()  # type: ignore[no-any-return]

    def experts(self, path: Path, ids: Sequence[int]) -> Any:
        """Which experts each position goes to, [positions, layers, topk], in no order."""
        routed = self._routed(path, ids)
        return np.stack([layer.topk(model.TOP_K).indices.numpy() for layer in routed], axis=1)

    def nearest_tie(self, path: Path, ids: Sequence[int]) -> float:
        """By how little, at least, an expert was chosen before another: so little that the order of sums may
        decide it, and all that follows is otherwise. Infinite for a dense model."""
        gaps = [layer.topk(model.TOP_K + 1).values for layer in self._routed(path, ids)]
        return min((float((gap[:, -2] - gap[:, -1]).min()) for gap in gaps), default=np.inf)

    def _routed(self, path: Path, ids: Sequence[int]) -> list[Any]:
        """What each layer's router gives the experts, [positions, experts]; none of a dense model."""
        import torch

        chosen: list[Any] = []
        loaded = self._of(path)
        routers = [layer.mlp.gate for layer in loaded.model.layers if hasattr(layer.mlp, "gate")]
        hooks = [router.register_forward_hook(lambda _, __, out: chosen.append(out[0])) for router in routers]
        with torch.no_grad():
            loaded(torch.tensor([list(ids)]))
        for hook in hooks:
            hook.remove()
        return chosen


@pytest.fixture(scope="session")
def reference() -> Reference:
    """What transformers makes of the models."""
    return Reference()


def greatest_difference(generation: Generation, wanted: Logprobs, start: int = 0) -> float:
    """Between a completion's logprobs from `start` on and those that they should be."""
    assert generation.logprobs is not None
    actual = generation.logprobs[start : start + len(wanted)]
    assert len(actual) == len(wanted) > 0
    return float(np.abs(actual - wanted).max())
