"""Real engines of containers, with an image of this host's busybox: what tests of containers run on."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

APPLETS = ("cat", "dd", "echo", "env", "id", "ls", "ps", "sh", "sleep", "test", "touch", "true", "wget")
IMAGE = "rollbook-test:busybox"
# Where a container may not raise its limits, as in a container, podman's own defaults fail.
PODMAN_SETTINGS = """
[containers]
default_ulimits = []
[engine]
runtime = "runc"
"""
PROGRAMS = {"podman": ("podman", "runc", "busybox", "catatonit"), "docker": ("docker", "busybox")}


def missing(engine: str) -> str | None:
    """What lacks here to run containers, for a reason to skip."""
    for program in PROGRAMS[engine]:
        if shutil.which(program) is None:
            return f"there is no {program}"
    if engine == "docker" and said(engine, "info", "--format", "{{.ServerVersion}}", check=False) == "":
        return "docker's daemon does not answer"
    return None


def prepare(engine: str, folder: Path) -> None:
    """Make the image, and let an engine in this process's environment run it.

    Raises:
        CalledProcessError: it does not work here.
    """
    if engine == "podman":
        (folder / "containers.conf").write_text(PODMAN_SETTINGS)
        os.environ["CONTAINERS_CONF"] = str(folder / "containers.conf")
    busybox = shutil.which("busybox")
    assert busybox is not None
    with tarfile.open(folder / "image.tar", "w") as image:
        image.add(os.path.realpath(busybox), "bin/busybox")
        for name in APPLETS:
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            image.addfile(link)
        for name, mode in (("tmp", 0o1777), ("etc", 0o755)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            image.addfile(entry)
    changes = ("--change", "ENV PATH=/bin", "--change", "ENV OF_IMAGE=1")
    said(engine, "import", *changes, str(folder / "image.tar"), IMAGE)
    said(engine, "run", "--rm", "--init", "--network=host", IMAGE, "/bin/true")


def said(engine: str, *words: str, check: bool = True) -> str:
    """What an engine's command prints."""
    done = subprocess.run([engine, *words], check=check, capture_output=True, text=True, timeout=120)
    return done.stdout.strip()
