"""The CONFIG of `rollbook rollout`: which tasks, which agent (`[agent]`), how it is started and
watched, and what its reward is made of (`[[score]]`).

The docstring under a key is its text on the page of keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, model_validator

from rollbook.rollouts.launchers.launching import Isolation, Level, Limits, Positive
from rollbook.store.config import (
    Table,
    describe_invalid,
    invalid_values,
    override,
    part_of,
    read_toml,
    written_key,
)
from rollbook.store.errors import ConfigError
from rollbook.store.events import Json
from rollbook.store.redaction import shown

T = TypeVar("T", bound=BaseModel)

Seconds = Annotated[float, Field(gt=0)]
Url = Annotated[str, Field(pattern=r"^https?://[^\s/]+")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]


def typed(
    model: type[T],
    values: Json,
    name: str,
    whole: str = "table",
    written: Callable[[str], str] = str,
    within: str = "",
) -> T:
    """A table's values, typed.

    Args:
        name: what the table or its file is called in an error; whole: what is wrong with no key of it alone;
            written: a key as the file has it; within: the table's own name in the file.

    Raises:
        ConfigError: a key is unknown, missing or ill-typed; all are named.
    """
    try:
        # JSON mode: TOML's lists serve as tuples and its integers as floats, yet types stay strict.
        return model.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        errors = invalid_values(error, values)
        places = [".".join([within] * bool(within) + list(item.keys)) for item in errors]
        lines = [
            f"  {written(place) if place else whole}: {shown(describe_invalid(model, item))}"
            for place, item in zip(places, errors, strict=True)
        ]
        raise ConfigError(f"{name}:\n" + "\n".join(lines)) from error


Launchers = Literal["subprocess", "docker", "ray", "http", "python", "verifiers"]


def _without_pidns(level: object) -> object:
    if level == "pidns":
        raise ValueError(
            '"pidns" is gone: name "bwrap", which has a namespace for processes and files of its own, or '
            '"session" or "none"'
        )
    return level


class ContainerConfig(Table):
    """`[agent.container]`: what an agent of launcher docker runs in."""

    image: str
    """The image; it is pulled once, before the first launch, where it is not there."""
    engine: Literal["auto", "docker", "podman"] = "auto"
    """auto: docker where its daemon answers, podman otherwise."""
    network: str = "auto"
    """The engine's word for a network. auto: `host` if the proxy listens on loopback, as nothing else reaches
    it there, or else the engine's default."""
    mounts: tuple[Annotated[str, Field(pattern=r"^[^:,]+:/[^:,]+(:(ro|rw))?$")], ...] = ()
    """Files and folders of this host that it sees, `/here:/there`, which it may read; `/here:/there:rw` to
    write too."""
    user: Annotated[str, Field(pattern=r"^[0-9]+(:[0-9]+)?$")] | None = None
    """Whom it runs as, by number, `uid` or `uid:gid`; absent: as this process."""
    folder: str = "/rollbook"
    """Where it sees its own folder, in which it starts."""
    workdir: str | None = None
    """Where it starts instead."""
    options: tuple[str, ...] = ()
    """More words for the engine's `run`, such as "--gpus=all" or "--cap-add=SETUID"."""


class ServiceConfig(Table):
    """`[agent.service]`: somebody's agents, of launcher http."""

    url: Url
    """Where agents are started: POST, as docs/rollouts.md has it."""
    token_variable: str | None = None
    """Variable of this process that holds a bearer token for it."""
    poll_s: Seconds = 1.0
    """Between two questions how an agent is."""
    lease_s: Seconds = 60.0
    """So long it may give no answer, until its agents failed by their infrastructure; and so long it keeps an
    agent that nobody asks for."""


class NodesConfig(Table):
    """`[agent.nodes]`: of launcher ray, the nodes of the cluster that agents are on."""

    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """What a node is to have in all: {CPU = 8}, or a word of one's own, of `ray start --resources`."""
    within_s: Annotated[float, Field(ge=0)] = 60.0
    """How long is waited for the first such node."""


class AgentConfig(Table):
    """`[agent]`: what is run for each trajectory."""

    launcher: Launchers = "subprocess"
    """A program in a process of its own, here or on a node of a Ray cluster, a container, an agent of
    somebody's service, a coroutine in this process, or rollouts of an environment of verifiers, which one
    process plays."""
    command: tuple[str, ...] = ()
    """The program and its arguments; {name} stands for a value of the task. For subprocess and ray, what
    names a file beside this process is found, though the agent starts in a folder of its own; for docker all
    is as the image has it, and without a command the image's own is run. For verifiers: vf-eval, the
    environment and its options; which tasks, how often, and the model's address are not among them."""
    rollout: str | None = None
    """For python: `module:Class` or `file.py:Class` of an AgenticRollout, or the name it is registered by;
    `gym` and `openenv` are there."""
    options: dict[str, Any] = Field(default_factory=dict)
    """For python: what the class is made with. For http: `options` of what is sent."""
    address: Url | None = None
    """For docker, ray and http: the proxy's URL as it is from there; absent: `proxy`, or for containers on
    another network than the host's, where that is on loopback, http://host.docker.internal with its port."""
    environment: dict[str, str] = Field(default_factory=dict)
    """For programs: variables that they are given besides."""
    pass_environment: tuple[str, ...] = ("PATH", "LANG", "LC_ALL", "TZ")
    """For programs: variables of this process that they are given; no others are. A container's PATH is its
    image's all the same."""
    names: dict[str, str] = Field(default_factory=dict)
    """For programs: variables of other systems, each with the one of ours that it stands for:
    RELAX_ROLLOUT_URL = "OPENAI_BASE_URL"."""
    isolation: Annotated[Isolation, BeforeValidator(_without_pidns)] = "auto"
    """For subprocess and ray, how far its processes are kept apart: none, session, bwrap, or the most that
    works there."""
    require: Annotated[Level, BeforeValidator(_without_pidns)] = "none"
    """For subprocess and ray, the least isolation; with less nothing is started."""
    user: Annotated[str, Field(pattern=r"^[^:\s]+(:[0-9]+)?$")] | None = None
    """For subprocess, ray and verifiers, where this process is root: another user of the host, by name or
    number, `uid` or `uid:gid`, whom agents run as; they read and write what it may."""
    readable: tuple[Path, ...] = ()
    """With bwrap: files and folders that it may read, beside the system's programs and the folders of files
    that the command names."""
    limits: Limits = Field(default_factory=Limits)
    """What it may take."""
    container: ContainerConfig | None = None
    """Of launcher docker."""
    service: ServiceConfig | None = None
    """Of launcher http."""
    nodes: NodesConfig = Field(default_factory=NodesConfig)
    """Of launcher ray."""

    @model_validator(mode="after")
    def _whole(self) -> AgentConfig:
        wanted = {
            "subprocess": (self.command, 'a command, such as ["python", "agent.py"]'),
            "ray": (self.command, 'a command, such as ["python", "agent.py"]'),
            "docker": (self.container, "a table [agent.container] with an image"),
            "http": (self.service, "a table [agent.service] with a url"),
            "python": (self.rollout, 'a rollout, such as "my_agents:MyAgent"'),
            "verifiers": (self.command[1:], 'a command, such as [".venv/bin/vf-eval", "gsm8k"]'),
        }
        given, needs = wanted[self.launcher]
        if not given:
            raise ValueError(f'launcher = "{self.launcher}" needs {needs}')
        if self.user is not None and self.launcher not in ("subprocess", "ray", "verifiers"):
            raise ValueError("user goes with the launchers subprocess, ray and verifiers")
        return self


def _with_a_group(text: str) -> str:
    try:
        groups = re.compile(text).groups
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from error
    if groups != 1:
        raise ValueError(f"has {groups} groups: the number is what its one group finds")
    return text


class JudgeConfig(Table):
    """`[score.judge]`: a model that judges. What it is asked and says is a trajectory of split `judge`."""

    prompt: str
    """What it is asked: {name} stands for a value of the task, {answer} for the agent's last reply, and
    {conversation} for all that was said."""
    system: str | None = None
    """A system message before that."""
    parse: Annotated[str, AfterValidator(_with_a_group)] | None = None
    """A regular expression whose group is the number, where it last matches the reply; absent: the reply's
    last line is a number, or an object with `reward`."""
    model: str = "judge"
    """The model that is asked for."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Others of the request's fields, such as temperature or max_tokens."""
    proxy: Url | None = None
    """The proxy of `rollbook serve` that has the judge; absent: the agents', whose policy then judges."""
    key_variable: str = "ROLLBOOK_KEY"
    """Variable of this process that holds an operator's or writer's key of that proxy, if it asks for one."""


class ScoreConfig(Table):
    """`[[score]]`: a component of the reward, by one of function, command, url and judge."""

    name: Name
    """What it is called; the source of its reward."""
    function: str | None = None
    """`module:function` or `file.py:function` of (task, attempt) that gives a number."""
    command: tuple[str, ...] = ()
    """A program whose last line of output is a number, or an object with `reward`."""
    url: Url | None = None
    """Somebody's judge: POST, as docs/rollouts.md has it, answered by a number or an object with `reward`."""
    token_variable: str | None = None
    """Variable of this process that holds a bearer token for url."""
    judge: JudgeConfig | None = None
    """A model that judges."""
    weight: float = 1.0
    """What it counts in the sum, which is the trajectory's reward."""

    @model_validator(mode="after")
    def _exactly_one(self) -> ScoreConfig:
        given = [self.function is not None, bool(self.command), self.url is not None, self.judge is not None]
        if sum(given) != 1:
            raise ValueError("needs one of function, command, url and judge")
        return self


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

    def config(self, base: RolloutConfig, version: int) -> RolloutConfig:
        """The rollouts that evaluate a version: those of a CONFIG, on these tasks."""
        changes = {"name": f"{base.name}.eval.{version}", "split": "eval", "epochs": 1, "evaluation": None}
        changes |= {"tasks": self.tasks, "samples": self.samples, "limit": self.limit}
        return base.model_copy(update=changes | {"concurrency": self.concurrency or base.concurrency})


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
    names = [component.name for component in config.score]
    if len(set(names)) < len(names):
        message = "two components have the same name; each is a source of rewards"
        raise ConfigError(f"{name}:\n  {written('score')}: {message}")
    return config
