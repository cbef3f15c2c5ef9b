"""A proxy in a process of its own, and a script that its engine follows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
from tests.fakes.processes.warm import EMBEDDED, LIGHT, WarmProcess

from rollbook.testing.asgi import free_port

SOURCE = Path(__file__).resolve().parents[3] / "src"

FEWER = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))
runpy.run_module("rollbook", run_name="__main__", alter_sys=True)
"""
"""A program: `rollbook`, with so many descriptors."""

SCRIPT = '''
import asyncio, json

async def answer(messages, tools):
    """Says what its last message asks for."""
    text = messages[-1].get("content") or ""
    if text.startswith("boom"):
        raise RuntimeError("boom")
    if text.startswith("sleep "):
        await asyncio.sleep(float(text.split()[1]))
    if text.startswith("call"):
        function = {"name": "calc", "arguments": {"a": 1, "b": "\\u00e9"}}
        call = {"id": "x", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call] * (2 if "two" in text else 1)}
    return f"{len(messages)}: {text}"
'''


class Served:
    """A `rollbook serve` of its own; its sealer, a process more, is beside it only with `--seal`."""

    def __init__(
        self, folder: Path, arguments: list[str], descriptors: int | None = None, port: int | None = None
    ) -> None:
        seals = [] if {"--seal", "--no-seal"} & set(arguments) else ["--no-seal"]
        self.path, self.arguments, self.port = folder, [*arguments, *seals], port or free_port()
        self.descriptors = descriptors
        self.log = folder.with_suffix(".log")
        self.start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the process and wait until it answers."""
        self.interrupted = False
        program = ["-c", FEWER.format(self.descriptors)] if self.descriptors else ["-m", "rollbook"]
        command = [sys.executable, *program, "serve", "--store", str(self.path)]
        command += ["--port", str(self.port), *self.arguments]
        environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            modules = LIGHT if "--engine" in self.arguments else EMBEDDED
            self.process = WarmProcess(command, modules=modules, env=environment, stdout=log, stderr=log)
        for _ in range(600):
            if self.process.poll() is not None:
                raise RuntimeError(f"rollbook serve ended: {self.log.read_text()}")
            try:
                if httpx.get(f"{self.url}/healthz").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"rollbook serve did not answer: {self.log.read_text()}")

    def kill(self) -> None:
        """kill -9."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def interrupt(self) -> None:
        """Interrupt it as a person would, once: a second time it would end in the middle of its end."""
        if not self.interrupted and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.interrupted = True

    def stop(self) -> int:
        """Interrupt it, and wait until it ended; its exit status."""
        if self.process.poll() is None:
            self.interrupt()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.process.returncode
