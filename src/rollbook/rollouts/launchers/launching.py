"""The launcher interface: how an agent is started, what is known of its run, and how nothing of it is
left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import Field

from rollbook.store.config import Table
from rollbook.store.events import Json

Positive = Annotated[int, Field(ge=1, lt=2**63)]
Level = Literal["none", "session", "bwrap"]
"""How far an agent's processes are kept from others: not at all; in a session of their own; in a namespace of
processes, which ends with its launcher, with files of their own."""
Isolation = Literal["auto", "none", "session", "bwrap"]
"""What is asked for: a level, which has to work here then, or `auto`, the most that works here."""


class Limits(Table):
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


@dataclass(frozen=True, slots=True)
class Launch:
    """An agent to start.

    Attributes:
        launch_id: a word of letters, digits and `-`. It is in the environment of every process of the agent,
            as ROLLBOOK_LAUNCH_ID, by which what was left behind is found.
        command: the program and its arguments.
        environment: all of it; nothing of the launcher's own is added.
        folder: its working folder, which is there and is its own.
        output: the folder for what it prints: `stdout.log` and `stderr.log`.
        isolation: how far it is kept from others.
        require: the least isolation; with less the launch is refused.
        labels: for whoever looks at what runs, where the launcher has a place for them.
        places: where else it finds parts of its folder, which it may write to; with less than files of its
            own (bwrap) a launch that has any is refused.
        after: where the command is the client of another program, which runs the agent: what ends the agent
            there, and tidies up. It is run in the same environment, also once this process is gone.
        user: whom it runs as, by name or number; None: as this process.
    """

    launch_id: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    output: Path
    isolation: Isolation = "auto"
    require: Level = "none"
    limits: Limits = field(default_factory=Limits)
    labels: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, Path] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    user: str | None = None


@dataclass(frozen=True, slots=True)
class Exit:
    """How an agent's first process ended, once nothing of it runs any more.

    Attributes:
        code: its exit code; None: a signal ended it.
        signal: that signal.
        cpu_s: of all of its processes; None: not known.
        peak_rss_mb: of the largest of its processes, or of what started it (10 MB) if that was larger; where
            a cgroup counts, of all of them, with what is cached of files. None: not known.
        printed: stream -> bytes that it printed, of which the file holds the first.
        left: processes that were still there when it ended, and were ended: `pid`, in the agent's own
            namespace if it has one, and `command`.
        complaint: the beginning of its stderr, on one line.
        error: what is known of its failure beyond that.
        infrastructure: why it could not run, or could not go on, by no fault of its own.
    """

    code: int | None
    signal: int | None
    cpu_s: float | None = None
    peak_rss_mb: float | None = None
    printed: Mapping[str, int] = field(default_factory=dict)
    left: tuple[Json, ...] = ()
    complaint: str = ""
    error: str | None = None
    infrastructure: str | None = None


@dataclass(frozen=True, slots=True)
class Leak:
    """A process or container that a launch left behind, found and ended.

    Attributes:
        launch_id: as in its environment, or its label.
        pid, command: of the process; of a container that of its first one, 0 where none runs.
    """

    launch_id: str
    pid: int
    command: str


class Running(Protocol):
    """An agent that runs."""

    isolation: Json
    """What it is really kept in, as the log has it."""

    async def wait(self) -> Exit:
        """Wait until its first process ended, then end whatever else of it runs.

        Cancelled, it ends all of it first.
        """

    async def stop(self, grace_s: float) -> Exit:
        """End it: SIGTERM to its first process, with the group that this leads where it has a session of its
        own, and after `grace_s` SIGKILL to all that is left.

        The grace is also that of the group: a shell that runs the agent is often gone before it.
        """


class Launcher(Protocol):
    """Starts agents."""

    async def start(self, launch: Launch) -> Running:
        """Start an agent.

        Raises:
            LaunchError: it cannot be started, or not as isolated as is required; the message says why.
        """

    async def sweep(self, alive: frozenset[str], dead: frozenset[str] = frozenset()) -> list[Leak]:
        """Find processes of launches that are not among those alive, end them, and say which.

        What another launcher on this host still watches over is spared, whatever `alive` says.

        Args:
            dead: launches of which it is known that nobody watches over them any more, wherever they were
                started.
        """
