"""Fixtures of the service's tests: the service as a process, and programs of the pinned client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.processes.warm import TORCH, WarmProcess
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.events import (
    OperationAccepted,
    OperationEnded,
    SessionOpened,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnCompleted,
    TurnFailed,
    TurnRequested,
)
from rollbook.train.tenants.history import events_of_clients
from rollbook.train.tenants.operations import session_of

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv-service" / "bin" / "python"
KEPT = ("PATH", "LANG", "TMPDIR")
BASE = "tiny"
"""What clients call the base model."""
QUIET = {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}


def client_environment() -> dict[str, str]:
    """The variables of a program of the client's."""
    if not PYTHON.exists():
        pytest.fail("no environment with the client: run `make test-service`")
    return {name: os.environ[name] for name in KEPT if name in os.environ} | QUIET


@pytest.fixture(scope="session")
def run_client() -> Callable[..., str]:
    """Runs a program of this folder where the client is installed, and gives what it printed."""
    environment = client_environment()

    def run(program: str, *words: object) -> str:
        command = [str(part) for part in (PYTHON, HERE / program, *words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, f"{program}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@dataclass(slots=True, eq=False)
class Service:
    """A `rollbook service` of a store, which may be killed and started again at the same address.

    Attributes:
        file: of the client's programs.
        first: Python that it runs first.
        worker: whether it is a worker of one, which has no address.
    """

    store: Path
    config: Path
    words: tuple[str, ...] = ()
    file: str = "client_loops.py"
    first: str = ""
    port: int = 0
    url: str = ""
    worker: bool = False
    process: subprocess.Popen[Any] | None = None
    programs: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self) -> Service:
        """Start it, and wait until it listens."""
        begin = ["-c", f"{self.first}\nfrom rollbook.__main__ import main\nmain()"]
        words = [sys.executable, *(begin if self.first else ["-m", "rollbook"]), "service"]
        words += ["worker"] if self.worker else ["--port", str(self.port)]
        words += [str(self.config), "--store", str(self.store), *self.words]
        with self.errors.open("ab") as errors:
            self.process = WarmProcess(words, modules=TORCH, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if self.worker:
            assert "is trained " in line, self.errors.read_text()
            return self
        assert "have clients set TINKER_BASE_URL=" in line, self.errors.read_text()
        self.url = line.strip().rpartition("=")[2]
        self.port = int(self.url.rpartition(":")[2])
        return self

    def kill(self) -> None:
        """End it at once."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def begin(self, what: str, through: str = "", **options: Any) -> subprocess.Popen[str]:
        """Begin a program of the client's, which reaches it at its own address or at this one."""
        self.programs.append(begun(self.file, through or self.url, what, **options))
        return self.programs[-1]

    def run(self, what: str, **options: Any) -> Any:
        """What a program of the client's prints."""
        return printed(self.begin(what, **options))

    @property
    def errors(self) -> Path:
        """Where what it says on stderr is, of all its lives."""
        return self.store.with_name(f"{self.store.name}.errors")

    @property
    def log(self) -> Store:
        """Its log."""
        return rb.open(self.store)

    def stop(self) -> None:
        """End everything."""
        for program in self.programs:
            program.kill()
            program.communicate()
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


def begun(file: str, url: str, what: str, /, **options: Any) -> subprocess.Popen[str]:
    """A program of the client's that begins."""
    words = [str(PYTHON), str(HERE / file), url, what, json.dumps(options)]
    return subprocess.Popen(
        words, env=client_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


Done = tuple[str, int, Any]
"""Name and number of an operation, and the digests of what it did."""


def done_by(service: Service | Store) -> dict[str, list[list[Done]]]:
    """What was done for each caller ("" without keys), by model and sampler in the order in which they came.

    Everything that was accepted ended once, and no sequence was opened or completed twice.
    """
    log = service.log if isinstance(service, Service) else service
    records = [event.record for event in log.events()]
    owners = {r.session_id: r.by or "" for r in records if isinstance(r, SessionOpened)}
    of_clients = (event.record for event in events_of_clients(log))
    accepted = [r for r in of_clients if isinstance(r, OperationAccepted)]
    ended = {r.request_id: r for r in records if isinstance(r, OperationEnded)}
    once = Counter(r.request_id for r in records if isinstance(r, OperationEnded))
    assert once == Counter(r.request_id for r in accepted)
    turns = Counter((_OF_SEQUENCES[type(r)], r.trajectory_id) for r in records if type(r) in _OF_SEQUENCES)
    assert {*once.values(), *turns.values()} <= {1}
    assert len({id_ for _, id_ in turns}) * len({*_OF_SEQUENCES.values()}) == len(turns)
    by_owner: dict[str, dict[str, list[Done]]] = {}
    for record in sorted(accepted, key=lambda record: record.number):
        own = by_owner.setdefault(owners[session_of(record.model_id)], {})
        done = record.operation, record.number, ended[record.request_id].digests
        own.setdefault(record.model_id, []).append(done)
    order = [record.model_id for record in accepted]
    return {owner: [own[name] for name in sorted(own, key=order.index)] for owner, own in by_owner.items()}


_OF_SEQUENCES: dict[type, str] = {
    TrajectoryOpened: "opened",
    TurnRequested: "requested",
    TurnCompleted: "sampled, or not",
    TurnFailed: "sampled, or not",
    TrajectoryFinished: "finished",
}
"""Records of which a sequence has one each."""


def printed(program: subprocess.Popen[str], timeout_s: float = 450) -> Any:
    """What a program prints once it has ended."""
    out, errors = program.communicate(timeout=timeout_s)
    assert program.returncode == 0, errors[-4000:]
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="session")
def started() -> Iterator[Callable[..., Service]]:
    """Starts services of stores in a folder, which are stopped at the end."""
    services: list[Service] = []

    def start(
        folder: Path,
        name: str = "store",
        *words: str,
        base: Path | None = None,
        called: str | None = BASE,
        first: str = "",
    ) -> Service:
        config = folder / "service.toml"
        named = "" if called is None else f'name = "{called}"\n'
        config.write_text(f'base = "{base or fabric.model_folder()}"\n{named}')
        services.append(Service(folder / name, config, words, first=first))
        return services[-1].start()

    yield start
    for service in services:
        service.stop()


@pytest.fixture
def service_at(tmp_path: Path, started: Callable[..., Service]) -> Iterator[Callable[..., Service]]:
    """Makes services of stores of their own, which are stopped afterwards."""
    services: list[Service] = []

    def make(name: str = "store", *words: str, **options: str) -> Service:
        services.append(started(tmp_path, name, *words, **options))
        return services[-1]

    yield make
    for service in services:
        service.stop()


@pytest.fixture
def service(service_at: Callable[..., Service]) -> Service:
    """A service of an empty store."""
    return service_at()
