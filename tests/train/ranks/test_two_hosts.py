"""A training over two hosts: a network between them, names of their own, and a store that one cannot see.

Linux's namespaces make them. Where none can be made the tests are skipped, and say so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.events import StepCommitted, StepFailed, StepPlanned
from rollbook.testing.asgi import free_port
from rollbook.train.interface import INTERFACE
from rollbook.train.ranks.meeting import SECRET, new_secret

pytestmark = pytest.mark.ranks
Stores = Callable[..., Store]
NAMES = tuple(f"rollbook-{os.getpid()}-{number}" for number in (0, 1))
ADDRESSES = ("10.203.77.1", "10.203.77.2")
ROOT = Path(__file__).parents[3]
TRAINED_S = 200.0


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[None]:
    """Two networks with a cable between them."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("only root makes networks, and with iproute2")
    with ExitStack() as undo:
        try:
            for name in NAMES:
                _ip("netns", "add", name)
                undo.callback(_ip, "netns", "del", name)
            cable = ["end0", "netns", NAMES[0], "type", "veth", "peer", "name", "end1", "netns", NAMES[1]]
            _ip("link", "add", *cable)
            for name, end, address in zip(NAMES, ("end0", "end1"), ADDRESSES, strict=True):
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
                for up in ("lo", end):
                    _ip("-n", name, "link", "set", up, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no networks can be made here: {error.stderr}")
        yield


class Nodes:
    """torchrun on each host, with one rank; the second sees another folder where the first has the store."""

    def __init__(self, log: Store, config: Path) -> None:
        self._log, port = log, str(free_port())
        self._secret = new_secret()
        self.said = config.with_suffix(".said")
        self._file = self.said.open("wb")
        run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        run += ["--master-addr", ADDRESSES[0], "--master-port", port, "--node-rank"]
        train = ["-m", "rollbook", "train", str(config), "--store", str(log.path)]
        self.nodes = [self._started(number, [*run, str(number), *train]) for number in (0, 1)]

    def _started(self, number: int, words: list[str]) -> subprocess.Popen[bytes]:
        hidden = f"mount -t tmpfs none {self._log.path} && " if number else ""
        script = f'hostname host{number} && {hidden}exec "$@"'
        host = ["ip", "netns", "exec", NAMES[number], "unshare", "--mount", "--uts", "sh", "-c", script, "sh"]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        environment[SECRET] = self._secret
        environment.pop(INTERFACE, None)  # ranks of this host alone may have been started here before
        return subprocess.Popen([*host, *words], env=environment, stdout=self._file, stderr=subprocess.STDOUT)

    def kill(self, node: int) -> None:
        """All of a node, at once."""
        for process in [*psutil.Process(self.nodes[node].pid).children(recursive=True), self.nodes[node]]:
            process.kill()

    def wait(self) -> list[int]:
        """Their exit codes."""
        return [node.wait(TRAINED_S) for node in self.nodes]

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for number, node in enumerate(self.nodes):
            if node.poll() is None:
                self.kill(number)
        self._file.close()


@pytest.fixture
def started(tmp_path: Path, hosts: None) -> Callable[..., Nodes]:
    """Starts a training of both hosts."""

    def start(log: Store, **changes: Any) -> Nodes:
        settings = fabric.config(fabric.SFT, optimizer={"lr": 1e-4, "eps": 1.0, "clip_grad": 0.0}, **changes)
        file = tmp_path / "config.toml"
        file.write_text(fabric.toml(settings))
        return Nodes(log, file)

    return start


def test_they_train(recorded: Stores, started: Callable[..., Nodes]) -> None:
    """The second gets its samples from the first, and what both compute is replayed bit for bit on one."""
    log = recorded()
    with started(log, steps=2, parallel={"timeout_s": 60.0}) as nodes:
        assert nodes.wait() == [0, 0], nodes.said.read_text()[-3000:]
    plans = records_of(log, StepPlanned)
    assert [plan.environment["parallel"]["data"] for plan in plans] == [2, 2]
    assert all(part for plan in plans for part in plan.partition)
    assert len(records_of(log, StepCommitted)) == 2
    assert replay_step(log, 1).differs_in is None


def test_one_is_lost(recorded: Stores, started: Callable[..., Nodes]) -> None:
    """The step fails and says that another rank was waited for; the same command goes on."""
    log = recorded()
    changes = {"steps": 30, "parallel": {"timeout_s": 10.0}, "checkpoint_every": 1}
    with started(log, **changes) as nodes:
        until = time.monotonic() + TRAINED_S
        while not records_of(log, StepCommitted) and time.monotonic() < until:
            time.sleep(0.05)
        nodes.kill(1)
        assert nodes.nodes[0].wait(TRAINED_S) != 0
    (failed,) = records_of(log, StepFailed)
    assert "another rank ended, or was waited for in vain" in failed.error
    done = len(records_of(log, StepCommitted))
    assert 0 < done < 30
    with started(log, **changes | {"steps": done + 1}) as nodes:
        assert nodes.wait() == [0, 0], nodes.said.read_text()[-3000:]
    assert [step.step for step in records_of(log, StepCommitted)] == list(range(done + 1))


def test_the_first_is_lost(recorded: Stores, started: Callable[..., Nodes]) -> None:
    """The second ends too."""
    log = recorded()
    with started(log, steps=30, parallel={"timeout_s": 10.0}) as nodes:
        until = time.monotonic() + TRAINED_S
        while not records_of(log, StepCommitted) and time.monotonic() < until:
            time.sleep(0.05)
        nodes.kill(0)
        assert nodes.nodes[1].wait(60) != 0
