"""Agents in containers of Docker or podman: one for each launch, which is gone once the launch is.

The engine is asked by its command line. The client that starts a container and shows what it prints runs
under a keeper, as agents of this host do: it ends the container, and removes it, also when this process is
killed. What even the keeper could not remove is found by its label.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import orjson

from rollbook.rollouts.config import ContainerConfig
from rollbook.rollouts.launchers import cgroups
from rollbook.rollouts.launchers.agent_environment import DEFAULT_NETWORK, GATEWAY, HOST_NETWORK
from rollbook.rollouts.launchers.launching import Exit, Launch, Launcher, Leak, Limits, Running
from rollbook.rollouts.launchers.reaper import TOLD_LENGTH
from rollbook.rollouts.launchers.subprocess_launcher import MIB, SubprocessLauncher
from rollbook.store.errors import LaunchError
from rollbook.store.events import Json

AFTER = """
[ -s "$3" ] || "$1" container inspect --format '{{json .State}}' "$2" > "$3"
"$1" kill "$2"
exec "$1" rm --force --volumes "$2"
"""
"""It may run twice: what the state was is known before the first removal."""
_OF_ENGINES = re.compile(
    r"(?i)path|home|user|tmpdir|lang|lc_.*|tz|.*_proxy|notify_socket|listen_(pid|fds|fdnames)"
    r"|(docker|compose|podman|containers?|buildah|conmon|libpod|cni|netavark|storage|registry)_.*"
    r"|(xdg|dbus|ssh|ssl|ld)_.*|go(debug|gc|maxprocs|memlimit|traceback)"
)
"""Variables that an engine's client may itself heed: an agent's are not to reach it."""
_NOT_RUN = re.compile(r"(?:ERROR \(catatonit:\d+\): |\[FATAL tini \(\d+\)\] )(.*)")
"""What the process that starts the agent in a container says if it cannot."""
CLIENT_FAILED = 125
"""A client's exit code where it, and no agent, failed."""
NEVER = "0001-01-01"
"""When a container started that did not."""


class ContainerLauncher(Launcher):
    """Starts agents in containers.

    Args:
        container: what they run in.
        network: theirs, as the engine calls it; `default` is the engine's own.
    """

    def __init__(self, container: ContainerConfig, network: str) -> None:
        self._container, self._network = container, network
        self._clients = SubprocessLauncher()
        self._lock = threading.Lock()
        self._known: tuple[Engine, Json] | None = None

    async def start(self, launch: Launch) -> Running:
        """Start an agent.

        Raises:
            LaunchError: no engine answers, or the image cannot be had, or not even the engine's client can be
                started. What else keeps it from running its end says.
        """
        engine_, isolation = await asyncio.to_thread(self._looked_up)
        await asyncio.to_thread(_give, launch.folder, self._container.user)
        command, environment = self._client(launch, engine_)
        after = ("sh", "-c", AFTER, "sh", engine_.program, _name(launch), str(_state_file(launch)))
        client = replace(
            launch,
            command=tuple(command),
            environment=environment,
            isolation="session",
            require="none",
            limits=Limits(disk_mb=launch.limits.disk_mb, output_mb=launch.limits.output_mb),
            after=after,
        )
        return _Contained(
            await self._clients.start(client),
            launch,
            isolation | {"limits": _container_limits(launch.limits)},
        )

    async def sweep(self, alive: frozenset[str], dead: frozenset[str] = frozenset()) -> list[Leak]:
        """As `Launcher`."""
        return await asyncio.to_thread(self._sweep, alive, dead)

    def _sweep(self, alive: frozenset[str], dead: frozenset[str]) -> list[Leak]:
        try:
            engine_ = self._engine()
        except LaunchError:
            return []
        # First the containers and then who is watched over: a keeper is there before its container is.
        there = engine_.containers()
        spared = alive | cgroups.watched_launches()
        gone = []
        for container in there:
            labels = container["Config"]["Labels"]
            launch_id = labels[LAUNCH]
            if launch_id in dead or (labels.get(HOST) == _host() and launch_id not in spared):
                engine_.remove(container["Id"])
                command = (
                    f"container {container['Id'][:12]}: {' '.join(container['Config'].get('Cmd') or ())}"
                )
                gone.append(Leak(launch_id, container["State"].get("Pid") or 0, command[:TOLD_LENGTH]))
        return gone

    # What is there ----------------------------------------------------------------------------

    def _looked_up(self) -> tuple[Engine, Json]:
        """The engine, and what is said of each launch's isolation."""
        engine_ = self._engine()
        with self._lock:
            if self._known is None or self._known[0] != engine_:
                image = engine_.image(self._container.image)
                self._known = (
                    engine_,
                    {
                        "level": "container",
                        **{"pid_namespace": True, "dies_with_launcher": True, "own_files": True},
                        **{"engine": engine_.name, "version": engine_.version, "runtime": engine_.runtime},
                        **{"rootless": engine_.rootless, "network": self._network},
                        **{"image": self._container.image, "image_id": image["Id"].removeprefix("sha256:")},
                        "digests": sorted(word.rpartition("@")[2] for word in image.get("RepoDigests") or ()),
                        "platform": f"{image.get('Os')}/{image.get('Architecture')}",
                    },
                )
            return self._known

    def _engine(self) -> Engine:
        with self._lock:
            if self._known is not None:
                return self._known[0]
        return engine(self._container.engine)

    # The command line -------------------------------------------------------------------------

    def _client(self, launch: Launch, engine_: Engine) -> tuple[list[str], dict[str, str]]:
        """The client's command line, and its environment.

        The agent's variables are in the client's environment, and only named on its command line, which every
        user of this host can read; but for those that the client itself would heed.
        """
        container, own = self._container, dict(os.environ)
        words = [
            engine_.program,
            "run",
            "--name",
            _name(launch),
            "--init",
            "--pull=never",
            "--log-driver=none",
        ]
        labels = {LAUNCH: launch.launch_id, HOST: _host(), **launch.labels}
        words += [f"--label={name}={value}" for name, value in labels.items()]
        words += ["--security-opt=no-new-privileges", "--cap-drop=ALL", f"--user={_user(container, engine_)}"]
        if engine_.name == "podman" and engine_.rootless:
            words.append("--userns=keep-id")
        if self._network != DEFAULT_NETWORK:
            words.append(f"--network={self._network}")
        if self._network != HOST_NETWORK:
            words.append(f"--add-host={GATEWAY}:host-gateway")
        words += _mounts(container, launch)
        words += [f"--workdir={container.workdir or container.folder}", *_limits(launch.limits)]
        for name, value in launch.environment.items():
            if _OF_ENGINES.fullmatch(name):
                words.append(f"--env={name}={value}")
            else:
                words.append(f"--env={name}")
                own[name] = value
        return [*words, *container.options, container.image, *launch.command], own


class _Contained(Running):
    """An agent whose container's client runs."""

    def __init__(self, client: Running, launch: Launch, isolation: Json) -> None:
        self.isolation = isolation
        self._client, self._launch = client, launch
        self._exit: Exit | None = None

    async def wait(self) -> Exit:
        """Wait until its first process ended, and its container is gone."""
        client = await self._client.wait()
        self._exit = self._exit or self._ended(client)
        return self._exit

    async def stop(self, grace_s: float) -> Exit:
        """End it: SIGTERM by the client to its first process, and after `grace_s` the container."""
        client = await self._client.stop(grace_s)
        self._exit = self._exit or self._ended(client)
        return replace(self._exit, infrastructure=None)

    def _ended(self, client: Exit) -> Exit:
        """How the container ended, as the engine said; of the client's own end only what it printed."""
        state = _read(_state_file(self._launch))
        exit_ = Exit(None, None, printed=client.printed, complaint=client.complaint)
        if state is None and client.code != CLIENT_FAILED:
            return replace(exit_, code=client.code, infrastructure="its container was removed while it ran")
        if state is None or str(state.get("StartedAt", NEVER)).startswith(NEVER):
            why = (state or {}).get("Error") or client.complaint or f"its client ended with {client.code}"
            return replace(exit_, code=client.code, infrastructure=f"its container did not start: {why}")
        if state.get("Running"):
            why = f"its client ended with {client.code} while it ran: {client.complaint}"
            return replace(exit_, signal=signal.SIGKILL, infrastructure=why)
        code = int(state["ExitCode"])
        if code and not client.printed.get("stdout") and (not_run := _NOT_RUN.fullmatch(client.complaint)):
            return replace(exit_, code=code, infrastructure=f"its program cannot be started: {not_run[1]}")
        error = _by_memory(code, self._launch.limits, known=bool(state.get("OOMKilled")))
        exit_ = replace(exit_, error=error)
        return replace(exit_, signal=code - 128) if 128 < code < 193 else replace(exit_, code=code)


# Words ------------------------------------------------------------------------------------------------


def _host() -> str:
    """Where keepers can be seen from here: this boot's processes, of this namespace and user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}-{os.getuid()}"


def _name(launch: Launch) -> str:
    return f"rollbook-{launch.launch_id}"


def _user(container: ContainerConfig, engine_: Engine) -> str:
    """Whom an agent runs as: by default whoever runs this, to whom then belongs what it writes."""
    if container.user is not None:
        return container.user
    own = f"{os.getuid()}:{os.getgid()}"
    return "0:0" if engine_.rootless and engine_.name == "docker" else own


def _give(folder: Path, user: str | None) -> None:
    """Let a launch's folder belong to whom the agent runs as.

    Raises:
        LaunchError: only root can.
    """
    if user is None:
        return
    owner, _, group = user.partition(":")
    if os.getuid() == 0:
        for path in (folder, *folder.iterdir()):
            os.chown(path, int(owner), int(group or owner))
    elif int(owner) != os.getuid():
        raise LaunchError(f"agent.container.user {user!r}: only root can let a folder belong to another user")


def _state_file(launch: Launch) -> Path:
    """What the engine said of its container at the end; where the agent cannot put a link in its place."""
    return launch.folder.absolute().with_name(f"{launch.folder.name}.container.json")


def _read(path: Path) -> Json | None:
    """What a state file says; None: nothing. It is read once."""
    try:
        data = path.read_bytes()
        path.unlink()
        state: Json = orjson.loads(data)
    except (OSError, orjson.JSONDecodeError):
        return None
    return state


def _mounts(container: ContainerConfig, launch: Launch) -> list[str]:
    """What an agent sees of this host: its folder, and what is configured.

    Raises:
        LaunchError: its folder has a name that no engine takes.
    """
    own = str(launch.folder.absolute())
    if "," in own:
        raise LaunchError(f"folder {own!r}: no engine takes a path with a comma; choose another `folder`")
    words = [f"--mount=type=bind,source={own},target={container.folder}"]
    for text in container.mounts:
        here, there, *mode = text.split(":")
        readonly = "" if mode == ["rw"] else ",readonly"
        words.append(f"--mount=type=bind,source={Path(here).absolute()},target={there}{readonly}")
    return words


def _container_limits(limits: Limits) -> Json:
    """The limits that a container is held to as a whole."""
    bounds = {"memory_mb": limits.memory_mb, "processes": limits.processes, "cpus": limits.cpus}
    return {name: value for name, value in bounds.items() if value is not None}


def _by_memory(code: int, limits: Limits, *, known: bool) -> str | None:
    """The error of an end for want of memory, as far as it is known; podman often does not know it."""
    limit = f"limits.memory_mb = {limits.memory_mb}"
    if known:
        return f"it took more than {limit}"
    perhaps = limits.memory_mb is not None and code == 128 + signal.SIGKILL
    return f"SIGKILL ended it, as what takes more than {limit}" if perhaps else None


def _limits(limits: Limits) -> list[str]:
    memory = limits.memory_mb and f"{limits.memory_mb}m"
    words = {
        **{"pids-limit": limits.processes, "cpus": limits.cpus},
        **{"memory": memory, "memory-swap": memory},  # with swap, as much: none
    }
    of_each = {
        "cpu": limits.cpu_s,
        "fsize": limits.file_mb and limits.file_mb * MIB,
        "nofile": limits.open_files,
    }
    return [
        *(f"--{name}={value}" for name, value in words.items() if value is not None),
        *(f"--ulimit={name}={value}:{value}" for name, value in of_each.items() if value is not None),
    ]


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
        images = self._answer("image", "inspect", name)
        if images is None:
            pulled = _run([self.program, "pull", "--quiet", name], PULL_S)
            images = self._answer("image", "inspect", name)
            if images is None:
                why = _last(pulled.stderr) or f"it ended with {pulled.returncode}"
                raise LaunchError(f"image {name!r} is not there, and {self.name} cannot pull it: {why}")
        [image] = images
        return dict(image)

    def containers(self) -> list[Json]:
        """All containers of launches, as the engine describes them."""
        listed = _run([self.program, "ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={LAUNCH}"])
        ids = listed.stdout.decode().split()
        # One that goes meanwhile is left out of the answer, whatever the exit code.
        return (self._answer("container", "inspect", *ids, whole=False) or []) if ids else []

    def remove(self, container: str) -> None:
        """End a container, and remove it with what is its own."""
        _run([self.program, "kill", container])
        _run([self.program, "rm", "--force", "--volumes", container])

    def _answer(self, *words: str, whole: bool = True) -> list[Any] | None:
        done = _run([self.program, *words])
        try:
            value = orjson.loads(done.stdout)
        except orjson.JSONDecodeError:
            return None
        return None if done.returncode and whole else value


def engine(wanted: Literal["auto", "docker", "podman"]) -> Engine:
    """The engine that is asked for.

    Raises:
        LaunchError: none answers; it says why.
    """
    reasons = []
    for name in ("docker", "podman") if wanted == "auto" else (wanted,):
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


def _last(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
