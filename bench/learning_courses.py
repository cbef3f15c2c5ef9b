"""What each algorithm is given: the keys that differ from its defaults, and a learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollbook.demo.run import RUN, Demo

CONFIG = """\
run = "{run}"
model = "{model}"
steps = {steps}
seed = {seed}
threads = 2
checkpoint_every = 10
idle_timeout_s = 120

[recipe]
splits = ["train"]
drop_zero_variance = false

[optimizer]
lr = {lr}
warmup_steps = 3
betas = [0.9, 0.98]

[sync]
engines = ["{engine}"]
sync_every = {sync_every}

[algorithm]
"""


@dataclass(frozen=True, slots=True)
class Course:
    """An algorithm on the demo's task.

    Attributes:
        algorithm: its name; keys: of `[algorithm]`; critic: of `[critic]`.
        offline: it learns from preferences that the first policy's rollouts gave, not from its own rollouts.
    """

    name: str
    algorithm: str
    lr: float = 5e-4
    keys: Mapping[str, Any] = field(default_factory=dict)
    critic: Mapping[str, Any] = field(default_factory=dict)
    offline: bool = False

    def steps(self, batches: int) -> int:
        """Optimizer steps on so many rollout batches."""
        return batches * int(self.keys.get("epochs", 1)) * int(self.keys.get("mini_batches", 1))


GROUPED = {"groups": 16, "group_size": 8}
SINGLE = {"groups": 128, "group_size": 1}

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
        Course("ppo", "ppo", keys=SINGLE | {"mini_batches": 2}, critic={"lr": 1e-3, "alone_steps": 4}),
        Course("dpo", "dpo", lr=3e-4, keys={"batch_size": 64, "beta": 0.1}, offline=True),
    )
}


def config_of(course: Course, demo: Demo, url: str, steps: int) -> str:
    """The CONFIG of a course."""
    text = CONFIG.format(
        run=RUN,
        model=demo.folder / "model",
        steps=steps,
        seed=demo.seed,
        lr=course.lr,
        engine=f"{url}/engine",
        sync_every=10 if course.offline else 1,
    )
    lines = [f'name = "{course.algorithm}"', *(f"{key} = {value}" for key, value in course.keys.items())]
    if course.critic:
        lines += ["", "[critic]", *(f"{key} = {value}" for key, value in course.critic.items())]
    return text + "\n".join(lines) + "\n"
