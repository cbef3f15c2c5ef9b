"""The shapes of what a launcher sends, checked at the HTTP edge and nowhere else."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollbook.ingest.engines.sampling_bounds import Finite, Whole
from rollbook.ingest.requests.fields import NAME_LENGTH, TASK_LENGTH
from rollbook.store.events import Json

Word = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[Whole, Field(ge=0, lt=2**63)]
Code = Annotated[Whole, Field(ge=-(2**31), lt=2**32)]
Amount = Annotated[Finite, Field(ge=0)]
ENTRIES, PROCESSES = 256, 4096
"""Streams, components and entries of `isolation`; and processes told of at once."""


class Place(BaseModel):
    """Where in a rollout a trajectory is."""

    model_config = ConfigDict(extra="forbid")
    epoch: Count
    task: str = Field(max_length=NAME_LENGTH)
    sample: Count


class Clocks(BaseModel):
    """Limits of a launch, in seconds."""

    model_config = ConfigDict(extra="forbid")
    start: Amount | None = None
    idle: Amount | None = None
    total: Amount | None = None
    scoring: Amount | None = None


class StartLaunch(BaseModel):
    """Body of POST /v1/trajectories/{id}/launches."""

    model_config = ConfigDict(extra="forbid")
    launch_id: str | None = Field(None, pattern=r"^[A-Za-z0-9-]{1,128}$")
    rollout: Word
    place: Place
    attempt: Whole = Field(ge=1, lt=2**31)
    launcher: Word
    isolation: Annotated[Json, Field(max_length=ENTRIES)] = Field(default_factory=dict)
    owner: Word
    clocks: Clocks = Field(default_factory=Clocks)
    places: Count | None = None


class Stream(BaseModel):
    """What was printed to a stream, and where the first of it is kept."""

    model_config = ConfigDict(extra="forbid")
    path: str = Field(max_length=4096)
    bytes: Count
    kept: Count


class EndLaunch(BaseModel):
    """Body of POST /v1/trajectories/{id}/launches/{launch_id}/end."""

    model_config = ConfigDict(extra="forbid")
    status: Literal["done", "truncated", "agent_error", "infra_error", "timeout", "cancelled"]
    why: str | None = Field(None, max_length=TASK_LENGTH)
    exit_code: Code | None = None
    signal: Code | None = None
    seconds: Amount | None = None
    cpu_s: Amount | None = None
    peak_rss_mb: Amount | None = None
    output: Annotated[dict[Word, Stream], Field(max_length=ENTRIES)] = Field(default_factory=dict)
    scoring: Annotated[dict[Word, Finite | Json | None], Field(max_length=ENTRIES)] = Field(
        default_factory=dict
    )
    proxy_away: bool | None = None


class TellEvaluated(BaseModel):
    """Body of POST /v1/evaluations."""

    model_config = ConfigDict(extra="forbid")
    policy: Word
    policy_version: Count
    rollout: Word
    trajectories: Count


class Process(BaseModel):
    """A process that a launch left behind."""

    model_config = ConfigDict(extra="forbid")
    pid: Count
    command: str = Field(max_length=TASK_LENGTH)


class TellLeaks(BaseModel):
    """Body of POST /v1/trajectories/{id}/launches/{launch_id}/leaks."""

    model_config = ConfigDict(extra="forbid")
    processes: Annotated[list[Process], Field(min_length=1, max_length=PROCESSES)]
    found: Literal["start", "running", "end"]
