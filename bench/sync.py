"""`sync.*`: new weights from the trainer to a real SGLang: speed compared with the bare bytes, and
exactness.

The trainer is Megatron's model in this process; the engine a real SGLang on the CPU, which it
shares. In each round the weights change and go to the engine by every transport, verified; for
comparison, as many bytes are plainly written, synced and read again. After each sync the engine
samples, and its logprobs are compared with the trainer's own forward of the same weights. Then a
scripted engine is updated in the middle of requests (`bench.sync_spans`).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rollbook.bench.figure import Outcome
from rollbook.bench.rounds import Limit, Side, Work, interleave
from rollbook.bench.sync_engine import Server, Size, TimedControl, sglang_python, write_model
from rollbook.bench.sync_outcome import BYTES, DISK, DISTRIBUTED, TENSOR, Measured, Parts, figures, spreads
from rollbook.bench.sync_spans import label_tokens
from rollbook.engines.weights.digests import read_weights
from rollbook.train.checkpoints.checkpoint import write_checkpoint
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.model.model import Build, choose_device
from rollbook.train.model.shape import read_shape
from rollbook.train.ranks.backend import TrainablePolicy
from rollbook.train.sync.session import Release, Syncer
from rollbook.train.sync.transports import ByBroadcast, FromDisk, FromTensors, Transport

TIMEOUT_S = 120.0
PROMPT = list(range(20, 52))


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    limit: Limit = field(default_factory=lambda: Limit(5, 150.0))
    size: Size = field(default_factory=Size)
    bucket: int = 64 << 20
    sampled: int = 24
    """Tokens after each sync whose logprobs are compared."""
    threads: int = 2
    updates: int = 1000
    clients: int = 8

    @property
    def steps(self) -> int:
        """How often `on_round` will be called, unless time runs out."""
        return self.limit.rounds + self.updates


class _Trainer:
    """A policy, the engine that serves it, and a way to get it there for each transport."""

    def __init__(self, folder: Path, models: tuple[Path, Path], server: Server, plan: Plan) -> None:
        self._folder, self._models, self._server, self._plan = folder, models, server, plan
        shape = read_shape(models[0])
        self._policy = TrainablePolicy(
            shape, OptimizerConfig(), Build(1, choose_device("cpu"), 0, plan.threads)
        )
        self._version = 0
        self._served: int | None = None
        self.differences: list[float] = []
        self.parts: dict[str, list[Parts]] = {}
        self._syncers: dict[str, tuple[Syncer, TimedControl, Transport]] = {}
        for transport in (
            FromDisk(Path()),
            FromTensors(plan.bucket),
            ByBroadcast(plan.bucket, "127.0.0.1", TIMEOUT_S),
        ):
            control = TimedControl(server.url, TIMEOUT_S)
            syncer = Syncer([control], transport, lambda *records: None, _manner())
            self._syncers[transport.name] = syncer, control, transport

    @property
    def bytes(self) -> int:
        """Of all weights."""
        return sum(t.numel() * t.element_size() for _, t in self._policy.stream_weights())

    def side(self, name: str) -> Side:
        """Sync other weights to the engine."""

        def prepare(number: int) -> Work:
            self.compare()
            self._version += 1
            self._policy.load_weights(read_weights(self._models[self._version % 2]))
            shutil.rmtree(self._folder / "store", ignore_errors=True)
            return lambda: self._sync(name, counted=number >= 0)

        return prepare

    def _sync(self, name: str, *, counted: bool) -> None:
        syncer, control, transport = self._syncers[name]
        control.laps.clear()
        begun = time.perf_counter()
        path, digest = "", ""
        if isinstance(transport, FromDisk):
            record = write_checkpoint(
                self._folder / "store",
                *("bench", "actor", self._version, self._policy.stream_weights(), None),
                like=self._models[0],
                phase=None,
            )
            path, digest = record.path, record.weights_digest
            transport.path = self._folder / "store" / path
        else:
            digest = self._policy.weights_digest().digest
        release = Release("actor", self._version, digest, path, self._policy.shape.head_dim, "bench")
        syncer.sync(release, self._policy.stream_weights)
        self._served = self._version
        if counted:
            self.parts.setdefault(name, []).append(Parts.of(begun, control.laps))

    def compare(self) -> None:
        """Let the engine sample under the weights served last, and compute the same logprobs in
        this process."""
        if self._served is None:
            return
        ids, engine_logprobs, spans = self._server.sample(PROMPT, self._plan.sampled)
        assert [span["version"] for span in spans] == [str(self._served)], spans
        whole = torch.tensor([[*PROMPT, *ids]])
        with torch.no_grad():
            positions = torch.arange(whole.shape[1])[None]
            logits = self._policy._parts.module(whole, positions, None)[0, len(PROMPT) - 1 : -1]
        ours = torch.log_softmax(logits[:, : self._policy.shape.vocab].float(), -1)
        picked = ours[torch.arange(len(ids)), ids].tolist()
        self.differences.append(max(abs(a - b) for a, b in zip(picked, engine_logprobs, strict=True)))
        self._served = None

    def close(self) -> None:
        """Let go of the engine."""
        for syncer, _, _ in self._syncers.values():
            syncer.close()


def _manner() -> Any:
    from rollbook.train.sync.session import SyncOptions

    return SyncOptions("retract")


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Start an engine in `folder`, sync in turns, then update a scripted one in the middle of requests.

    Raises:
        ConfigError: there is no SGLang.
        EngineError: a sync failed; none may.
    """
    sglang_python()
    first = write_model(folder / "a", plan.size, 1)
    models = (first, write_model(folder / "b", plan.size, 2, like=first))
    with ExitStack() as stack:
        server = Server(first, folder)
        stack.callback(server.process.stop)
        server.ready()
        trainer = _Trainer(folder, models, server, plan)
        stack.callback(trainer.close)
        plain = _plain(folder / "plain", trainer.bytes)
        sides: Mapping[str, Side] = {
            BYTES: lambda _: plain,
            **{name: trainer.side(name) for name in (DISK, TENSOR, DISTRIBUTED)},
        }
        laps = interleave(sides, plan.limit, on_round)
        trainer.compare()
    scripted = folder / "scripted"
    scripted.mkdir()
    labelled = label_tokens(scripted, plan.updates, plan.clients, on_round)
    return Measured(laps, trainer.parts, trainer.bytes, trainer.differences, labelled)


def _plain(path: Path, size: int) -> Work:
    """Write so many bytes, have them synced, and read them again."""
    data, back = torch.randint(0, 255, (size,), dtype=torch.uint8).numpy().data, bytearray(size)

    def work() -> None:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with path.open("rb") as file:
            assert file.readinto(back) == size
        path.unlink()

    return work


def outcome(measured: Measured) -> Outcome:
    """The figures and spreads of a measurement."""
    return Outcome(figures(measured), spreads(measured))
