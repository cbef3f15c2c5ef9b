"""Commands as forks of a process that has imported what they need: a start takes seconds of CPU less.

For tests of what a command does, in a process of its own. How one starts, what it imports, and what it does
with variables that libraries read as they are imported, is tested with real starts.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fakes.processes.warm_server import AT_IMPORT

LIGHT = (
    *("rollbook.cli.app", "rollbook.ingest.serve.serve", "rollbook.store.sql.query"),
    # What these import when they first use it: as much work as all else of a start.
    *("rollbook.store.catalog.catalog", "sqlalchemy.dialects.sqlite", "pandas", "pyarrow.pandas_compat"),
    *("pydantic.v1", "uvicorn.loops.auto", "uvicorn.lifespan.on", "uvloop"),
)
"""What most commands need."""
TORCH = (
    *LIGHT,
    *("megatron.core.models.gpt", "megatron.core.optimizer", "megatron.core.pipeline_parallel"),
    *("rollbook.train.loop.loop", "rollbook.train.model.layer", "rollbook.train.ranks.ranks"),
    *("rollbook.replay.step.step", "rollbook.train.step.reference", "pyarrow.dataset"),
)
"""What trainings and replays need, too."""
EMBEDDED = (*TORCH, "transformers.models.qwen3.modeling_qwen3")
"""What the engine needs that is embedded in a proxy, too."""
SERVER = Path(__file__).with_name("warm_server.py")
NAME = f"rollbook-warm-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
"""All processes of a session share the one that they fork."""
TAKEN = {"stdin", "stdout", "stderr", "env", "cwd", "text", "start_new_session"}
"""Options of `subprocess.Popen`."""


class WarmProcess(subprocess.Popen[Any]):
    """`subprocess.Popen` for `[sys.executable, "-m" or "-c", WORD, ...]`, of which it starts no new process.

    Args:
        modules: what is imported before.
    """

    def __init__(self, words: Sequence[str], *, modules: Sequence[str] = LIGHT, **options: Any) -> None:
        assert words[0] == sys.executable
        assert words[1] in ("-m", "-c")
        assert options.keys() <= TAKEN
        self._modules = modules
        _keeper()
        self._asked = _connected()
        super().__init__(words, **options)

    def _execute_child(self, words: Any, *given: Any) -> None:
        """Instead of the one that starts a process. What it takes is the interpreter's own affair, so that
        this says where it is if that changes."""
        folder, environment = given[4:6]
        ends = p2cread, _, _, c2pwrite, _, errwrite = given[9:15]
        own_session = given[20]
        environment = dict(os.environ if environment is None else environment)
        changed = {name for name in environment if environment[name] != os.environ.get(name)}
        assert not [name for name in changed if name.startswith(AT_IMPORT)], f"{changed}: start it afresh"
        request = {
            "modules": self._modules,
            "words": [str(word) for word in words[1:]],
            "folder": str(folder or Path.cwd()),
            "environment": environment,
            "own_session": own_session,
        }
        streams = [own if end < 0 else end for own, end in enumerate((p2cread, c2pwrite, errwrite))]
        socket.send_fds(self._asked, [json.dumps(request).encode()], streams)
        self.pid = int(self._asked.recv(20))
        self._child_created = True
        self._close_pipe_fds(*ends)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        try:
            status = int(self._asked.recv(20, socket.MSG_DONTWAIT if wait_flags & os.WNOHANG else 0))
        except BlockingIOError:
            return 0, 0
        self._asked.close()
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                if self.returncode is None and (ended := self._try_wait(os.WNOHANG))[0]:
                    self._handle_exitstatus(ended[1])
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run_warm(
    words: Sequence[str], *, timeout: float = 120.0, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` with its output captured."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with WarmProcess(words, **pipes | options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


@functools.cache
def _keeper() -> socket.socket:
    """As long as this process lives, the server does not end."""
    return _connected()


def _connected() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    until = time.monotonic() + 20
    while connection.connect_ex("\0" + NAME):
        assert time.monotonic() < until
        nowhere = subprocess.DEVNULL
        words = [sys.executable, str(SERVER), NAME]  # it ends at once where another one begins to listen
        here = os.environ | {"PYTHONPATH": str(SERVER.parents[3] / "src")}
        subprocess.run(words, env=here, stdin=nowhere, stdout=nowhere, stderr=nowhere, check=True)
    return connection
