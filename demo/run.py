"""`rollbook demo`: record a teacher, learn offline, learn online, query, replay. All parts are real."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rollbook import store
from rollbook.cli.terminal import Console
from rollbook.demo.model import make_model
from rollbook.demo.processes import Agent, DemoError, Process, Server, rollbook_command
from rollbook.demo.report import REWARD_BY_VERSION, plot, reward_by_version
from rollbook.demo.task import Problem, problems
from rollbook.demo.typed import activated_by, typed_rollbook
from rollbook.store.errors import ConfigError

RUN = "demo"
TEACHER_CONVERSATIONS, OFFLINE_STEPS = 1600, 450
ONLINE_STEPS, GROUPS, GROUP_SIZE = 22, 16, 8
HELD_OUT = 192
MIN_GAIN = 0.3

SFT_CONFIG = """\
# Offline: imitate the recorded teacher.
run = "{run}"
model = "{model}"
steps = {offline_steps}
seed = {seed}
threads = 2
checkpoint_every = 90

[algorithm]
name = "sft"
batch_size = 64

[recipe]
splits = ["teacher"]

[optimizer]
lr = 3e-3
min_lr = 1.5e-4
warmup_steps = 30
decay = "WSD"
wsd_decay_steps = {decay_steps}
betas = [0.9, 0.98]
weight_decay = 0.01
"""

GRPO_CONFIG = """\
# Online: reinforce what worked. Each new version goes to the engine at once.
run = "{run}"
model = "{model}"
steps = {online_steps}
seed = {seed}
threads = 2
checkpoint_every = 8
idle_timeout_s = 120

[algorithm]
name = "grpo"
groups = {groups}
group_size = {group_size}

[recipe]
splits = ["train"]
max_staleness = 0
drop_zero_variance = false

[optimizer]
lr = 5e-4
warmup_steps = 5
betas = [0.9, 0.98]

[sync]
engines = ["{engine}"]
"""


@dataclass(slots=True)
class Demo:
    """One run of the demo: where it works, how it shows its progress, and calls that a problem takes."""

    path: Path
    seed: int
    console: Console
    progress: Progress
    calls: int = 1

    @property
    def folder(self) -> Path:
        """Everything of the demo that is not the store's."""
        return self.path / "demo"

    def bar(self, what: str, total: int) -> Callable[[int], None]:
        """A progress bar; call it with how much is done."""
        task = self.progress.add_task(what, total=total)
        return lambda done: self.progress.update(task, completed=done)

    def config(self, name: str, text: str, **values: Any) -> Path:
        """Write a CONFIG file of the demo."""
        file = self.folder / name
        model = self.folder / "model"
        file.write_text(text.format(run=RUN, model=model, seed=self.seed, **values))
        return file

    def jobs(
        self, name: str, problem_list: list[Problem], split: str, copies: int = 1
    ) -> list[dict[str, Any]]:
        """Jobs for the agent: each problem is a group of `copies` trajectories."""
        return [
            {
                "id": f"{name}-{i}-{c}",
                "group": f"{name}-{i}",
                "task": problem.text,
                "split": split,
                "question": problem.text,
                "answer": str(problem.results[-1]),
                "seed": random.Random(f"{self.seed}-{name}-{i}-{c}").getrandbits(40),
            }
            for i, problem in enumerate(problem_list)
            for c in range(copies)
        ]

    def problems(self, name: str, count: int, *, held_out: bool) -> list[Problem]:
        """Problems decided by the demo's seed and this name."""
        rng = random.Random(f"{self.seed}-{name}")
        return list(problems(rng, count, held_out=held_out, calls=self.calls))


def record_teacher(demo: Demo) -> None:
    """Part 1: a scripted teacher behind the proxy; an agent's runs with it become the log."""
    shown = demo.bar("recording the teacher", TEACHER_CONVERSATIONS)
    jobs = demo.jobs("teacher", demo.problems("teacher", TEACHER_CONVERSATIONS, held_out=False), "teacher")
    script = "rollbook.demo.task:teacher"
    options = ("--store", demo.path, "--model", demo.folder / "model", "--run", RUN)
    with Server("teacher", demo.folder, *options, "--engine", "scripted", "--script", script) as server:
        server.await_ready()
        with Agent(demo.folder, server.url) as agent:
            for start in range(0, len(jobs), 200):
                agent.work(jobs[start : start + 200])
                shown(min(start + 200, len(jobs)))


def train_offline(demo: Demo, steps: int = OFFLINE_STEPS) -> None:
    """Part 1, continued: supervised fine-tuning on the recorded turns."""
    shown = demo.bar("learning offline (SFT)", steps)
    config = demo.config("sft.toml", SFT_CONFIG, offline_steps=steps, decay_steps=steps * 3 // 10)
    command = rollbook_command("train", config, "--store", demo.path)
    log = store.open(demo.path)
    with Process("train-offline", command, demo.folder) as trainer:
        while trainer.child.poll() is None:
            shown(min(log.head().get("train", 0) // 2, steps))
            time.sleep(0.2)
        trainer.check()
    shown(steps)


def train_online(demo: Demo, server: Server) -> None:
    """Part 2: the agent plays, GRPO trains on the log's tail, the engine gets every version."""
    evaluate, shown = (
        demo.bar("held-out problems", 2 * HELD_OUT),
        demo.bar("learning online (GRPO)", ONLINE_STEPS),
    )
    config = demo.config(
        "grpo.toml",
        GRPO_CONFIG,
        online_steps=ONLINE_STEPS,
        groups=GROUPS,
        group_size=GROUP_SIZE,
        engine=f"{server.url}/engine",
    )
    command = rollbook_command("train", config, "--store", demo.path, "--source", "tail")
    held_out = demo.problems("held-out", HELD_OUT, held_out=True)
    with Process("train-online", command, demo.folder) as trainer, Agent(demo.folder, server.url) as agent:
        await_version(server, trainer, OFFLINE_STEPS)
        agent.work(demo.jobs("before", held_out, "eval"))
        evaluate(HELD_OUT)
        for step in range(ONLINE_STEPS):
            exercises = demo.problems(f"online-{step}", GROUPS, held_out=False)
            agent.work(demo.jobs(f"online-{step}", exercises, "train", GROUP_SIZE))
            await_version(server, trainer, OFFLINE_STEPS + step + 1)
            shown(step + 1)
        agent.work(demo.jobs("after", held_out, "eval"))
        evaluate(2 * HELD_OUT)
        trainer.wait()
        trainer.check()


def await_version(server: Server, trainer: Process, version: int) -> None:
    """Wait until the engine serves a version.

    Raises:
        DemoError: the trainer failed, or it took more than two minutes.
    """
    deadline = time.monotonic() + 120
    while server.version() < version:
        server.check()
        trainer.check()
        if time.monotonic() > deadline:
            raise DemoError(f"version {version} did not reach the engine:\n{trainer.tail()}")
        time.sleep(0.03)


def replay_both(demo: Demo) -> dict[int, bool]:
    """Part 4: one offline and one online step, each replayed in a process of its own."""
    steps = (OFFLINE_STEPS // 5 + 3, OFFLINE_STEPS + ONLINE_STEPS // 2)
    shown = demo.bar("replaying two steps", len(steps))
    running = {
        step: Process(
            f"replay-{step}", rollbook_command("replay", "step", step, "--store", demo.path), demo.folder
        )
        for step in steps
    }
    same: dict[int, bool] = {}
    for step, process in running.items():
        with process:
            same[step] = process.wait() == 0
            shown(len(same))
            if not same[step]:
                demo.console.print(process.tail(20))
    return same


def run_demo(path: Path, seed: int, replace: bool) -> int:
    """Run the demo; the exit code: 0 if it learned enough and both replays were bit for bit.

    Raises:
        ConfigError: the folder exists.
        DemoError: a process failed.
    """
    if path.exists():
        if not replace or not (path / "STORE.json").exists():
            raise ConfigError(f"{path} exists: remove it, choose another --store, or add --replace")
        shutil.rmtree(path)
    started = time.monotonic()
    console = Console()
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        demo = Demo(path.absolute(), seed, console, progress)
        store.open(demo.path, create=True)
        demo.folder.mkdir()
        shown = demo.bar("making a tiny model", 1)
        make_model(demo.folder / "model", seed)
        shown(1)
        record_teacher(demo)
        options = ("--store", demo.path, "--model", demo.folder / "model", "--run", RUN)
        with Server("engine", demo.folder, *options, "--threads", 2) as server:
            train_offline(demo)
            server.await_ready()
            train_online(demo, server)
        same = replay_both(demo)
    return _conclude(demo, same, time.monotonic() - started)


def _conclude(demo: Demo, same: dict[int, bool], seconds: float) -> int:
    """Print the result; the exit code."""
    from rich.table import Table

    rows = reward_by_version(demo.path)
    picture = demo.folder / "reward.png"
    plot(rows, picture)
    say = demo.console.print
    rollbook, where = typed_rollbook(), shlex.quote(os.path.relpath(demo.path))
    demo.console.tell("\n", (f"{rollbook} sql", "bold"), f' "{REWARD_BY_VERSION}" --store {where}\n')
    table = Table("version", "split", "rollouts", "reward", box=None)
    for row in rows:
        table.add_row(str(row.version), row.split, str(row.rollouts), f"{row.reward:.3f}")
    say(table)
    held_out = [row.reward for row in rows if row.split == "eval"]
    gain = held_out[-1] - held_out[0]
    learned = gain >= MIN_GAIN
    say(f"\nheld-out reward {held_out[0]:.3f} -> {held_out[-1]:.3f} ({gain:+.3f}, wanted +{MIN_GAIN})")
    for step, equal in same.items():
        outcome = ("bit for bit", "green") if equal else ("differs", "red")
        demo.console.tell(f"replay of step {step}: ", outcome)
    say(f"plot: {picture}    took {seconds:.0f} s")
    say("\nTry next:")
    for words in (
        'sql "select * from turns limit 5"',
        "samples --trajectory online-0-0-0 --json",
        f"replay step {OFFLINE_STEPS + 3}",
    ):
        demo.console.tell(f"  {rollbook} {words} --store {where}")
    if (activation := activated_by()) is not None:
        demo.console.tell(f"With {activation} they begin with rollbook alone.")
    return 0 if learned and all(same.values()) else 1
