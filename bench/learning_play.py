"""How each algorithm learns a task: what the agent plays, what the trainer trains, and what they
exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from rollbook.bench.learning_courses import COURSES, PAIRS, REWARD_MODEL, SCORES, TASKS, Course, config_of
from rollbook.demo.processes import Agent, Process, Server, rollbook_command
from rollbook.demo.run import OFFLINE_STEPS, RUN, Demo, await_version
from rollbook.train.checkpoints.directory import checkpoint_name

GROUPS, GROUP_SIZE = 16, 8
"""Problems that are played for a rollout batch, and how often each."""
EVERY = 5
"""Rollout batches between looks at the held-out problems."""
PAIRS_TIMES = 4
"""Rollout batches between whose rollouts there are preferences, for each one that the others learn from."""
PATIENCE_S = 120
"""Of who waits for trajectories: a batch takes seconds."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is learnt.

    Attributes:
        batches: rollout batches of each algorithm; held_out: problems that none of them trains on.
        offline_steps: of supervised fine-tuning, which all start from.
        reward_steps: of the reward model.
        tasks, courses: names of what is learnt, and by what.
    """

    batches: int = 15
    held_out: int = 128
    offline_steps: int = OFFLINE_STEPS
    reward_steps: int = 100
    tasks: tuple[str, ...] = tuple(TASKS)
    courses: tuple[str, ...] = tuple(COURSES)
    seed: int = 0

    @property
    def steps(self) -> int:
        """Of each task, one for each algorithm, and one for what all start from."""
        return len(self.tasks) * (1 + len(self.courses))


def first_policy(demo: Demo, plan: Plan) -> Path:
    """The checkpoint that all start from."""
    return demo.path / checkpoint_name(RUN, "actor", plan.offline_steps)


def from_rewards(demo: Demo, server: Server, course: Course, plan: Plan) -> None:
    """The agent plays a batch, the trainer takes its steps, the engine gets the version."""
    each = course.steps(1)
    text = config_of(course, demo, demo.folder / "model", course.steps(plan.batches), server.url)
    with _training(demo, text, "--source", "tail") as trainer, Agent(demo.folder, server.url) as agent:
        await_version(server, trainer, plan.offline_steps)
        for batch in range(plan.batches):
            if batch % EVERY == 0:
                _play_held_out(demo, agent, plan, batch)
            agent.work(_jobs(demo, batch, f"online-{batch}", "train"))
            await_version(server, trainer, plan.offline_steps + each * (batch + 1))
        _play_held_out(demo, agent, plan, plan.batches)
        trainer.wait()
        trainer.check()


def from_preferences(demo: Demo, server: Server, course: Course, plan: Plan) -> None:
    """The first policy plays, right answers are preferred to wrong ones, and the trainer learns from these
    preferences alone, with the first policy as the reference."""
    course = replace(course, keys={**course.keys, "reference_version": plan.offline_steps})
    with Agent(demo.folder, server.url) as agent:
        _play_held_out(demo, agent, plan, 0)
        _record_preferences(demo, server, agent, plan)
        for batch in [*range(2 * EVERY, plan.batches, 2 * EVERY), plan.batches]:
            text = config_of(course, demo, demo.folder / "model", course.steps(batch), server.url)
            _train(demo, text)
            _play_held_out(demo, agent, plan, batch)


def from_scores(demo: Demo, server: Server, course: Course, plan: Plan) -> None:
    """A reward model learns from such preferences. It scores the policy's rollouts as they finish,
    and the trainer uses its scores: the agent's own rewards are only for the held-out problems."""
    with Agent(demo.folder, server.url) as agent:
        _record_preferences(demo, server, agent, plan)
    _train(demo, config_of(REWARD_MODEL, demo, first_policy(demo, plan), plan.reward_steps, None))
    judge = demo.path / checkpoint_name(RUN, REWARD_MODEL.policy, plan.reward_steps)
    options = ("--store", demo.path, "--run", RUN, "--source", SCORES, "--split", "train")
    command = rollbook_command("score", judge, *options, "--follow", PATIENCE_S)
    with Process("score", command, demo.folder) as scoring:
        from_rewards(demo, server, course, plan)
        scoring.check()


LEARN: Mapping[str, Callable[[Demo, Server, Course, Plan], None]] = {
    "rewards": from_rewards,
    "preferences": from_preferences,
    "scores": from_scores,
}


def _training(demo: Demo, text: str, *options: str) -> Process:
    config = demo.folder / "learning.toml"
    config.write_text(text)
    return Process("train", rollbook_command("train", config, "--store", demo.path, *options), demo.folder)


def _train(demo: Demo, text: str) -> None:
    """Train at a cut, to the end."""
    with _training(demo, text) as trainer:
        trainer.wait()
        trainer.check()


def _jobs(demo: Demo, batch: int, name: str, split: str) -> list[dict[str, Any]]:
    """A rollout batch: the same problems whoever plays them."""
    problems = demo.problems(f"online-{batch}", GROUPS, held_out=False)
    return demo.jobs(name, problems, split, GROUP_SIZE)


def _play_held_out(demo: Demo, agent: Agent, plan: Plan, batch: int) -> None:
    """The held-out problems once more, the same each time."""
    problems = demo.problems("held-out", plan.held_out, held_out=True)
    agent.work(demo.jobs(f"held-out-{batch}", problems, "eval"))


def _record_preferences(demo: Demo, server: Server, agent: Agent, plan: Plan) -> None:
    """Play problems, and pair right answers of each with wrong ones as preferences, one to one."""
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for batch in range(PAIRS_TIMES * plan.batches):
            jobs = _jobs(demo, batch, f"pairs-{batch}", PAIRS)
            rewards = agent.work(jobs)
            for start in range(0, len(jobs), GROUP_SIZE):
                group = list(zip(jobs[start : start + GROUP_SIZE], rewards[start:], strict=False))
                right, wrong = ([job["id"] for job, reward in group if reward == r] for r in (1.0, 0.0))
                for chosen, rejected in zip(right, wrong, strict=False):
                    preference = {"chosen": chosen, "rejected": rejected}
                    http.post("/v1/preferences", json=preference).raise_for_status()
