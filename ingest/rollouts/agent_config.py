"""`[agent]` of a CONFIG: what is run for each trajectory, where, and how it is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from rollbook.ingest.rollouts.launching import Isolation, Level
from rollbook.ingest.rollouts.tables import Positive, Seconds, Table, Url

Launchers = Literal["subprocess", "docker", "ray", "http", "python", "verifiers"]


def _without_pidns(level: object) -> object:
    if level == "pidns":
        raise ValueError(
            '"pidns" is gone: name "bwrap", which has a namespace for processes and files of its own, or '
            '"session" or "none"'
        )
    return level


class LimitsConfig(Table):
    """`[agent.limits]`: what an agent may take; absent: as much as there is."""

    memory_mb: Positive | None = None
    """Memory of all of its processes, by a cgroup; where subprocess can make none, address space of each."""
    processes: Positive | None = None
    """Its processes and threads at once, by a cgroup; where none can be made, nothing is started."""
    cpus: Annotated[float, Field(gt=0)] | None = None
    """CPUs that it may keep busy, by a cgroup; where none can be made, nothing is started."""
    cpu_s: Positive | None = None
    """CPU time of each of its processes."""
    file_mb: Positive | None = None
    """Size of each file that it writes."""
    open_files: Positive | None = None
    """Open files of each of its processes."""
    disk_mb: Positive | None = None
    """What its folder may take of the disk, measured every 2 s; what takes more is ended. With bwrap its
    /tmp, which is memory, is bounded by as much."""
    output_mb: Annotated[float, Field(ge=0)] = 8.0
    """Kept of each of stdout and stderr, the beginning; the rest is let go."""


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
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
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
