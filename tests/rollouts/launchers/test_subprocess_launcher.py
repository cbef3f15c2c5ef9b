"""Agents as processes: nothing of them is left, whatever they start and whoever dies; they get their due.

Levels that do not work on a host are left out there, with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.processes.warm import WarmProcess

from rollbook.rollouts.launchers import isolation, subprocess_launcher
from rollbook.rollouts.launchers.cgroups import Cgroup
from rollbook.rollouts.launchers.launching import Exit, Isolation, Launch, Limits
from rollbook.rollouts.launchers.subprocess_launcher import SubprocessLauncher, _keeper, _marshalled
from rollbook.store.errors import LaunchError

PYTHON = (isolation.interpreter(), "-I", "-S", "-c")
PID_NAMESPACE = "/proc/self/ns/pid"
SYSTEM_PATH = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


def _of(*levels: str) -> Any:
    """A parameter of these levels, without those that do not work here."""
    reasons = {level: isolation.missing(level) for level in isolation.LEVELS if level in levels}
    return pytest.mark.parametrize(
        "level",
        [
            pytest.param(level, marks=pytest.mark.skipif(bool(why), reason=str(why)))
            for level, why in reasons.items()
        ],
    )


EVERY_LEVEL = _of(*isolation.LEVELS)


class Agents:
    """Starts shell commands as agents, in folders of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.word = f"3{uuid.uuid4().int % 10**9:09d}"
        """A number of seconds to sleep for that no other process on this host sleeps for."""

    def launch(
        self,
        command: str | tuple[str, ...],
        level: str = "session",
        limits: Limits | None = None,
        environment: Mapping[str, str] = SYSTEM_PATH,
    ) -> Launch:
        """A launch of a command, in which SLEEP is a sleep that `alive` finds."""
        launch_id = f"t-{uuid.uuid4().hex}"
        folder = self.folder / launch_id / "own"
        folder.mkdir(parents=True)
        words = (
            ("sh", "-c", command.replace("SLEEP", f"sleep {self.word}"))
            if isinstance(command, str)
            else command
        )
        isolation_: Isolation = level  # type: ignore[assignment]
        return Launch(
            launch_id, words, environment, folder, folder.parent, isolation_, limits=limits or Limits()
        )

    def run(self, command: str | tuple[str, ...], *args: Any, **kwargs: Any) -> tuple[Exit, Launch]:
        """How an agent ended that nobody stopped."""
        launch = self.launch(command, *args, **kwargs)

        async def run() -> Exit:
            return await (await SubprocessLauncher().start(launch)).wait()

        return asyncio.run(run()), launch

    def alive(self) -> list[int]:
        """The processes that sleep so long."""
        pids = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if path.read_bytes() == f"sleep\0{self.word}\0".encode():
                    pids.append(int(path.parent.name))
        return pids

    def all_gone(self) -> bool:
        """Whether none is there, now or soon."""
        return _in_time(lambda: not self.alive())


@pytest.fixture
def agents(tmp_path: Path) -> Any:
    """Starts agents; what a failed test left is ended."""
    started = Agents(tmp_path)
    yield started
    for pid in started.alive():
        os.kill(pid, signal.SIGKILL)


def _in_time(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not (done := true()) and time.monotonic() < end:
        time.sleep(0.01)
    return done


def _stat(pid: int) -> list[str]:
    """State and parent of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[:2]


def _out(launch: Launch, stream: str = "stdout") -> str:
    return (launch.output / f"{stream}.log").read_text()


async def _ready(launch: Launch) -> None:
    while "ready" not in _out(launch):
        await asyncio.sleep(0.01)


TREES = {
    "child": "SLEEP & echo ready; exec SLEEP",
    "setsid": "setsid SLEEP & echo ready; exec SLEEP",
    "daemon": "(env -i /usr/bin/setsid SLEEP &) ; echo ready; exec SLEEP",
    "deaf": "trap '' TERM; SLEEP & echo ready; exec SLEEP",
}


@EVERY_LEVEL
@pytest.mark.parametrize("tree", TREES)
def test_stop_ends_the_whole_tree(agents: Agents, tree: str, level: str) -> None:
    """Also a child in a session of its own, a daemon without its parent or environment, and what is deaf to
    SIGTERM; those that did not heed it are told."""

    async def stopped(launch: Launch) -> Exit:
        running = await SubprocessLauncher().start(launch)
        assert running.isolation["level"] == level
        await _ready(launch)
        assert _in_time(lambda: len(agents.alive()) == 2)
        return await running.stop(0.3 if tree == "deaf" else 20)

    result = asyncio.run(stopped(agents.launch(TREES[tree], level)))
    assert agents.alive() == []
    assert result.code is None
    assert result.signal == (signal.SIGKILL if tree == "deaf" else signal.SIGTERM)
    heeded = tree == "child" and level != "none"
    assert [process["command"] for process in result.left] == ([] if heeded else [f"sleep {agents.word}"])


@EVERY_LEVEL
def test_what_an_agent_leaves_is_ended_and_told(agents: Agents, level: str) -> None:
    """Its own end is as it was: what it left behind takes nothing from that."""
    leaving = "SLEEP & setsid SLEEP & (setsid SLEEP &); exit 4"
    result, _ = agents.run(leaving, level)
    assert agents.alive() == []
    assert (result.code, result.signal) == (4, None)
    assert len({process["pid"] for process in result.left}) == 3
    assert all(agents.word in process["command"] for process in result.left)


def test_nothing_is_left_where_nobody_waits_to_the_end(agents: Agents) -> None:
    """A task that waits is cancelled; or the loop ends, with an agent that nobody asked after."""

    async def cancelled(launch: Launch) -> None:
        task = asyncio.create_task((await SubprocessLauncher().start(launch)).wait())
        await _ready(launch)
        await asyncio.sleep(0)  # a task that never began to wait is not one that waits
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert agents.alive() == []

    async def forgotten(launch: Launch) -> None:
        await SubprocessLauncher().start(launch)
        await _ready(launch)

    for ending in (cancelled, forgotten):
        asyncio.run(ending(agents.launch(TREES["daemon"])))
        assert agents.alive() == []


def test_a_start_that_is_cancelled_starts_nothing(agents: Agents) -> None:
    """At whatever moment."""

    async def cancelled(launch: Launch, turns: int) -> None:
        task = asyncio.create_task(SubprocessLauncher().start(launch))
        for _ in range(turns):
            await asyncio.sleep(0.004)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await task).stop(0)

    for turns in range(0, 8, 2):
        asyncio.run(cancelled(agents.launch(TREES["setsid"]), turns))
        assert agents.alive() == []


def test_the_grace_is_for_all_that_were_asked(agents: Agents) -> None:
    """A shell ends at once at SIGTERM: what it runs still has its time. What needs none of it ends it."""

    async def stopped(launch: Launch) -> Exit:
        running = await SubprocessLauncher().start(launch)
        await _ready(launch)
        return await running.stop(20)

    inner = "trap 'sleep 0.5; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    launch = agents.launch(f'sh -c "{inner}"; echo never')
    begun = time.monotonic()
    result = asyncio.run(stopped(launch))
    assert (result.signal, result.left, _out(launch)) == (signal.SIGTERM, (), "ready\nsaved\n")
    assert time.monotonic() - begun < 10


LAUNCHER = """
import asyncio, sys
from pathlib import Path
from rollbook.rollouts.launchers.launching import Launch
from rollbook.rollouts.launchers.subprocess_launcher import SubprocessLauncher

async def main(folder, launch_id, tree, levels):
    running = []
    for level in levels:
        own = Path(folder, level)
        own.mkdir()
        launch = Launch(launch_id, ("sh", "-c", tree), {}, own, own, level)
        running.append(await SubprocessLauncher().start(launch))
    print("ready", running[0]._process.pid, flush=True)
    await asyncio.gather(*(agent.wait() for agent in running))

asyncio.run(main(*sys.argv[1:4], sys.argv[4:]))
"""


def _launcher(agents: Agents, tree: str, *levels: str) -> tuple[subprocess.Popen[str], int]:
    """A launcher that started a tree at each level, and the pid of what it started first."""
    words = (
        str(agents.folder),
        f"left-{agents.word}",
        tree.replace("SLEEP", f"sleep {agents.word}"),
        *levels,
    )
    modules = ("rollbook.rollouts.launchers.subprocess_launcher",)
    launcher = WarmProcess(
        [sys.executable, "-c", LAUNCHER, *words], modules=modules, stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    ready, _, keeper = launcher.stdout.readline().partition(" ")
    assert ready == "ready"
    return launcher, int(keeper)


def test_nothing_outlives_a_launcher_that_is_killed(agents: Agents) -> None:
    """kill -9 on it alone. At the lower levels it is the keeper that sees it; a namespace ends without it."""
    levels = [level for level in isolation.LEVELS if isolation.missing(level) is None]
    launcher, _ = _launcher(agents, TREES["daemon"], *levels)
    with launcher:
        assert _in_time(lambda: len(agents.alive()) == 2 * len(levels))
        keepers = {int(_stat(pid)[1]) for pid in agents.alive()} - {1}
        deaf = [pid for pid in keepers if os.readlink(f"/proc/{pid}/ns/pid") != os.readlink(PID_NAMESPACE)]
        assert len(deaf) == len(set(levels) & {"bwrap"})
        for pid in deaf:
            os.kill(pid, signal.SIGSTOP)
        launcher.kill()
    gone = agents.all_gone()
    for pid in [] if gone else deaf:
        os.kill(pid, signal.SIGKILL)
    assert gone


@_of("none", "session")
def test_nothing_outlives_a_launcher_that_was_just_told_of_it(agents: Agents, level: Isolation) -> None:
    """That ends with something unread: the keeper's next read fails, where it is else at the stream's end."""
    launch = agents.launch("SLEEP", level)
    ours, keeper = _keeper(launch, level, isolation.NO_FILES, [])
    with keeper:
        with ours:
            ours.sendall(_marshalled(launch, level, Cgroup(launch.launch_id, launch.limits), [], None))
            assert ours.recv(20, socket.MSG_PEEK) == b"started\n"
            assert _in_time(lambda: len(agents.alive()) == 1)
        assert keeper.wait(60) == 0
    assert agents.alive() == []


@_of("bwrap")
def test_agents_in_a_namespace_reach_nobody_else(agents: Agents, level: str) -> None:
    """They see no process but their own, and cannot end what watches over them."""
    command = f"readlink {PID_NAMESPACE}; kill -9 1 $PPID; ls -d /proc/[0-9]* | wc -l; exit 6"
    result, launch = agents.run(command, level)
    namespace, count = _out(launch).split()
    assert namespace != os.readlink(PID_NAMESPACE)
    assert int(count) <= 4  # the keeper, the shell, ls and wc
    assert (result.code, result.left) == (6, ())


def test_a_sweep_ends_what_was_left_and_spares_the_living(agents: Agents) -> None:
    """Launcher and keeper both killed, an agent is left: found by its environment, unless it is said to be
    alive. Another launcher's agents are not touched, though they are not said to be."""
    launcher, keeper = _launcher(agents, TREES["setsid"], "none")
    launch_id = f"left-{agents.word}"
    with launcher:
        assert _in_time(lambda: len(agents.alive()) == 2)
        launcher.send_signal(signal.SIGSTOP)  # it would end the agent as soon as its keeper is gone
        os.kill(keeper, signal.SIGKILL)
        launcher.kill()
    left = set(agents.alive())
    assert len(left) == 2

    async def swept(launch: Launch) -> None:
        sweeping = SubprocessLauncher()
        running = await SubprocessLauncher().start(launch)
        await _ready(launch)
        assert launch_id not in {leak.launch_id for leak in await sweeping.sweep(frozenset({launch_id}))}
        assert left < set(agents.alive())
        leaks = [leak for leak in await sweeping.sweep(frozenset()) if leak.launch_id == launch_id]
        assert {leak.pid for leak in leaks} == left
        assert {leak.command for leak in leaks} == {f"sleep {agents.word}"}
        assert _in_time(lambda: not left & set(agents.alive()))
        assert _in_time(lambda: len(agents.alive()) == 2)  # one of the other's may not be what it becomes yet
        await running.stop(0)

    asyncio.run(swept(agents.launch(TREES["setsid"])))


def test_an_agent_that_kills_its_keeper_is_ended(agents: Agents) -> None:
    """Outside a namespace it can. What it took is not known then."""
    result, _ = agents.run("setsid SLEEP & (sleep 0.2; kill -9 $PPID) & exec SLEEP")
    assert agents.all_gone()
    assert (result.code, result.signal, result.cpu_s) == (None, signal.SIGKILL, None)
    assert len([process for process in result.left if agents.word in process["command"]]) >= 2


@EVERY_LEVEL
def test_an_agent_gets_what_it_is_given(agents: Agents, level: str) -> None:
    """Its environment and nothing else, its folder, an empty stdin; how it ended is told as it was."""
    environment = {"A": "1", "B": "x=y \u00e9\nz", "PYTHONHOME": "/nowhere", "LD_PRELOAD": ""}
    result, launch = agents.run(("/usr/bin/env", "-0"), level, environment=environment)
    assert (result.code, result.signal, result.left) == (0, None, ())
    words = dict(word.split("=", 1) for word in _out(launch).split("\0") if word)
    assert words == {**environment, "ROLLBOOK_LAUNCH_ID": launch.launch_id}
    result, launch = agents.run("cat; pwd; echo x > new; echo no >&2; exit 7", level)
    assert (result.code, _out(launch), _out(launch, "stderr")) == (7, f"{launch.folder}\n", "no\n")
    assert (launch.folder / "new").read_text() == "x\n"
    result, _ = agents.run("kill -SEGV $$", level)
    assert (result.code, result.signal) == (None, signal.SIGSEGV)


@pytest.mark.more_but("16M")
@pytest.mark.parametrize("size", [16 << 20, 1 << 30], ids=["16M", "1G"])
def test_what_is_printed_is_read_and_let_go(agents: Agents, size: int) -> None:
    """Also a gigabyte: the beginning is kept, all is counted, and the agent gets on. stderr has room of its
    own."""
    command = f"head -c {size} /dev/zero; head -c 700000 /dev/zero >&2"
    result, launch = agents.run(command, limits=Limits(output_mb=0.5))
    assert result.code == 0
    assert result.printed == {"stdout": size, "stderr": 700000}
    assert {(launch.output / f"{name}.log").stat().st_size for name in result.printed} == {1 << 19}


def test_limits_hold(agents: Agents) -> None:
    """Of file sizes, descriptors, processor time, also for what an agent starts; and no cores."""
    result, launch = agents.run("head -c 3M /dev/zero > big; echo $?", limits=Limits(file_mb=1))
    assert _out(launch) == f"{128 + signal.SIGXFSZ}\n"
    assert (launch.folder / "big").stat().st_size == 1 << 20
    result, launch = agents.run("ulimit -n; ulimit -c", limits=Limits(open_files=77))
    assert _out(launch) == "77\n0\n"
    result, _ = agents.run((*PYTHON, "while True: pass"), limits=Limits(cpu_s=1))
    assert (result.code, result.signal) == (None, signal.SIGXCPU)
    assert result.cpu_s is not None
    assert 0.5 < result.cpu_s < 3


@EVERY_LEVEL
def test_what_an_agent_took_is_known(agents: Agents, level: str) -> None:
    """Its processes' too, also of one that it left behind."""
    code = "import os, time; x = b'x' * (90 << 20); b = time.process_time()\n"
    code += "while time.process_time() < b + 0.15: pass\nif os.fork() == 0: os.setsid(); time.sleep(60)"
    result, _ = agents.run((*PYTHON, code), level)
    assert len(result.left) == 1
    assert result.cpu_s is not None
    assert 0.15 <= result.cpu_s < 2
    assert result.peak_rss_mb is not None
    assert 90 < result.peak_rss_mb < 130


@EVERY_LEVEL
def test_what_cannot_be_started_is_named(agents: Agents, level: str) -> None:
    """A program that is not there, or is none, with where it was looked for."""

    def refused(launch: Launch) -> str:
        with pytest.raises(LaunchError) as error:
            asyncio.run(SubprocessLauncher().start(launch))
        assert launch.launch_id in str(error.value)
        return str(error.value)

    message = refused(agents.launch(("no-such-agent", "x"), level))
    assert "'no-such-agent' cannot be started: No such file or directory in PATH=/usr/sbin:" in message
    assert ("there are the system's programs" in message) == (level == "bwrap")
    launch = agents.launch(("./agent",), level)
    (launch.folder / "agent").write_text("echo")
    assert "'./agent' cannot be started: Permission denied" in refused(launch)


def test_a_launch_that_makes_no_sense_is_refused(agents: Agents) -> None:
    """Before anything of it is started."""
    sound = agents.launch("exit")
    for changed, message in (
        ({"launch_id": "a b"}, "launch 'a b': an id has letters, digits and '-' alone"),
        ({"command": ()}, "there is no command"),
        ({"folder": agents.folder / "gone"}, "gone is not there"),
        ({"output": Path("/dev/null/x")}, "its output cannot be written"),
        ({"require": "bwrap"}, "isolation 'session' was asked for, but 'bwrap' is required"),
    ):
        with pytest.raises(LaunchError, match=message):
            asyncio.run(SubprocessLauncher().start(replace(sound, **changed)))


@_of("bwrap")
def test_an_agent_sees_its_own_files_alone(agents: Agents, tmp_path: Path, level: str) -> None:
    """Not another launch's folder, the store, or the system's secrets. Its folder and a /tmp of its own are
    all that it writes to. The network is there, for the proxy."""
    other = agents.launch("exit").folder
    (other / "secret").write_text("x")
    (tmp_path / "project/store").mkdir(parents=True)
    (tmp_path / "project/store/secret").write_text("x")
    (tmp_path / "project/open").write_text("shown")
    files = isolation.Files((tmp_path / "project",), (tmp_path / "project/store",))
    unseen = [
        other / "secret",
        tmp_path / "project/store/secret",
        Path("/etc/shadow"),
    ]
    unwritten = [Path("/new"), tmp_path / "project/new", tmp_path / "project/store/new", Path("/usr/new")]
    command = "".join(f"ls -A '{path}' 2>/dev/null; " for path in unseen)
    command += "".join(f"echo > '{path}' && echo wrote '{path}'; " for path in unwritten)
    command += f"cat {tmp_path}/project/open; echo; touch mine /tmp/{agents.word}; "
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket; socket.create_connection(('127.0.0.1', {port})); print('met')"
        launch = agents.launch(command + f'{PYTHON[0]} -I -S -c "{connect}"', level)

        async def run() -> Exit:
            return await (await SubprocessLauncher(files).start(launch)).wait()

        result = asyncio.run(run())
    assert (result.code, _out(launch).split()) == (0, ["shown", "met"])
    assert (launch.folder / "mine").exists()
    assert not Path("/tmp", agents.word).exists()


# Another user, and its disk --------------------------------------------------------------------------

AS_NOBODY = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts agents as another user")
NOBODY = 65534


@pytest.fixture
def open_agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    """Agents in a folder that other users reach, beside a file that only this user may read."""
    folder = Path(tempfile.mkdtemp(prefix="agents-"))
    folder.chmod(0o755)
    (folder / "SECRET").write_text("the secret")
    (folder / "SECRET").chmod(0o600)
    started = Agents(folder)
    yield started
    for pid in started.alive():
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder)


@AS_NOBODY
@EVERY_LEVEL
def test_an_agent_that_is_another_user(open_agents: Agents, level: str) -> None:
    """It is that user for good, writes its own folder, and reads and writes nothing that the user may not."""
    secret = open_agents.folder / "SECRET"
    script = (
        f"id -u; id -G; echo mine > here; cat {secret}; touch {secret.parent}/there; "
        "setpriv --reuid 0 true; kill -9 $PPID; (trap '' TERM; setsid SLEEP) & exit 0"
    )
    launch = replace(open_agents.launch(script, level), user=str(NOBODY))
    ended = asyncio.run(_ended(launch))
    assert (ended.code, ended.signal) == (0, None)
    assert (launch.output / "stdout.log").read_text().split() == [str(NOBODY), str(NOBODY)]
    assert (launch.folder / "here").stat().st_uid == NOBODY
    assert not (secret.parent / "there").exists()
    assert open_agents.all_gone()


@AS_NOBODY
def test_what_it_is_kept_in_names_the_user(open_agents: Agents) -> None:
    async def kept() -> Any:
        running = await SubprocessLauncher().start(replace(open_agents.launch("true"), user="nobody"))
        await running.wait()
        return running.isolation

    assert asyncio.run(kept())["uid"] == NOBODY


def test_a_user_that_is_not_there_is_named(open_agents: Agents) -> None:
    launch = replace(open_agents.launch("true"), user="no-such-user")
    with pytest.raises(LaunchError, match=r"agent\.user = 'no-such-user': this host has no such user"):
        asyncio.run(_ended(launch))


def test_an_agent_that_fills_the_disk_is_ended(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is looked at while it runs; the error says which limit it was."""
    monkeypatch.setattr(subprocess_launcher, "LOOK_S", 0.05)
    fill = "mkdir sub; head -c 3000000 /dev/zero > sub/full; exec SLEEP"
    ended, _ = agents.run(fill, limits=Limits(disk_mb=2))
    assert (ended.signal, ended.error) == (signal.SIGKILL, "it took more than limits.disk_mb = 2")
    ended, _ = agents.run("head -c 1000000 /dev/zero > full; sleep 0.3", limits=Limits(disk_mb=2))
    assert (ended.code, ended.error) == (0, None)


@_of("bwrap")
def test_a_tmp_of_its_own_is_bounded(agents: Agents, level: str) -> None:
    ended, launch = agents.run("head -c 3000000 /dev/zero > /tmp/full", level, Limits(disk_mb=2))
    assert ended.code != 0
    assert "No space left" in (launch.output / "stderr.log").read_text()


async def _ended(launch: Launch) -> Exit:
    return await (await SubprocessLauncher().start(launch)).wait()
