"""Does each algorithm learn? The demo's task, from one recorded teacher, by every algorithm; one figure.

The task takes several turns: a question is answered by calling a tool, reading its result and repeating it. A
model that imitates the sloppy teacher is right about a third of the time. From there each algorithm goes on
with the same agent, problems and engine, and steps of it are replayed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.progress import Progress

from rollbook import store
from rollbook.bench.figure import Figure, Outcome, Spread, spread
from rollbook.bench.learning_courses import COURSES, Course, config_of
from rollbook.cli.terminal import Console
from rollbook.demo.model import make_model
from rollbook.demo.processes import Agent, Process, Server, rollbook_command
from rollbook.demo.run import OFFLINE_STEPS, RUN, Demo, await_version, record_teacher, train_offline
from rollbook.train.checkpoints.checkpoint import checkpoint_name

KEEPS_STORES = True
"""A folder that is named keeps the stores and the figure, `learning.png`."""
GROUPS, GROUP_SIZE = 16, 8
"""Problems that are played for a rollout batch, and how often each."""
DONE = "learnt"
"""Empty file of a store in which all was learnt: a further run reads what is there."""
EVERY = 5
"""Rollout batches between looks at the held-out problems."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is learnt.

    Attributes:
        batches: rollout batches of each algorithm; held_out: problems that none of them trains on.
        offline_steps: of supervised fine-tuning, which all start from.
        courses: names of the algorithms.
    """

    batches: int = 30
    held_out: int = 128
    offline_steps: int = OFFLINE_STEPS
    courses: tuple[str, ...] = tuple(COURSES)
    seed: int = 0

    @property
    def steps(self) -> int:
        """One for each algorithm, and one for what all start from."""
        return 1 + len(self.courses)


def sized(scale: float) -> Plan:
    """So many times 30 rollout batches."""
    return Plan(batches=max(round(30 * scale), 2))


@dataclass(frozen=True, slots=True)
class Learnt:
    """What became of one algorithm.

    Attributes:
        curve: (optimizer steps, mean reward on the held-out problems), from before the first step on.
        replayed: step -> whether its replay was bit for bit.
    """

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


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Record and imitate once, and let every algorithm go on from there.

    Raises:
        DemoError: a process failed.
    """
    base = _base(folder / "base", plan)
    on_round()
    learnt = []
    for name in plan.courses:
        learnt.append(_learn(folder / name, base, COURSES[name], plan))
        on_round()
    picture = folder / "learning.png"
    plot(learnt, picture)
    return Measured(learnt, picture)


def _demo(path: Path, seed: int) -> Demo:
    return Demo(path, seed, Console(), Progress(disable=True))


def _base(path: Path, plan: Plan) -> Path:
    """A store with the teacher's conversations and a policy that imitates them; kept from an earlier run."""
    if (path / DONE).exists():
        return path
    shutil.rmtree(path, ignore_errors=True)
    demo = _demo(path, plan.seed)
    store.open(path, create=True)
    demo.folder.mkdir()
    make_model(demo.folder / "model", plan.seed)
    record_teacher(demo)
    train_offline(demo, plan.offline_steps)
    (path / DONE).touch()
    return path


def _learn(path: Path, base: Path, course: Course, plan: Plan) -> Learnt:
    """One algorithm, in a copy of the store; one that was learnt in an earlier run is read again."""
    if not (path / DONE).exists():
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(base, path)
        (path / DONE).unlink()
        demo = _demo(path, plan.seed)
        begins = path / checkpoint_name(RUN, "actor", plan.offline_steps)
        options = ("--store", path, "--model", begins, "--run", RUN, "--threads", 2)
        with Server("engine", demo.folder, *options) as server:
            server.await_ready()
            learn = _from_pairs if course.offline else _online
            learn(demo, server, course, plan)
        (path / DONE).touch()
    return Learnt(course.name, _curve(path, course), _replayed(path, course, plan))


def _curve(path: Path, course: Course) -> list[tuple[int, float]]:
    """The held-out rewards, as the log has them."""
    with store.connect(path) as connection:
        rows = connection.execute(_HELD_OUT).fetchall()
    return [(course.steps(batch), reward) for batch, reward in rows]


def _replayed(path: Path, course: Course, plan: Plan) -> dict[int, bool]:
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


def _online(demo: Demo, server: Server, course: Course, plan: Plan) -> None:
    """The agent plays a batch, the trainer takes its steps, the engine gets the version."""
    each = course.steps(1)
    text = config_of(course, demo, server.url, course.steps(plan.batches))
    with _training(demo, text, "--source", "tail") as trainer, Agent(demo.folder, server.url) as agent:
        await_version(server, trainer, plan.offline_steps)
        for batch in range(plan.batches):
            if batch % EVERY == 0:
                _play_held_out(demo, agent, plan, batch)
            asked = demo.problems(f"online-{batch}", GROUPS, held_out=False)
            agent.work(demo.jobs(f"online-{batch}", asked, "train", GROUP_SIZE))
            await_version(server, trainer, plan.offline_steps + each * (batch + 1))
        _play_held_out(demo, agent, plan, plan.batches)
        trainer.wait()
        trainer.check()


def _from_pairs(demo: Demo, server: Server, course: Course, plan: Plan) -> None:
    """The first policy plays all problems, right answers are preferred to wrong ones, and the trainer learns
    from these preferences alone."""
    with Agent(demo.folder, server.url) as agent:
        _play_held_out(demo, agent, plan, 0)
        _record_preferences(demo, server, agent, plan)
        for batch in [*range(2 * EVERY, plan.batches, 2 * EVERY), plan.batches]:
            text = config_of(course, demo, server.url, course.steps(batch))
            with _training(demo, text) as trainer:
                trainer.wait()
                trainer.check()
            _play_held_out(demo, agent, plan, batch)


def _training(demo: Demo, text: str, *options: str) -> Process:
    config = demo.folder / "learning.toml"
    config.write_text(text)
    return Process("train", rollbook_command("train", config, "--store", demo.path, *options), demo.folder)


def _play_held_out(demo: Demo, agent: Agent, plan: Plan, batch: int) -> None:
    """The held-out problems once more, the same each time."""
    asked = demo.problems("held-out", plan.held_out, held_out=True)
    agent.work(demo.jobs(f"held-out-{batch}", asked, "eval"))


def _record_preferences(demo: Demo, server: Server, agent: Agent, plan: Plan) -> None:
    """Play as many problems as the others play, and prefer right answers of a problem to wrong ones, one to
    one."""
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for batch in range(plan.batches):
            asked = demo.problems(f"online-{batch}", GROUPS, held_out=False)
            jobs = demo.jobs(f"online-{batch}", asked, "train", GROUP_SIZE)
            rewards = agent.work(jobs)
            for start in range(0, len(jobs), GROUP_SIZE):
                group = list(zip(jobs[start : start + GROUP_SIZE], rewards[start:], strict=False))
                right, wrong = ([job["id"] for job, reward in group if reward == r] for r in (1.0, 0.0))
                for chosen, rejected in zip(right, wrong, strict=False):
                    said = {"chosen": chosen, "rejected": rejected}
                    http.post("/v1/preferences", json=said).raise_for_status()


def outcome(measured: Measured) -> Outcome:
    """What each algorithm gained, and whether its steps replayed."""
    figures, spreads = list[Figure](), list[Spread]()
    for one in measured.learnt:
        before, after = one.curve[0][1], one.curve[-1][1]
        against = f"held-out reward before: {before:.3f}"
        figures.append(Figure(f"learning.{one.name}.held_out", after, "reward", against, None, 1))
        figures.append(Figure(f"learning.{one.name}.gain", one.gain, "reward", None, None, 1))
        same = sum(one.replayed.values()) / len(one.replayed)
        figures.append(Figure(f"learning.{one.name}.replayed", same, "share of steps", None, None, 1))
        spreads.append(spread(one.name, "held-out reward", [reward for _, reward in one.curve]))
    return Outcome(tuple(figures), tuple(spreads))


def plot(learnt: list[Learnt], file: Path) -> None:
    """Draw the held-out reward of every algorithm over its optimizer steps as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for one, marker in zip(learnt, "osv^<>DPX*dh" * 2, strict=False):
        axes.plot(*zip(*one.curve, strict=True), marker=marker, markersize=4, linewidth=1.2, label=one.name)
    axes.set(
        xlabel="optimizer steps after imitation", ylabel="mean reward, held-out problems", ylim=(0, 1.02)
    )
    axes.set_title("The demo's task, learnt by each algorithm")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small", ncols=2)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
