"""Rollouts in groups and a tiny model, made on the spot: the input of the steps of `bench replay`.

Ids, logprobs and rewards of the rollouts are random; their records are those that a proxy
writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollbook.bench.train_sides import Size
from rollbook.store import Event, Store
from rollbook.store.events import (
    Record,
    RewardAssigned,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnCompleted,
    TurnDelivered,
    TurnRequested,
    VersionSpan,
)
from rollbook.store.fold.trajectory import prompt_sha256
from rollbook.store.ids import new_id

VOCABULARY = 100
TINY = Size(32, 2, 4, VOCABULARY)
"""Of the model of tests: 30 thousand parameters in 24 tensors."""
MIDDLE = Size(128, 4, 4, VOCABULARY)
"""A million parameters: for steps that take longer than to read what they are made of, as real ones do."""
TINIEST = Size(16, 1, 2, VOCABULARY)
"""For a step of a million tokens, whose passes are none of what is measured."""
PROMPT = 8
"""Tokens of a prompt."""
APPEND = 500
POLICY = "actor"


@dataclass(frozen=True, slots=True)
class Steps:
    """A training by GRPO and the rollouts that it takes.

    Attributes:
        groups, size: of a step: groups, and rollouts of each.
        tokens: sampled of each rollout; all of them are trained.
        vectors: stages whose numbers are recorded.
    """

    run: str
    count: int
    groups: int
    size: int
    tokens: int
    checkpoint_every: int = 50
    micro_batch_size: int = 8
    vectors: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.groups * self.size

    def config(self, model: Path) -> str:
        """The CONFIG of `rollbook train`."""
        vectors = ", ".join(f'"{stage}"' for stage in self.vectors)
        return f"""\
run = "{self.run}"
model = "{model}"
steps = {self.count}
threads = 1
device = "cpu"
micro_batch_size = {self.micro_batch_size}
checkpoint_every = {self.checkpoint_every}
[algorithm]
name = "grpo"
groups = {self.groups}
group_size = {self.size}
[optimizer]
lr = 1e-3
[record]
vectors = [{vectors}]
"""


def append_rollouts(log: Store, steps: Steps) -> None:
    """Record the rollouts of a training, with different rewards within each group."""
    rng = np.random.default_rng(0)
    pending: list[Event] = []
    with log.writer(f"serve-{steps.run}") as writer:
        for number in range(steps.count * steps.samples):
            pending += [Event(record, steps.run) for record in _rollout(rng, number, steps)]
            if len(pending) >= APPEND:
                writer.append(pending).result()
                pending = []
        if pending:
            writer.append(pending).result()


def _rollout(rng: np.random.Generator, number: int, steps: Steps) -> Iterator[Record]:
    trajectory_id, turn_id, member = new_id(), new_id(), number % steps.size
    prompt, completion = (
        rng.integers(4, VOCABULARY, count).astype(np.int32) for count in (PROMPT, steps.tokens)
    )
    logprobs = rng.normal(-4.6, 0.1, steps.tokens).astype(np.float32)
    yield TrajectoryOpened(
        trajectory_id, f"{steps.run}-{number}", f"{steps.run}-{number // steps.size}", None
    )
    yield TurnRequested(
        trajectory_id, turn_id, turn_id, None, "first", None, 0, [], {}, None, {}, {}, "bench"
    )
    yield TurnCompleted(
        *(trajectory_id, turn_id, POLICY, 0, prompt, completion, logprobs),
        *((VersionSpan(POLICY, 0, 0, steps.tokens),), PROMPT, prompt_sha256(prompt), "stop", {}),
        *({"temperature": 1.0}, [], {}),
    )
    yield TurnDelivered(trajectory_id, turn_id, "sent")
    yield RewardAssigned(trajectory_id, None, float(member % 2))
    yield TrajectoryFinished(trajectory_id)
