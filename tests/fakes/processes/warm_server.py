"""`python warm_server.py NAME`: a process that imports what is asked for, and whose forks become commands.

A request is a message on the abstract Unix socket NAME, with the standard streams of the command to be. Each
command ends as a program does, and how it ended is told over the connection that asked for it; if that closes
before, the command is killed. The server itself ends when nobody is connected any more.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from importlib import import_module
from typing import Any, Never

LONGEST = 200_000
FIRST_S = 30.0
"""How long it waits for who started it to connect."""
AT_IMPORT = ("MKL_", "OPENBLAS_", "ATEN_", "TORCH", "HF_", "TRANSFORMERS_", "LD_", "CUDA_")
"""Beginnings of the variables that libraries read when they are imported: a fork cannot change these."""


class Server:
    """Forks itself for who asks."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._waking, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        for what in (listener, self._waking):
            self._selector.register(what, selectors.EVENT_READ)
        self._commands: dict[int, socket.socket] = {}
        self._connected = 0

    def serve(self) -> None:
        """Until nobody is connected."""
        patience: float | None = FIRST_S
        while ready := self._selector.select(patience):
            for key, _ in ready:
                self._see_to(key.fileobj)
            if not self._connected and patience is None:
                return
            patience = None if self._connected else patience

    def _see_to(self, what: Any) -> None:
        if what is self._listener:
            connection, _ = self._listener.accept()
            _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid == os.getuid():
                self._selector.register(connection, selectors.EVENT_READ)
                self._connected += 1
        elif what == self._waking:
            os.read(self._waking, 4096)
            self._tell_ends()
        else:
            self._hear(what)

    def _hear(self, connection: socket.socket) -> None:
        """A request, or the end of who was connected."""
        text, streams, _, _ = socket.recv_fds(connection, LONGEST, 3)
        if not text:
            self._selector.unregister(connection)
            self._connected -= 1
            for pid in [pid for pid, client in self._commands.items() if client is connection]:
                os.kill(pid, signal.SIGKILL)
            connection.close()
            return
        request = json.loads(text)
        self._have(request["modules"])
        if pid := os.fork():
            self._commands[pid] = connection
            for stream in streams:
                os.close(stream)
            connection.send(str(pid).encode())
            return
        self._leave()
        become(request, streams)

    def _have(self, modules: list[str]) -> None:
        """Import what is missing; collections in forks pass over it."""
        if missing := set(modules) - sys.modules.keys():
            for module in sorted(missing):
                import_module(module)
            gc.collect()
            gc.freeze()

    def _tell_ends(self) -> None:
        while self._commands:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            client = self._commands.pop(pid)
            if client.fileno() >= 0:
                client.send(str(status).encode())

    def _leave(self) -> None:
        """In a fork: it has none of this."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()


def become(request: dict[str, Any], streams: list[int]) -> Never:
    """Be `python WORDS...`, as if started with these streams, in that folder and that environment."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1 << 16)
    if request["own_session"]:
        os.setsid()
    # The old ones remember whether theirs can be sought in.
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    tempfile.tempdir = None
    if "torch" in sys.modules and (threads := os.environ.get("OMP_NUM_THREADS")):
        sys.modules["torch"].set_num_threads(int(threads))
    try:
        _run(request["words"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _end(code)


def _run(arguments: list[str]) -> None:
    kind, what, *words = arguments
    sys.path[:1] = [os.getcwd() if kind == "-m" else ""]
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:1] = [path for path in paths if path not in sys.path]
    sys.orig_argv = [sys.executable, *arguments]
    sys.argv = [kind, *words]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = type(sys)("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)


def _end(code: int) -> Never:
    """As an interpreter does, which then would take apart all that was imported."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def main() -> None:
    """Listen, and leave who started it: that it ended says that it listens, or that another does."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind("\0" + sys.argv[1])
    except OSError:
        return
    listener.listen(64)
    if os.fork():
        os._exit(0)
    os.setsid()
    Server(listener).serve()


if __name__ == "__main__":
    main()
