"""Engines to give weights to: scripted ones that keep checksums, in this process or one of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from rollbook.bench.scripted.job import Options, Script, hashed
from rollbook.bench.scripted.sglang import ScriptedSGLang
from rollbook.bench.scripted.weights import Fault
from rollbook.engines.weights.name import version_in
from rollbook.store.events import Record
from rollbook.testing.asgi import serving
from rollbook.train.sync.control import EngineControl
from rollbook.train.sync.session import Release, Syncer, SyncOptions
from rollbook.train.sync.transports import FromDisk, FromTensors, Transport

ROOT = Path(__file__).resolve().parents[3]
BROADCAST_ENGINE = ROOT / "tests/fakes/engines/broadcast.py"
LAYER = "model.layers.0"
SHAPES = {
    "model.embed_tokens.weight": (70, 8),
    f"{LAYER}.self_attn.q_proj.weight": (16, 8),
    f"{LAYER}.self_attn.k_proj.weight": (8, 8),
    f"{LAYER}.self_attn.v_proj.weight": (8, 8),
    f"{LAYER}.self_attn.o_proj.weight": (8, 16),
    f"{LAYER}.mlp.gate_proj.weight": (12, 8),
    f"{LAYER}.mlp.up_proj.weight": (12, 8),
    f"{LAYER}.mlp.down_proj.weight": (8, 12),
    "model.norm.weight": (8,),
}
BUCKET = 600
"""Bytes: every larger tensor is a bucket of its own."""


def said_version(name: str) -> str:
    """The version in a name of weights, or the name where there is none."""
    version = version_in(name)
    return name if version is None else str(version)


def make_weights(seed: int) -> dict[str, torch.Tensor]:
    """A small model's tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def write_weights(path: Path, version: int) -> Path:
    """A directory of a version's weights, made if it is not there."""
    if not path.exists():
        path.mkdir()
        save_file(make_weights(version), path / "model.safetensors")
    return path


@dataclass(slots=True, eq=False)
class Engine:
    """A scripted server in a thread, and what it was asked: (route, body)."""

    app: ScriptedSGLang
    url: str
    asked: list[tuple[str, dict[str, Any]]]

    @property
    def version(self) -> str:
        """Which version it says that it serves."""
        return said_version(self.app.weight_version)

    def routes(self) -> list[str]:
        """What it was asked, in order, from its pause on."""
        names = [route for route, _ in self.asked]
        return names[names.index("/pause_generation") :] if "/pause_generation" in names else []

    def fault(self, route: str, kind: Any, **more: Any) -> None:
        """Something goes wrong from now on."""
        self.app.faults.add(Fault(route, kind, **more))


@dataclass(slots=True, eq=False)
class World:
    """Engines, the records that were written, and both on one line of time."""

    folder: Path
    stack: ExitStack
    records: list[Record] = field(default_factory=list)
    line: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def engine(self, script: Script | None = None, dtype: str = "float32") -> Engine:
        """One that holds version 0."""
        requests: list[tuple[str, dict[str, Any]]] = []
        options = Options(model_path=str(self.folder / "v0"), weights=dtype, weight_version="0")
        app = _Recorded(script or hashed(), options, requests, self.line)
        return Engine(app, self.stack.enter_context(serving(app)), requests)

    def write(self, *records: Record) -> None:
        """Append to the log."""
        with self.lock:
            self.records.extend(records)
            self.line.extend(record.KIND for record in records)

    def sync_kinds(self, engine: str, start: int = 0) -> list[str]:
        """Kinds of the records of one engine."""
        return [record.KIND for record in self.records[start:] if record.engine == engine]  # type: ignore[union-attr]

    def transport(self, name: str, version: int = 1) -> Transport:
        """To give that version."""
        return FromDisk(self.directory(version)) if name == "disk" else FromTensors(BUCKET)

    def directory(self, version: int) -> Path:
        """Of that version's weights."""
        return write_weights(self.folder / f"v{version}", version)

    def syncer(
        self, urls: Sequence[str], transport: Transport, pause: str = "retract", timeout_s: float = 10.0
    ) -> Syncer:
        """Closed at the end of the test."""
        engines = [EngineControl(url, timeout_s) for url in urls]
        syncer = Syncer(engines, transport, self.write, SyncOptions(pause, drain_s=2.0))
        self.stack.callback(syncer.close)
        return syncer

    def sync(self, syncer: Syncer, version: int) -> list[str]:
        """Give a version's weights."""
        transport: Any = syncer._transport
        if isinstance(transport, FromDisk):
            transport.path = self.directory(version)
        weights = make_weights(version)
        return syncer.sync(
            Release("actor", version, f"w{version}", "", 4, "run"), lambda: iter(weights.items())
        )

    def process(self, *faults: str, port: int = 0) -> Process:
        """An engine in a process of its own, which takes part in broadcasts."""
        process = Process(self.directory(0), port, faults)
        self.stack.callback(process.stop)
        return process


def running(engine: Engine) -> Callable[[], dict[str, Any]]:
    """Have a request run that has made tokens; what waits for its end and gives its meta_info."""
    got: list[Any] = []
    body = {"input_ids": [1, 2], "return_logprob": True}

    def ask() -> None:
        got.append(httpx.post(f"{engine.url}/generate", json=body, timeout=30).json())

    thread = threading.Thread(target=ask)
    thread.start()
    while not any(job.made > 2 for job in engine.app.running.values()):
        time.sleep(0.002)

    def wait() -> dict[str, Any]:
        thread.join(30)
        meta: dict[str, Any] = got[0]["meta_info"]
        return meta

    return wait


class _Recorded(ScriptedSGLang):
    """A scripted server that remembers what it was asked."""

    def __init__(self, script: Script, options: Options, requests: list[Any], line: list[str]) -> None:
        super().__init__(script, options)
        for routes in (self._routes, self.weights.routes):
            for path, route in list(routes.items()):
                routes[path] = _noted(path, route, requests, line)  # type: ignore[index,assignment,arg-type]


def _noted(path: str, route: Any, requests: list[Any], line: list[str]) -> Any:
    def note(body: Any) -> Any:
        requests.append((path, body))
        line.append(path)
        return route(body)

    return note


class Process:
    """A scripted engine with gloo, in a process of its own.

    Args:
        faults: JSON of `Fault`s.
    """

    def __init__(self, model: Path, port: int = 0, faults: Sequence[str] = ()) -> None:
        words = [sys.executable, str(BROADCAST_ENGINE), str(model), str(port), *faults]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.url = ""

    def ready(self) -> str:
        """Wait until it serves; its address."""
        if not self.url:
            assert self._process.stdout is not None
            self.url = self._process.stdout.readline().strip()
            assert self.url, "the engine ended"
        return self.url

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.ready().rpartition(":")[2])

    def fault(self, **fields: Any) -> None:
        """Something goes wrong from now on."""
        httpx.post(f"{self.ready()}/scripted/fault", json=fields).raise_for_status()

    def version(self) -> str:
        """What it calls its weights."""
        return said_version(httpx.get(f"{self.ready()}/model_info").json()["weight_version"])

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait(60)
        if self._process.stdout is not None:
            self._process.stdout.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Makes engines and a log; ends them."""
    with ExitStack() as stack:
        created = World(tmp_path, stack)
        created.directory(0)
        yield created


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], list[Process]]]:
    """Gives two engines in processes of their own that are alive: a module's tests share them."""
    model = write_weights(tmp_path_factory.mktemp("crew") / "v0", 0)
    members: list[Process] = []

    def two() -> list[Process]:
        members[:] = [member for member in members if member.alive()]
        members.extend(Process(model) for _ in range(2 - len(members)))
        for member in members:
            httpx.post(f"{member.ready()}/scripted/well", timeout=20).raise_for_status()
        return list(members)

    yield two
    for member in members:
        member.stop()


@pytest.fixture
def timed() -> Callable[..., Any]:
    """A context that fails when what is in it took longer than so many seconds."""

    @contextlib.contextmanager
    def within(seconds: float) -> Iterator[None]:
        begun = time.monotonic()
        yield
        took = time.monotonic() - begun
        assert took < seconds, f"took {took:.1f} s"

    return within
