"""The shapes of what clients and launchers send, checked at the HTTP edge and nowhere else."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rollbook.edge.bounds import Finite, Temperature, Whole, check_depth, check_weight
from rollbook.store.config import first_invalid_value
from rollbook.store.errors import RequestError
from rollbook.store.events import JUDGE, SPLITS, Json

Model = TypeVar("Model", bound=BaseModel)


Reward = Finite
Bias = Annotated[Finite, Field(ge=-1e6, le=1e6)]
NAME_LENGTH, TASK_LENGTH, LABELS = 1024, 65536, 256
"""A group's name, a task, which may be its whole text, and how many labels a trajectory is opened with."""


class SamplingFields(BaseModel):
    """What a request says about sampling, by the names of OpenAI's APIs and of vLLM's and SGLang's additions.

    Every endpoint's own names are mapped to these. Other fields are kept as sent, and not read.
    """

    model_config = ConfigDict(extra="ignore")
    model: str | None = Field(None, max_length=4096)
    temperature: Temperature | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Whole | None = Field(None, ge=-(2**31), lt=2**31)
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=1e4)] | None = None
    max_tokens: Whole | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: Whole | None = Field(None, ge=1, lt=2**31)
    min_tokens: Whole | None = Field(None, ge=0, lt=2**31)
    seed: Whole | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    n: Whole | None = Field(None, ge=1, le=128)
    logit_bias: dict[str, Bias] | None = None
    stream: bool | None = None
    stream_options: Json | None = None
    tool_choice: Any = None
    response_format: Json | None = None
    chat_template_kwargs: Json | None = None


class OpenTrajectory(BaseModel):
    """Body of POST /v1/trajectories."""

    model_config = ConfigDict(extra="forbid")
    id: str | None = Field(None, min_length=1, max_length=256)
    group: str | None = Field(None, max_length=NAME_LENGTH)
    task: str | None = Field(None, max_length=TASK_LENGTH)
    split: Literal["train", "eval", "teacher", "judge"] = "train"
    labels: Annotated[Json, Field(max_length=LABELS)] = Field(default_factory=dict)
    judges: str | None = Field(None, min_length=1, max_length=NAME_LENGTH)
    """Id of the trajectory that one of split judge is about."""

    @model_validator(mode="after")
    def _names_whom_it_judges(self) -> OpenTrajectory:
        if (self.split == JUDGE) != (self.judges is not None):
            raise ValueError("`judges`, the id of a trajectory, goes with split 'judge', and that with it")
        return self


class FinishTrajectory(BaseModel):
    """Body of POST /v1/trajectories/{id}/finish."""

    model_config = ConfigDict(extra="forbid")
    reward: Reward | None = None
    success: bool | None = None
    turn_rewards: list[Reward] | dict[str, Reward] | None = None
    status: Literal["completed", "truncated", "aborted", "failed", "void"] = "completed"


class AssignReward(BaseModel):
    """Body of POST /v1/trajectories/{id}/rewards. `turn` is a reply's id; none: of the whole trajectory."""

    model_config = ConfigDict(extra="forbid")
    reward: Reward
    source: str = Field("agent", min_length=1, max_length=256)
    turn: str | None = Field(None, max_length=NAME_LENGTH)
    supersedes: str | None = Field(None, max_length=NAME_LENGTH)


class AddLabel(BaseModel):
    """Body of POST /v1/trajectories/{id}/labels. `turn` is a reply's id; none: of the whole trajectory."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1, max_length=256)
    value: Any = None
    source: str = Field("agent", min_length=1, max_length=256)
    turn: str | None = Field(None, max_length=NAME_LENGTH)


class AddPreference(BaseModel):
    """Body of POST /v1/preferences: the names of two trajectories, and how much better the first one is."""

    model_config = ConfigDict(extra="forbid")
    chosen: str = Field(min_length=1, max_length=256)
    rejected: str = Field(min_length=1, max_length=256)
    margin: Reward | None = None
    source: str = Field("label", min_length=1, max_length=256)


def json_object(raw: bytes) -> Json:
    """A body as a JSON object, of a depth and a weight that everything behind it can take.

    Raises:
        RequestError: 400, it is none.
        LimitError: 400, it is nested too deep; 413, its values would take too much memory.
    """
    check_weight(raw)
    try:
        body = orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError as error:
        raise RequestError(400, "bad_json", f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(400, "bad_json", "the body must be a JSON object")
    check_depth(body)
    return body


def check_recordable(value: Any, what: str = "the body") -> None:
    """Refuse what could be read but not written again, such as lists nested 300 deep.

    Raises:
        RequestError: 400.
    """
    try:
        orjson.dumps([[value]])  # as deep as it gets inside an event
    except orjson.JSONEncodeError as error:
        raise RequestError(400, "bad_json", f"{what} cannot be recorded: {error}") from error


def validated(model: type[Model], body: Json) -> Model:
    """The body as the model.

    Raises:
        RequestError: 400, naming the field.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise RequestError(400, "bad_request", first_invalid_value(error, body)) from error


def check_split(split: str) -> str:
    """The split a header names.

    Raises:
        RequestError: 400, no such split.
    """
    if split not in SPLITS:
        text = f"split is {split!r}: use one of {', '.join(SPLITS)}"
        raise RequestError(400, "unknown_split", text)
    return split


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
