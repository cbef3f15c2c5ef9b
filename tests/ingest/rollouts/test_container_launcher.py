"""Agents in real containers: they get what they are told and no more, and nothing of them is left."""

from __future__ import annotations

import asyncio
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
from typing import Any

import podman_image
import pytest
from rollout_runs import launches, run, told

from rollbook.ingest.rollouts.agent_config import AgentConfig, ContainerConfig
from rollbook.ingest.rollouts.config import parse_rollouts
from rollbook.ingest.rollouts.container_launcher import ContainerLauncher
from rollbook.ingest.rollouts.launching import Exit, Launch, Limits
from rollbook.ingest.rollouts.tasks import Task
from rollbook.ingest.rollouts.told import address_in, network_of
from rollbook.store.errors import LaunchError

CONTAINER = ContainerConfig(image=podman_image.IMAGE, engine="podman")


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Podman with an image; skipped with the reason where it is not there, but where it is required."""
    why = podman_image.missing()
    if why is not None and os.environ.get("ROLLBOOK_CONTAINERS") != "required":
        pytest.skip(why)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", "")
        try:
            podman_image.prepare(tmp_path_factory.mktemp("image"))
        except subprocess.CalledProcessError as error:
            if os.environ.get("ROLLBOOK_CONTAINERS") == "required":
                raise
            pytest.skip(f"podman does not work here: {error.stderr.strip()}")
        yield


class Containers:
    """Starts shell commands as agents in containers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mine: list[str] = []

    def launch(self, command: str, limits: Limits | None = None, **variables: str) -> Launch:
        """A launch of a command."""
        launch_id = f"c-{uuid.uuid4().hex}"
        folder = self.folder / launch_id
        folder.mkdir(mode=0o700)
        self.mine.append(launch_id)
        words = ("/bin/sh", "-c", command)
        return Launch(launch_id, words, variables, folder, folder, limits=limits or Limits())

    def run(
        self,
        command: str,
        limits: Limits | None = None,
        container: ContainerConfig = CONTAINER,
        **variables: str,
    ) -> tuple[Exit, Launch]:
        """How an agent ended that nobody stopped."""
        launch = self.launch(command, limits, **variables)

        async def run() -> Exit:
            return await (await launcher(container).start(launch)).wait()

        return asyncio.run(run()), launch

    def left(self) -> list[str]:
        """Containers of these launches that are there, running or not."""
        done = subprocess.run(
            ["podman", "ps", "--all", "--format", "{{.Names}}"], capture_output=True, text=True, check=True
        )
        return [name for name in done.stdout.split() if name.removeprefix("rollbook-") in self.mine]


def launcher(container: ContainerConfig = CONTAINER, network: str = "host") -> ContainerLauncher:
    """Of podman."""
    return ContainerLauncher(container, network)


@pytest.fixture
def containers(podman: None, tmp_path: Path) -> Iterator[Containers]:
    """Starts agents; what a failed test left is removed."""
    made = Containers(tmp_path)
    yield made
    for name in made.left():
        subprocess.run(["podman", "rm", "--force", "--time=0", name], capture_output=True)


def _in_time(true: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not (done := true()) and time.monotonic() < end:
        time.sleep(0.05)
    return done


def test_it_is_told_and_has_what_it_is_given(containers: Containers, tmp_path: Path) -> None:
    """The variables of its launch and its image's, whatever they hold; its folder; nothing of ours."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/in.txt").write_text("beside")
    container = CONTAINER.model_copy(update={"mounts": (f"{tmp_path}/data:/data",)})
    command = (
        "env > env.txt; cat /data/in.txt > read.txt; touch /data/out.txt; id -u; echo bad >&2; "
        "ls /root /home /work; pwd; exit 3"
    )
    found, launch = containers.run(command, container=container, KEY="se cret\nof two lines", PATH="/bin:/x")
    assert (found.code, found.signal, found.infrastructure, found.left) == (3, None, None, ())
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
        running = await launcher().start(launch)
        while not (launch.folder / "stdout.log").stat().st_size:
            await asyncio.sleep(0.02)
        words = ["podman", "inspect", "--format", "{{json .Config.Labels}}", f"rollbook-{launch.launch_id}"]
        labels = await asyncio.to_thread(subprocess.check_output, words)
        await running.stop(0)
        return running.isolation, json.loads(labels)

    told, labels = asyncio.run(started())
    assert labels.pop("rollbook.host").endswith(f"-{os.getuid()}")
    assert labels == {"rollbook.launch": launch.launch_id, **launch.labels}
    image = json.loads(subprocess.check_output(["podman", "image", "inspect", podman_image.IMAGE]))[0]
    assert (told["level"], told["engine"], told["network"]) == ("container", "podman", "host")
    assert (told["image_id"], told["digests"]) == (image["Id"], [image["Digest"]])
    assert told["runtime"] == "runc"
    assert told["limits"] == {"memory_mb": 64, "processes": 9}


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
    found, launch = containers.run(command, limits)
    assert found.infrastructure is None
    if error is not None:
        assert error in (found.error or "")
    else:
        assert found.code != 0
        assert "can't fork" in (launch.folder / "stderr.log").read_text()
    assert containers.left() == []


def test_what_it_prints_is_counted_and_its_beginning_kept(containers: Containers) -> None:
    """However much it is."""
    found, launch = containers.run("dd if=/dev/zero bs=1048576 count=200 2>/dev/null", Limits(output_mb=0.5))
    assert (found.code, found.printed["stdout"]) == (0, 200 << 20)
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
        running = await launcher().start(launch)
        while not (launch.folder / "stdout.log").stat().st_size:
            await asyncio.sleep(0.02)
        return await running.stop(grace_s)

    found = asyncio.run(stop())
    assert (found.code, found.signal, found.infrastructure) == (code, number, None)
    assert containers.left() == []


def test_a_cancelled_wait_leaves_no_container(containers: Containers) -> None:
    """Not even one that is being made."""

    async def cancel(after_s: float) -> None:
        running = await launcher().start(containers.launch("sleep 600"))
        waiting = asyncio.ensure_future(running.wait())
        await asyncio.sleep(after_s)
        waiting.cancel()
        await asyncio.wait([waiting])

    for after_s in (0.0, 0.05, 0.1, 0.2, 0.5):
        asyncio.run(cancel(after_s))
    assert containers.left() == []


@pytest.mark.parametrize(
    ("image", "command", "why"),
    [
        ("localhost/none:1", "true", "image 'localhost/none:1' is not there"),
        (podman_image.IMAGE, None, "its program cannot be started: failed to exec"),
    ],
)
def test_what_cannot_run_is_no_fault_of_the_agent(
    containers: Containers, image: str, command: str | None, why: str
) -> None:
    """It is said why."""
    launch = containers.launch("true")
    if command is None:
        launch = replace(launch, command=("no-such-program",))

    async def start() -> str | None:
        try:
            running = await launcher(CONTAINER.model_copy(update={"image": image})).start(launch)
        except LaunchError as error:
            return str(error)
        return (await running.wait()).infrastructure

    assert why in (asyncio.run(start()) or "")
    assert containers.left() == []


def test_a_container_that_is_removed_by_others(containers: Containers) -> None:
    """It ended by a signal, and is not waited for."""
    launch = containers.launch("echo up; sleep 600")

    async def removed() -> Exit:
        running = await launcher().start(launch)
        while not (launch.folder / "stdout.log").stat().st_size:
            await asyncio.sleep(0.02)
        name = f"rollbook-{launch.launch_id}"
        await asyncio.to_thread(
            subprocess.run, ["podman", "rm", "--force", "--time=0", name], capture_output=True
        )
        return await running.wait()

    found = asyncio.run(removed())
    # Whether its end or its removal is seen first is the engine's haste.
    assert found.signal == signal.SIGKILL or found.infrastructure == "its container was removed while it ran"


# Launchers that die -------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, sys
from pathlib import Path
from rollbook.ingest.rollouts.agent_config import ContainerConfig
from rollbook.ingest.rollouts.container_launcher import ContainerLauncher
from rollbook.ingest.rollouts.launching import Launch

image, launch_id, folder = sys.argv[1:]

async def run():
    launcher = ContainerLauncher(ContainerConfig(image=image, engine="podman"), "host")
    command = ("/bin/sh", "-c", "trap '' TERM; echo up; sleep 600")
    launch = Launch(launch_id, command, {}, Path(folder), Path(folder))
    await (await launcher.start(launch)).wait()

asyncio.run(run())
"""


def _start_another(containers: Containers) -> tuple[subprocess.Popen[bytes], Launch]:
    """Another process with a container, which runs."""
    launch = containers.launch("")
    words = [sys.executable, "-c", PROGRAM, podman_image.IMAGE, launch.launch_id, str(launch.folder)]
    process = subprocess.Popen(words)
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
        leaks = asyncio.run(launcher().sweep(frozenset()))
        mine = [leak for leak in leaks if leak.launch_id in containers.mine]
        assert [leak.launch_id for leak in mine] == [launch.launch_id]
        assert mine[0].pid > 0
        assert "sleep 600" in mine[0].command
        assert containers.left() == [f"rollbook-{others.launch_id}"]
        # Of which it is known that nobody watches over it is ended all the same.
        leaks = asyncio.run(launcher().sweep(frozenset(), frozenset({others.launch_id})))
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
    agent = AgentConfig(launcher="docker", container=CONTAINER, address=address)
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


def test_rollouts_in_containers(
    containers: Containers, serve: Any, text_model: Any, script: Any, tmp_path: Path
) -> None:
    """They reach a proxy on loopback, are scored by what they left, and those that a clock ends are gone."""
    model = str(text_model("chatml"))
    server = serve("--model", model, "--engine", "scripted", "--script", f"{script}:answer")
    (tmp_path / "scores.py").write_text(
        "def size(task, attempt):\n    return float((attempt.folder / 'answer.json').stat().st_size > 100)\n"
    )
    config = parse_rollouts(
        {
            **{"name": "boxes", "proxy": server.url, "tasks": "none", "folder": str(tmp_path / "launches")},
            "clocks": {"total_s": 6.0, "grace_s": 0.2},
            "score": [{"name": "size", "function": f"{tmp_path}/scores.py:size"}],
            "agent": {
                "launcher": "docker",
                "command": ["/bin/sh", "-c", "{do}"],
                "container": {"image": podman_image.IMAGE, "engine": "podman"},
            },
        },
        "test",
    )
    what = [AGENT, AGENT + "exit 5", AGENT + "trap '' TERM; sleep 60 & sleep 60", "true"]
    found, _ = run(config, [Task(f"t{i}", {"do": text}) for i, text in enumerate(what)])
    rows = launches(server, "boxes")
    assert told(rows, "status", "finished", "reward", "turns", "exit_code") == [
        ("done", "completed", 1.0, 1, 0),
        ("agent_error", "failed", None, 1, 5),
        ("timeout", "failed", None, 1, None),
        ("agent_error", "failed", None, 0, 0),
    ]
    assert {json.loads(row["isolation"])["level"] for row in rows} == {"container"}
    assert (found.done, found.leaked) == (4, 0)
    names = subprocess.check_output(
        ["podman", "ps", "--all", "--filter", "label=rollbook.rollout=boxes", "--quiet"]
    )
    assert names == b""
