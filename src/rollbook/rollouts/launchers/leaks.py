"""Processes that launches left behind: found by what is in their environment, never by a name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from rollbook.rollouts.launchers.launching import Leak
from rollbook.store.whose import START

LAUNCH_ID, KEEPER = "ROLLBOOK_LAUNCH_ID", "ROLLBOOK_KEEPER"
"""In the environment of all processes of a launch; of its keeper, and what this is wrapped in, alone."""
TOLD_LENGTH = 500
"""Most characters of a command line."""


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


def command_of(pid: int) -> str:
    """A process's command line; `?` of one that has none, or ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "?"
    return " ".join(words.split())[:TOLD_LENGTH] or "?"
