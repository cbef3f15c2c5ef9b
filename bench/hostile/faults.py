"""Attacks on the proxy's underlying resources: descriptors, the disk. While they last nothing can
be recorded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from rollbook.bench.hostile.attack import ANYTHING, RECORD, TOKENS, Ground, attack

BOTH = (TOKENS, RECORD)


async def _last(ground: Ground, share: float = 0.6) -> None:
    """Let a fault last, while the attacker sends requests."""
    for _ in range(int(10 * share)):
        await ground.chat(ground.name(), "hi", allowed=ANYTHING)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ground.over.wait(), 0.1)


@attack(proxies=BOTH, at_once=1, refuses=True)
async def no_descriptors(ground: Ground) -> None:
    """No descriptor left, as its limit is reached: the writer goes on, with what it held in reserve."""
    used = len(list(Path(f"/proc/{ground.process.pid}/fd").iterdir()))
    await ground.key(ground.name())
    with limited(ground.process.pid, resource.RLIMIT_NOFILE, used):
        await _last(ground)
    await _last(ground)


@attack(proxies=BOTH, at_once=1, refuses=True)
async def files_that_cannot_grow(ground: Ground) -> None:
    """Writes fail for a while, as on a full disk: 503 meanwhile, and it resumes by itself."""
    with limited(ground.process.pid, resource.RLIMIT_FSIZE, 4096):
        await _last(ground)
    await _last(ground)


@attack(proxies=BOTH, at_once=1, refuses=True)
async def a_disk_that_is_read_only(ground: Ground) -> None:
    """No file can be made for a while, as on a disk that became read-only: it resumes by itself."""
    lanes = Path(ground.process.folder) / "store" / "lanes"
    with read_only(lanes if lanes.is_dir() else lanes.parent):
        await _last(ground, 1.2)
    await _last(ground)


@contextlib.contextmanager
def limited(pid: int, what: int, soft: int) -> Iterator[None]:
    """A limit of a living process while the context lasts."""
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (soft, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, what, before)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A folder in which no file can be made while the context lasts.

    With the right to mount, a read-only mount covers it, which holds for everybody; otherwise
    its permissions forbid it, which hold for all but the superuser.
    """
    if os.geteuid() != 0 or shutil.which("mount") is None or not _mounted(folder):
        mode = folder.stat().st_mode
        folder.chmod(0o500)
        try:
            yield
        finally:
            folder.chmod(mode)
        return
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def _mounted(folder: Path) -> bool:
    """Bind-mount the folder onto itself, read-only; whether that is allowed."""
    if subprocess.run(["mount", "--bind", folder, folder], stderr=subprocess.DEVNULL).returncode:
        return False
    words = ["mount", "-o", "remount,bind,ro", str(folder)]
    if subprocess.run(words, stderr=subprocess.DEVNULL).returncode:
        subprocess.run(["umount", "--lazy", folder])
        return False
    return True
