"""`[[score]]` of a CONFIG: what a reward is made of."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from rollbook.ingest.rollouts.tables import Name, Table, Url


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
    def _one(self) -> ScoreConfig:
        given = [self.function is not None, bool(self.command), self.url is not None, self.judge is not None]
        if sum(given) != 1:
            raise ValueError("needs one of function, command, url and judge")
        return self
