"""The demo's processes: the server, the trainer, the agent; each ended by its own pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self, cast

import httpx
import orjson

from rollbook.engines.weights.name import version_in
from rollbook.store.errors import RollbookError
from rollbook.testing.asgi import free_port

READY_S, STOP_S = 120.0, 30.0


class DemoError(RollbookError):
    """A process of the demo failed; the message ends with its last lines."""


class Process:
    """A child process whose output goes to a log file."""

    def __init__(self, name: str, command: list[str], folder: Path, **pipes: Any) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        self._file = self._log.open("wb")
        outputs = {"stdout": self._file, "stderr": self._file} | pipes
        self.child = cast("subprocess.Popen[bytes]", subprocess.Popen(command, env=_environment(), **outputs))

    def check(self) -> None:
        """Raise DemoError if it ended with an error."""
        if self.child.poll() not in (None, 0):
            raise DemoError(f"{self.name} failed ({self.child.returncode}):\n{self.tail()}")

    def wait(self, timeout: float = 600.0) -> int:
        """Wait for its end; its exit code."""
        return self.child.wait(timeout)

    def stop(self) -> None:
        """End it, politely first."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
            try:
                self.child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()
        self._file.close()

    def tail(self, lines: int = 15) -> str:
        """Last lines of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _environment() -> dict[str, str]:
    """Children import the rollbook of this process, and never ask a model hub."""
    import rollbook

    root = str(Path(rollbook.__file__).parent.parent)
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    # Its servers are its own: keys that stand in the environment are for others.
    inherited = {k: v for k, v in os.environ.items() if k not in ("ROLLBOOK_API_KEYS", "ROLLBOOK_ENGINE_KEY")}
    return inherited | offline | {"PYTHONPATH": root, "COLUMNS": "100"}


def rollbook_command(*words: object) -> list[str]:
    """`rollbook WORDS...`, with this interpreter."""
    return [sys.executable, "-m", "rollbook.cli.app", *map(str, words)]


class Server(Process):
    """`rollbook serve`."""

    def __init__(self, name: str, folder: Path, *options: object) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(name, rollbook_command("serve", "--port", port, *options), folder)

    def await_ready(self) -> None:
        """Wait until it answers.

        Raises:
            DemoError: it ended, or took too long.
        """
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            self.check()
            try:
                if httpx.get(f"{self.url}/healthz", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.1)
        raise DemoError(f"{self.name} did not answer within {READY_S:.0f} s:\n{self.tail()}")

    def version(self) -> int:
        """Policy version that its engine serves; -1 while it names none."""
        info = httpx.get(f"{self.url}/engine/model_info", timeout=30).json()
        version = version_in(info["weight_version"])
        return -1 if version is None else version


class Agent(Process):
    """The agent, in a process of its own that imports nothing of Rollbook."""

    def __init__(self, folder: Path, url: str) -> None:
        script = Path(__file__).with_name("agent.py")
        command = [sys.executable, str(script), "--url", url]
        super().__init__("agent", command, folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def work(self, jobs: list[dict[str, Any]]) -> list[float]:
        """Have it work on a batch; its rewards.

        Raises:
            DemoError: it failed.
        """
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        try:
            self.child.stdin.write(orjson.dumps(jobs) + b"\n")
            self.child.stdin.flush()
            line = self.child.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            self.child.wait(STOP_S)
            raise DemoError(f"the agent failed:\n{self.tail()}")
        rewards: list[float] = orjson.loads(line)
        return rewards

    def stop(self) -> None:
        """End its input, then it."""
        if self.child.stdin is not None:
            self.child.stdin.close()
        super().stop()
