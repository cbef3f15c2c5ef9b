"""What is said of an error: one line, an exit code, and never a traceback."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import os
import pty
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from sqlalchemy.exc import OperationalError
from tests.fakes.processes.warm import run_warm

from rollbook import store as rb
from rollbook.cli.errors import PATIENCE_S, foreseen, run
from rollbook.store import Event
from rollbook.store.errors import (
    CorruptionError,
    EngineLostError,
    ProxyLostError,
    RankLostError,
    WorkerLostError,
)
from rollbook.store.sealed.derived import build_derived
from rollbook.store.sealed.seal import seal_closed
from rollbook.store.settings import AppendSettings, SealSettings

NOT_UTF8 = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


@pytest.fixture(autouse=True)
def _own_temporaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept tracebacks of these tests are beside them."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("rollbook.cli.errors._file", [])
    monkeypatch.delenv("ROLLBOOK_TRACEBACK", raising=False)


def _ends(error: BaseException | None) -> int | str | None:
    def command() -> None:
        if error is not None:
            raise error

    with pytest.raises(SystemExit) as stop:
        run(command)
    return stop.value.code


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CorruptionError("x.wal: damaged"), "x.wal: damaged"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/a/b"),
            "/a/b: No space left on device: make room",
        ),
        (OSError(errno.EROFS, "Read-only file system", "/a"), "/a: Read-only file system: what is mounted"),
        (PermissionError(errno.EACCES, "Permission denied", b"/a"), "/a: Permission denied: see whose it is"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/a"), "/a: No such file or directory"),
        (OSError("without a number"), "without a number"),
        (RecursionError("maximum recursion depth"), "nested deeper"),
        (MemoryError(), "not enough memory"),
        (pa.ArrowMemoryError("malloc of size 1"), "not enough memory: malloc of size 1"),
        (pa.ArrowInvalid("bad\nlines"), "columns cannot be read or written: bad"),
        (NOT_UTF8, "a text is not UTF-8"),
        (duckdb.ParserException("Parser Error: at 7"), "Parser Error: at 7"),
        (sqlite3.OperationalError("disk I/O error"), "the catalog: disk I/O error"),
        (OperationalError("select", {}, Exception("locked")), "the catalog: "),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_was_foreseen(
    error: Exception, reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One line with what failed and what to do, exit code 2; nothing is kept."""
    assert reason in str(foreseen(error))
    assert _ends(error) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert reason in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [RankLostError, EngineLostError, ProxyLostError, WorkerLostError])
def test_what_was_lost(kind: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 75, by which whoever started the command knows that another start may mend it."""
    assert _ends(kind("it does not answer")) == 75
    assert capsys.readouterr().err == "error: it does not answer\n"


def test_what_was_not_foreseen(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One line, which says where the traceback is; exit code 70."""
    assert _ends(KeyError("a \x1b[2J key")) == 70
    err = capsys.readouterr().err
    [kept] = tmp_path.iterdir()
    assert err == (
        "error: unexpected KeyError: 'a \\x1b[2J key' (a fault of Rollbook's; where it happened is in "
        f"{kept})\n"
    )
    assert "Traceback" in kept.read_text()
    assert kept.stat().st_mode & 0o777 == 0o600


def test_where_it_cannot_be_kept(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: the line says how to see it."""

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("tempfile.mkstemp", full)
    assert _ends(KeyError("x")) == 70
    assert "ROLLBOOK_TRACEBACK=1 in the environment shows where" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyError("x"), CorruptionError("x")])
def test_who_asks_sees_it(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """ROLLBOOK_TRACEBACK=1 prints it, for every error."""
    monkeypatch.setenv("ROLLBOOK_TRACEBACK", "1")
    _ends(error)
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, 0), (SystemExit(1), 1), (SystemExit(0), 0), (KeyboardInterrupt(), 130), (SystemExit(143), 143)],
)
def test_what_is_no_error(error: BaseException | None, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit codes pass as they are, and nothing is said."""
    assert _ends(error) == code
    assert capsys.readouterr().err == ""


def test_a_thread_that_ends_with_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """It is said in a line as well."""

    def command() -> None:
        thread = threading.Thread(target=lambda: [][0], name="flush-serve")
        thread.start()
        thread.join()

    with pytest.raises(SystemExit):
        run(command)
    err = capsys.readouterr().err
    assert err.startswith("error: flush-serve ended: IndexError: list index out of range\n")
    assert "Traceback" not in err


def test_a_log_record_with_an_exception() -> None:
    """What libraries log is a line each, an exception's traceback goes to the file."""
    code = (
        "import logging, sys\nfrom rollbook.cli.errors import run\n"
        "def command():\n    try:\n        {}['\\x1b[2J']\n    except KeyError:\n"
        "        logging.getLogger('lib').exception('it \\x9b failed')\n"
        "run(command)\n"
    )
    ended = run_warm([sys.executable, "-c", code], text=True)
    err = ended.stderr
    assert ended.returncode == 0
    assert err.startswith("it \\x9b failed: KeyError: '\\x1b[2J' (a fault of Rollbook's; where")
    Path(err.split(" is in ")[1].rstrip(")\n")).unlink()
    assert logging.getLogger().handlers


# Real processes ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sealed(story: dict[str, list[Event]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The story, a lane of it sealed."""
    log = rb.open(tmp_path_factory.mktemp("sealed") / "store", create=True)
    for lane, events in story.items():
        with log.writer(lane, AppendSettings(segment_bytes=1)) as writer:
            for event in events:
                writer.append([event]).result(30)
    for unit in seal_closed(log.path, "serve", SealSettings()):
        build_derived(log.path, unit)
    return log.path


@pytest.fixture
def started(root: Path, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """A function that starts `rollbook ...` as its own process."""

    def start(*words: object, **options: Any) -> subprocess.Popen[str]:
        env = os.environ | {"PYTHONPATH": str(root / "src"), "TMPDIR": str(tmp_path)}
        merged: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        command = [sys.executable, "-m", "rollbook", *map(str, words)]
        return subprocess.Popen(command, env=env, cwd=tmp_path, text=True, **merged)

    return start


def _without_rights() -> None:
    """No right to pass over modes, which root has: the process is like any other account's."""
    for right in (1, 2, 3):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
        ctypes.CDLL(None).prctl(24, right, 0, 0, 0)  # PR_CAPBSET_DROP


def _small_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))


def _hears_all() -> None:
    """As `_heard`, and SIGHUP, which `nohup` has a whole tree of processes ignore."""
    _heard()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _heard() -> None:
    """One that is begun where interrupts are ignored would ignore those that come before it is ready."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _await_loading(pid: int) -> None:
    """Until a command's imports have begun: an interrupt before that would find Python alone."""
    deadline = time.monotonic() + 30
    while "libarrow" not in Path(f"/proc/{pid}/maps").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


READS = [["sql", "select count(*) from turns"], ["store", "verify"], ["store", "info"]]
WRITES = [["store", "seal"], ["store", "retire", "--run", "demo", "--reason", "x", "--steps", "0"]]


def _codes(
    started: Any, commands: list[list[str]], folder: Path, before: Callable[[], None]
) -> dict[str, tuple[int, str]]:
    """Exit code and what was said of each command, run all together."""
    running = {" ".join(w): started(*w, "--store", folder, preexec_fn=before) for w in commands}
    ended = {}
    for name, process in running.items():
        _, err = process.communicate(timeout=120)
        assert "Traceback" not in err, err
        assert "Exception ignored" not in err, err
        ended[name] = (process.returncode, err)
    return ended


def _state(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.more
@pytest.mark.skipif(sys.platform != "linux", reason="rights of root are dropped as Linux does it")
def test_a_backup_that_may_only_be_read(
    started: Callable[..., subprocess.Popen[str]], sealed: Path, tmp_path: Path
) -> None:
    """All that reads gives its answer, damage is told though it cannot be noted, nothing is written."""
    folder = Path(shutil.copytree(sealed, tmp_path / "store"))
    damaged = Path(shutil.copytree(sealed, tmp_path / "damaged"))
    os.truncate(damaged / "lanes" / "train" / "00000003.wal", 100)
    before = _state(tmp_path)
    places = [*folder.rglob("*"), *damaged.rglob("*"), folder, damaged]
    for path in places:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        ended = _codes(started, [*READS, WRITES[1]], folder, _without_rights)
        assert [code for code, _ in ended.values()] == [0, 0, 0, 2]
        [(code, _)] = _codes(started, [["store", "verify"]], damaged, _without_rights).values()
        assert code == 1
        assert {path: data for path, data in _state(tmp_path).items() if path in before} == before
        assert set(_state(tmp_path)) == set(before)
    finally:
        for path in places:
            path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.mark.more
def test_on_a_full_disk_reading_goes_on(
    started: Callable[..., subprocess.Popen[str]], sealed: Path, tmp_path: Path
) -> None:
    """Where no byte can be written, all that reads gives its answer; what writes says why it cannot."""
    folder = Path(shutil.copytree(sealed, tmp_path / "store"))
    ended = _codes(started, READS, folder, _small_files)
    assert [code for code, _ in ended.values()] == [0, 0, 0]
    [(code, err)] = _codes(started, [WRITES[1]], folder, _small_files).values()
    assert code == 2
    assert "error: " in err


@pytest.mark.more
def test_signals_end_it_cleanly(started: Callable[..., subprocess.Popen[str]], sealed: Path) -> None:
    """In the middle of a query, and while it is loaded: 130 and 143 within seconds, and nothing is said."""
    endless = "select count(*) from range(1000000000000) a where a.range % 7 = 3"
    waiting = []
    for pause, number in ((0.0, signal.SIGINT), (0.0, signal.SIGTERM), (2.5, signal.SIGINT)):
        time.sleep(pause)
        waiting.append((number, started("sql", endless, "--store", sealed, preexec_fn=_heard)))
    for _, process in waiting:
        _await_loading(process.pid)
    for number, process in waiting:
        process.send_signal(number)
    sent = time.monotonic()
    for number, process in waiting:
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, err = process.communicate(timeout=60)
            assert "Traceback" not in err, err
            assert process.returncode in (128 + number, -number), (out, err)
            assert time.monotonic() - sent < PATIENCE_S
            continue
        process.kill()
        pytest.fail("it does not end")


LOADED_THEN_STOPPED = """
import enum, os, signal, sys
from rollbook.cli import errors
errors.PATIENCE_S = 50
set_value, values = enum.EnumType.__setattr__, []
def set_and_stop(cls, name, value):
    values.append(name)
    if len(values) == 5:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    set_value(cls, name, value)
def command():
    enum.EnumType.__setattr__ = set_and_stop
    try:
        import duckdb
        signal.pause()
    finally:
        print("went on", len(values) > 5)
errors.run(command)
"""
"""A command that is stopped while DuckDB's native code makes its enumerations, which calls Python."""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 143)])
def test_a_signal_while_native_code_is_loaded(name: str, code: int, root: Path) -> None:
    """Loading goes on for a moment: an exception there aborts the process (SIGABRT), with a traceback."""
    command = [sys.executable, "-c", LOADED_THEN_STOPPED, name]
    env = os.environ | {"PYTHONPATH": str(root / "src")}
    ended = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=60, preexec_fn=_hears_all
    )
    assert (ended.returncode, ended.stderr) == (code, "")
    assert ended.stdout == "went on True\n"


HUNG_UP = """
import os, signal, sys
from rollbook.cli.errors import run
def command():
    try:
        print("there", flush=True)
        while True:
            signal.pause()
    finally:
        print("said to nobody", flush=True)
        open(sys.argv[1], "w").write("ended in order")
run(command)
"""


def test_a_terminal_that_is_closed(tmp_path: Path, root: Path) -> None:
    """The command ends as at SIGTERM, in order: what it prints then goes nowhere, and fails nothing."""
    path = tmp_path / "said"
    pid, terminal = pty.fork()
    if pid == 0:
        _hears_all()
        os.environ["PYTHONPATH"] = str(root / "src")
        os.execv(sys.executable, [sys.executable, "-c", HUNG_UP, str(path)])
    while b"there" not in os.read(terminal, 1000):
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 143
    assert path.read_text() == "ended in order"


def test_a_command_that_outlives_its_terminal(root: Path) -> None:
    """As `nohup` starts it: SIGHUP is ignored."""
    code = "import os, signal; from rollbook.cli.errors import run; run(lambda: os.kill(os.getpid(), 1))"
    env = os.environ | {"PYTHONPATH": str(root / "src")}
    ignores = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    assert (
        subprocess.run([sys.executable, "-c", code], env=env, timeout=60, preexec_fn=ignores).returncode == 0
    )


INTERRUPTED_IN_A_CALLBACK = """
import os, signal, sys
class Asked:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
class Finder:
    def find_spec(self, name, *_):
        if name == "rollbook.cli.app":
            Asked()
sys.meta_path.insert(0, Finder())
sys.argv = ["rollbook", "--help"]
from rollbook.__main__ import main
main()
"""


def test_an_interrupt_while_it_is_loaded(root: Path) -> None:
    """It ends the process, also where Python would ignore an exception and go on."""
    command = [sys.executable, "-c", INTERRUPTED_IN_A_CALLBACK]
    env = os.environ | {"PYTHONPATH": str(root / "src")}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, preexec_fn=_heard)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_nobody_reads_the_output(started: Callable[..., subprocess.Popen[str]], sealed: Path) -> None:
    """A closed pipe ends it quietly with 141; an output that is full is said, with 2."""
    for words in (["tail", "--no-follow", "--json"],):
        read, write = os.pipe()
        os.close(read)
        process = started(*words, "--store", sealed, stdout=write)
        os.close(write)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (141, "")
        with open("/dev/full", "w") as full:
            process = started(*words, "--store", sealed, stdout=full)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 2
        assert err.startswith("error: ")
        assert "No space left on device" in err
        assert err.count("\n") == 1


def test_help_says_the_exit_codes() -> None:
    """--help ends with them."""
    ended = run_warm([sys.executable, "-m", "rollbook", "--help"], text=True)
    assert ended.returncode == 0
    words = " ".join(ended.stdout.replace("│", " ").split())
    assert "2 bad input" in words
    assert "70 an error that nobody foresaw" in words
    assert "ROLLBOOK_TRACEBACK=1" in words
