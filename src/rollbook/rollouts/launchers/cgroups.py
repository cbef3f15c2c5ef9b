"""Control groups of the kernel, one for each launch: limits of all of its processes, and what they
used.

Only version 2 is used, in which all controllers share one tree. A group is made inside the tree's
root, or beside this process's own, as version 2 allows none inside a group with processes. Nothing
is mounted, and no other process is moved.

Processes that launches left behind: found by what is in their environment, never by a name.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rollbook.rollouts.launchers.launching import Leak, Limits
from rollbook.rollouts.launchers.reaper import command_of
from rollbook.store.errors import LaunchError
from rollbook.store.whose import START

LAUNCH_ID, KEEPER = "ROLLBOOK_LAUNCH_ID", "ROLLBOOK_KEEPER"
"""In the environment of all processes of a launch; of its keeper, and what this is wrapped in, alone."""


def start() -> dict[str, str]:
    """What processes of a launch have in their environment, to be known as this start's."""
    return {START: os.environ[START]} if START in os.environ else {}


def start_of(pid: int) -> str | None:
    """The start of a run that another process belongs to, as NAME=VALUE; None: it is of none, or ended."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return next((entry for entry in environment if entry.startswith(f"{START}=")), None)


def end_left(alive: frozenset[str]) -> list[Leak]:
    """End the processes of launches that are not among those alive, and that nobody watches over.

    A keeper goes as soon as its launcher does. Where one runs, its launch is some launcher's.
    """
    tagged = dict(_tagged())
    spared = alive | _watched(tagged)
    return _end(tagged, lambda launch_id: launch_id not in spared)


def watched_launches() -> frozenset[str]:
    """The launches of this user that somebody watches over."""
    return _watched(dict(_tagged()))


def end_launch(launch_id: str) -> list[Leak]:
    """End all processes of one launch."""
    return _end(dict(_tagged()), lambda owner: owner == launch_id)


def _watched(tagged: dict[int, tuple[str, bool]]) -> frozenset[str]:
    return frozenset(launch_id for launch_id, is_keeper in tagged.values() if is_keeper)


def _tagged() -> Iterator[tuple[int, tuple[str, bool]]]:
    """The processes of this user that are of a launch: pid, id of the launch, and whether it keeps others."""
    user = os.getuid()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == user and (tag := _tag(int(name))):
                    yield int(name), tag
            except OSError:
                continue  # it ended meanwhile, or is not to be looked into


def _tag(pid: int) -> tuple[str, bool] | None:
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ids = [entry.partition(b"=")[2] for entry in environment if entry.startswith(f"{LAUNCH_ID}=".encode())]
    return (ids[-1].decode(errors="replace"), f"{KEEPER}=1".encode() in environment) if ids else None


def _end(tagged: dict[int, tuple[str, bool]], wanted: Callable[[str], bool]) -> list[Leak]:
    leaks = []
    for pid, (launch_id, is_keeper) in tagged.items():
        # What a process leaves behind is what it started: this very process may be of a launch itself.
        if wanted(launch_id) and pid != os.getpid() and (command := _end_one(pid, (launch_id, is_keeper))):
            leaks.append(Leak(launch_id, pid, command))
    return leaks


def _end_one(pid: int, tag: tuple[str, bool]) -> str | None:
    """SIGKILL to a process, unless its pid is another's by now; its command line."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        if _tag(pid) != tag:
            return None
        command = command_of(pid)
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return command


MIB = 1 << 20
PERIOD_US = 100_000
"""Of the CPU's bandwidth, in which a group may take its share."""
PREFIX = "rollbook-"
"""Of a group's name; the launch's id follows."""
YOUNG_S = 10.0
"""An empty group that is younger is left to whoever makes it."""
EMPTY_S = 2.0
"""So long is waited for what was ended to leave a group."""
PROC = Path("/proc/self")
TO_VERSION_2 = "boot the host with systemd.unified_cgroup_hierarchy=1"


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """What a launch's processes took, and what was denied them.

    Attributes:
        cpu_s: CPU time; peak_mb: most memory, with what is cached of files; None: not counted.
        killed: processes that were ended for want of memory.
        refused: whether a process was refused for want of room.
    """

    cpu_s: float | None
    peak_mb: float | None
    killed: int
    refused: bool


def controllers(limits: Limits) -> tuple[str, ...]:
    """The controllers by which limits are kept here; memory is not among them where there is none for it.

    Raises:
        LaunchError: a limit that nothing else can keep needs one that is not here.
    """
    needs = {"pids": limits.processes, "cpu": limits.cpus}
    needed = tuple(name for name, limit in needs.items() if limit is not None)
    if needed and (why := missing(needed)) is not None:
        keys = " and ".join(
            f"limits.{key}" for key in ("processes", "cpus") if getattr(limits, key) is not None
        )
        raise LaunchError(f"{keys}: {why}; leave the limit out, or run agents in containers")
    return needed if limits.memory_mb is None or missing(["memory"]) else (*needed, "memory")


def missing(names: Iterable[str]) -> str | None:
    """Why groups with these controllers cannot be made here; None: they can."""
    for name in names:
        base = _base(name)
        if base is None and name in _of_version_1():
            return f"limits need cgroups of version 2, and {name!r} is of version 1 here: {TO_VERSION_2}"
        if base is None:
            return f"there is no cgroup controller {name!r} that this process may use"
        if not os.access(base, os.W_OK):
            return f"{base} may not be written: be root, or in an own cgroup (systemd-run --user --scope)"
    return None


class Cgroup:
    """The group of a launch; no group is made for one that needs no controller.

    Raises:
        LaunchError: it cannot be made.
    """

    def __init__(self, launch_id: str, limits: Limits) -> None:
        self.controllers = controllers(limits)
        bases = {base for name in self.controllers if (base := _base(name))}
        self.folder = bases.pop() / f"{PREFIX}{launch_id}" if bases else None
        if self.folder is None:
            return
        try:
            self.folder.mkdir(exist_ok=True)
            for name in self.controllers:
                _limit(name, self.folder, limits)
        except OSError as error:
            self.remove()
            raise LaunchError(f"launch {launch_id}: its cgroup cannot be made: {error}") from error

    def entrances(self) -> list[int]:
        """Descriptors, to be closed: a process that writes `0` to each is in the group."""
        return [] if self.folder is None else [os.open(self.folder / "cgroup.procs", os.O_WRONLY)]

    def taken(self) -> ResourceUsage:
        """What was taken until now."""
        if self.folder is None:
            return ResourceUsage(None, None, 0, False)
        us, peak = _entry(self.folder / "cpu.stat", "usage_usec"), _number(self.folder / "memory.peak")
        return ResourceUsage(
            cpu_s=us and us / 1e6,
            peak_mb=peak and round(peak / MIB, 1),
            killed=_entry(self.folder / "memory.events", "oom_kill") or 0,
            refused=bool(_entry(self.folder / "pids.events", "max")),
        )

    def end(self) -> list[tuple[int, str]]:
        """End what is left in the group, and remove it: pids and command lines of what was left."""
        return [] if self.folder is None else _emptied(self.folder)

    def remove(self) -> None:
        """Remove it, as far as it is there; it is empty."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def sweep(alive: frozenset[str]) -> list[Leak]:
    """End what is in groups of launches that are not alive and not watched over, and remove the groups."""
    groups: dict[str, Path] = {}
    for folder in {path for base in _bases() for path in base.glob(f"{PREFIX}*")}:
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                groups[folder.name.removeprefix(PREFIX)] = folder
    spared = alive | watched_launches() if groups else frozenset()
    return [
        Leak(launch_id, pid, command)
        for launch_id, folder in sorted(groups.items())
        if launch_id not in spared and not _beginning(folder)
        for pid, command in _emptied(folder)
    ]


def _beginning(folder: Path) -> bool:
    """Whether a group may be another launcher's whose keeper is about to start."""
    with contextlib.suppress(OSError):
        return time.time() - folder.stat().st_mtime < YOUNG_S and not _pids(folder)
    return False


# The tree -------------------------------------------------------------------------------------------------


def _own() -> Path | None:
    """This process's own folder in the tree of version 2; None: no such tree is mounted."""
    paths = [line[3:] for line in (PROC / "cgroup").read_text().splitlines() if line.startswith("0::")]
    for line in (PROC / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, mount = before.split(" ")[3:5]
        if paths and after.startswith("cgroup2 "):
            # In a container the tree's root may be the group itself, or lie above what is mounted.
            inside = os.path.relpath(paths[0], root)
            folder = Path(mount) / inside
            return folder if not inside.startswith("..") and folder.is_dir() else Path(mount)
    return None


def _of_version_1() -> set[str]:
    """The controllers that the host has in version 1, where version 2 cannot have them."""
    lines = (PROC / "cgroup").read_text().splitlines()
    return {name for line in lines for name in line.split(":", 2)[1].split(",") if name}


def _base(controller: str) -> Path | None:
    """Where a group with a controller can be made."""
    own = _own()
    if own is None:
        return None
    if (own / "cgroup.type").exists():
        # Of a group that has processes, as this one's, version 2 lets no group be inside: then beside it.
        return own.parent if controller in _words(own.parent) else None
    with contextlib.suppress(OSError):  # the root is exempt, and has no type
        (own / "cgroup.subtree_control").write_text(f"+{controller}")
    return own if controller in _words(own) else None


def _bases() -> list[Path]:
    own = _own()
    return [] if own is None else [own, own.parent]


def _words(base: Path) -> list[str]:
    try:
        return (base / "cgroup.subtree_control").read_text().split()
    except OSError:
        return []


def _limit(controller: str, folder: Path, limits: Limits) -> None:
    if controller == "pids":
        (folder / "pids.max").write_text(str(limits.processes))
    elif controller == "memory":
        (folder / "memory.max").write_text(str((limits.memory_mb or 0) * MIB))
        if (swap := folder / "memory.swap.max").exists():
            swap.write_text("0")
    elif controller == "cpu":
        quota = max(int((limits.cpus or 0) * PERIOD_US), 1000)
        (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")


# What is in a group ---------------------------------------------------------------------------------------


def _emptied(folder: Path) -> list[tuple[int, str]]:
    """SIGKILL to all that is in the group until nothing is, and remove it; what was there at first."""
    commands = {pid: command_of(pid) for pid in _pids(folder)}
    until = time.monotonic() + EMPTY_S
    while (pids := _pids(folder)) and time.monotonic() < until:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    while not _removed(folder) and time.monotonic() < until:
        time.sleep(0.005)
    return sorted(commands.items())


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _pids(folder: Path) -> set[int]:
    with contextlib.suppress(OSError):
        return {int(word) for word in (folder / "cgroup.procs").read_text().split() if word != "0"}
    return set()


def _number(path: Path) -> int | None:
    return _read(path, lambda text: int(text))


def _entry(path: Path, name: str) -> int | None:
    """The number of an entry of a file of `name number` lines."""
    return _read(path, lambda text: int(dict(line.split() for line in text.splitlines())[name]))


def _read(path: Path, read: Callable[[str], int]) -> int | None:
    try:
        return read(path.read_text())
    except (OSError, ValueError, KeyError):
        return None
