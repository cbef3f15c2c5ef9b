"""The attacked proxies: `rollbook serve` as a separate process, killed and started at will."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import signal
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from rollbook import store
from rollbook.bench.hostile.agents import CHAT, Habits
from rollbook.bench.hostile.attack import RECORD, TOKENS
from rollbook.bench.loop_processes import COMMAND, Victim
from rollbook.bench.processes import Process, module
from rollbook.bench.scripted.dialogues import write_model
from rollbook.testing.asgi import free_port

HONEST = "honest"
"""What names of honest trajectories begin with."""
OPERATOR, WRITER, JUDGE, READER = (
    "operator-7d1f0c55e2",
    "writer-0ac51be1",
    "judge-91f5c2d7",
    "reader-5b7e3c02",
)
EXPIRED = "expired-4c1e9a80"
ROLES = {OPERATOR: "operator", WRITER: "writer", JUDGE: "judge", READER: "reader", EXPIRED: "operator"}
"""The keys of the proxies that are attacked."""
SCRIPT = "rollbook.bench.hostile.script:answer"
SEGMENT_BYTES = 1 << 20
"""Small segments, so that the writer rolls and the sealer works during every attack."""
PRELOADED = ("rollbook.ingest.serve.serve",)


@dataclass(slots=True)
class Proxy:
    """One proxy and its store."""

    folder: Path
    kind: str
    url: str
    victim: Victim

    @property
    def store(self) -> Path:
        """Its store's folder."""
        return self.folder / "store"

    @property
    def pid(self) -> int:
        """Of its process, now."""
        return self.victim.pid

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.victim.start()
        self.await_ready()

    def await_ready(self) -> None:
        """Wait until it answers."""
        self.victim.await_http(f"{self.url}/healthz")

    def log(self) -> str:
        """What it printed so far."""
        return self.victim.log.read_text(errors="replace") if self.victim.log.exists() else ""

    def forget_peak(self) -> None:
        """Have the kernel count the peak of its memory anew."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def memory(self, field: str = "VmHWM") -> int:
        """Bytes it has resident: `VmHWM` at the peak, `VmRSS` now."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))

    @contextlib.contextmanager
    def limited(self, what: int, soft: int) -> Iterator[None]:
        """A limit of the living process while the context lasts (`resource.RLIMIT_...`)."""
        pid = self.pid
        before = resource.prlimit(pid, what)
        resource.prlimit(pid, what, (soft, before[1]))
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, what, before)

    def end(self) -> None:
        """End it orderly, with its sealer."""
        self.victim.stop()


class Stage:
    """A folder with a model, where proxies are started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        write_model(self.model)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def proxy(self, kind: str, name: str, words: Sequence[object] = (), settings: str = "") -> Proxy:
        """A proxy of a kind, not started yet; it ends with the stage."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        store.open(folder / "store", create=True)
        number = free_port()
        write_keys(folder / "keys.toml")
        command: list[object] = ["serve", "--store", folder / "store", "--port", number]
        command += ["--keys", folder / "keys.toml"]
        if kind == TOKENS:
            command += ["--engine", "scripted", "--script", SCRIPT, "--model", self.model]
        else:
            command += ["--engine", "upstream"]
        proxy = Proxy(
            folder,
            kind,
            f"http://127.0.0.1:{number}",
            Victim(
                name,
                COMMAND,
                [*command, *words],
                folder / "serve.log",
                {"COLUMNS": "200"},
                PRELOADED,
            ),
        )
        _settings(folder / "store", settings)
        self._stack.callback(proxy.victim.end)
        return proxy

    def standard(self, kind: str, name: str) -> Proxy:
        """A proxy in its default form, started; a record-only one has an upstream, and refuses what
        it cannot record."""
        words = ["--on-store-failure", "refuse"] if kind == RECORD else []
        words += ["--engine-url", f"{self.upstream(name).url()}/v1"] if kind == RECORD else []
        proxy = self.proxy(kind, name, words)
        proxy.start()
        return proxy

    def upstream(self, name: str) -> Process:
        """An upstream, started; it ends with the stage."""
        words = module("rollbook.bench.hostile.upstream")
        return self._stack.enter_context(Process(f"upstream-{name}", words, self.folder, "all"))

    def agents(self, proxy: Proxy, seed: int = 0, **habits: object) -> Process:
        """Honest agents of a proxy, at work; they end with the stage."""
        apis = {"apis": (CHAT,)} if proxy.kind == RECORD else {}
        settings = asdict(
            Habits(proxy.url, str(acks_of(proxy)), HONEST, WRITER, JUDGE, seed=seed, **apis | habits)  # type: ignore[arg-type]
        )
        words = module("rollbook.bench.hostile.agents", orjson.dumps(settings).decode())
        return self._stack.enter_context(Process(f"agents-{proxy.victim.name}", words, self.folder, "all"))


def write_keys(file: Path) -> None:
    """Write the file of keys, which holds only their hashes."""
    lines = []
    for key, role in ROLES.items():
        lines += ["[[key]]", f'name = "{key.partition("-")[0]}"', f'role = "{role}"']
        lines += [f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"']
        lines += ["expires = 2020-01-01T00:00:00Z"] if key == EXPIRED else []
    file.write_text("\n".join(lines) + "\n")
    file.chmod(0o600)


def acks_of(proxy: Proxy) -> Path:
    """The file with all acknowledgements to a proxy's honest agents."""
    return proxy.folder / "acks.jsonl"


def _settings(folder: Path, more: str) -> None:
    """The store's settings: small segments."""
    (folder / "store.toml").write_text(f"[append]\nsegment_bytes = {SEGMENT_BYTES}\n{more}")


def kill(pid: int) -> None:
    """kill -9 of a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
