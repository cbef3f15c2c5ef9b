"""Kinds of events about launches: agent programs that were started, each for one trajectory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from rollbook.store.events.about import (
    About,
    each_marked,
    gone_if_any,
    only_numbers,
    said_gone,
    unnamed,
)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LaunchStarted:
    """An agent program was started, to be this trajectory's agent.

    `launch_id` is unique in the trajectory, which may have several launches. `rollout` is the name of the
    configuration that says what to start; `place` is where in it this is: `epoch`, `task` and `sample`;
    `attempt` counts from 1. `launcher` is how it was started (`subprocess`, `docker`, `http`, `python`),
    `isolation` what really keeps it apart, `owner` the id of the process that started it. `clocks` are limits
    in seconds: `start`, `idle`, `total` and `scoring`; null where there is none. `places` is how many places
    these rollouts have in all; null: nobody said, or they have no end. Erasure takes the task out of `place`,
    as out of the trajectory's opening, and each word but names: `launch_id`, `rollout`, `by`.
    """

    KIND: ClassVar[str] = "launch.started"
    ABOUT: ClassVar[About] = About(
        of="trajectory",
        text={
            "place": only_numbers,
            "launcher": said_gone,
            "isolation": only_numbers,
            "owner": said_gone,
        },
    )
    trajectory_id: str
    launch_id: str
    rollout: str
    place: Json
    attempt: int
    launcher: str
    isolation: Json
    owner: str
    clocks: Json
    by: str | None = None
    places: int | None = None


@dataclass(frozen=True, slots=True)
class LaunchEnded:
    """A launch is over, and so is the scoring of what it did.

    `status` is done, truncated, agent_error, infra_error, timeout or cancelled; `why` says more where there
    is more to say. `proxy_away` is true where it failed because the proxy was away: it is tried again, and
    is no attempt of the place; null: no, or nobody said. `exit_code` and `signal` are of its first process,
    `cpu_s` of all of them, `peak_rss_mb` of the largest, or where a cgroup counts of all, with what is cached
    of files; null: not known. `output` says of each stream how many bytes were printed and how many of them
    are kept in the file at `path`, which is not of the store. `scoring` has of each component its score, or
    an object that says why there is none.
    """

    KIND: ClassVar[str] = "launch.ended"
    ABOUT: ClassVar[About] = About(
        of="trajectory", text={"why": gone_if_any, "output": unnamed, "scoring": unnamed}
    )
    trajectory_id: str
    launch_id: str
    status: str
    why: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    seconds: float | None = None
    cpu_s: float | None = None
    peak_rss_mb: float | None = None
    output: Json = field(default_factory=dict)
    scoring: Json = field(default_factory=dict)
    by: str | None = None
    proxy_away: bool | None = None


@dataclass(frozen=True, slots=True)
class LaunchLeaked:
    """Processes of a launch were found where none should be any more, and were ended.

    Each has its `pid` and its `command`. `found` says when: at the `start` of another process that launches,
    while one was `running`, or at the launch's `end`.
    """

    KIND: ClassVar[str] = "launch.leaked"
    ABOUT: ClassVar[About] = About(of="trajectory", text={"processes": each_marked})
    trajectory_id: str
    launch_id: str
    processes: list[Json]
    found: str
    by: str | None = None
