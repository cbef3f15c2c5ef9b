"""A real podman with an image of this host's busybox: what tests of containers run on."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

APPLETS = ("cat", "dd", "echo", "env", "id", "ls", "ps", "sh", "sleep", "test", "touch", "true", "wget")
IMAGE = "localhost/rollbook-test:busybox"
# Where a container may not raise its limits, as in a container, podman's own defaults fail.
SETTINGS = """
[containers]
default_ulimits = []
[engine]
runtime = "runc"
"""


def missing() -> str | None:
    """What lacks here to run containers, for a reason to skip; in CI it is required to be nothing."""
    for program in ("podman", "runc", "busybox", "catatonit"):
        if shutil.which(program) is None:
            return f"there is no {program}"
    return None


def prepare(folder: Path) -> None:
    """Make the image, and let podman of this process's environment run it.

    Raises:
        CalledProcessError: podman does not work here.
    """
    settings = folder / "containers.conf"
    settings.write_text(SETTINGS)
    os.environ["CONTAINERS_CONF"] = str(settings)
    busybox = shutil.which("busybox")
    assert busybox is not None
    with tarfile.open(folder / "image.tar", "w") as image:
        image.add(os.path.realpath(busybox), "bin/busybox")
        for name in APPLETS:
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            image.addfile(link)
        for name, mode in (("tmp", 0o1777), ("etc", 0o755)):
            made = tarfile.TarInfo(name)
            made.type, made.mode = tarfile.DIRTYPE, mode
            image.addfile(made)
    _podman(
        "import", "--change", "ENV=PATH=/bin", "--change", "ENV=OF_IMAGE=1", str(folder / "image.tar"), IMAGE
    )
    _podman("run", "--rm", "--init", "--network=host", IMAGE, "/bin/true")


def _podman(*words: str) -> str:
    done = subprocess.run(["podman", *words], check=True, capture_output=True, text=True, timeout=120)
    return done.stdout
