"""Hosts in networks and with disks of their own, where the machine allows it: processes that are killed,
hang, are cut off or have another clock, and hosts that are lost with their disks.

ROLLBOOK_ROUNDS=100 kills that often, with each acknowledgement, and ROLLBOOK_SEED makes a failed run again.
Where namespaces cannot be had, hosts are folders.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rollbook import store
from rollbook.bench.cluster_machines import Machine, Network, namespaces, network
from rollbook.bench.cluster_outcome import NATS, OBJECTS
from rollbook.bench.cluster_rounds import rounds
from rollbook.bench.cluster_stage import Kind, Medium, environment, medium_of
from rollbook.bench.cluster_storage import CREDENTIALS
from rollbook.bench.loop_stage import write_model
from rollbook.store.catalog.database import URL_VARIABLE
from rollbook.store.config import toml_text
from rollbook.store.errors import LaneLockedError
from rollbook.store.events import EventOrphaned
from rollbook.store.hosts.carrier import Carrier
from rollbook.store.hosts.join import join
from rollbook.store.log.store import Store
from rollbook.store.settings import OwnMediumSettings

pytestmark = pytest.mark.crashes
ROUNDS = int(os.environ.get("ROLLBOOK_ROUNDS", "3"))
SQLITE, POSTGRESQL = "sqlite", "postgresql"
"""Catalogs: each host has its own, or all have one."""
KINDS = [(OBJECTS, "medium", SQLITE), (NATS, "medium", POSTGRESQL)]
if "ROLLBOOK_ROUNDS" in os.environ:
    KINDS += [(OBJECTS, "local", POSTGRESQL), (NATS, "local", SQLITE)]
SEED = int(os.environ.get("ROLLBOOK_SEED", random.SystemRandom().getrandbits(24)))
APART = namespaces()
LEASE_S = 2.0
WRITER = """
import sys, time
off, now, now_ns = int(sys.argv[2]), time.time, time.time_ns
time.time, time.time_ns = lambda: now() + off, lambda: now_ns() + off * 10**9
from pathlib import Path
from rollbook import store
from rollbook.store.events import Event, LabelAdded
from rollbook.store.ids import new_id

log = store.open(Path(sys.argv[1]))
with log.claim("x", "wait", 20), log.writer("work") as writer:
    number = 0
    while True:
        future = writer.append([Event(LabelAdded(new_id(), None, "note", str(number)), "r")])
        asked = time.clock_gettime(time.CLOCK_BOOTTIME)
        try:
            seq = future.result()
        except Exception as error:
            print("refused", type(error).__name__, flush=True)
            break
        print("acknowledged", seq, number, time.clock_gettime(time.CLOCK_BOOTTIME), flush=True)
        number += 1
        time.sleep(0.02)
time.sleep(3600)
"""


@dataclass
class Pair:
    """A host on which a process writes, and another one that would take over.

    Attributes:
        said: what the writer printed.
    """

    net: Network
    medium: Medium
    writer: Machine
    settings: OwnMediumSettings
    store_id: str
    other: Store
    said: list[list[str]] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None

    @property
    def folder(self) -> Path:
        """The writer's store, as seen from here."""
        return self.writer.own / "store"

    def start(self, clock_s: int = 0) -> None:
        """Start the process that writes, and wait until it does.

        Args:
            clock_s: how much its wall clock is ahead.
        """
        words = [sys.executable, "-c", WRITER, str(self.writer.disk / "store"), str(clock_s)]
        self.process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=self.writer.place.enter,
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.until(10)

    def read(self) -> list[list[str]]:
        """All that it said so far."""
        assert self.process is not None
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            self.said.append(line.split())
        return self.said

    def until(self, count: int, word: str = "acknowledged") -> None:
        """Wait until it has said that so often."""
        until = time.monotonic() + 40
        while sum(said[0] == word for said in self.read()) < count:
            assert time.monotonic() < until, self.said
            time.sleep(0.05)

    def take_over(self) -> float:
        """Take the writer's claim; how long that took."""
        begun = time.monotonic()
        with self.other.claim("x", "wait", 30):
            return time.monotonic() - begun

    def check(self, ended: int) -> None:
        """What was acknowledged is in the lane, or an orphan where only the disk had it, once; both hosts
        have the same.

        Args:
            ended: where the lane was ended.
        """
        carrier = Carrier(self.folder, self.store_id, self.settings)
        try:
            carrier.catch_up()
            log = Store(self.folder, self.store_id, carrier=carrier)
            with log.writer("work") as writer:
                assert writer.lane.endswith(".2"), "the lane that was ended stays so"
            carrier.catch_up()
            self.other.carrier.catch_up()
            both = [{(e.lane, e.seq): e for e in one.events()} for one in (log, self.other)]
            first, second = ({at: repr(e) for at, e in one.items()} for one in both)
        finally:
            carrier.close()
        assert first == second
        events = list(both[0].values())
        kept = [e.record.value for e in events if not isinstance(e.record, EventOrphaned)]
        orphans = [str(e.record.event["value"]) for e in events if isinstance(e.record, EventOrphaned)]
        acknowledged = [said[2] for said in self.said if said[0] == "acknowledged"]
        assert len(kept) == len(set(kept)) == ended
        assert len(kept + orphans) == len({*kept, *orphans})
        assert {*kept, *orphans} >= set(acknowledged)
        if self.settings.ack == "medium":
            assert set(kept) >= set(acknowledged)


@pytest.fixture(params=["local", "medium"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two hosts over object storage."""
    pytest.importorskip("moto", reason="object storage is tested against moto: install the [dev] extra")
    with network(tmp_path / "net") as net, medium_of(tmp_path / "medium", OBJECTS, net.outside) as medium:
        medium.gate.await_http(medium.endpoint)
        with environment({**CREDENTIALS, "ROLLBOOK_ALLOW": medium.allowed}):
            settings = OwnMediumSettings(
                url=medium.url, endpoint=medium.endpoint, ack=request.param, lease_s=LEASE_S
            )
            writer = net.machine("w")
            log = store.open(writer.own / "store", create=True)
            first = Carrier(log.path, log.store_id, settings)
            assert first.session.valid
            first.close()
            (log.path / "store.toml").write_text(toml_text({"medium": settings.table()}))
            join(tmp_path / "other", f"{settings.url}/{log.store_id}", settings)
            carrier = Carrier(tmp_path / "other", log.store_id, settings)
            carrier.catch_up()
            other = Store(tmp_path / "other", log.store_id, carrier=carrier)
            made = Pair(net, medium, writer, settings, log.store_id, other)
            try:
                yield made
            finally:
                if made.process is not None:
                    made.process.kill()
                    made.process.wait()
                carrier.close()


def test_a_host_that_hangs_for_longer_than_its_lease(pair: Pair) -> None:
    """It goes on where it was, and finds its lane ended: nothing is acknowledged any more."""
    pair.start()
    assert pair.process is not None
    os.kill(pair.process.pid, signal.SIGSTOP)
    assert pair.take_over() > 0.5 * LEASE_S
    ended = sum(pair.other.head().values())
    before = len([said for said in pair.read() if said[0] == "acknowledged"])
    os.kill(pair.process.pid, signal.SIGCONT)
    pair.until(1, "refused")
    assert pair.said[-1] == ["refused", "FencedError"]
    # One may have been under way to whoever asked.
    assert len([said for said in pair.said if said[0] == "acknowledged"]) <= before + 1
    pair.process.kill()
    pair.process.wait()
    pair.check(ended)


@pytest.mark.skipif(
    not APART, reason="a host's packets are dropped in a network of its own: root, ip, iptables"
)
def test_a_host_that_is_cut_off(pair: Pair) -> None:
    """Nothing of it reaches the medium, and nobody tells it so: beyond its lease it acknowledges nothing;
    once it reaches the medium again, there is one chain of each lane."""
    pair.start()
    assert pair.process is not None
    cut = time.clock_gettime(time.CLOCK_BOOTTIME)
    pair.writer.cut_off(pair.net.outside)
    try:
        pair.take_over()
        ended = sum(pair.other.head().values())
        time.sleep(1.0)
    finally:
        pair.writer.heal(pair.net.outside)
    pair.until(1, "refused")
    assert pair.said[-1] == ["refused", "FencedError"]
    last = max(float(said[3]) for said in pair.said if said[0] == "acknowledged")
    assert last < cut + LEASE_S
    pair.process.kill()
    pair.process.wait()
    pair.check(ended)


@pytest.mark.parametrize("clock_s", [3600, -3600])
def test_a_host_whose_clock_is_an_hour_off(pair: Pair, clock_s: int) -> None:
    """Its lease is as long as any: it is not taken over while it lives, and is soon after it is killed."""
    pair.start(clock_s)
    assert pair.process is not None
    until = time.monotonic() + 2 * LEASE_S
    while time.monotonic() < until:
        with pytest.raises(LaneLockedError), pair.other.claim("x", "wait"):
            pass
        time.sleep(0.1)
    written = {e.time_us for e in pair.other.events()}
    assert all(abs(us / 1e6 - time.time() - clock_s) < 60 for us in written)
    pair.process.kill()
    pair.process.wait()
    pair.read()
    assert pair.take_over() < 10 * LEASE_S
    pair.check(sum(pair.other.head().values()))


@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(("medium", "ack", "catalog"), KINDS)
def test_nothing_is_lost_in_rounds_of_faults(
    tmp_path: Path, medium: str, ack: str, catalog: str, request: pytest.FixtureRequest
) -> None:
    """A proxy, the medium, a sealer, a follower, the trainer, or a whole host with its disk: what clients
    were told is there once and unchanged, all hosts have the same log, and its steps replay bit for bit."""
    pytest.importorskip("moto", reason="object storage is tested against moto: install the [dev] extra")
    model, values = write_model(tmp_path / "model", width=32), dict[str, str]()
    if catalog == POSTGRESQL:
        server = request.getfixturevalue("postgres")
        server.run(f"create database {ack}")
        values[URL_VARIABLE] = server.url(ack).render_as_string(hide_password=False)
    with environment(values):
        found = rounds(tmp_path / "run", model, Kind(medium, ack), SEED, ROUNDS, print)
    assert (found.wrong, found.lost, found.doubled, found.changed) == ([], [], [], []), f"seed {SEED}"
    assert found.answered > ROUNDS, f"seed {SEED}"
    assert "bit for bit" in found.replayed, f"seed {SEED}"
