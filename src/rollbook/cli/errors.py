"""Error messages and exit codes of the command line: one line per error, whether it was foreseen or
not.

No traceback is printed. That of an error which was not foreseen is kept in a file, which the line
names; with ROLLBOOK_TRACEBACK=1 in the environment it is printed for every error.

A command that needs an extra of the package names it where the install has none.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ExtensionFileLoader
from types import FrameType
from typing import TYPE_CHECKING, Any

from rollbook.cli.terminal import LogFormatter
from rollbook.transcript.text import visible

if TYPE_CHECKING:
    from rollbook.store.sql.sandbox import Connection

NO, BAD, UNFORESEEN, AGAIN = 1, 2, 70, 75
LOST = ("RankLostError", "EngineLostError", "ProxyLostError", "FencedError", "WorkerLostError")
"""Errors of what was there, and may be again."""
INTERRUPTED, NO_READER = 128 + signal.SIGINT, 128 + signal.SIGPIPE
TRACEBACK = "ROLLBOOK_TRACEBACK"
PATIENCE_S = 20.0
"""How long a command may take to stop after a signal. What it was writing is then cut off, as by a crash."""
AGAIN_S = 0.05
"""After how long a signal is handled again that came where no exception may be raised."""
EPILOG = (
    "Exit codes: 0 done; 1 the answer is no (a replay differs, a goal was missed); 2 bad input, or a disk, "
    "file or server that refuses, with the remedy in the message; 70 an error that nobody foresaw; 75 a "
    "proxy, an engine, a rank, a worker or a host's lease was lost, and the same command goes on; 130, 143 "
    "stopped by SIGINT and SIGTERM, as which SIGHUP counts; 141 nobody reads the output. "
    f"{TRACEBACK}=1 in the environment shows the traceback of an error."
)
_REMEDIES = {
    errno.ENOSPC: "make room there; temporary files go where TMPDIR says",
    errno.EDQUOT: "make room there; temporary files go where TMPDIR says",
    errno.EFBIG: "it would be larger than files may be here (ulimit -f)",
    errno.EROFS: "what is mounted read-only can be read, but not written: use a copy",
    errno.EACCES: "see whose it is; or use a copy of your own",
    errno.EPERM: "see whose it is; or use a copy of your own",
    errno.EMFILE: "too many files are open: raise ulimit -n",
    errno.ENFILE: "too many files are open on this machine",
    errno.EIO: "the disk does not answer as it should: see the kernel's messages",
}


_signals: list[int] = []
"""The signals that asked this process to stop."""
_interrupts: list[Callable[[], object]] = []
"""What ends work that would go on in threads of its own."""


def run(command: Callable[[], object]) -> None:
    """Run the command line and end the process, with an exit code that `EPILOG` explains."""
    code: int | str | None = 0
    _signals.clear()
    try:
        with _prepared():
            command()
    except SystemExit as stop:
        code = stop.code
        if code == NO and isinstance(stop.__context__, BrokenPipeError):  # so Typer ends then
            code = NO_READER if _output_is_gone() else _exit_code(stop.__context__)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError as error:
        code = NO_READER if _output_is_gone() else _exit_code(error)
    except BaseException as error:
        code = _exit_code(error)
    if _signals and code != 0:  # whatever a library made of it
        code = 128 + _signals[0]
    sys.exit(_flushed(code))


@contextlib.contextmanager
def querying(connection: Connection) -> Iterator[None]:
    """Context of queries. A signal that stops the command stops them, for DuckDB's own threads would go on.

    Raises:
        QueryError: the SQL is wrong; the message is DuckDB's.
        RemoteError: the object storage is away.
    """
    import duckdb

    from rollbook.store.sql.object_storage import outage
    from rollbook.store.sql.sandbox import explained

    interrupt = connection.interrupt
    _interrupts.append(interrupt)
    try:
        yield
    except duckdb.InterruptException:
        raise KeyboardInterrupt from None
    except duckdb.Error as error:
        raise outage(error) or explained(error) from error
    finally:
        _interrupts.remove(interrupt)


@contextlib.contextmanager
def _prepared() -> Iterator[None]:
    """Context: SIGTERM and SIGHUP end the process orderly, errors of threads are one line, any text can be
    printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # a test's stand-in
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    root = logging.getLogger()
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_KeepingFormatter())
        handler.setLevel(logging.WARNING)
        root.addHandler(handler)
    is_main = threading.current_thread() is threading.main_thread()
    hooks = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = _told_of_thread, _told_of_callback
    handlers = {n: signal.signal(n, _stopped) for n in (signal.SIGINT, signal.SIGTERM) if is_main}
    if is_main and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` has it
        handlers[signal.SIGHUP] = signal.signal(
            signal.SIGHUP, _hung_up([fd for fd in (0, 1, 2) if os.isatty(fd)])
        )
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = hooks
        for number, before in handlers.items():
            signal.signal(number, before)


def _stopped(number: int, frame: FrameType | None) -> None:
    """Handle a signal: end orderly, or after `PATIENCE_S` even if a library does not return."""
    if not _signals:
        patience = threading.Timer(PATIENCE_S, os._exit, (128 + number,))
        patience.daemon = True
        patience.start()
    _signals.append(number)
    for interrupt in _interrupts:
        interrupt()
    if _in_native_import(frame):
        _raise_again(number)
        return
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def _hung_up(terminals: list[int]) -> Callable[[int, FrameType | None], None]:
    """A handler of SIGHUP that raises SIGTERM, so that one handler also serves for a closed terminal.

    Args:
        terminals: descriptors that were one. What is printed there would fail, once it is closed.
    """

    def ended(_: int, __: FrameType | None) -> None:
        for fd in terminals:
            if not os.isatty(fd):
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, fd)
                os.close(nowhere)
        signal.raise_signal(signal.SIGTERM)

    return ended


def _in_native_import(frame: FrameType | None) -> bool:
    """Whether a library's native code is being loaded, where an exception may abort the process.

    DuckDB's calls Python and ends so while it makes its enumerations.
    """
    loads = (ExtensionFileLoader.create_module.__code__, ExtensionFileLoader.exec_module.__code__)
    while frame is not None:
        if frame.f_code in loads:
            return True
        frame = frame.f_back
    return False


def _raise_again(number: int) -> None:
    """Handle the signal anew in a moment, when the main thread may be where an exception is caught."""

    def send() -> None:
        if callable(signal.getsignal(number)):  # else the command has ended
            signal.pthread_kill(threading.main_thread().ident or 0, number)  # wakes it where it waits

    again = threading.Timer(AGAIN_S, send)
    again.daemon = True
    again.start()


class _KeepingFormatter(LogFormatter):
    """Log records as the terminal has them; the traceback of an error is kept in a file."""

    def format(self, record: logging.LogRecord) -> str:
        kept = ""
        if record.exc_info and record.exc_info[1] is not None:
            kept = f" ({_save_traceback(record.exc_info[1])})"
        return super().format(record) + kept


def _exit_code(error: BaseException) -> int:
    """Print the error; returns the exit code."""
    if _signals:
        return 128 + _signals[0]
    if isinstance(error, KeyboardInterrupt) or _is(error, "duckdb", "InterruptException"):
        return INTERRUPTED
    text = foreseen(error)
    if text is not None:
        _say(f"error: {text}")
        if os.environ.get(TRACEBACK):
            _say(_text_of(error))
        lost = any(_is(error, "rollbook.store.errors", name) for name in LOST)
        return AGAIN if lost else BAD
    _say(f"error: unexpected {type(error).__name__}: {_first_line(error)} ({_save_traceback(error)})")
    return UNFORESEEN


def foreseen(error: BaseException) -> str | None:
    """The message for an error that is no bug; None for one that may be a bug."""
    from rollbook.store.errors import RollbookError

    if isinstance(error, RollbookError):
        return str(error)
    if isinstance(error, OSError):
        return _of_system(error)
    if isinstance(error, ModuleNotFoundError):
        return missing_extra(error.name, sys.argv[1:])
    if isinstance(error, RecursionError):
        return "a value is nested deeper than anything that this release has ever written"
    if isinstance(error, MemoryError):
        return f"not enough memory: {_first_line(error) or 'a file asks for more than there is'}"
    if isinstance(error, UnicodeError):
        return f"a text is not UTF-8: {_first_line(error)}"
    if _is(error, "duckdb", "Error"):
        return str(error).strip()
    if _is(error, "sqlalchemy.exc", "SQLAlchemyError") or _is(error, "sqlite3", "Error"):
        return f"the catalog: {_first_line(error)}; nothing in the log depends on it"
    if _is(error, "pyarrow", "ArrowException"):
        return f"a file's columns cannot be read or written: {_first_line(error)}"
    return None


def _of_system(error: OSError) -> str:
    """The message for an error of the operating system: the path, the failure, and a remedy."""
    what = error.strerror or _first_line(error)
    where = "".join(f"{os.fsdecode(name)}: " for name in (error.filename,) if isinstance(name, str | bytes))
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{where}{what}{'' if remedy is None else f': {remedy}'}"


def _is(error: BaseException, module: str, name: str) -> bool:
    """Whether it is an instance of a library's class, without importing the library."""
    cls = getattr(sys.modules.get(module), name, None)
    return isinstance(cls, type) and isinstance(error, cls)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _text_of(error: BaseException) -> str:
    from rollbook.store.redaction import shown

    return shown("".join(traceback.format_exception(error)).rstrip())


_file: list[str] = []
"""The file that this process keeps tracebacks in, once there is one."""


def _save_traceback(error: BaseException) -> str:
    """Write the traceback to a file; returns a text that names the file."""
    if os.environ.get(TRACEBACK):
        return f"its traceback:\n{_text_of(error)}"
    try:
        if not _file:
            fd, path = tempfile.mkstemp(prefix="rollbook-traceback-", suffix=".txt")
            os.close(fd)
            _file.append(path)
        with open(_file[0], "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(_text_of(error) + "\n\n")
    except OSError:
        return f"a fault of Rollbook's; {TRACEBACK}=1 in the environment shows where"
    return f"a fault of Rollbook's; where it happened is in {_file[0]}"


def _told_of_thread(args: Any) -> None:
    """Report that a thread ended with an error."""
    if args.exc_type is SystemExit or args.exc_value is None:
        return
    name = args.thread.name if args.thread else "a thread"
    _say(f"error: {name} ended: {type(args.exc_value).__name__}: {_first_line(args.exc_value)}")
    if foreseen(args.exc_value) is None:
        _say(_save_traceback(args.exc_value))


def _told_of_callback(args: Any) -> None:
    """Report an exception raised where no code can catch it; a signal raised there is raised again."""
    number = {KeyboardInterrupt: signal.SIGINT, SystemExit: signal.SIGTERM}.get(args.exc_type)
    if number is not None:
        _raise_again(number)
    elif args.exc_value is not None:
        error = args.exc_value
        _say(f"error: {type(error).__name__}: {_first_line(error)} ({_save_traceback(error)})")


def _say(text: str) -> None:
    from rollbook.store.redaction import shown

    with contextlib.suppress(OSError, ValueError):
        print(visible(shown(text), lines=True), file=sys.stderr, flush=True)


# Output ---------------------------------------------------------------------------------------------


def _output_is_gone() -> bool:
    """Whether standard output is a pipe whose reader has gone."""
    try:
        poll = select.poll()
        poll.register(sys.__stdout__.fileno() if sys.__stdout__ else 1, select.POLLOUT)
        return any(event & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, event in poll.poll(0))
    except (OSError, ValueError):
        return True


def _flushed(code: int | str | None) -> int | str | None:
    """Flush the output; returns the exit code, which is another one if flushing fails."""
    try:
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        code = NO_READER
    except OSError as error:
        _say(f"error: the output cannot be written: {_of_system(error)}")
        code = BAD
    except ValueError:  # it is closed
        return code
    # Nothing is left for the interpreter to write, and to complain of, when it ends.
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
    return code


OF_COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(("train", "replay", "score", "preflight", "run", "bench"), "train"),
    "demo": "demo",
}
"""Command -> the extra that has all it needs; others need one for what they are asked to do."""
OF_MODULES: Mapping[str, str] = {
    **dict.fromkeys(("torch", "transformers", "safetensors"), "engine"),
    **dict.fromkeys(("megatron", "psutil", "tensorboard"), "train"),
    **{"matplotlib": "plot", "openai": "demo", "ray": "ray", "fsspec": "s3", "psycopg": "postgres"},
    "pyiceberg": "iceberg",
}
"""Module -> the smallest extra that brings it."""
INCLUDED: Mapping[str, frozenset[str]] = {
    "train": frozenset({"engine"}),
    "ray": frozenset({"engine", "train"}),
    "demo": frozenset({"engine", "train", "plot"}),
}
"""Extra -> those that it brings along."""


def missing_extra(module: str | None, words: Sequence[str]) -> str | None:
    """The message for a missing module; None for one that no extra of the package brings.

    Args:
        words: of the command line, without the program's name.
    """
    of_module = OF_MODULES.get((module or "").partition(".")[0])
    if of_module is None:
        return None
    command = next((word for word in words if not word.startswith("-")), "")
    of_command = OF_COMMANDS.get(command, of_module)
    extra = of_command if of_module in INCLUDED.get(of_command, ()) else of_module
    what = f"`rollbook {command}`" if command else "this command"
    return f"{what} needs {module}, which is not installed: pip install 'rollbook[{extra}]'"
