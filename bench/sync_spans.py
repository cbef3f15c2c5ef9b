"""Updates in the middle of requests, and the weights that the engine really held when it made each
token.

A scripted SGLang keeps checksums of the weights that it was given; a witness in it notes them
with every token. Clients send requests without a pause while a trainer syncs version after
version, verified, with every way to treat running requests. A token is mislabelled if its
recorded span names a version whose verified weights are not those that the witness saw.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rollbook.bench.scripted.job import Answer, Job, Options
from rollbook.bench.scripted.sglang import ScriptedSGLang
from rollbook.engines.engine import Generation, Prompt, Sampling, ignore_tokens
from rollbook.engines.sglang.client import SglangEngine
from rollbook.engines.sglang.http import SglangServer
from rollbook.store.errors import EngineError
from rollbook.store.events import PolicyActivated, token_ids
from rollbook.testing.asgi import serving
from rollbook.train.sync.control import EngineControl
from rollbook.train.sync.session import Release, Syncer, SyncOptions
from rollbook.train.sync.transports import FromTensors

PAUSES = ("in_place", "retract", "abort")
LENGTH, TOKEN_S = 120, 0.003
RUN = "bench"
SHAPES = {"model.embed_tokens.weight": (64, 16), "model.layers.0.mlp.down_proj.weight": (16, 32)} | {
    f"model.layers.0.self_attn.{part}_proj.weight": (16, 16) for part in "qkvo"
}
BUCKET = 2048
"""Bytes: an update is several calls, between which an engine holds a mixture of versions."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """The result: tokens made, mislabelled tokens, requests with several versions, and updates."""

    tokens: int
    wrong: int
    mixed: int
    updates: int


class Witness(ScriptedSGLang):
    """A scripted server whose ids are all different: `held` tells which weights it held when it
    made each."""

    def __init__(self, options: Options) -> None:
        super().__init__(_counting, options)
        self.held: dict[int, int] = {}

    def holds(self) -> int:
        """A number for the weights that it has now."""
        assert self.weights.held is not None
        return hash(frozenset(self.weights.held.checksums.items()))

    def _emit(self, job: Job, step: int) -> None:
        before, now = job.made, self.holds()
        super()._emit(job, step)
        self.held.update((token, now) for token in job.draft.ids[before : job.made])


def _counting(ids: list[int], params: Mapping[str, Any]) -> Answer:
    """The ids that follow the last one, also where an ended request goes on."""
    return Answer(range(ids[-1] + 1, ids[-1] + 1 + int(params["max_new_tokens"])), token_s=TOKEN_S)


def _weights(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(version)
    for name, shape in SHAPES.items():
        yield name, torch.randn(shape, generator=generator)


def label_tokens(folder: Path, updates: int, clients: int, on_update: Callable[[], None]) -> Labelled:
    """Sync `updates` versions while so many clients ask. Calls `on_update` after each."""
    save_file(dict(_weights(0)), folder / "model.safetensors")
    witness = Witness(Options(model_path=str(folder), weights="float32", weight_version="0"))
    with ExitStack() as stack:
        url = stack.enter_context(serving(witness))
        done = threading.Event()
        generations: list[Generation] = []
        names = Names()
        asking = threading.Thread(
            target=lambda: generations.extend(asyncio.run(_ask(url, clients, done, names)))
        )
        asking.start()
        true = {0: witness.holds()}
        try:
            for version in _synced(url, updates, stack, names):
                true[version] = witness.holds()
                on_update()
        finally:
            done.set()
            asking.join()
    return _compared(generations, witness.held, true, updates)


def _synced(url: str, updates: int, stack: ExitStack, names: Names) -> Iterator[int]:
    """Sync versions from 1 on; each once it is verified and served."""
    syncers = []
    for pause in PAUSES:
        syncers.append(
            Syncer([EngineControl(url, 30.0)], FromTensors(BUCKET), names.write, SyncOptions(pause))
        )
        stack.callback(syncers[-1].close)
    for version in range(1, updates + 1):
        release = Release("actor", version, str(version), "", 8, RUN)
        syncers[version % len(PAUSES)].sync(release, lambda: _weights(version))  # noqa: B023
        yield version


class Names:
    """The names that syncs give the weights: replaces the log's part, without a log."""

    changes = 0

    def __init__(self) -> None:
        self._versions = {"0": 0}  # which the server was started with

    def write(self, *records: object) -> None:
        """Take a sync's record."""
        for record in records:
            if isinstance(record, PolicyActivated):
                self._versions[record.weight_name] = record.policy_version

    def version_of(self, name: str) -> int | None:
        """The version of a name."""
        return self._versions.get(name)

    def gave(self, name: str) -> bool:
        """No: nothing is named here."""
        return False

    async def refresh(self) -> None:
        """Nothing comes later."""

    async def identify(self, server: SglangServer) -> int:
        """No: only syncs say which version there is."""
        raise EngineError(f"{server.url} has not been synced yet")


async def _ask(url: str, clients: int, done: threading.Event, names: Names) -> list[Generation]:
    engine, generations = SglangEngine(url, names), []

    async def activated(*_: Any) -> None:
        return

    async def ask(client: int) -> None:
        number = client
        while not done.is_set():
            prompt = Prompt(token_ids([number * 10 * LENGTH]), (), None, f"{client}-{number}")
            generations.append(await engine.generate(prompt, Sampling(LENGTH, 1.0, number), ignore_tokens))
            number += clients

    await engine.start(activated)
    await asyncio.gather(*(ask(client) for client in range(1, clients + 1)))
    await engine.close()
    return generations


def _compared(
    generations: list[Generation], held: Mapping[int, int], true: Mapping[int, int], updates: int
) -> Labelled:
    tokens = wrong = 0
    for generation in generations:
        ids = generation.completion_ids.tolist()
        versions = [span.version for span in generation.version_spans for _ in range(span.start, span.end)]
        tokens += len(ids)
        wrong += abs(len(versions) - len(ids))
        pairs = zip(ids, versions, strict=False)
        wrong += sum(v is None or true.get(v) != held.get(token) for token, v in pairs)
    mixed = sum(len(generation.version_spans) > 1 for generation in generations)
    return Labelled(tokens, wrong, mixed, updates)
