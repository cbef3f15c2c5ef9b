"""The CONFIG of `rollbook rollout`: which tasks, which agent, how it is started, watched and scored.

The docstring under a key is what the page of keys says of it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rollbook.ingest.rollouts.launching import Isolation, Level
from rollbook.store.errors import ConfigError
from rollbook.store.events import Json
from rollbook.store.redaction import shown
from rollbook.store.toml_file import read_toml
from rollbook.store.whole_config import part_of

Positive = Annotated[int, Field(ge=1, lt=2**63)]
Seconds = Annotated[float, Field(gt=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]


class _Table(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class LimitsConfig(_Table):
    """`[agent.limits]`: what an agent may take; absent: as much as there is."""

    memory_mb: Positive | None = None
    """Address space of each of its processes."""
    cpu_s: Positive | None = None
    """CPU time of each of its processes."""
    file_mb: Positive | None = None
    """Size of each file that it writes."""
    open_files: Positive | None = None
    """Open files of each of its processes."""
    output_mb: Annotated[float, Field(ge=0)] = 8.0
    """Kept of each of stdout and stderr, the beginning; the rest is let go."""


class AgentConfig(_Table):
    """`[agent]`: what is run for each trajectory."""

    launcher: Literal["subprocess", "python"] = "subprocess"
    """A program in a process of its own, or a coroutine in this one."""
    command: tuple[str, ...] = ()
    """For subprocess: the program and its arguments; {name} stands for a value of the task. What names a file
    beside this process is found, though the agent starts in a folder of its own."""
    rollout: str | None = None
    """For python: `module:Class` or `file.py:Class` of an AgenticRollout, or the name it is registered by."""
    options: dict[str, Any] = Field(default_factory=dict)
    """For python: what the class is made with."""
    environment: dict[str, str] = Field(default_factory=dict)
    """For subprocess: variables that it is given besides."""
    pass_environment: tuple[str, ...] = ("PATH", "LANG", "LC_ALL", "TZ")
    """For subprocess: variables of this process that it is given; no others are."""
    names: dict[str, str] = Field(default_factory=dict)
    """For subprocess: variables of other systems, each with the one of ours that it stands for:
    RELAX_ROLLOUT_URL = "OPENAI_BASE_URL"."""
    isolation: Isolation = "auto"
    """How far its processes are kept apart: none, session, pidns, bwrap, or the most that works here."""
    require: Level = "none"
    """The least isolation; with less nothing is started."""
    readable: tuple[Path, ...] = ()
    """With bwrap: files and folders that it may read, beside the system's programs and the folders of files
    that the command names."""
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    """What it may take."""

    @model_validator(mode="after")
    def _whole(self) -> AgentConfig:
        if self.launcher == "subprocess" and not self.command:
            raise ValueError('launcher = "subprocess" needs a command, such as ["python", "agent.py"]')
        if self.launcher == "python" and self.rollout is None:
            raise ValueError('launcher = "python" needs a rollout, such as "my_agents:MyAgent"')
        return self


class ClocksConfig(_Table):
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


class RetriesConfig(_Table):
    """`[retries]`: what becomes of trajectories whose infrastructure failed."""

    attempts: Positive = 3
    """Trajectories for one place of a group, the first included."""
    pause_s: Annotated[float, Field(ge=0)] = 1.0
    """Before another attempt; twice as long before each further one."""
    window: Positive = 20
    """Of so many launches, the latest, ..."""
    stop_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """... this share failed by its infrastructure: then the rollouts stop."""


class ScoreConfig(_Table):
    """`[[score]]`: a component of the reward."""

    name: Name
    """What it is called; the source of its reward."""
    function: str | None = None
    """`module:function` or `file.py:function` of (task, attempt) that gives a number."""
    command: tuple[str, ...] = ()
    """A program whose last line of output is a number, or an object with `reward`."""
    weight: float = 1.0
    """What it counts in the sum, which is the trajectory's reward."""

    @model_validator(mode="after")
    def _one(self) -> ScoreConfig:
        if (self.function is None) == (not self.command):
            raise ValueError("needs either a function or a command")
        return self


class EvaluationConfig(_Table):
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


class RolloutConfig(_Table):
    """All of a CONFIG."""

    name: Name = "rollouts"
    """Of these rollouts, in the log; a restart under the same name goes on."""
    proxy: str = "http://127.0.0.1:8000"
    """The proxy of `rollbook serve`."""
    tasks: str
    """A file of JSON lines or Parquet, a folder of either (a Hugging Face dataset), `module:function` or
    `file.py:function`."""
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
    """Read a CONFIG and apply `key=value` overrides (dotted keys, TOML values). A folder in it is relative to
    its own.

    Raises:
        ConfigError: it cannot be read, or a key is unknown, missing or ill-typed; all are named.
    """
    values = part_of(read_toml(path), "rollout", str(path))
    for text in overrides:
        _override(values, text)
    return parse_rollouts(values, str(path))


def parse_rollouts(values: Json, name: str) -> RolloutConfig:
    """Check a CONFIG's values.

    Args:
        name: what they are called in an error.

    Raises:
        ConfigError: a key is unknown, missing or ill-typed; all are named.
    """
    try:
        # JSON mode: TOML's lists serve as tuples and its integers as floats, yet types stay strict.
        config = RolloutConfig.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc'])) or 'file'}: {_said(e)}" for e in error.errors()]
        raise ConfigError(f"{name}:\n" + "\n".join(lines)) from error
    names = [one.name for one in config.score]
    if len(set(names)) < len(names):
        raise ConfigError(f"{name}:\n  score: two components have the same name; each is a source of rewards")
    return config


def _override(values: Json, text: str) -> None:
    key, sign, value = text.partition("=")
    try:
        if not sign:
            raise tomllib.TOMLDecodeError("no `=`")
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{text!r} is no key=value: {error}; text needs quotes, as in name='\"x\"'"
        ) from error
    *tables, last = key.strip().split(".")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{text!r}: {table} is no table")
    values[last] = parsed


def _said(error: Any) -> str:
    if error["type"] == "missing":
        return "is missing"
    if error["type"] == "extra_forbidden":
        return "unknown key"
    return shown(f"{error['msg']} (got {error['input']!r})")
