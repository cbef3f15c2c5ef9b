"""Fixtures of the engines' tests: checkpoints of one architecture, and what a plain forward pass says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.proxies.in_process import InProcess


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The machine is shared: one torch thread."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def perturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, int], Path]:
    """A function that makes a second checkpoint of a model: its weights moved at random."""

    def make(model: Path, seed: int) -> Path:
        import torch
        from transformers import AutoModelForCausalLM

        folder = tmp_path_factory.mktemp("other-model")
        loaded = AutoModelForCausalLM.from_pretrained(model)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in loaded.parameters():
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.05)
        loaded.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def other_model(tiny_model: Path, perturbed: Callable[[Path, int], Path]) -> Path:
    """A second checkpoint of the tiny model's architecture."""
    return perturbed(tiny_model, 5)


@pytest.fixture
def served(tiny_model: Path, in_process: Callable[..., InProcess]) -> InProcess:
    """An in-process proxy over an embedded engine of its own."""
    from rollbook.engines.embedded.engine import EmbeddedEngine
    from rollbook.ingest.tokens.chat_template import load_chat_tokenizer

    return in_process(EmbeddedEngine(tiny_model), load_chat_tokenizer(tiny_model))


@pytest.fixture(scope="module")
def shared(tiny_model: Path, in_process: Callable[..., InProcess]) -> InProcess:
    """An in-process proxy over an embedded engine that the module's tests share."""
    from rollbook.engines.embedded.engine import EmbeddedEngine
    from rollbook.ingest.tokens.chat_template import load_chat_tokenizer

    return in_process(EmbeddedEngine(tiny_model), load_chat_tokenizer(tiny_model))


@pytest.fixture
def renewed(shared: InProcess, tiny_model: Path) -> InProcess:
    """The module's engine, let go on and with its first weights as version 0 again, whatever was before."""
    weights, updates = shared.engine.weights, shared.engine.updates
    shared.run(updates.update_from_disk(tiny_model, 0, flush=False))
    weights.update = None
    shared.engine.gate.release("session")
    shared.run(updates.resume())
    return shared


class Pace:
    """Slows a generation loop down, so that a test can step in before everything has been sampled."""

    def __init__(self) -> None:
        self.step_s = 0.0

    def full(self) -> None:
        """Let the loop go on as fast as it can."""
        self.step_s = 0.0

    async def until(self, served: Any, tokens: int) -> None:
        """Return when a request of the engine has so many tokens; it goes on slowly."""
        manager, self.step_s = served.engine._manager, 0.005
        step = type(manager)._generation_step

        def slowly() -> None:
            time.sleep(self.step_s)
            step(manager)

        manager._generation_step = slowly
        async with asyncio.timeout(30):
            while max((len(request.ids) for request in served.engine._live.values()), default=0) < tokens:
                await asyncio.sleep(0.001)


@pytest.fixture
def pace() -> Iterator[Pace]:
    """A loop's pace, full again at the end."""
    new = Pace()
    yield new
    new.step_s = 0.0


@pytest.fixture(scope="session")
def forward() -> Callable[..., np.ndarray]:
    """Logprobs of a completion by plain forward passes of transformers, in float32."""
    loaded: dict[Path, Any] = {}

    def model_of(path: Path) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        if path not in loaded:
            loaded[path] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return loaded[path]

    def logprobs(
        models: Sequence[tuple[Path, int]], prompt: Any, completion: Any, temperature: float = 1.0
    ) -> np.ndarray:
        """`models`: (model, completion tokens that it and those before it sampled). Each takes the keys and
        values that those before it left."""
        import torch

        ids = torch.tensor([[*map(int, prompt), *map(int, completion)]])
        parts, cache, start = [], None, 0
        for path, until in models:
            end = len(prompt) + until - 1  # the last one is still to be read when it has been sampled
            with torch.no_grad():
                out = model_of(path)(ids[:, start:end], past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, out.logits[0] / (temperature or 1.0)
            chosen = torch.log_softmax(logits, -1).gather(-1, ids[0, start + 1 : end + 1].unsqueeze(-1))
            parts.append(chosen.squeeze(-1).numpy())
            start = end
        return np.concatenate(parts)[len(prompt) - 1 :]

    return logprobs
