"""`rollbook run` in a folder of its own, with the parts that it has running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from rollbook import store as rb
from rollbook.demo.model import make_model
from rollbook.demo.processes import rollbook_command
from rollbook.rollouts.launchers.cgroups import start_of
from rollbook.store import Store
from rollbook.testing.asgi import free_port

HERE = Path(__file__).parents[3]
_STEP = re.compile(r" step \d+: version ")
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
{train}
[train.algorithm]
name = "grpo"
groups = 2
group_size = 4
{algorithm}
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
{rollout}
[rollout.agent]
command = ["python3", "-S", "{agent}", "{{question}}"]
isolation = "session"
[[rollout.score]]
name = "brief"
function = "examples/arithmetic/sums.py:brief"
{more}
"""


class Run:
    """`rollbook run`, in a folder of its own.

    Args:
        agent: the program of its agents.
        train, algorithm, rollout, more: lines for these tables of its CONFIG, and for its end.
    """

    def __init__(
        self,
        folder: Path,
        *,
        agent: str = "examples/arithmetic/agent.py",
        train: str = "",
        algorithm: str = "",
        rollout: str = "",
        more: str = "",
    ) -> None:
        self.folder, self.store, self.log_file = folder, folder / "runs", folder / "run.log"
        (folder / "examples").symlink_to(HERE / "examples")
        make_model(folder / "my-model", 0)
        values = {"agent": agent, "train": train, "algorithm": algorithm, "rollout": rollout, "more": more}
        (folder / "online.toml").write_text(CONFIG.format(port=free_port(), **values))
        self._marks = set[str]()
        """Of the starts that were seen, in the environment of all that each has started."""
        self.child: subprocess.Popen[bytes]
        """The process that was started last."""

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start it."""
        command = [*rollbook_command("run", "online.toml"), *words]
        environment = os.environ | {"PYTHONPATH": str(HERE / "src"), "OMP_NUM_THREADS": "1"}
        with self.log_file.open("ab") as log:
            self.child = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, preexec_fn=_hears_hangups
            )
        return self.child

    def processes(self) -> dict[int, list[bytes]]:
        """What runs in its folder, what such has started elsewhere, and its guards; pid -> words."""
        running = dict[int, list[bytes]]()
        every = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        for pid in every:
            if _in(pid, self.folder):
                running[pid] = _words(pid)
                self._marks |= {mark} if (mark := start_of(pid)) is not None else set()
        running |= {pid: _words(pid) for pid in every if start_of(pid) in self._marks}
        guards = {mark.encode() for mark in self._marks}
        running |= {pid: words for pid in every if guards & set(words := _words(pid))}
        return {pid: words for pid, words in running.items() if words}

    def pids(self, part: str) -> list[int]:
        """Processes of a part, by its command."""
        processes = self.processes().items()
        return [pid for pid, words in processes if part.encode() in words[:5] and b"rollbook" in words]

    def log(self) -> Store:
        """Its store, once there is one."""
        return rb.open(self.store)

    def done(self) -> int:
        """Steps that are committed."""
        try:
            [[count]] = self.sql("SELECT count(*) FROM metrics")
            return int(count)
        except rb.errors.RollbookError:
            return 0

    def sql(self, query: str) -> list[tuple[Any, ...]]:
        """Rows of its store."""
        with rb.connect(self.store) as connection:
            return connection.execute(query).fetchall()

    def said(self) -> str:
        """What it printed so far."""
        return self.log_file.read_text()

    def await_steps(self, count: int, child: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Wait until it has told of so many more steps; the process of the run.

        One that gave up, since a part died too often, is started again: the same command goes on.
        """
        before, by = len(_STEP.findall(self.said())), time.monotonic() + 240
        while len(_STEP.findall(self.said())) < before + count:
            log = self.said()[-3000:]
            assert time.monotonic() < by, log
            if child.poll() is not None:
                assert "for the 6th time within 10 minutes" in log
                child = self.start()
            time.sleep(0.3)
        return child


def _hears_hangups() -> None:
    """SIGHUP is ignored by all that `nohup` starts."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _in(pid: int, folder: Path) -> bool:
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(folder.resolve())
    except OSError:
        return False


def _words(pid: int) -> list[bytes]:
    """Of its command line; none of one that has ended."""
    try:
        return [word for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") if word]
    except OSError:
        return []
