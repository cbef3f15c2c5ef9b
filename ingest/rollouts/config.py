"""The CONFIG of `rollbook rollout`: which tasks, which agent, how it is started, watched and scored.

The docstring under a key is what the page of keys says of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rollbook.ingest.rollouts.agent_config import AgentConfig
from rollbook.ingest.rollouts.score_config import ScoreConfig
from rollbook.ingest.rollouts.tables import Name, Positive, Seconds, Table, typed
from rollbook.store.errors import ConfigError
from rollbook.store.events import Json
from rollbook.store.toml_file import override, read_toml
from rollbook.store.whole_config import part_of, written_key


class ClocksConfig(Table):
    """`[clocks]`: how long is waited, in seconds."""

    start_s: Seconds | None = 120.0
    """From its start to its first request."""
    idle_s: Seconds | None = 600.0
    """From one request's end to the next, and for its end after the last."""
    total_s: Seconds | None = 3600.0
    """From its start to its end."""
    scoring_s: Seconds = 300.0
    """For each scorer."""
    grace_s: Annotated[float, Field(ge=0)] = 5.0
    """From SIGTERM to SIGKILL."""


class RetriesConfig(Table):
    """`[retries]`: what becomes of trajectories whose infrastructure failed."""

    attempts: Positive = 3
    """Trajectories for one place of a group, the first included. Up to 10 that failed because the proxy was
    away are not counted: those are tried again once it is back."""
    pause_s: Annotated[float, Field(ge=0)] = 1.0
    """Before another attempt; twice as long before each further one."""
    window: Positive = 20
    """Of so many launches, the latest, ..."""
    stop_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """... this share failed by its infrastructure: then the rollouts stop."""
    warn_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """This share of all launches, `window` or more, failed so: then it is said, once."""


class EvaluationConfig(Table):
    """`[evaluation]`: with --follow, what agents are evaluated on where the training waits for that
    (`evaluation.wait_s` of `rollbook train`)."""

    tasks: str
    """Tasks that are held out, as `tasks`."""
    samples: Positive = 1
    """Trajectories of each."""
    limit: Positive | None = None
    """Tasks, the first; absent: all."""
    concurrency: Positive | None = None
    """Trajectories at once; absent: as in training."""

    def config(self, of: RolloutConfig, version: int) -> RolloutConfig:
        """The rollouts that evaluate a version: those of a CONFIG, on these tasks."""
        found = {"name": f"{of.name}.eval.{version}", "split": "eval", "epochs": 1, "evaluation": None}
        found |= {"tasks": self.tasks, "samples": self.samples, "limit": self.limit}
        return of.model_copy(update=found | {"concurrency": self.concurrency or of.concurrency})


class RolloutConfig(Table):
    """All of a CONFIG."""

    name: Name = "rollouts"
    """Of these rollouts, in the log; a restart under the same name goes on."""
    proxy: str = "http://127.0.0.1:8000"
    """The proxy of `rollbook serve`."""
    run: Name | None = None
    """Run that it is to record into; absent: whichever it does."""
    store: Path | None = None
    """Folder of that run's store; the proxy is to record there, if the folder is on this host."""
    tasks: str
    """A file of JSON lines or Parquet, a folder of either (a Hugging Face dataset) or of tasks as Harbor has
    them, `module:function` or `file.py:function`; or `range:N`, the tasks 0 to N-1 of an environment that has
    its own, as `idx`."""
    samples: Positive = 1
    """Trajectories of each task, which make a group."""
    split: Literal["train", "eval", "teacher"] = "train"
    """Split that they are recorded in."""
    epochs: Positive = 1
    """How often the tasks are gone over."""
    limit: Positive | None = None
    """Tasks, the first; absent: all."""
    concurrency: Positive = 32
    """Trajectories at once."""
    folder: Path = Path("rollouts")
    """Where each launch has a folder of its own, for its task, its files and what it prints."""
    agent: AgentConfig
    """What is run."""
    clocks: ClocksConfig = Field(default_factory=ClocksConfig)
    """How long is waited."""
    retries: RetriesConfig = Field(default_factory=RetriesConfig)
    """What becomes of infrastructure that fails."""
    score: tuple[ScoreConfig, ...] = ()
    """What the reward is made of; absent: what the agent says of itself."""
    evaluation: EvaluationConfig | None = None
    """What agents are evaluated on, beside an online training."""


def load_rollouts(path: Path, overrides: Sequence[str] = ()) -> RolloutConfig:
    """Read a CONFIG and apply `key=value` overrides: dotted keys, TOML or plain text.

    Raises:
        ConfigError: it cannot be read, or a key is unknown, missing or ill-typed; all are named.
    """
    whole = read_toml(path)
    values = part_of(whole, "rollout", str(path))
    for text in overrides:
        override(values, text)
    return parse_rollouts(values, str(path), partial(written_key, whole, "rollout"))


def parse_rollouts(values: Json, name: str, written: Callable[[str], str] = str) -> RolloutConfig:
    """Check a CONFIG's values.

    Args:
        name: what they are called in an error; written: a key as the file of a whole run has it.

    Raises:
        ConfigError: a key is unknown, missing or ill-typed; all are named.
    """
    config = typed(RolloutConfig, values, name, "file", written)
    names = [one.name for one in config.score]
    if len(set(names)) < len(names):
        said = "two components have the same name; each is a source of rewards"
        raise ConfigError(f"{name}:\n  {written('score')}: {said}")
    return config
