"""A real SGLang server on this machine's CPU: a process tree of its own, on a loopback port."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

from rollbook.testing.asgi import free_port

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-sglang"
SHIM = Path(__file__).parent / "cpu_shim"
SHARED_MEMORY = Path("/dev/shm")
START_S, STOP_S = 240.0, 10.0
OPTIONS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--max-total-tokens", "16384", "--log-level", "warning"),
    "--sleep-on-idle",  # a scheduler that waits would otherwise keep a core busy
)


class Process:
    """A process with all that it starts, in a group of its own; its output goes to a file.

    Args:
        folder: made; holds its log.
    """

    def __init__(self, folder: Path, name: str, command: list[str], environment: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{name}.log"
        self.name = name
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def tail(self, lines: int = 40) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait(self, url: str, seconds: float = START_S) -> None:
        """Return once a GET of `url` is answered with 200.

        Raises:
            RuntimeError: it ended, or took longer; with the end of its log.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self.process.returncode}:\n{self.tail()}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(url, timeout=5).status_code == 200:
                    return
            time.sleep(0.25)
        self.stop()
        raise RuntimeError(f"{self.name} was not ready after {seconds:.0f} s:\n{self.tail()}")

    def stop(self) -> None:
        """End it with its whole group, at once, and remove what that leaves in shared memory."""
        shared = shared_files(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_S)
        deadline = time.monotonic() + STOP_S
        while group_of(self.process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        for file in shared:
            file.unlink(missing_ok=True)


class SglangServer:
    """SGLang serving the model directory `model`. `start` begins it, `ready` waits: several start at once.

    Args:
        folder: where its log goes.
        options: more of its command line.
    """

    def __init__(self, model: Path, folder: Path, *options: str) -> None:
        self.model, self.folder, self.options = model, folder, options
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Begin to start it; use `ready` before it is asked anything."""
        command = [str(ENVIRONMENT / "bin" / "python"), "-m", "sglang.launch_server", *OPTIONS]
        command += ["--model-path", str(self.model), "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = Process(
            self.folder, f"sglang-{self.port}", [*command, *self.options], environment(self.folder)
        )

    def ready(self) -> None:
        """Return once it answers.

        Raises:
            RuntimeError: it ended, or took too long; with the end of its log.
        """
        self.process.wait(f"{self.url}/health")

    def post(self, path: str, body: Any = None, *, status: int = 200) -> Any:
        """What it answers to a POST, which has to be of this status."""
        reply = httpx.post(f"{self.url}{path}", json={} if body is None else body, timeout=120)
        assert reply.status_code == status, f"{path}: {reply.status_code} {reply.text}\n{self.process.tail()}"
        return reply.json() if reply.content else None

    def get(self, path: str) -> Any:
        """What it answers to a GET."""
        return httpx.get(f"{self.url}{path}", timeout=60).raise_for_status().json()

    def stop(self) -> None:
        """Kill its processes; more than once does no harm."""
        if hasattr(self, "process"):
            self.process.stop()


def group_of(leader: int) -> list[Path]:
    """The processes of a group that run, in /proc; nobody may ever ask for those that have ended."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(process.name)) == leader and ") Z" not in (process / "stat").read_text():
                processes.append(process)
    return processes


def shared_files(group: int) -> set[Path]:
    """What the processes of a group have mapped of shared memory, and nobody else has.

    Found by inode: a semaphore is mapped under another name than it has. A trainer's tensors are not theirs.
    """
    own = set(group_of(group))
    others = (process for process in Path("/proc").glob("[0-9]*") if process not in own)
    mapped = {inode for process in own for inode in _shared_inodes(process)}
    if mapped:
        mapped -= {inode for process in others for inode in _shared_inodes(process)}
    files = SHARED_MEMORY.iterdir() if mapped else ()
    return {file for file in files if file.stat().st_ino in mapped}


def _shared_inodes(process: Path) -> set[int]:
    """Of a process in /proc; none of one that has ended."""
    with contextlib.suppress(OSError):
        lines = (process / "maps").read_text().splitlines()
        return {int(line.split()[4]) for line in lines if f" {SHARED_MEMORY}/" in line}
    return set()


def environment(folder: Path) -> dict[str, str]:
    """What SGLang's environment holds: the shim, no accelerator, nothing to look up elsewhere."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    return kept | {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(SHIM),
        "PYTHONUNBUFFERED": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
