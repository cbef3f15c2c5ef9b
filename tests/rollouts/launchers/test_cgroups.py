"""Limits of all processes of an agent together, and what they took, by real cgroups where there are some."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.processes.warm import WarmProcess

from rollbook.rollouts.config import parse_rollouts
from rollbook.rollouts.launchers import cgroups, isolation
from rollbook.rollouts.launchers.agents import agents_of, launcher_of
from rollbook.rollouts.launchers.launching import Exit, Isolation, Launch, Limits
from rollbook.rollouts.launchers.reaper import command_of
from rollbook.rollouts.launchers.subprocess_launcher import SubprocessLauncher
from rollbook.rollouts.proxy import Proxy
from rollbook.store.errors import LaunchError

WHY = cgroups.missing(("pids", "memory", "cpu"))
HERE = pytest.mark.skipif(WHY is not None, reason=str(WHY))
LEVELS: list[Any] = [level for level in isolation.LEVELS if isolation.missing(level) is None]
PYTHON = (isolation.interpreter(), "-I", "-S", "-c")
FORKS = """
import os, sys, time
made = 0
try:
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except OSError as error:
    print(made, error.strerror)
    sys.exit(4)
"""
EATS = """
import os, time
if os.fork() == 0:
    held = bytearray(40 << 20)
    time.sleep(60)
time.sleep(0.5)
held = bytearray(40 << 20)
print("had it")
"""


def _launch(folder: Path, program: str, limits: Limits, level: Isolation = "session") -> Launch:
    launch_id = f"g-{uuid.uuid4().hex}"
    own = folder / launch_id
    own.mkdir(parents=True)
    return Launch(launch_id, (*PYTHON, program), {"PATH": os.environ["PATH"]}, own, own, level, limits=limits)


def _run(launch: Launch) -> tuple[Exit, Any]:
    async def run() -> tuple[Exit, Any]:
        running = await SubprocessLauncher().start(launch)
        return await running.wait(), running.isolation

    return asyncio.run(run())


def _groups() -> list[Path]:
    """The groups of these tests that are there."""
    return [path for base in cgroups._bases() for path in base.glob(f"{cgroups.PREFIX}g-*")]


@HERE
@pytest.mark.parametrize("level", LEVELS)
def test_processes(tmp_path: Path, level: Isolation) -> None:
    """A fork bomb gets as many as it may have, at every level; it is told why it failed, and all are gone."""
    launch = _launch(tmp_path, FORKS, Limits(processes=12), level)
    result, isolated = _run(launch)
    assert (launch.output / "stdout.log").read_text() == "11 Resource temporarily unavailable\n"
    assert (result.code, result.error) == (
        4,
        "it exited with 4: it was refused more than limits.processes = 12",
    )
    assert len(result.left) == 11
    assert isolated["cgroup"] == ["pids"]
    assert _groups() == []


@HERE
@pytest.mark.parametrize("level", LEVELS)
def test_memory(tmp_path: Path, level: Isolation) -> None:
    """Of all processes together: two that take too much between them are ended, and one alone is not."""
    launch = _launch(tmp_path, EATS, Limits(memory_mb=64), level)
    result, isolated = _run(launch)
    ended = result.error == "signal 9 ended it: it took more than limits.memory_mb = 64"
    # The kernel takes either of them.
    assert ended or (launch.output / "stdout.log").read_text() == "had it\n"
    assert (result.peak_rss_mb or 0) >= 60
    assert isolated["cgroup"] == ["memory"]
    result, _ = _run(_launch(tmp_path, EATS, Limits(memory_mb=256), level))
    assert (result.code, result.error) == (0, None)


@HERE
def test_what_was_taken(tmp_path: Path) -> None:
    """CPU time of what outlives its parent too, and of each process at once; a share of a CPU is no more."""
    busy = (
        "import os, time\nfor _ in range(3):\n os.fork()\nend = time.time() + 1\nwhile time.time() < end:\n 0"
    )
    begun = time.monotonic()
    result, _ = _run(_launch(tmp_path, busy, Limits(cpus=0.25, processes=50)))
    assert result.cpu_s is not None
    # Eight that take what they can get would take more than one CPU has.
    assert 0.02 < result.cpu_s < 0.3 * (time.monotonic() - begun) + 0.1
    assert _groups() == []


@pytest.fixture
def of_no_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that limit nothing, where the kernel's tree of version 2 has no controllers: they hold processes
    all the same."""
    if WHY is not None:
        own = cgroups._own()
        if own is None or not os.access(own, os.W_OK):
            pytest.skip(WHY)
        monkeypatch.setattr(cgroups, "_base", lambda _: own)
        monkeypatch.setattr(cgroups, "_limit", lambda *_: None)


@pytest.mark.usefixtures("of_no_controller")
def test_what_leaves_its_namespace_and_its_name_is_found(tmp_path: Path) -> None:
    """A daemon with another environment is in the group all the same."""
    program = (
        "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n"
        "  os.execve('/bin/sleep', ['sleep', '61'], {})\n os._exit(0)\ntime.sleep(60)"
    )
    launch = _launch(tmp_path, program, Limits(processes=50))

    async def killed() -> Exit:
        running = await SubprocessLauncher().start(launch)
        while "sleep 61" not in [command_of(int(pid)) for path in _groups() for pid in _pids(path)]:
            await asyncio.sleep(0.02)
        os.kill(running._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        return await running.wait()

    result = asyncio.run(killed())
    assert "sleep 61" in [process["command"] for process in result.left]
    assert _groups() == []


KILLED = """
import asyncio, sys
from pathlib import Path
from rollbook.rollouts.launchers import cgroups
from rollbook.rollouts.launchers.launching import Launch, Limits
from rollbook.rollouts.launchers.subprocess_launcher import SubprocessLauncher

if cgroups.missing(["pids"]):
    cgroups._base = lambda _: cgroups._own()
    cgroups._limit = lambda *_: None

async def run():
    folder = Path(sys.argv[2])
    launch = Launch(sys.argv[1], ("sleep", "62"), {}, folder, folder, "session", limits=Limits(processes=9))
    await (await SubprocessLauncher().start(launch)).wait()

asyncio.run(run())
"""


@pytest.mark.usefixtures("of_no_controller")
def test_groups_of_a_killed_launcher_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once nobody watches over them, and not while somebody does."""
    launch_id = f"g-{uuid.uuid4().hex}"
    modules = ("rollbook.rollouts.launchers.subprocess_launcher",)
    process = WarmProcess([sys.executable, "-c", KILLED, launch_id, str(tmp_path)], modules=modules)
    assert _in_time(lambda: any(_pids(path) for path in _groups()))
    monkeypatch.setattr(cgroups, "YOUNG_S", 0.0)
    assert [leak for leak in cgroups.sweep(frozenset()) if leak.launch_id == launch_id] == []
    assert len(_groups()) > 0
    process.kill()
    process.wait()
    assert _in_time(lambda: not any(_pids(path) for path in _groups()))
    assert _in_time(lambda: launch_id not in cgroups.watched_launches())
    cgroups.sweep(frozenset())
    assert _groups() == []


def _pids(path: Path) -> list[str]:
    try:
        return (path / "cgroup.procs").read_text().split()
    except OSError:
        return []


def _in_time(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not (done := true()) and time.monotonic() < end:
        time.sleep(0.02)
    return done


# Where there are none, and what is written to one -------------------------------------------------------


@pytest.fixture
def version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A tree of version 2 as plain files, in which this process is in a group, or in the root."""

    def make(*controllers: str, root: bool) -> Path:
        mount = tmp_path / "cgroup"
        own = mount if root else mount / "user.slice/session.scope"
        own.mkdir(parents=True)
        if not root:
            (own / "cgroup.type").write_text("domain\n")
        for folder in (own, own.parent):
            (folder / "cgroup.subtree_control").write_text("")
        (own if root else own.parent).joinpath("cgroup.subtree_control").write_text(" ".join(controllers))
        monkeypatch.setattr(Path, "write_text", _refusing(Path.write_text))
        proc = tmp_path / "proc"
        proc.mkdir()
        (proc / "cgroup").write_text(f"0::/{own.relative_to(mount)}\n".replace("/.", "/"))
        line = f"31 23 0:28 / {mount} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
        (proc / "mountinfo").write_text(f"30 23 0:27 / /proc rw - proc proc rw\n{line}")
        monkeypatch.setattr(cgroups, "PROC", proc)
        return own

    return make


def _refusing(write: Any) -> Any:
    """Controllers are never asked for in a group with processes: some would be given, and spoil it."""

    def refuse(self: Path, text: str) -> int:
        if self.name == "cgroup.subtree_control":
            assert not (self.parent / "cgroup.type").exists()
            raise OSError(16, "Device or resource busy")
        written: int = write(self, text)
        return written

    return refuse


@pytest.mark.parametrize("root", [False, True])
def test_version_2(version_2: Callable[..., Path], root: bool) -> None:
    """One folder for all, inside the root or beside the own group, with the names that limits have there."""
    own = version_2("pids", "memory", "cpu", root=root)
    limits = Limits(processes=7, memory_mb=64, cpus=1.5)
    group = cgroups.Cgroup("g-2", limits)
    folder = group.folder
    assert folder is not None
    assert folder == (own if root else own.parent) / "rollbook-g-2"
    assert group.controllers == ("pids", "cpu", "memory")
    assert (folder / "pids.max").read_text() == "7"
    assert (folder / "memory.max").read_text() == str(64 << 20)
    assert (folder / "cpu.max").read_text() == "150000 100000"
    (folder / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1000000\n")
    (folder / "memory.peak").write_text(f"{32 << 20}\n")
    (folder / "memory.events").write_text("low 0\noom 1\noom_kill 2\n")
    (folder / "pids.events").write_text("max 3\n")
    assert group.taken() == cgroups.ResourceUsage(1.5, 32.0, 2, True)


def test_without_a_controller(version_2: Callable[..., Path], tmp_path: Path) -> None:
    """What nothing else keeps is refused at the start, with the remedy; memory is kept otherwise."""
    version_2("memory", root=False)
    assert cgroups.controllers(Limits(memory_mb=64)) == ("memory",)
    values = {
        "tasks": "none",
        "folder": str(tmp_path / "launches"),
        "agent": {"command": ["true"], "limits": {"processes": 5, "cpus": 1.0}},
    }
    config = parse_rollouts(values, "test")
    with pytest.raises(LaunchError) as error:
        agents_of(config, Proxy(config.proxy), launcher_of(config))
    assert str(error.value) == (
        "limits.processes and limits.cpus: there is no cgroup controller 'pids' that this process may use; "
        "leave the limit out, or run agents in containers"
    )


@pytest.mark.parametrize("mounted", ["", "40 30 0:35 / /unified rw - cgroup2 cgroup2 rw\n"])
def test_of_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounted: str) -> None:
    """Controllers of the first version are not used, whether the second is there without them or not."""
    version_1 = "35 30 0:31 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
    (tmp_path / "mountinfo").write_text(version_1 + mounted)
    (tmp_path / "cgroup").write_text("8:pids:/\n7:cpu,cpuacct:/\n4:memory:/\n0::/\n")
    monkeypatch.setattr(cgroups, "PROC", tmp_path)
    assert cgroups.controllers(Limits(memory_mb=64)) == ()
    with pytest.raises(LaunchError) as error:
        cgroups.controllers(Limits(cpus=1.0))
    assert str(error.value) == (
        "limits.cpus: limits need cgroups of version 2, and 'cpu' is of version 1 here: boot the host with "
        "systemd.unified_cgroup_hierarchy=1; leave the limit out, or run agents in containers"
    )


def test_without_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is that of each process then, and the log says that no cgroup keeps it."""
    for name in ("cgroup", "mountinfo"):
        (tmp_path / name).touch()
    monkeypatch.setattr(cgroups, "PROC", tmp_path)
    launch = _launch(tmp_path, "held = bytearray(400 << 20)", Limits(memory_mb=256))
    result, isolated = _run(launch)
    assert (result.code, "cgroup" in isolated) == (1, False)
    assert "MemoryError" in (launch.output / "stderr.log").read_text()
    with pytest.raises(LaunchError, match=r"limits\.processes: there is no cgroup controller"):
        _run(_launch(tmp_path, "pass", Limits(processes=5)))
