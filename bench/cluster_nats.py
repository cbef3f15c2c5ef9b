"""Real NATS servers with JetStream: one, or a cluster of three."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rollbook.bench.tied import end_with_parent

READY_S = 30.0


def program() -> str | None:
    """The server's program: beside the interpreter, or on the path."""
    beside = Path(sys.executable).with_name("nats-server")
    return str(beside) if beside.exists() else shutil.which("nats-server")


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((address, 0))
        return [one.getsockname()[1] for one in sockets]


@dataclass
class NatsServers:
    """Servers of one cluster. Each commit is synced to the disk."""

    folder: Path
    ports: list[int]
    routes: list[int]
    processes: list[subprocess.Popen[bytes] | None] = field(default_factory=list)
    address: str = "127.0.0.1"

    @property
    def url(self) -> str:
        """The address of all of them."""
        return "nats://" + ",".join(f"{self.address}:{port}" for port in self.ports)

    def start(self, number: int) -> None:
        """Start one, with what it had."""
        folder = self.folder / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        routes = ", ".join(f'"nats-route://{self.address}:{port}"' for port in self.routes)
        listen = f"{self.address}:{self.routes[number]}"
        cluster = f"cluster {{ name: rollbook, listen: {listen}, routes: [{routes}] }}\n"
        (folder / "nats.conf").write_text(
            f"server_name: n{number}\nlisten: {self.address}:{self.ports[number]}\n"
            f'jetstream {{ store_dir: "{folder}/data", max_mem: 64M, max_file: 8G, sync_interval: always }}\n'
            + (cluster if len(self.ports) > 1 else "")
        )
        path = program()
        assert path is not None
        with (folder / "log").open("ab") as log:
            command = [path, "-c", str(folder / "nats.conf")]
            self.processes[number] = subprocess.Popen(
                command, stdout=log, stderr=log, preexec_fn=end_with_parent
            )

    def kill(self, number: int) -> None:
        """End one without a word."""
        process = self.processes[number]
        assert process is not None
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.processes[number] = None

    def stop(self) -> None:
        """End all."""
        for process in self.processes:
            if process is not None:
                process.kill()
                process.wait()

    def wait(self) -> None:
        """Return once a stream can be made."""
        import asyncio

        import nats

        async def ready() -> None:
            client = await nats.connect(self.url.split(","), connect_timeout=2)
            try:
                await client.jetstream(timeout=2).account_info()
            finally:
                await client.close()

        until = time.monotonic() + READY_S
        while True:
            try:
                asyncio.run(ready())
                return
            except Exception:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)


@contextlib.contextmanager
def nats_servers(folder: Path, count: int = 1, address: str = "127.0.0.1") -> Iterator[NatsServers]:
    """Servers that end with the context."""
    ports = free_ports(2 * count, address)
    servers = NatsServers(folder, ports[:count], ports[count:], [None] * count, address)
    try:
        for number in range(count):
            servers.start(number)
        servers.wait()
        yield servers
    finally:
        servers.stop()
