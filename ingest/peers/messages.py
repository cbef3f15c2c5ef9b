"""The forms of what proxies of a run say to each other. What has another form is refused before it is read.

Whoever has the proxies' token may send anything: no message may end in the middle of what it does here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollbook.ingest.http.siblings import KNOWS
from rollbook.ingest.workers.admitting import BEGAN, ENTER, KEPT, LEFT
from rollbook.store.errors import RequestError
from rollbook.store.events import Json
from rollbook.store.refused_values import first_refused

HOLDS, GIVE_BACK = "holds", "give-back"
MOST_NAMED = 65_536
Number = Annotated[int, Field(ge=0, lt=2**63)]
Text = Annotated[str, Field(max_length=MOST_NAMED)]


class Message(BaseModel):
    """Types are strict; what a later release adds is ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)


M = TypeVar("M", bound=Message)


class Question(Message):
    """A question for the holder of a seat."""

    sender: Number = Field(alias="from")
    process: Text
    seat: Number
    words: Json


class Meeting(Message):
    """A proxy says which seats it holds."""

    sender: Number = Field(alias="from")
    process: Text
    holds: list[Number]


class GiveBack(Message):
    """A proxy that begins has its seat given back."""

    sender: Number = Field(alias="from")
    process: Text
    seat: Number


class Enter(Message):
    """A trajectory asks for room."""

    token: Number
    name: Text
    group: Text | None
    split: Text


class Kept(Message):
    """Room that another gate gave is kept."""

    token: Number
    name: Text
    group: Text | None


class Told(Message):
    """What was asked for by a token began, or never will."""

    token: Number


class Knows(Message):
    """Whether one of some replies is known."""

    replies: list[Text]


class Held(Message):
    """An answer: the seats that a proxy holds."""

    holds: list[Number]
    number: Number
    process: Text


class Words(Message):
    """An answer to a question."""

    words: Json


class Reserved(Message):
    """The words of an answer to `enter`."""

    reserved: bool


class Known(Message):
    """The words of an answer to `knows`."""

    knows: Number | None


class Raised(Message):
    """An answer: an error."""

    error: Annotated[list[int | str], Field(min_length=3, max_length=3)]


MEETINGS: Mapping[str, type[Message]] = MappingProxyType({HOLDS: Meeting, GIVE_BACK: GiveBack})
QUESTIONS: Mapping[str, type[Message]] = MappingProxyType(
    {ENTER: Enter, KEPT: Kept, BEGAN: Told, LEFT: Told, KNOWS: Knows}
)
"""Kind -> the form of a question's words."""
ANSWERS: Mapping[str, type[Message]] = MappingProxyType({ENTER: Reserved, KNOWS: Known})
"""Kind -> the form of the words of an answer, where they say something."""


def read_message(said: bytes) -> object:
    """What a message says.

    Raises:
        RequestError: 400, it is no JSON.
    """
    try:
        return orjson.loads(said)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, "bad_message", f"a message of a proxy is no JSON: {error}") from error


def check_question(kind: str, asked: object, proxies: int) -> Json:
    """What another proxy asks, in its form.

    Args:
        proxies: how many the run has.

    Raises:
        RequestError: 400, it has another form, or names a proxy that the run does not have.
    """
    if kind in MEETINGS:
        _as(MEETINGS[kind], asked, kind)
    elif kind in QUESTIONS:
        _as(QUESTIONS[kind], _as(Question, asked, kind).words, kind)
    else:
        raise RequestError(400, "bad_message", f"proxies ask each other no {kind[:40]!r}")
    assert isinstance(asked, dict)
    greatest = max([asked["from"], asked.get("seat", 0), *asked.get("holds", [])])
    listed = asked.get("proxies")  # where that is another list than ours, the meeting says so
    if greatest >= max(proxies, len(listed) if isinstance(listed, list) else 0):
        text = f"{kind}: it names proxy {greatest}, and this run has {proxies}, numbered from 0"
        raise RequestError(400, "bad_message", text)
    return asked


def check_answer(kind: str, said: object) -> Json:
    """What another proxy answers, in its form.

    Raises:
        RequestError: it has another one.
    """
    if isinstance(said, dict) and "error" in said:
        status, code, text = _as(Raised, said, kind).error
        if not (isinstance(status, int) and isinstance(code, str) and isinstance(text, str)):
            raise RequestError(400, "bad_message", f"{kind}: error: is no status, code and message")
    elif isinstance(said, dict) and said.get("moved") is True:
        return said
    elif kind in MEETINGS:
        _as(Held, said, kind)
    else:
        words = _as(Words, said, kind).words
        if kind in ANSWERS:
            _as(ANSWERS[kind], words, kind)
    assert isinstance(said, dict)
    return said


def _as(form: type[M], said: object, kind: str) -> M:
    try:
        return form.model_validate(said)
    except ValidationError as error:
        raise RequestError(400, "bad_message", f"{kind}: {first_refused(error, said)}") from error
