"""`rollbook run` with a real engine and agents that are programs, while its parts are killed.

ROLLBOOK_KILLS=100 kills that often, and ROLLBOOK_SEED makes a failed run again.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollbook import store as rb
from rollbook.demo.model import make_model
from rollbook.demo.processes import rollbook_command
from rollbook.replay.stretch import history_of, prove_stretch
from rollbook.store import Store
from rollbook.store.events import VOID, EvalFinished, LaunchStarted
from rollbook.testing.ledger import fold_ledger
from rollbook.testing.ports import free_port

pytestmark = [pytest.mark.torch, pytest.mark.crashes]
HERE = Path(__file__).parents[2]
KILLS = int(os.environ.get("ROLLBOOK_KILLS", "6"))
SEED = int(os.environ.get("ROLLBOOK_SEED", random.SystemRandom().getrandbits(24)))
PARTS = ("serve", "train", "rollout")
CONFIG = """
run = "sums"
store = "runs"
model = "my-model"

[serve]
port = {port}
threads = 1

[train]
steps = 100000
threads = 1
[train.algorithm]
name = "grpo"
groups = 2
group_size = 4
[train.recipe]
drop_zero_variance = false
max_staleness = 2

[rollout]
tasks = "examples/arithmetic/tasks.jsonl"
concurrency = 8
[rollout.retries]
attempts = 20
pause_s = 0.2
stop_share = 1.0
[rollout.agent]
command = ["python3", "-S", "examples/arithmetic/agent.py", "{{question}}"]
isolation = "session"
[[rollout.score]]
name = "brief"
function = "examples/arithmetic/sums.py:brief"

[evaluation]
tasks = "examples/arithmetic/tasks.jsonl"
every = 4
limit = 3
"""


class Run:
    """`rollbook run`, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, folder / "runs"
        (folder / "examples").symlink_to(HERE / "examples")
        make_model(folder / "my-model", 0)
        (folder / "online.toml").write_text(CONFIG.format(port=free_port()))

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start it."""
        command = [*rollbook_command("run", "online.toml"), *words]
        environment = os.environ | {"PYTHONPATH": str(HERE / "src"), "OMP_NUM_THREADS": "1"}
        with (self.folder / "run.log").open("ab") as log:
            return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log)

    def pids(self, part: str) -> list[int]:
        """Processes of a part that run in this folder."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    if part.encode() in words[:5] and b"rollbook" in words and _in(entry, self.folder):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def log(self) -> Store:
        """Its store, once there is one."""
        return rb.open(self.store)

    def done(self) -> int:
        """Steps that are committed."""
        try:
            with rb.connect(self.store) as connection:
                [[count]] = connection.execute("SELECT count(*) FROM metrics").fetchall()
                return int(count)
        except rb.errors.RollbookError:
            return 0

    def await_steps(self, count: int, child: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Wait for so many more steps than there are; the process of the run.

        One that gave up, since a part died too often, is started again: the same command goes on.
        """
        wanted, by = self.done() + count, time.monotonic() + 240
        while self.done() < wanted:
            said = (self.folder / "run.log").read_text()[-3000:]
            assert time.monotonic() < by, said
            if child.poll() is not None:
                assert "for the 6th time within 10 minutes" in said
                child = self.start()
            time.sleep(0.3)
        return child


def _in(process: Path, folder: Path) -> bool:
    return Path(os.readlink(process / "cwd")) == folder.resolve()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run whose parts were killed at random moments, interrupted, and run to its end."""
    run, dice = Run(tmp_path_factory.mktemp("online")), random.Random(SEED)
    child = run.start()
    try:
        child = run.await_steps(2, child)
        for _ in range(KILLS):
            time.sleep(dice.uniform(0.0, 4.0))
            for pid in run.pids(dice.choice(PARTS)):
                os.kill(pid, signal.SIGKILL)
            child = run.await_steps(1, child)
        child.send_signal(signal.SIGTERM)
        assert child.wait(90) == 128 + signal.SIGTERM
        assert [run.pids(part) for part in PARTS] == [[], [], []]
        steps = (run.done() // 4 + 2) * 4
        child = run.start("--set", f"train.steps={steps}")
        assert child.wait(300) == 0, (run.folder / "run.log").read_text()[-3000:]
        yield run
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def _sql(run: Run, query: str) -> list[tuple[Any, ...]]:
    with rb.connect(run.store) as connection:
        return connection.execute(query).fetchall()


@pytest.mark.timeout(2400)
def test_nothing_is_lost_or_doubled(killed: Run) -> None:
    """Each place has one trajectory that counts, however many attempts that took; groups are whole."""
    places = _sql(
        killed,
        f"""SELECT rollout, epoch, l.task, sample, count(*) FILTER (t.status != '{VOID}'), count(*),
                   count(DISTINCT attempt)
            FROM launches l JOIN trajectories t USING (trajectory_id) GROUP BY ALL""",
    )
    doubled = [row for row in places if row[4] > 1 or row[5] != row[6]]
    assert doubled == [], f"seed {SEED}"
    trained = _sql(
        killed,
        """SELECT t."group", count(DISTINCT trajectory_id), min(t.status), max(t.status) FROM samples s
           JOIN trajectories t USING (trajectory_id) WHERE s.status = 'committed' GROUP BY ALL""",
    )
    assert trained, f"seed {SEED}"
    assert {row[1] for row in trained} <= {3, 4}, f"seed {SEED}"  # a member may have failed at its task
    assert Counter(row[1] for row in trained)[4] > len(trained) * 0.8
    assert {status for row in trained for status in row[2:]} <= {"completed", "failed"}
    used = _sql(killed, "SELECT turn_id FROM samples WHERE status = 'committed'")
    assert len(used) == len(set(used)), f"seed {SEED}"


def test_the_ledger_is_exact(killed: Run) -> None:
    """Every token is accounted for, and no launch is without its end."""
    assert not any(fold_ledger(killed.log().events()).unaccounted().values()), f"seed {SEED}"
    assert _sql(killed, "SELECT count(*) FROM launches WHERE ended IS NULL") == [(0,)]
    assert _sql(killed, "SELECT count(*) FROM trajectories WHERE finished IS NULL") == [(0,)]


def test_evaluations_are_of_their_version(killed: Run) -> None:
    """Each of its three tasks once, sampled by that version alone; also where something died meanwhile."""
    found = [e.record for e in killed.log().events_of({EvalFinished.KIND})]
    assert [(one.policy_version, one.trajectories) for one in found] == [
        (version, 3) for version in range(0, found[-1].policy_version + 1, 4)
    ]
    versions = [(one.policy_version, one.oldest_version, one.newest_version) for one in found]
    assert [said for said in versions if len(set(said)) > 1] == [], f"seed {SEED}"


def test_failures_of_the_infrastructure_are_none_of_agents(killed: Run) -> None:
    """What a killed proxy did to an agent: void, and tried again."""
    status = dict(_sql(killed, "SELECT status, count(*) FROM launches GROUP BY ALL"))
    assert set(status) <= {"done", "infra_error", "cancelled"}, status
    started = [e.record.owner for e in killed.log().events_of({LaunchStarted.KIND})]
    assert len(set(started)) >= 2


def test_a_step_is_replayed(killed: Run) -> None:
    """The last one, bit for bit."""
    history = history_of(killed.log(), None, "actor")
    last = max(history.steps)
    found = prove_stretch(killed.log(), history, last, last)
    assert [one.replay is not None and one.replay.bit_for_bit for one in found.steps] == [True]
