"""Does each algorithm learn? Each learns two tasks, starting from one recorded teacher per task;
one figure shows all.

The demo's task takes two turns: a question is answered by calling a tool, reading its result and
repeating it. The other task takes three: the first call's result goes into a second call. A
model that imitates the sloppy teacher is right about a third of the time on the first task, and
a sixth on the second. From there each algorithm continues with the same agent, problems and
engine, and some of its steps are replayed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import orjson
from rich.progress import Progress

from rollbook import store
from rollbook.bench.figure import Figure, Outcome, Spread, spread
from rollbook.bench.learning_courses import COURSES, TASKS, Course
from rollbook.bench.learning_play import LEARN, Plan, first_policy
from rollbook.cli.pictures import pyplot
from rollbook.cli.terminal import Console
from rollbook.demo.model import make_model
from rollbook.demo.processes import Process, Server, rollbook_command
from rollbook.demo.run import RUN, Demo, record_teacher, train_offline

KEEPS_STORES = True
"""A folder that is named keeps the stores and the figure, `learning.png`."""
MARKERS = "osv^<>DPX*dh"
DONE = "learnt"
"""File of a store in which all was learnt, with the steps that were replayed: a further run reads both."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """The result of one algorithm.

    Attributes:
        task: that it learnt; name: of its course.
        curve: (optimizer steps, mean reward on the held-out problems), from before the first
            step on.
        replayed: step -> whether its replay was bit for bit.
    """

    task: str
    name: str
    curve: list[tuple[int, float]]
    replayed: dict[int, bool]

    @property
    def gain(self) -> float:
        """Held-out reward at the end less that at the beginning."""
        return self.curve[-1][1] - self.curve[0][1]


@dataclass(frozen=True, slots=True)
class Measured:
    """All algorithms, and where the figure is."""

    learnt: list[Learnt]
    picture: Path


def sized(scale: float) -> Plan:
    """So many times 15 rollout batches."""
    return Plan(batches=max(round(15 * scale), 2))


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """For each task, record and imitate once, and let every algorithm continue from there.

    Raises:
        DemoError: a process failed.
    """
    learnt = []
    for task in plan.tasks:
        base = _base(folder / task / "base", task, plan)
        on_round()
        for name in plan.courses:
            learnt.append(_learn(folder / task / name, base, task, COURSES[name], plan))
            on_round()
    picture = folder / "learning.png"
    plot(learnt, picture)
    return Measured(learnt, picture)


def _demo(path: Path, task: str, seed: int) -> Demo:
    return Demo(path, seed, Console(), Progress(disable=True), TASKS[task])


def _base(path: Path, task: str, plan: Plan) -> Path:
    """A store with the teacher's conversations and a policy that imitates them; an earlier run's is
    reused."""
    if (path / DONE).exists():
        return path
    shutil.rmtree(path, ignore_errors=True)
    demo = _demo(path, task, plan.seed)
    store.open(path, create=True)
    demo.folder.mkdir()
    make_model(demo.folder / "model", plan.seed, demo.calls)
    record_teacher(demo)
    train_offline(demo, plan.offline_steps)
    (path / DONE).touch()
    return path


def _learn(path: Path, base: Path, task: str, course: Course, plan: Plan) -> Learnt:
    """One algorithm, in a copy of the store; the result of an earlier run is read again."""
    if not (path / DONE).exists():
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(base, path)
        (path / DONE).unlink()
        demo = _demo(path, task, plan.seed)
        options = ("--store", path, "--model", first_policy(demo, plan), "--run", RUN, "--threads", 2)
        with Server("engine", demo.folder, *options) as server:
            server.await_ready()
            LEARN[course.learns_from](demo, server, course, plan)
        (path / DONE).write_bytes(orjson.dumps(_replay(path, course, plan), option=orjson.OPT_NON_STR_KEYS))
    replayed = {int(step): same for step, same in orjson.loads((path / DONE).read_bytes()).items()}
    return Learnt(task, course.name, _curve(path, course), replayed)


def _curve(path: Path, course: Course) -> list[tuple[int, float]]:
    """The held-out rewards, from the log."""
    with store.connect(path) as connection:
        rows = connection.execute(_HELD_OUT).fetchall()
    return [(course.steps(batch), reward) for batch, reward in rows]


def _replay(path: Path, course: Course, plan: Plan) -> dict[int, bool]:
    """Whether the first and the last step are replayed bit for bit."""
    same = {}
    for step in (plan.offline_steps, plan.offline_steps + course.steps(plan.batches) - 1):
        command = rollbook_command("replay", "step", step, "--store", path)
        with Process(f"replay-{step}", command, path / "demo") as replay:
            same[step] = replay.wait() == 0
    return same


_HELD_OUT = r"""
    SELECT CAST(regexp_extract(trajectory, '^held-out-(\d+)-', 1) AS INT) AS batch, avg(reward)
    FROM trajectories WHERE split = 'eval' GROUP BY batch ORDER BY batch"""


def outcome(measured: Measured) -> Outcome:
    """What each algorithm gained, and whether its steps replayed."""
    figures, spreads = list[Figure](), list[Spread]()
    for learnt in measured.learnt:
        before, after = learnt.curve[0][1], learnt.curve[-1][1]
        against = f"held-out reward before: {before:.3f}"
        name = f"learning.{learnt.task}.{learnt.name}"
        figures.append(Figure(f"{name}.held_out", after, "reward", against, None, 1))
        figures.append(Figure(f"{name}.gain", learnt.gain, "reward", None, None, 1))
        same = sum(learnt.replayed.values()) / len(learnt.replayed)
        figures.append(Figure(f"{name}.replayed", same, "share of steps", None, None, 1))
        spreads.append(
            spread(f"{learnt.task} {learnt.name}", "held-out reward", [reward for _, reward in learnt.curve])
        )
    return Outcome(tuple(figures), tuple(spreads))


def plot(learnt: list[Learnt], file: Path) -> None:
    """Draw the held-out reward of every algorithm over its optimizer steps, a panel a task, as a PNG."""
    plots = pyplot()
    tasks = list(dict.fromkeys(result.task for result in learnt))
    size = (7 * len(tasks), 6)
    figure, panels = plots.subplots(1, len(tasks), figsize=size, layout="constrained", squeeze=False)
    for task, axes in zip(tasks, panels[0], strict=True):
        shown = [result for result in learnt if result.task == task]
        for number, result in enumerate(shown):
            style = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--"}
            marker = MARKERS[number % len(MARKERS)]
            axes.plot(
                *zip(*result.curve, strict=True),
                **style,
                marker=marker,
                markersize=5,
                linewidth=1.2,
                label=result.name,
            )
        axes.set(
            xlabel="optimizer steps after imitation", ylabel="mean reward, held-out problems", ylim=(0, 1.02)
        )
        axes.set_title(f"Problems of {task.replace('_', ' ')}, learnt by each algorithm")
        axes.grid(alpha=0.3)
    lines = panels[0][0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", fontsize="small", ncols=5)
    figure.savefig(file, dpi=130)
    plots.close(figure)
