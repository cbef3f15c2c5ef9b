"""Agents as processes of this host, each with a keeper (`reaper.py`) between it and this process.

What a launch takes of the disk, which no kernel bounds by folder, is measured every few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import marshal
import os
import re
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TypeVar

from rollbook.rollouts.launchers import cgroups, isolation, reaper
from rollbook.rollouts.launchers import cgroups as leaks
from rollbook.rollouts.launchers.cgroups import Cgroup
from rollbook.rollouts.launchers.isolation import User, hand_over, user_of
from rollbook.rollouts.launchers.launching import Exit, Launch, Launcher, Leak, Level, Limits, Running
from rollbook.store.errors import LaunchError
from rollbook.store.events import Json

logger = logging.getLogger(__name__)

MIB = 1 << 20
INSIST_S = reaper.INSIST_S + 5.0
"""A keeper that has not ended everything so long after it was told to is ended itself."""
LAST_WORDS_S = 2.0
"""So long output is waited for once nothing of the agent runs: another process may hold its end."""
FIRST = 2000
"""Bytes of the beginning of a stream, by which a failure is told."""
T = TypeVar("T")
_LAUNCH_ID = re.compile(r"[A-Za-z0-9-]{1,200}")


class _OutputLog(asyncio.Protocol):
    """Writes the beginning of a stream to a file, and reads the rest, so that the agent is never blocked."""

    def __init__(self, path: Path, most: int) -> None:
        self.path, self.count = path, 0
        self.closed = asyncio.get_running_loop().create_future()
        self._room, self._first = most, b""
        self._file = path.open("wb", buffering=0)

    async def follow(self, pipe: IO[bytes]) -> asyncio.BaseTransport:
        """Read a pipe from now on."""
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, pipe)
        return transport

    def data_received(self, data: bytes) -> None:
        """Keep what there is room for, and count all."""
        self.count += len(data)
        self._first += data[: FIRST - len(self._first)]
        kept = data[: self._room]
        try:
            while kept:
                written = self._file.write(kept)
                kept, self._room = kept[written:], self._room - written
        except OSError as error:  # a full disk: the agent's own work may still be done
            logger.warning("%s: %s; what an agent prints from here on is let go", self.path, error.strerror)
            self._room = 0

    def connection_lost(self, exc: Exception | None = None) -> None:
        """The stream's end."""
        self._file.close()
        if not self.closed.done():
            self.closed.set_result(None)

    def beginning(self) -> str:
        """What came first, on one line; not from the file, which the agent may have replaced."""
        return " ".join(self._first.decode(errors="replace").split())


class SubprocessLauncher(Launcher):
    """Starts agents as processes of this host.

    Agents with a namespace of process ids end with the thread in whose event loop they were started.

    Args:
        files: what agents with files of their own see.
    """

    def __init__(self, files: isolation.Files = isolation.NO_FILES) -> None:
        self._files = files

    async def start(self, launch: Launch) -> Running:
        """Start an agent.

        Raises:
            LaunchError: it cannot be started, or not as isolated as is required; the message says why.
        """
        require: Level = "bwrap" if launch.places else launch.require
        level = await asyncio.to_thread(isolation.chosen, launch.isolation, require)
        user = None if launch.user is None else user_of(launch.user)
        started = _Started(launch, level, self._files, user)
        await started.begin()
        return started

    async def sweep(self, alive: frozenset[str], dead: frozenset[str] = frozenset()) -> list[Leak]:
        """As `Launcher`; where a launch's process is gone, so is its keeper."""
        return [
            *await asyncio.to_thread(leaks.end_left, alive),
            *await asyncio.to_thread(cgroups.sweep, alive),
        ]


class _Started(Running):
    """An agent that was started.

    One task, `_life`, sees it from its beginning to its end; whoever waits, waits for that.

    Raises:
        LaunchError: not even its keeper can be started.
    """

    def __init__(
        self, launch: Launch, level: Level, files: isolation.Files, user: User | None = None
    ) -> None:
        self.isolation: Json = isolation.described(level) | ({} if user is None else {"uid": user.uid})
        self._launch, self._level, self._user = launch, level, user
        self._over_disk = False
        self._streams = _streams(launch)
        self._group = Cgroup(launch.launch_id, launch.limits)
        self._entrances: list[int] = []
        try:
            self._entrances += self._group.entrances()
            if user is not None:
                hand_over(launch.folder, user)
            self._ours, self._process = _keeper(launch, level, files, self._entrances)
        except OSError as error:
            self._group.remove()
            for stream in self._streams.values():
                stream.connection_lost()
            raise LaunchError(f"launch {launch.launch_id}: its keeper cannot be started: {error}") from error
        finally:
            for entrance in self._entrances:
                os.close(entrance)
        if self._group.controllers:
            self.isolation = self.isolation | {"cgroup": list(self._group.controllers)}
        loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[str] = loop.create_future()
        self._writer: asyncio.StreamWriter | None = None
        self._force: asyncio.TimerHandle | None = None
        self._end = loop.create_task(self._life(), name=f"agent {launch.launch_id}")
        self._disk = None if launch.limits.disk_mb is None else loop.create_task(self._watch_disk())

    async def begin(self) -> None:
        """See it started.

        Raises:
            LaunchError: it was not.
        """
        answer = await self._unless_cancelled(self._answer)
        if answer != "started":
            try:
                await self._unless_cancelled(self._end)
            except OSError as error:
                raise LaunchError(_not_started(self._launch, self._level, str(error))) from error
            why = answer.removeprefix("failed ") or self._streams["stderr"].beginning()
            raise LaunchError(_not_started(self._launch, self._level, why))

    async def wait(self) -> Exit:
        """Wait until its first process ended, then end whatever else of it runs."""
        return await self._unless_cancelled(self._end)

    async def stop(self, grace_s: float) -> Exit:
        """Ask it to end, and after `grace_s` end what is left."""
        if self._writer is not None and not self._end.done():
            self._writer.write(b"T")
        await self._unless_cancelled(asyncio.ensure_future(asyncio.wait({self._end}, timeout=grace_s)))
        if not self._end.done():
            self._kill()
        return await self.wait()

    async def _unless_cancelled(self, waited: asyncio.Future[T]) -> T:
        """Wait for something. Cancelled, end the agent, and wait for that."""
        try:
            return await asyncio.shield(waited)
        except asyncio.CancelledError:
            self._kill()
            await asyncio.wait({self._end})
            raise

    def _kill(self) -> None:
        """Have all of it ended now."""
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_WR)
        if self._force is None and not self._end.done():
            insist_s = INSIST_S + (reaper.AFTER_S if self._launch.after else 0.0)
            self._force = asyncio.get_running_loop().call_later(insist_s, self._process.kill)

    async def _watch_disk(self) -> None:
        """End it once its folder has taken more of the disk than it may."""
        most = (self._launch.limits.disk_mb or 0) * MIB
        while not self._over_disk:
            await asyncio.sleep(LOOK_S)
            self._over_disk = await asyncio.to_thread(bytes_used, self._launch.folder) > most
        self._kill()

    async def _life(self) -> Exit:
        transports: list[asyncio.BaseTransport] = []
        try:
            reader, self._writer = await asyncio.open_unix_connection(sock=self._ours)
            transports.append(self._writer.transport)
            for name, stream in self._streams.items():
                transports.append(await stream.follow(getattr(self._process, name)))
            report = await self._heard(reader)
            await asyncio.to_thread(self._process.wait)
            exit_ = _exit(report)
            if exit_ is None and self._answer.done() and self._answer.result() == "started":
                left = await asyncio.to_thread(leaks.end_launch, self._launch.launch_id)
                leaked = tuple({"pid": leak.pid, "command": leak.command} for leak in left)
                exit_ = Exit(None, signal.SIGKILL, left=leaked)
            exit_ = await asyncio.to_thread(_with_group, exit_, self._group, self._launch.limits)
            await asyncio.wait({stream.closed for stream in self._streams.values()}, timeout=LAST_WORDS_S)
        except BaseException:  # the loop itself ends, or lacks descriptors: nobody will look after the agent
            self._kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(INSIST_S)
            self._process.kill()
            self._group.end()
            raise
        finally:
            if not self._answer.done():
                self._answer.set_result("")
            for transport in transports:
                transport.close()
            for timer in (self._force, self._disk):
                if timer is not None:
                    timer.cancel()
        printed = {name: stream.count for name, stream in self._streams.items()}
        complaint = self._streams["stderr"].beginning()
        exit_ = replace(exit_ or Exit(None, None), printed=printed, complaint=complaint)
        if self._over_disk:
            return replace(exit_, error=f"it took more than limits.disk_mb = {self._launch.limits.disk_mb}")
        return exit_

    async def _heard(self, reader: asyncio.StreamReader) -> list[str]:
        """What the keeper says, after it was told what to start and answered that."""
        assert self._writer is not None
        rest = b""
        with contextlib.suppress(OSError):  # it ended before it had read all
            task = (self._launch, self._level, self._group, self._entrances, self._user)
            self._writer.write(_marshalled(*task))
            answer = await reader.readline()
            self._answer.set_result(answer.decode(errors="replace").strip())
            rest = await reader.read()
        return rest.decode(errors="replace").splitlines()


def _streams(launch: Launch) -> dict[str, _OutputLog]:
    if not _LAUNCH_ID.fullmatch(launch.launch_id):
        raise LaunchError(f"launch {launch.launch_id!r}: an id has letters, digits and '-' alone")
    if not launch.command:
        raise LaunchError(f"launch {launch.launch_id}: there is no command")
    if not launch.folder.is_dir():
        raise LaunchError(f"launch {launch.launch_id}: its folder {launch.folder} is not there")
    most = int(launch.limits.output_mb * MIB)
    try:
        launch.output.mkdir(parents=True, exist_ok=True)
        return {name: _OutputLog(launch.output / f"{name}.log", most) for name in ("stdout", "stderr")}
    except OSError as error:
        raise LaunchError(f"launch {launch.launch_id}: its output cannot be written: {error}") from error


def _keeper(
    launch: Launch, level: Level, files: isolation.Files, passed: list[int]
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A keeper, which has the descriptors that are passed, and our end of the socket to it.

    It does not get the agent's environment, which may bend loaders.
    """
    command = [isolation.interpreter(), "-I", "-S", str(Path(reaper.__file__).resolve())]
    environment = {leaks.LAUNCH_ID: launch.launch_id, leaks.KEEPER: "1", **leaks.start()}
    if "LD_LIBRARY_PATH" in os.environ:  # by which the interpreter may find its own library
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            isolation.wrapped(
                *(level, command, launch.folder.absolute(), files, launch.places),
                as_another=launch.user is not None,
                disk_mb=launch.limits.disk_mb,
            ),
            stdin=theirs.fileno(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd="/",
            start_new_session=level != "none",
            pass_fds=passed,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours, process


def _marshalled(
    launch: Launch, level: Level, group: Cgroup, entrances: list[int], user: User | None
) -> bytes:
    """What the keeper is sent, which runs on this very interpreter."""
    # The environment of a client is not its agent's: what it starts for others is no process of the launch.
    tag = {} if launch.after else {leaks.LAUNCH_ID: launch.launch_id, **leaks.start()}
    task = {
        "command": list(launch.command),
        "environment": {**launch.environment, **tag},
        "folder": str(launch.folder.absolute()),
        "limits": _limits(launch.limits, of_all=group.controllers),
        "entrances": entrances,
        "own_group": level != "none",
        "after": list(launch.after),
        "user": [] if user is None else [user.uid, user.gid, *user.groups],
    }
    data = marshal.dumps(task)
    return len(data).to_bytes(reaper.LENGTH_BYTES, "big") + data


def _limits(limits: Limits, of_all: Sequence[str]) -> dict[str, int]:
    """Limits of each process, without those that a cgroup holds all of them to."""
    wanted = {
        "CORE": 0,
        "AS": None if "memory" in of_all else limits.memory_mb and limits.memory_mb * MIB,
        "CPU": limits.cpu_s,
        "FSIZE": limits.file_mb and limits.file_mb * MIB,
        "NOFILE": limits.open_files,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def _exit(report: list[str]) -> Exit | None:
    """What the keeper reported; None: it ended before it could."""
    left: list[Json] = []
    for line in report:
        what, _, rest = line.partition(" ")
        if what == "left":
            pid, _, command = rest.partition(" ")
            left.append({"pid": int(pid), "command": command})
        elif what == "ended":
            code, number, cpu_s, rss_kb = rest.split()
            ended_by = int(number) or None
            return Exit(
                code=None if ended_by else int(code),
                signal=ended_by,
                cpu_s=float(cpu_s),
                peak_rss_mb=round(int(rss_kb) / 1024, 1),
                left=tuple(left),
            )
    return None


def _with_group(exit_: Exit | None, group: Cgroup, limits: Limits) -> Exit | None:
    """How an agent ended, with what its cgroup says of it; the group is removed."""
    usage, left = group.taken(), group.end()
    if exit_ is None or not group.controllers:
        return exit_
    how = f"signal {exit_.signal} ended it" if exit_.code is None else f"it exited with {exit_.code}"
    error = exit_.error
    if exit_.code != 0 and usage.killed:
        error = f"{how}: it took more than limits.memory_mb = {limits.memory_mb}"
    elif exit_.code != 0 and usage.refused:
        error = f"{how}: it was refused more than limits.processes = {limits.processes}"
    known = {found_pid["pid"] for found_pid in exit_.left}
    return replace(
        exit_,
        error=error,
        cpu_s=exit_.cpu_s if usage.cpu_s is None else round(usage.cpu_s, 3),
        peak_rss_mb=exit_.peak_rss_mb if usage.peak_mb is None else usage.peak_mb,
        left=(*exit_.left, *({"pid": pid, "command": command} for pid, command in left if pid not in known)),
    )


def _not_started(launch: Launch, level: Level, why: str) -> str:
    program = launch.command[0]
    message = f"launch {launch.launch_id}: {program!r} cannot be started: {why}"
    if "No such file" in why:
        if "/" not in program:
            message += f" in PATH={launch.environment.get('PATH', os.defpath)}"
        if level == "bwrap":
            message += "; at isolation 'bwrap' there are the system's programs, its own folder, and no more"
    return message


LOOK_S = 2.0
"""Between two measurements; what is written meanwhile goes beyond the bound."""
_BLOCK = 512
"""Bytes of a block of `st_blocks`, whatever the file system's own are."""


def bytes_used(folder: Path) -> int:
    """What a folder takes of the disk, with all that is in it: a file of two names once, links as links."""
    seen: set[tuple[int, int]] = set()
    used = 0
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):  # it is gone by now
                entry = os.lstat(os.path.join(root, name))
                place = (entry.st_dev, entry.st_ino)
                used += 0 if place in seen else entry.st_blocks * _BLOCK
                seen |= {place} if entry.st_nlink > 1 else set()
    return used
