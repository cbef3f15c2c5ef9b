"""The image of deploy/Containerfile, in podman: two hosts record, one is killed, the other goes on.

To build it takes minutes and package registries, so no suite does: ROLLBOOK_IMAGE names one that is there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from tests.fakes.processes import container_engine
from tests.fakes.processes.container_engine import said
from tests.fakes.proxies.served import SCRIPT
from tests.fakes.proxies.several import say

from rollbook.testing.asgi import free_port

PATIENCE_S = 60.0
ANYBODY = "4711:0"
"""A user that no image knows."""


class Containers:
    """Hosts of one store: containers with volumes of their own, and a folder between them as the medium."""

    def __init__(self, image: str, folder: Path, model: Path) -> None:
        self.image, self.folder = image, folder
        self.urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
        self.names: list[str] = []
        settings = folder / "settings"
        shutil.copytree(model, settings / "model")
        (settings / "script.py").write_text(SCRIPT)
        (settings / "SECRET").write_bytes(os.urandom(32))
        (settings / "store.toml").write_text(
            '[medium]\nurl = "file:///medium"\nlease_s = 2\nack = "medium"\n'
        )
        (settings / "serve.toml").write_text(
            f'store = "/data/runs"\nmodel = "/etc/rollbook/model"\nengine = "scripted"\n'
            f'script = "/etc/rollbook/script.py:answer"\nproxies = {self.urls}\n'
        )
        subprocess.run(["chmod", "-R", "a+rX", settings], check=True)
        self._volume("medium")

    def _volume(self, name: str) -> Path:
        volume = self.folder / name
        volume.mkdir(exist_ok=True)
        volume.chmod(0o777)
        return volume

    def run(self, host: str, *command: str, keep: bool = True) -> str:
        """What a command prints in a container of a host; the container's id, of one that goes on."""
        name = f"{self.folder.name}-{host}"
        self.names.append(name)
        volumes = {
            self.folder / "settings": "/etc/rollbook:ro",
            self._volume("medium"): "/medium",
            self._volume(host): "/data",
        }
        words = [word for path, there in volumes.items() for word in ("--volume", f"{path}:{there}")]
        for variable in (
            "ROLLBOOK_ALLOW=/medium",
            "STORE_ID=tried",
            "ROLLBOOK_SECRET_FILE=/etc/rollbook/SECRET",
        ):
            words += ["--env", variable]
        words += ["--network=host", "--read-only", "--tmpfs=/tmp", "--user", ANYBODY, "--cap-drop=ALL"]
        words += ["--detach", "--name", name] if keep else ["--rm"]
        return said("podman", "run", *words, self.image, *command)

    def serve(self, number: int) -> str:
        """Start a proxy, and wait until it answers; its container's name."""
        port = self.urls[number].rpartition(":")[2]
        words = ["rollbook", "serve", "/etc/rollbook/serve.toml", "--proxy", str(number), "--port", port]
        self.run(f"host-{number}", *words)
        until = time.monotonic() + PATIENCE_S
        while not _well(self.urls[number]):
            assert time.monotonic() < until, said("podman", "logs", self.names[-1])
            time.sleep(0.1)
        return self.names[-1]

    def agent(self, number: int, name: str) -> openai.OpenAI:
        """An agent that asks a proxy."""
        return openai.OpenAI(base_url=f"{self.urls[number]}/t/{name}/v1", api_key="none", max_retries=0)

    def remove(self) -> None:
        """End all."""
        for name in self.names:
            said("podman", "rm", "--force", "--ignore", "--time=0", name)


def _well(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def hosts(
    tmp_path: Path, text_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Containers]:
    """Of the image that somebody built."""
    image = os.environ.get("ROLLBOOK_IMAGE")
    if not image:
        pytest.skip("ROLLBOOK_IMAGE names no image of deploy/Containerfile")
    (tmp_path / "containers.conf").write_text(container_engine.PODMAN_SETTINGS)
    monkeypatch.setenv("CONTAINERS_CONF", str(tmp_path / "containers.conf"))
    containers = Containers(image, tmp_path, text_model("chatml"))
    try:
        yield containers
    finally:
        containers.remove()


def test_one_is_killed_and_the_other_goes_on(hosts: Containers) -> None:
    """As any user, on a read-only root; a third container sees both; SIGTERM ends a proxy orderly."""
    first, second = hosts.serve(0), hosts.serve(1)
    names = [f"task-{number}" for number in range(6)]
    for number, name in enumerate(names):
        assert say(hosts.agent(number % 2, name), "hi") == "1: hi"
    assert said("podman", "exec", first, "healthy", hosts.urls[0].rpartition(":")[2]) == ""
    said("podman", "kill", "--signal=KILL", first)
    for name in names:
        assert say(hosts.agent(1, name), "hi", "1: hi", "on") == "3: on"
    table = hosts.run("third", "rollbook", "store", "hosts", keep=False)
    assert table.count("serve-") == 2
    assert "ended" in table
    query = "select count(*) as trajectories, sum(turns) as turns from trajectories"
    assert "6,12" in hosts.run("third", "rollbook", "sql", query, "--format", "csv", keep=False)
    began = time.monotonic()
    said("podman", "stop", "--time=30", second)
    assert time.monotonic() - began < 15
    assert said("podman", "inspect", "--format", "{{.State.ExitCode}}", second) == "143"
