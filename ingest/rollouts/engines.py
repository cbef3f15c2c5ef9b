"""Docker or podman by its command line: what is there, images, containers by label."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from rollbook.store.errors import LaunchError
from rollbook.store.events import Json

ANSWER_S = 60.0
"""An engine that takes longer for an answer is away."""
PULL_S = 3600.0
LAUNCH, HOST = "rollbook.launch", "rollbook.host"
"""Labels of a container: its launch, and where the launcher watches over it."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that answers.

    Attributes:
        program: its command line's full path.
        name: docker or podman.
        version, runtime: of the engine, and of what makes its containers.
        rootless: user 0 in a container is the user that runs this.
    """

    program: str
    name: Literal["docker", "podman"]
    version: str
    runtime: str
    rootless: bool

    def image(self, name: str) -> Json:
        """What the engine says of an image.

        Raises:
            LaunchError: it is not there, and cannot be pulled.
        """
        found = self._said("image", "inspect", name)
        if found is None:
            pulled = _run([self.program, "pull", "--quiet", name], PULL_S)
            found = self._said("image", "inspect", name)
            if found is None:
                why = _last(pulled.stderr) or f"it ended with {pulled.returncode}"
                raise LaunchError(f"image {name!r} is not there, and {self.name} cannot pull it: {why}")
        [image] = found
        return dict(image)

    def containers(self) -> list[Json]:
        """All containers of launches, as the engine describes them."""
        listed = _run([self.program, "ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={LAUNCH}"])
        ids = listed.stdout.decode().split()
        # One that goes meanwhile is left out of the answer, whatever the exit code.
        return (self._said("container", "inspect", *ids, whole=False) or []) if ids else []

    def remove(self, container: str) -> None:
        """End a container, and remove it with what is its own."""
        _run([self.program, "kill", container])
        _run([self.program, "rm", "--force", "--volumes", container])

    def _said(self, *words: str, whole: bool = True) -> list[Any] | None:
        done = _run([self.program, *words])
        try:
            said = orjson.loads(done.stdout)
        except orjson.JSONDecodeError:
            return None
        return None if done.returncode and whole else said


def engine(asked: Literal["auto", "docker", "podman"]) -> Engine:
    """The engine that is asked for.

    Raises:
        LaunchError: none answers; it says why.
    """
    reasons = []
    for name in ("docker", "podman") if asked == "auto" else (asked,):
        program = shutil.which(name)
        if program is None:
            reasons.append(f"there is no {name!r}: install it")
            continue
        done = _run([program, "info", "--format", "{{json .}}"])
        try:
            facts = orjson.loads(done.stdout)
            # Without its daemon the client of Docker says what it knows itself, and ends well.
            errors = facts.get("ServerErrors") or []
        except orjson.JSONDecodeError:
            facts, errors = None, []
        if done.returncode == 0 and facts is not None and not errors:
            return _of_docker(program, facts) if "ServerVersion" in facts else _of_podman(program, facts)
        reasons.append(f"{name} does not answer: {' '.join(errors) or _last(done.stderr)}")
    raise LaunchError("; ".join(reasons))


def _of_docker(program: str, facts: Json) -> Engine:
    rootless = any("rootless" in option for option in facts.get("SecurityOptions") or ())
    return Engine(program, "docker", facts["ServerVersion"], facts.get("DefaultRuntime", "?"), rootless)


def _of_podman(program: str, facts: Json) -> Engine:
    host = facts["host"]
    rootless = bool(host["security"]["rootless"])
    return Engine(program, "podman", facts["version"]["Version"], host["ociRuntime"]["name"], rootless)


def _run(command: Sequence[str], limit_s: float = ANSWER_S) -> subprocess.CompletedProcess[bytes]:
    """Run a command of an engine; one that takes too long failed."""
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, b"", str(error).encode())


def _last(said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
