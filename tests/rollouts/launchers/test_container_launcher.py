"""Agents in real containers: they get what they are told and no more, and nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.fakes.processes import container_engine
from tests.fakes.processes.container_engine import IMAGE
from tests.fakes.processes.rollout_runs import columns_of, launches, run
from tests.fakes.processes.warm import WarmProcess
from tests.fakes.proxies.served import Served

from rollbook.rollouts.config import AgentConfig, ContainerConfig, RolloutConfig, parse_rollouts
from rollbook.rollouts.launchers.agent_environment import address_in, network_of
from rollbook.rollouts.launchers.container_launcher import ContainerLauncher, Engine
from rollbook.rollouts.launchers.launching import Exit, Launch, Limits
from rollbook.rollouts.tasks import Task
from rollbook.store.errors import LaunchError


@pytest.fixture(scope="module", params=["podman", "docker"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine with an image; skipped with the reason where it is not there. Podman may be required."""
    name: str = request.param
    required = name == "podman" and os.environ.get("ROLLBOOK_CONTAINERS") == "required"
    why = container_engine.missing(name)
    if why is not None and not required:
        pytest.skip(why)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", "")
        try:
            container_engine.prepare(name, tmp_path_factory.mktemp("image"))
        except subprocess.CalledProcessError as error:
            if required:
                raise
            pytest.skip(f"{name} does not work here: {error.stderr.strip()}")
        yield name


class Containers:
    """Starts shell commands as agents in containers."""

    def __init__(self, engine: Literal["docker", "podman"], folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.mine: list[str] = []

    def launch(self, command: str, limits: Limits | None = None, **variables: str) -> Launch:
        """A launch of a command."""
        launch_id = f"c-{uuid.uuid4().hex}"
        folder = self.folder / launch_id
        folder.mkdir(mode=0o700)
        self.mine.append(launch_id)
        words = ("/bin/sh", "-c", command)
        return Launch(launch_id, words, variables, folder, folder, limits=limits or Limits())

    def launcher(self, **changes: Any) -> ContainerLauncher:
        """Of the engine."""
        return ContainerLauncher(ContainerConfig(image=IMAGE, engine=self.engine, **changes), "host")

    def run(
        self, command: str, limits: Limits | None = None, mounts: tuple[str, ...] = (), **variables: str
    ) -> tuple[Exit, Launch]:
        """How an agent ended that nobody stopped."""
        launch = self.launch(command, limits, **variables)

        async def run() -> Exit:
            return await (await self.launcher(mounts=mounts).start(launch)).wait()

        return asyncio.run(run()), launch

    def said(self, *words: str) -> str:
        """What the engine's command prints."""
        return container_engine.said(self.engine, *words)

    def remove(self, name: str) -> None:
        """As somebody else would."""
        at_once = ["--time=0"] if self.engine == "podman" else []
        container_engine.said(self.engine, "rm", "--force", *at_once, name, check=False)

    def left(self) -> list[str]:
        """Containers of these launches that are there, running or not."""
        names = self.said("ps", "--all", "--format", "{{.Names}}").split()
        return [name for name in names if name.removeprefix("rollbook-") in self.mine]

    def watched(self) -> list[str]:
        """The command lines of the processes by which podman watches over containers of these launches."""
        commands = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().decode(errors="replace").split("\0")
                if Path(words[0]).name == "conmon" and any(
                    f"rollbook-{launch_id}" in words for launch_id in self.mine
                ):
                    commands.append(" ".join(words))
        return commands


@pytest.fixture
def containers(engine: Any, tmp_path: Path) -> Iterator[Containers]:
    """Starts agents; what a failed test left is removed."""
    started = Containers(engine, tmp_path)
    yield started
    for name in started.left():
        started.remove(name)


def _in_time(true: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not (done := true()) and time.monotonic() < end:
        time.sleep(0.05)
    return done


def test_it_is_told_and_has_what_it_is_given(containers: Containers, tmp_path: Path) -> None:
    """The variables of its launch and its image's, whatever they hold; its folder; nothing of ours."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/in.txt").write_text("beside")
    mounts = (f"{tmp_path}/data:/data",)
    command = (
        "env > env.txt; cat /data/in.txt > read.txt; touch /data/out.txt; id -u; echo bad >&2; "
        "ls /root /home /work; pwd; exit 3"
    )
    result, launch = containers.run(command, mounts=mounts, KEY="se cret\nof two lines", PATH="/bin:/x")
    assert (result.code, result.signal, result.infrastructure, result.left) == (3, None, None, ())
    environment = (launch.folder / "env.txt").read_text()
    assert "KEY=se cret\nof two lines\n" in environment
    assert "PATH=/bin:/x\n" in environment
    names = {line.partition("=")[0] for line in environment.splitlines() if "=" in line}
    assert names - {"KEY", "PATH", "OF_IMAGE"} <= {"HOME", "HOSTNAME", "PWD", "SHLVL", "TERM", "container"}
    assert (launch.folder / "read.txt").read_text() == "beside"
    assert not (tmp_path / "data/out.txt").exists()
    assert (launch.folder / "stdout.log").read_text() == f"{os.getuid()}\n/rollbook\n"
    assert "bad\n" in (launch.folder / "stderr.log").read_text()
    assert (launch.folder / "env.txt").stat().st_uid == os.getuid()
    assert containers.left() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [launch.launch_id, "data"]


def test_what_it_ran_in_is_told(containers: Containers) -> None:
    """The image's digest, the engine, its runtime, the limits; and by labels what it is."""
    launch = containers.launch("echo up; sleep 60", Limits(memory_mb=64, processes=9))
    launch = replace(launch, labels={"rollbook.run": "first", "rollbook.rollout": "nightly"})

    async def started() -> tuple[dict[str, Any], Any]:
        running = await containers.launcher().start(launch)
        while not (launch.folder / "stdout.log").stat().st_size:
            await asyncio.sleep(0.02)
        name = f"rollbook-{launch.launch_id}"
        labels = await asyncio.to_thread(
            containers.said, "container", "inspect", "--format", "{{json .Config.Labels}}", name
        )
        await running.stop(0)
        return running.isolation, json.loads(labels)

    isolation, labels = asyncio.run(started())
    assert labels.pop("rollbook.host").endswith(f"-{os.getuid()}")
    assert labels == {"rollbook.launch": launch.launch_id, **launch.labels}
    image = json.loads(containers.said("image", "inspect", IMAGE))[0]
    assert (isolation["level"], isolation["engine"], isolation["network"]) == (
        "container",
        containers.engine,
        "host",
    )
    # What came from no registry has a digest with podman alone.
    digests = [image["Digest"]] if "Digest" in image else []
    assert (isolation["image_id"], isolation["digests"]) == (image["Id"].removeprefix("sha256:"), digests)
    assert isolation["runtime"] == "runc"
    assert isolation["limits"] == {"memory_mb": 64, "processes": 9}


@pytest.mark.parametrize(
    ("command", "limits", "error"),
    [
        # Each takes what it can get: memory, processes.
        ("x=aaaaaaaa; while true; do x=$x$x; done", Limits(memory_mb=32), "limits.memory_mb = 32"),
        ("i=0; while test $i -lt 200; do sleep 60 & i=$((i+1)); done", Limits(processes=16), None),
    ],
)
def test_limits(containers: Containers, command: str, limits: Limits, error: str | None) -> None:
    """Of memory it is ended, of processes it gets no more; the host is none the wiser."""
    result, launch = containers.run(command, limits)
    assert result.infrastructure is None
    if error is not None:
        assert error in (result.error or "")
    else:
        assert result.code != 0
        assert "can't fork" in (launch.folder / "stderr.log").read_text()
    assert containers.left() == []


def test_what_it_prints_is_counted_and_its_beginning_kept(containers: Containers) -> None:
    """However much it is."""
    result, launch = containers.run("dd if=/dev/zero bs=1048576 count=50 2>/dev/null", Limits(output_mb=0.5))
    assert (result.code, result.printed["stdout"]) == (0, 50 << 20)
    assert (launch.folder / "stdout.log").stat().st_size == 1 << 19


@pytest.mark.parametrize(
    ("command", "grace_s", "code", "number"),
    [
        ("trap 'echo bye; exit 7' TERM; while true; do sleep 0.1; done", 10.0, 7, None),
        ("trap '' TERM; while true; do sleep 0.1; done", 0.3, None, signal.SIGKILL),
    ],
)
def test_it_is_stopped(
    containers: Containers, command: str, grace_s: float, code: int | None, number: int | None
) -> None:
    """It is asked first, and what does not heed that is ended."""
    launch = containers.launch(f"echo up; {command}")

    async def stop() -> Exit:
        running = await containers.launcher().start(launch)
        while not (launch.folder / "stdout.log").stat().st_size:
            await asyncio.sleep(0.02)
        return await running.stop(grace_s)

    result = asyncio.run(stop())
    assert (result.code, result.signal, result.infrastructure) == (code, number, None)
    assert containers.left() == []


@pytest.mark.more
def test_a_cancelled_wait_leaves_no_container(containers: Containers) -> None:
    """Not even one that is being made, of which the engine knows nothing: a process watches over it."""

    async def cancel(after_s: float) -> None:
        running = await containers.launcher().start(containers.launch("sleep 600"))
        waiting = asyncio.ensure_future(running.wait())
        await asyncio.sleep(after_s)
        waiting.cancel()
        await asyncio.wait([waiting])

    for after_s in (0.0, 0.05, 0.07, 0.08, 0.09, 0.1, 0.12, 0.2, 0.5):
        asyncio.run(cancel(after_s))
    assert _in_time(lambda: containers.watched() == []), containers.watched()
    assert containers.left() == []


@pytest.mark.parametrize(
    ("image", "command", "why"),
    [
        ("localhost/none:1", "true", "image 'localhost/none:1' is not there"),
        (IMAGE, None, "its program cannot be started: "),
    ],
)
def test_what_cannot_run_is_no_fault_of_the_agent(
    containers: Containers,
    image: str,
    command: str | None,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is said why."""
    # Podman would ask three times, with pauses, for a registry that is not there.
    registries = tmp_path / "registries.conf"
    registries.write_text('[[registry]]\nlocation = "localhost"\nblocked = true\n')
    monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(registries))
    launch = containers.launch("true")
    if command is None:
        launch = replace(launch, command=("no-such-program",))

    config = ContainerConfig(image=image, engine=containers.engine)

    async def start() -> str | None:
        try:
            running = await ContainerLauncher(config, "host").start(launch)
        except LaunchError as error:
            return str(error)
        return (await running.wait()).infrastructure

    reason = asyncio.run(start()) or ""
    assert why in reason
    assert command or reason.endswith("No such file or directory")
    assert containers.left() == []


def test_a_container_that_is_removed_by_others(containers: Containers) -> None:
    """It ended by a signal, and is not waited for."""
    launch = containers.launch("echo up; sleep 600")

    async def removed() -> Exit:
        running = await containers.launcher().start(launch)
        while not (launch.folder / "stdout.log").stat().st_size:
            await asyncio.sleep(0.02)
        name = f"rollbook-{launch.launch_id}"
        await asyncio.to_thread(containers.remove, name)
        return await running.wait()

    result = asyncio.run(removed())
    # Whether its end or its removal is seen first is the engine's haste.
    assert (
        result.signal == signal.SIGKILL or result.infrastructure == "its container was removed while it ran"
    )


# Launchers that die -------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, sys
from pathlib import Path
from rollbook.rollouts.config import ContainerConfig
from rollbook.rollouts.launchers.container_launcher import ContainerLauncher
from rollbook.rollouts.launchers.launching import Launch

image, engine, launch_id, folder = sys.argv[1:]

async def run():
    launcher = ContainerLauncher(ContainerConfig(image=image, engine=engine), "host")
    command = ("/bin/sh", "-c", "trap '' TERM; echo up; sleep 600")
    launch = Launch(launch_id, command, {}, Path(folder), Path(folder))
    await (await launcher.start(launch)).wait()

asyncio.run(run())
"""


def _start_another(containers: Containers) -> tuple[subprocess.Popen[bytes], Launch]:
    """Another process with a container, which runs."""
    launch = containers.launch("")
    words = [sys.executable, "-c", PROGRAM, IMAGE, containers.engine, launch.launch_id, str(launch.folder)]
    process = WarmProcess(words, modules=("rollbook.rollouts.launchers.container_launcher",))
    printed = launch.folder / "stdout.log"
    assert _in_time(lambda: printed.exists() and printed.stat().st_size > 0)
    return process, launch


def _keeper(launch: Launch) -> int:
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if (
            f"ROLLBOOK_LAUNCH_ID={launch.launch_id}".encode() in environment
            and b"ROLLBOOK_KEEPER=1" in environment
        ):
            return int(path.parent.name)
    raise AssertionError("it has no keeper")


def test_a_killed_launcher_leaves_no_container(containers: Containers) -> None:
    """Its keeper ends it; nobody else has to come by."""
    process, _ = _start_another(containers)
    assert len(containers.left()) == 1
    process.kill()
    process.wait()
    assert _in_time(lambda: containers.left() == [])


@pytest.mark.more
def test_what_even_a_keeper_left_is_swept(containers: Containers) -> None:
    """By its label, and told of; what another launcher watches over is spared."""
    process, launch = _start_another(containers)
    other, others = _start_another(containers)
    try:
        # First the keeper: it would otherwise see its launcher gone.
        os.kill(process.pid, signal.SIGSTOP)
        os.kill(_keeper(launch), signal.SIGKILL)
        process.kill()
        process.wait()
        assert len(containers.left()) == 2
        leaks = asyncio.run(containers.launcher().sweep(frozenset()))
        mine = [leak for leak in leaks if leak.launch_id in containers.mine]
        assert [leak.launch_id for leak in mine] == [launch.launch_id]
        assert mine[0].pid > 0
        assert "sleep 600" in mine[0].command
        assert containers.left() == [f"rollbook-{others.launch_id}"]
        # Of which it is known that nobody watches over it is ended all the same.
        leaks = asyncio.run(containers.launcher().sweep(frozenset(), frozenset({others.launch_id})))
        assert others.launch_id in [leak.launch_id for leak in leaks]
    finally:
        other.kill()
        other.wait()


# Where the proxy is ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "address", "proxy", "found"),
    [
        ("auto", None, "http://127.0.0.1:8000", ("host", "http://127.0.0.1:8000")),
        ("auto", None, "http://ml-1:8000", ("default", "http://ml-1:8000")),
        ("bridge", None, "http://localhost:8000", ("bridge", "http://host.docker.internal:8000")),
        ("bridge", "http://10.0.0.1:9", "http://localhost:8000", ("bridge", "http://10.0.0.1:9")),
        ("host", None, "http://[::1]:8000", ("host", "http://[::1]:8000")),
    ],
)
def test_the_proxy_as_it_is_from_there(
    network: str, address: str | None, proxy: str, found: tuple[str, str]
) -> None:
    """On loopback it is reached by this host's network alone."""
    agent = AgentConfig(launcher="docker", container=ContainerConfig(image=IMAGE), address=address)
    chosen = network_of(network, proxy)
    assert (chosen, address_in(chosen, agent, proxy)) == found


# Against a proxy ------------------------------------------------------------------------------------------

AGENT = """
wget -q -O answer.json --header 'content-type: application/json' \
  --header "authorization: Bearer $OPENAI_API_KEY" \
  --post-data '{"model": "m", "messages": [{"role": "user", "content": "hello"}]}' \
  $OPENAI_BASE_URL/chat/completions
test -s $ROLLBOOK_TASK_FILE
"""


@pytest.mark.more
def test_rollouts_in_containers(
    containers: Containers,
    serve: Callable[..., Served],
    text_model: Callable[[str], Path],
    script: Path,
    tmp_path: Path,
) -> None:
    """They reach a proxy on loopback, are scored by what they left, and those that a clock ends are gone."""
    model = str(text_model("chatml"))
    server = serve("--model", model, "--engine", "scripted", "--script", f"{script}:answer", "--no-seal")
    (tmp_path / "scores.py").write_text(
        "def size(task, attempt):\n    return float((attempt.folder / 'answer.json').stat().st_size > 100)\n"
    )
    container = {"image": IMAGE, "engine": containers.engine}
    agent = {"launcher": "docker", "command": ["/bin/sh", "-c", "{do}"], "container": container}

    def config(name: str, **clocks: float) -> RolloutConfig:
        values = {
            **{"name": f"{name}-{containers.engine}", "proxy": server.url, "tasks": "none"},
            **{"folder": str(tmp_path / name), "agent": agent, "clocks": {"grace_s": 0.2} | clocks},
            "score": [{"name": "size", "function": f"{tmp_path}/scores.py:size"}],
        }
        return parse_rollouts(values, "test")

    boxes, late = config("boxes"), config("late", total_s=3.0)
    what = [AGENT, AGENT + "exit 5", "true"]
    progress, _ = run(boxes, [Task(f"t{i}", {"do": text}) for i, text in enumerate(what)])
    rows = launches(server, boxes.name)
    assert columns_of(rows, "status", "finished", "reward", "turns", "exit_code") == [
        ("done", "completed", 1.0, 1, 0),
        ("agent_error", "failed", None, 1, 5),
        ("agent_error", "failed", None, 0, 0),
    ]
    assert {json.loads(row["isolation"])["level"] for row in rows} == {"container"}
    assert (progress.done, progress.leaked) == (3, 0)
    run(late, [Task("t", {"do": "trap '' TERM; sleep 60 & sleep 60"})])
    assert columns_of(launches(server, late.name), "status", "finished") == [("timeout", "failed")]
    for name in (boxes.name, late.name):
        label = f"label=rollbook.rollout={name}"
        assert containers.said("ps", "--all", "--quiet", "--filter", label) == ""


@pytest.mark.parametrize(
    ("name", "heeded"),
    [
        *[(name, True) for name in ("PATH", "HOME", "DOCKER_HOST", "https_proxy", "LD_PRELOAD", "GODEBUG")],
        *[(name, False) for name in ("OPENAI_API_KEY", "GOOGLE_API_KEY", "NOTION_TOKEN", "ROLLBOOK_TASK")],
    ],
)
def test_variables_that_clients_heed_do_not_reach_them(name: str, heeded: bool, tmp_path: Path) -> None:
    """All others do, since command lines can be read by everybody on a host."""
    engine = Engine("/bin/engine", "docker", "1", "runc", False)
    launch = Launch("l", (), {name: "a secret"}, tmp_path, tmp_path)
    words, own = ContainerLauncher(ContainerConfig(image=IMAGE), "host")._client(launch, engine)
    assert (f"--env={name}=a secret" in words, f"--env={name}" in words) == (heeded, not heeded)
    assert (own.get(name) == "a secret") is not heeded
