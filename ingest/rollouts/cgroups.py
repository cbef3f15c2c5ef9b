"""Control groups of the kernel, one for each launch: limits of all of its processes, and what they took.

Both versions are spoken: of version 1 each controller has a tree of its own, of version 2 all share one. A
group is made inside this process's own, or beside it where version 2 allows none inside. Nothing is mounted,
and no other process is moved.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rollbook.ingest.rollouts.launching import Leak, Limits
from rollbook.ingest.rollouts.leaks import command_of, kept
from rollbook.store.errors import LaunchError

MIB = 1 << 20
PERIOD_US = 100_000
"""Of the CPU's bandwidth, in which a group may take its share."""
PREFIX = "rollbook-"
"""Of a group's name; the launch's id follows."""
YOUNG_S = 10.0
"""An empty group that is younger is left to whoever makes it."""
EMPTY_S = 2.0
"""So long is waited for what was ended to leave a group."""
COUNTS = "cpuacct"
"""The controller of version 1 that counts CPU time."""
V2 = "2"
"""The name of version 2's tree, which has no controller's."""


@dataclass(frozen=True, slots=True)
class Taken:
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
    asked = tuple(name for name, limit in needs.items() if limit is not None)
    if asked and (why := missing(asked)) is not None:
        keys = " and ".join(
            f"limits.{key}" for key in ("processes", "cpus") if getattr(limits, key) is not None
        )
        raise LaunchError(f"{keys}: {why}; leave the limit out, or run agents in containers")
    return asked if limits.memory_mb is None or missing(["memory"]) else (*asked, "memory")


def missing(names: Iterable[str]) -> str | None:
    """Why groups with these controllers cannot be made here; None: they can."""
    trees = _trees()
    for name in names:
        base = _base(trees, name)
        if base is None:
            return f"there is no cgroup controller {name!r} that this process may use"
        if not os.access(base, os.W_OK):
            return f"{base} may not be written: be root, or in an own cgroup (systemd-run --user --scope)"
    return None


class Cgroup:
    """The group of a launch; one that needs no controller is nowhere.

    Raises:
        LaunchError: it cannot be made.
    """

    def __init__(self, launch_id: str, limits: Limits) -> None:
        self.controllers = controllers(limits)
        trees, asked = _trees(), self.controllers
        self._of = {name: base / f"{PREFIX}{launch_id}" for name in asked if (base := _base(trees, name))}
        if COUNTS in trees and asked:
            self._of[COUNTS] = trees[COUNTS] / f"{PREFIX}{launch_id}"
        elif shared := [folder for name, folder in self._of.items() if name not in trees]:
            self._of[COUNTS] = shared[0]  # version 2 counts in every group
        try:
            for folder in self.folders:
                folder.mkdir(exist_ok=True)
            for name in asked:
                _limit(name, self._of[name], limits)
        except OSError as error:
            self.remove()
            raise LaunchError(f"launch {launch_id}: its cgroup cannot be made: {error}") from error

    @property
    def folders(self) -> list[Path]:
        """Of the group, one for each tree that it is in."""
        return sorted(set(self._of.values()))

    def entrances(self) -> list[int]:
        """Descriptors, to be closed: a process that writes `0` to each is in the group."""
        return [os.open(folder / "cgroup.procs", os.O_WRONLY) for folder in self.folders]

    def taken(self) -> Taken:
        """What was taken until now."""
        cpu = memory = None
        killed, refused = 0, False
        if (of := self._of.get(COUNTS)) is not None:
            ns, us = _number(of / "cpuacct.usage"), _entry(of / "cpu.stat", "usage_usec")
            cpu = ns / 1e9 if ns is not None else us and us / 1e6
        if (of := self._of.get("memory")) is not None:
            peak = _number(of / "memory.max_usage_in_bytes") or _number(of / "memory.peak")
            memory = peak and round(peak / MIB, 1)
            events = (_entry(of / "memory.oom_control", "oom_kill"), _entry(of / "memory.events", "oom_kill"))
            killed = max(count or 0 for count in events)
        if (of := self._of.get("pids")) is not None:
            refused = bool(_entry(of / "pids.events", "max"))
        return Taken(cpu, memory, killed, refused)

    def end(self) -> list[tuple[int, str]]:
        """End what is left in the group, and remove it: pids and command lines of what was left."""
        return _end(self.folders)

    def remove(self) -> None:
        """Remove it, as far as it is there; it is empty."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                folder.rmdir()


def sweep(alive: frozenset[str]) -> list[Leak]:
    """End what is in groups of launches that are not alive and not watched over, and remove the groups."""
    groups: dict[str, list[Path]] = {}
    for folder in {path for base in _bases() for path in base.glob(f"{PREFIX}*")}:
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                groups.setdefault(folder.name.removeprefix(PREFIX), []).append(folder)
    spared = alive | kept() if groups else frozenset()
    return [
        Leak(launch_id, pid, command)
        for launch_id, folders in sorted(groups.items())
        if launch_id not in spared and not _beginning(folders)
        for pid, command in _end(folders)
    ]


def _beginning(folders: list[Path]) -> bool:
    """Whether a group may be another launcher's whose keeper is about to start."""
    young = False
    for folder in folders:
        with contextlib.suppress(OSError):
            young = young or time.time() - folder.stat().st_mtime < YOUNG_S
    return young and not _pids(folders)


# The trees ------------------------------------------------------------------------------------------------


def _trees(proc: Path = Path("/proc/self")) -> dict[str, Path]:
    """Controller of version 1, or V2 -> this process's own folder in its tree."""
    own: dict[str, str] = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        own |= dict.fromkeys(names.split(",") if names else [V2], path)
    found = {}
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, mount = before.split(" ")[3:5]
        of_mount = [V2] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        for name in of_mount:
            if name in own:
                # In a container the tree's root may be the group itself, or lie above what is mounted.
                inside = os.path.relpath(own[name], root)
                folder = Path(mount) / inside
                found[name] = folder if not inside.startswith("..") and folder.is_dir() else Path(mount)
    return found


def _base(trees: dict[str, Path], controller: str) -> Path | None:
    """Where a group with a controller can be made."""
    if controller in trees:
        return trees[controller]
    own = trees.get(V2)
    if own is None:
        return None
    if (own / "cgroup.type").exists():
        # Of a group that has processes, as this one's, version 2 lets no group be inside: then beside it.
        return own.parent if controller in _words(own.parent) else None
    with contextlib.suppress(OSError):  # the root is exempt, and has no type
        (own / "cgroup.subtree_control").write_text(f"+{controller}")
    return own if controller in _words(own) else None


def _bases() -> Iterator[Path]:
    trees = _trees()
    yield from {trees[name] for name in ("pids", "memory", "cpu", COUNTS) if name in trees}
    if V2 in trees:
        yield from (trees[V2], trees[V2].parent)


def _words(base: Path) -> list[str]:
    try:
        return (base / "cgroup.subtree_control").read_text().split()
    except OSError:
        return []


def _limit(controller: str, folder: Path, limits: Limits) -> None:
    def put(name: str, value: object, *, needed: bool = True) -> None:
        if needed or (folder / name).exists():
            (folder / name).write_text(str(value))

    second = (folder / "cgroup.controllers").exists()
    if controller == "pids":
        put("pids.max", limits.processes)
    elif controller == "memory":
        size = (limits.memory_mb or 0) * MIB
        put("memory.max" if second else "memory.limit_in_bytes", size)
        put("memory.swap.max", 0, needed=False)
        put("memory.memsw.limit_in_bytes", size, needed=False)
    elif controller == "cpu":
        quota = max(int((limits.cpus or 0) * PERIOD_US), 1000)
        if second:
            put("cpu.max", f"{quota} {PERIOD_US}")
        else:
            put("cpu.cfs_period_us", PERIOD_US)
            put("cpu.cfs_quota_us", quota)


# What is in a group ---------------------------------------------------------------------------------------


def _end(folders: list[Path]) -> list[tuple[int, str]]:
    """SIGKILL to all that is in these folders until nothing is, and remove them; what was there at first."""
    found = {pid: command_of(pid) for pid in _pids(folders)}
    until = time.monotonic() + EMPTY_S
    while (pids := _pids(folders)) and time.monotonic() < until:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    while (there := [folder for folder in folders if not _removed(folder)]) and time.monotonic() < until:
        time.sleep(0.005)
        folders = there
    return sorted(found.items())


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _pids(folders: Iterable[Path]) -> set[int]:
    found: set[int] = set()
    for folder in folders:
        with contextlib.suppress(OSError):
            found |= {int(word) for word in (folder / "cgroup.procs").read_text().split() if word != "0"}
    return found


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
