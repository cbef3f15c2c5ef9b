"""On a host with a stranger's beside it: where each command listens, and what it makes of a stranger's bytes.

Nothing listens but on the loopback, and where that was asked for; and no bytes of a stranger are unpickled,
whether he is on another host or another user of this one. Linux's namespaces make the hosts. Where none can
be made the tests are skipped, and say so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.bench.scripted.dialogues import write_model
from rollbook.demo.model import make_model
from rollbook.demo.processes import rollbook_command
from rollbook.store import Store
from rollbook.store.events import StepCommitted

ROOT = Path(__file__).parents[2]
STRANGER = Path(__file__).parent / "programs" / "stranger.py"
HOSTS = tuple(f"rollbook-ports-{os.getpid()}-{number}" for number in (0, 1))
OUTSIDE, STRANGERS = "10.203.78.1", "10.203.78.2"
LOOK_S, LONGEST_S = 0.05, 150.0
LISTENS = "0A"
Address = tuple[str, int]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[None]:
    """A host and a stranger's, with a cable between them."""
    if sys.platform != "linux" or shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("only root makes networks, on Linux and with iproute2")
    with contextlib.ExitStack() as undo:
        try:
            for name in HOSTS:
                _ip("netns", "add", name)
                undo.callback(_ip, "netns", "del", name)
            cable = ["end0", "netns", HOSTS[0], "type", "veth", "peer", "name", "end1", "netns", HOSTS[1]]
            _ip("link", "add", *cable)
            for name, end, address in zip(HOSTS, ("end0", "end1"), (OUTSIDE, STRANGERS), strict=True):
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
                for up in ("lo", end):
                    _ip("-n", name, "link", "set", up, "up")
            # As many hosts have it: what takes the way to the internet for the host's address takes this one.
            _ip("-n", HOSTS[0], "route", "add", "default", "via", STRANGERS)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no networks can be made here: {error.stderr}")
        yield


class Stranger:
    """Attacks addresses from a host. What he sends makes `file`, where it is unpickled."""

    def __init__(self, host: str, file: Path) -> None:
        words = ["ip", "netns", "exec", host, sys.executable, "-S", str(STRANGER), str(file)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid, self._attacked = self._process.pid, 0

    def attack(self, host: str, port: int) -> None:
        """Begin to."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{host} {port}\n")
        self._process.stdin.flush()
        self._attacked += 1

    def close(self) -> set[Address]:
        """Wait until all is sent; the addresses where something listened."""
        output, _ = self._process.communicate(timeout=60)
        lines = [line.split() for line in output.splitlines()]
        assert len(lines) == self._attacked
        return {(host, int(port)) for host, port, there in lines if there == "True"}


class Watched:
    """A command that ran on the host: all that listened there meanwhile, where the stranger was answered, and
    whether any of his bytes ran."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.harmed = folder, folder / "harmed"
        self.seen: set[Address] = set()
        self.answered: set[Address] = set()
        self.output = folder / "output"

    @property
    def outside(self) -> set[Address]:
        """What listened on another interface than the loopback, or on all of them."""
        return {address for address in self.seen if not address[0].startswith("127.") and address[0] != "::1"}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context: look what listens, and attack it, from the host and from the stranger's."""
        own, other = Stranger(HOSTS[0], self.harmed), Stranger(HOSTS[1], self.harmed)
        over = threading.Event()

        def watch() -> None:
            while not over.wait(LOOK_S):
                for host, port in listening(own.pid) - self.seen:
                    self.seen.add((host, port))
                    own.attack("127.0.0.1" if host in ("0.0.0.0", "::") else host, port)
                    other.attack(OUTSIDE, port)

        with ThreadPoolExecutor(1) as pool:
            watcher = pool.submit(watch)
            try:
                yield
            finally:
                over.set()
                watcher.result()
                own.close()
                self.answered = other.close()

    def run(self, *words: object, until: Callable[[], bool] | None = None, **variables: str) -> int:
        """Run `rollbook WORDS...` on the host while it is watched, to its end or until this holds; its exit
        code."""
        return self.run_command(rollbook_command(*words), until, **variables)

    def run_command(
        self, words: Sequence[str], until: Callable[[], bool] | None = None, **variables: str
    ) -> int:
        """Run another command likewise."""
        with self.watching(), self.output.open("wb") as log:
            command = ["ip", "netns", "exec", HOSTS[0], *words]
            environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"} | variables
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "RAY_ADDRESS", "RAY_AUTH_MODE"):
                environment.pop(name, None)
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                by = time.monotonic() + LONGEST_S
                while process.poll() is None and not (until and until()):
                    assert time.monotonic() < by, self.said
                    time.sleep(LOOK_S)
                time.sleep(1.0 if until else 0.0)  # what was found last is attacked
            finally:
                _end(process)
        return process.returncode

    @property
    def said(self) -> str:
        """The end of what it printed."""
        return self.output.read_text()[-3000:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command, and whatever it started."""
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(60)
    for target in [*children, process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            target.kill()
    process.wait()


def listening(pid: int) -> set[Address]:
    """Where anything listens for TCP, on the host of a process."""
    addresses = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == LISTENS:
                host, _, port = local.partition(":")
                addresses.add((_address(bytes.fromhex(host)), int(port, 16)))
    return addresses


def _address(packed: bytes) -> str:
    """Of the kernel's words, each of which is in the order of this machine."""
    turned = b"".join(packed[i : i + 4][::-1] for i in range(0, len(packed), 4))
    if len(turned) == 4:
        return str(IPv4Address(turned))
    address = IPv6Address(turned)
    return str(address.ipv4_mapped or address)


# What is run --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store of teachers' conversations and groups of rollouts. Copy it; never write."""
    log: Store = fabric.record_store(tmp_path_factory.mktemp("recorded") / "runs")
    return log


@pytest.fixture
def watched(hosts: None, tmp_path: Path) -> Iterator[Watched]:
    """What is to run; afterwards none of the stranger's bytes may have."""
    started = Watched(tmp_path)
    yield started
    assert started.seen, f"nothing was seen to listen: {started.said}"
    assert not started.harmed.exists(), f"a stranger's bytes ran: {started.said}"
    assert started.answered == started.outside


def _training(recorded: Store, folder: Path, **settings: Any) -> Callable[[], int]:
    """A copy of the store and a CONFIG; what counts the steps that are committed."""
    log = rb.open(shutil.copytree(recorded.path, folder / "runs"))
    (folder / "train.toml").write_text(fabric.toml(fabric.config(settings.pop("base"), **settings)))
    return lambda: len(list(log.events_of({StepCommitted.KIND})))


def test_the_stranger_sets_keys() -> None:
    """Of torch's store, if he reaches it: so what the others show is that nobody reads his, not that he
    is too clumsy."""
    from rollbook.train.ranks.meeting import MeetingPoint, meet

    sys.path.append(str(STRANGER.parent))
    import stranger

    meeting = meet(MeetingPoint("127.0.0.1", 0, "secret"), leads=True)
    assert stranger.attack("127.0.0.1", meeting.point.port, b"harm")
    assert [bytes(meeting.store.get(key)) for key in stranger.KEYS] == [b"harm"] * len(stranger.KEYS)


def test_training(recorded: Store, watched: Watched) -> None:
    """One rank opens what gloo wants, on the loopback."""
    done = _training(recorded, watched.folder, base=fabric.SFT, steps=1)
    assert watched.run("train", "train.toml", "--store", "runs") == 0, watched.said
    assert (watched.outside, done()) == (set(), 1)


def test_ranks(recorded: Store, watched: Watched) -> None:
    """And their reference in a process of its own. What is not signed ends the training, which says so."""
    algorithm = {"name": "grpo", "groups": 1, "group_size": 4, "kl": 0.5, "old": "trainer"}
    changes = {"algorithm": algorithm, "steps": 50, "checkpoint_every": 50, "reference_apart": True}
    done = _training(recorded, watched.folder, base=fabric.GRPO, **changes)
    code = watched.run("train", "train.toml", "--store", "runs", "--ranks", 2)
    assert "is not signed by a rank of this training" in watched.said
    assert watched.outside == set()
    assert code in (2, 75)  # the rank that read it ends with an error, or is found lost by the other
    assert done() >= 1


@pytest.fixture(scope="module")
def of_two_ranks(recorded: Store, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store on which two ranks took a step."""
    log = rb.open(shutil.copytree(recorded.path, tmp_path_factory.mktemp("trained") / "runs"))
    fabric.train(log, fabric.config(fabric.SFT, steps=1), ranks=2)
    return log


def test_a_replay(of_two_ranks: Store, watched: Watched) -> None:
    """Which starts as many ranks as the step had."""
    code = watched.run("replay", "step", 0, "--store", of_two_ranks.path)
    assert (watched.outside, code) == (set(), 0), watched.said


SCRIPT = """
from rollbook.bench.scripted.job import Answer

def answer(input_ids, params):
    return Answer([5, 6, 7])
"""


def test_serving(watched: Watched) -> None:
    """At the address that was asked for, and at no other."""
    write_model(watched.folder / "model")
    (watched.folder / "script.py").write_text(SCRIPT)
    address, engine = (OUTSIDE, 18_004), ("--engine", "scripted", "--script", "script.py:answer")
    where = ("--store", "runs", "--model", "model", "--host", address[0], "--port", address[1])
    watched.run("serve", *where, *engine, until=lambda: address in watched.seen)
    assert watched.outside == {address}, watched.said


WHOLE = """
run = "sums"
store = "runs"
model = "model"
[serve]
port = 18005
threads = 1
[train]
steps = 1000
threads = 1
[train.algorithm]
name = "grpo"
groups = 1
group_size = 2
[train.parallel]
tensor = 2
[train.recipe]
drop_zero_variance = false
[rollout]
tasks = "examples/arithmetic/tasks.jsonl"
concurrency = 4
[rollout.agent]
command = ["python3", "-S", "examples/arithmetic/agent.py", "{question}"]
isolation = "session"
[[rollout.score]]
name = "brief"
function = "examples/arithmetic/sums.py:brief"
"""


@pytest.mark.timeout(300)
def test_a_run_by_ray(watched: Watched) -> None:
    """Proxy, trainer and rollouts: `serve`, `train --launch ray` and `rollout --ray`, each Ray of its own."""
    (watched.folder / "examples").symlink_to(ROOT / "examples")
    make_model(watched.folder / "model", 0)
    (watched.folder / "online.toml").write_text(WHOLE)

    def stepped() -> bool:
        with contextlib.suppress(rb.errors.RollbookError, OSError):
            return any(True for _ in rb.open(watched.folder / "runs").events_of({StepCommitted.KIND}))
        return False

    watched.run("run", "online.toml", "--ray", until=stepped)
    assert stepped(), watched.said
    assert watched.outside == set(), watched.said
    assert len(watched.seen) > 10


def test_a_benchmark(watched: Watched) -> None:
    """Of the loop: proxies, scripted engines and trainers, while they start."""
    (watched.folder / "bench").mkdir()
    loop = [sys.executable, "-m", "rollbook.bench", "loop", "--folder", "bench"]
    watched.run_command(loop, until=lambda: len(watched.seen) > 2)
    assert watched.outside == set(), watched.said
