"""The settings of each algorithm: the keys that differ from its defaults, and a learning rate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rollbook.demo.run import RUN, Demo

CONFIG = """\
run = "{run}"
policy = "{policy}"
model = "{model}"
steps = {steps}
seed = {seed}
threads = 2
checkpoint_every = 10
idle_timeout_s = 120

[optimizer]
lr = {lr}
warmup_steps = 3
betas = [0.9, 0.98]
"""


@dataclass(frozen=True, slots=True)
class Course:
    """An algorithm on a task.

    Attributes:
        algorithm: its name; keys: of `[algorithm]`; critic: of `[critic]`; recipe: of `[recipe]`.
        learns_from: its own rollouts and the agent's rewards; its own rollouts and the scores of a reward
            model, which is trained on preferences between the first policy's rollouts; or those preferences.
        policy: the name of its weights.
    """

    name: str
    algorithm: str
    lr: float = 5e-4
    keys: Mapping[str, Any] = field(default_factory=dict)
    critic: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    learns_from: Literal["rewards", "scores", "preferences"] = "rewards"
    policy: str = "actor"

    def steps(self, batches: int) -> int:
        """Optimizer steps on so many rollout batches; twice as many on preferences, which all exist
        from the beginning."""
        if self.learns_from == "preferences":
            return 2 * batches
        return batches * int(self.keys.get("epochs", 1)) * int(self.keys.get("mini_batches", 1))


TASKS = {"one_call": 1, "two_calls": 2}
"""Calls of the calculator that a task's problems take."""
GROUPED = {"groups": 16, "group_size": 8}
SINGLE = {"groups": 128, "group_size": 1}
PAIRED = {"batch_size": 64}
WITH_CRITIC: Any = {"keys": SINGLE | {"mini_batches": 2}, "critic": {"lr": 1e-3, "alone_steps": 4}}
SCORES = "reward-model"
"""Source of the rewards that a reward model gives."""
PAIRS: Any = "teacher"
"""Split of the rollouts between which there are preferences."""

COURSES = {
    one.name: one
    for one in (
        Course("grpo", "grpo", keys=GROUPED),
        Course("rloo", "rloo", keys=GROUPED),
        Course("dr_grpo", "dr_grpo", keys=GROUPED | {"constant_length": 32}),
        Course("dapo", "dapo", keys=GROUPED),
        Course("gspo", "gspo", keys=GROUPED),
        Course("cispo", "cispo", keys=GROUPED),
        Course("reinforce_plus_plus", "reinforce_plus_plus", keys=SINGLE),
        Course("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline", keys=GROUPED),
        Course("decoupled_ppo", "decoupled_ppo", keys=GROUPED | {"mini_batches": 2}),
        Course("ppo", "ppo", **WITH_CRITIC),
        Course("dpo", "dpo", 1e-4, PAIRED | {"beta": 1.0}, learns_from="preferences"),
        Course("grpo_scored", "grpo", keys=GROUPED, recipe={"reward_source": SCORES}, learns_from="scores"),
        Course("ppo_scored", "ppo", **WITH_CRITIC, recipe={"reward_source": SCORES}, learns_from="scores"),
    )
}
REWARD_MODEL = Course("reward_model", "reward_model", keys=PAIRED, policy="reward")
"""What gives the scores."""


def config_of(course: Course, demo: Demo, model: Path, steps: int, url: str | None) -> str:
    """The CONFIG of a course.

    Args:
        model: that its weights start from.
        url: of the proxy whose engine gets the weights; None for weights that no engine serves.
    """
    text = CONFIG.format(
        run=RUN, policy=course.policy, model=model, steps=steps, seed=demo.seed, lr=course.lr
    )
    offline = course.learns_from == "preferences" or course.policy != "actor"
    splits: Mapping[str, Any] = {"splits": [PAIRS if offline else "train"], "drop_zero_variance": False}
    tables: dict[str, Mapping[str, Any]] = {
        "recipe": {**splits, **course.recipe},
        "algorithm": {"name": course.algorithm, **course.keys},
        "critic": course.critic,
        "sync": {"engines": [f"{url}/engine"], "sync_every": 10 if offline else 1} if url else {},
    }
    for table, keys in tables.items():
        if keys:
            lines = (f"{key} = {json.dumps(value)}" for key, value in keys.items())
            text += "\n".join(["", f"[{table}]", *lines, ""])
    return text
