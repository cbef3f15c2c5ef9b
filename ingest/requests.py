"""The shapes of what clients send, checked at the HTTP edge and nowhere else."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from rollbook.store.errors import RequestError
from rollbook.store.events import SPLITS, Json

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("a reward must be a finite number")
    return value


Reward = Annotated[float, AfterValidator(_finite)]


def _greedy_if_tiny(value: float) -> float:
    """Below 1e-6 logits over the temperature overflow: greedy is what such a value means."""
    return 0.0 if value < 1e-6 else value


Temperature = Annotated[float, Field(ge=0), AfterValidator(_greedy_if_tiny)]


class ChatRequest(BaseModel):
    """OpenAI chat completions, as far as the proxy reads it; every other field is kept as sent."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    messages: list[Json]
    tools: list[Json] | None = None
    temperature: Temperature | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = None


class OpenTrajectory(BaseModel):
    """Body of POST /v1/trajectories."""

    model_config = ConfigDict(extra="forbid")
    id: str | None = Field(None, min_length=1, max_length=256)
    group: str | None = None
    task: str | None = None
    split: Literal["train", "eval", "teacher"] = "train"
    labels: Json = Field(default_factory=dict)


class FinishTrajectory(BaseModel):
    """Body of POST /v1/trajectories/{id}/finish."""

    model_config = ConfigDict(extra="forbid")
    reward: Reward | None = None
    success: bool | None = None
    turn_rewards: list[Reward] | dict[str, Reward] | None = None
    status: Literal["completed", "truncated", "aborted", "failed"] = "completed"


class AssignReward(BaseModel):
    """Body of POST /v1/trajectories/{id}/rewards. `turn` is a reply's id; none: of the whole trajectory."""

    model_config = ConfigDict(extra="forbid")
    reward: Reward
    source: str = Field("agent", min_length=1, max_length=256)
    turn: str | None = None
    supersedes: str | None = None


def check_messages(messages: list[Json]) -> None:
    """Refuse what no chat template can mean.

    Raises:
        RequestError: 400, naming the message.
    """
    if not messages:
        raise RequestError(400, "empty_messages", "messages is empty: send at least one message")
    for index, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            text = f"messages[{index}].role is {role!r}: use one of {', '.join(ROLES)}"
            raise RequestError(400, "unknown_role", text)
        _check_calls(index, message.get("tool_calls"))
    if messages[-1].get("role") == "assistant":
        text = "the last message is the assistant's: nothing is left to answer"
        raise RequestError(400, "nothing_to_answer", text)


def _check_calls(index: int, calls: Any) -> None:
    if calls is None:
        return
    sound = isinstance(calls, list) and all(
        isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls
    )
    if not sound:
        text = f"messages[{index}].tool_calls must be a list of objects with a function"
        raise RequestError(400, "bad_tool_calls", text)


def check_split(split: str) -> str:
    """The split a header names.

    Raises:
        RequestError: 400, no such split.
    """
    if split not in SPLITS:
        text = f"split is {split!r}: use one of {', '.join(SPLITS)}"
        raise RequestError(400, "unknown_split", text)
    return split
