"""The messages between proxies of a run: small POSTs, with a token that the store's folder gives.

A message of another form is refused before it is acted on. Whoever has the token may send anything,
so no message may fail halfway through what it does here.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import aiohttp
import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollbook.edge.forwarding import plain_session
from rollbook.ingest.cluster.admitting import BEGAN, ENTER, KEPT, LEFT
from rollbook.ingest.cluster.siblings import KNOWS
from rollbook.store.config import first_invalid_value
from rollbook.store.errors import RequestError
from rollbook.store.events import Json
from rollbook.store.ids import new_id
from rollbook.store.secret import store_secret

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


class KeepRoom(Message):
    """Room that another gate gave is kept."""

    token: Number
    name: Text
    group: Text | None


class ReleaseRoom(Message):
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
    {ENTER: Enter, KEPT: KeepRoom, BEGAN: ReleaseRoom, LEFT: ReleaseRoom, KNOWS: Knows}
)
"""Kind -> the form of a question's words."""
ANSWERS: Mapping[str, type[Message]] = MappingProxyType({ENTER: Reserved, KNOWS: Known})
"""Kind -> the form of the words of an answer, where they say something."""


def read_message(raw: bytes) -> object:
    """What a message says.

    Raises:
        RequestError: 400, it is no JSON.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, "bad_message", f"a message of a proxy is no JSON: {error}") from error


def check_question(kind: str, question: object, proxies: int) -> Json:
    """Check the form of another proxy's question, and return it.

    Args:
        proxies: how many the run has.

    Raises:
        RequestError: 400, it has another form, or names a proxy that the run does not have.
    """
    if kind in MEETINGS:
        _as(MEETINGS[kind], question, kind)
    elif kind in QUESTIONS:
        _as(QUESTIONS[kind], _as(Question, question, kind).words, kind)
    else:
        raise RequestError(400, "bad_message", f"proxies ask each other no {kind[:40]!r}")
    assert isinstance(question, dict)
    greatest = max([question["from"], question.get("seat", 0), *question.get("holds", [])])
    listed = question.get("proxies")  # where that is another list than ours, the meeting says so
    if greatest >= max(proxies, len(listed) if isinstance(listed, list) else 0):
        text = f"{kind}: it names proxy {greatest}, and this run has {proxies}, numbered from 0"
        raise RequestError(400, "bad_message", text)
    return question


def check_answer(kind: str, answer: object) -> Json:
    """Check the form of another proxy's answer, and return it.

    Raises:
        RequestError: it has another one.
    """
    if isinstance(answer, dict) and "error" in answer:
        status, code, text = _as(Raised, answer, kind).error
        if not (isinstance(status, int) and isinstance(code, str) and isinstance(text, str)):
            raise RequestError(400, "bad_message", f"{kind}: error: is no status, code and message")
    elif isinstance(answer, dict) and answer.get("moved") is True:
        return answer
    elif kind in MEETINGS:
        _as(Held, answer, kind)
    else:
        words = _as(Words, answer, kind).words
        if kind in ANSWERS:
            _as(ANSWERS[kind], words, kind)
    assert isinstance(answer, dict)
    return answer


def _as(form: type[M], message: object, kind: str) -> M:
    try:
        return form.model_validate(message)
    except ValidationError as error:
        raise RequestError(400, "bad_message", f"{kind}: {first_invalid_value(error, message)}") from error


PREFIX = "/peers/"
TOKEN_HEADER = "x-rollbook-peer"
CONNECT_S = 3.0
ANSWER_S = 2.0
"""A proxy that takes longer to say how it is does not answer."""
MESSAGE_BYTES = 1 << 20


class UnreachableError(Exception):
    """A proxy does not answer."""


class MovedError(Exception):
    """A proxy was asked as the holder of a seat, and another one holds that now."""


def token_of(store: Path, run: str) -> str:
    """The token by which proxies of a run know each other; whoever has the store's folder can derive it."""
    return hmac.new(store_secret(store, "peers"), run.encode(), hashlib.sha256).hexdigest()


@dataclass(slots=True, eq=False)
class Wire:
    """One proxy's way to the others.

    Attributes:
        addresses: of all, by number, without a path.
        lanes: of all, by number.
        number: its own.
    """

    addresses: Sequence[str]
    lanes: Sequence[str]
    number: int
    token: str = field(repr=False)
    process: str = field(default_factory=new_id)
    """Tells this process from those that had its number before."""
    _session: aiohttp.ClientSession | None = None
    _closed: bool = False

    @property
    def session(self) -> aiohttp.ClientSession:
        """The connections to the others; made on the loop that uses them.

        Raises:
            UnreachableError: this proxy has ended.
        """
        if self._closed:
            raise UnreachableError("this proxy has ended")
        if self._session is None:
            # On a connection that is kept, a request to a proxy that ends has come, or has not.
            self._session = plain_session(CONNECT_S, None)
        return self._session

    async def disconnect(self) -> None:
        """Let go of the connections; more may be made."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def close(self) -> None:
        """Let go of the connections for good."""
        self._closed = True
        await self.disconnect()

    @property
    def same(self) -> Json:
        """What all proxies of a run have in common."""
        return {"proxies": list(self.addresses), "lanes": list(self.lanes)}

    def check_same(self, question: Json) -> None:
        """See that another proxy has the same list.

        Raises:
            RequestError: 409, it has not.
        """
        for name, own in self.same.items():
            if question.get(name) != own:
                text = (
                    f"the proxy at {self.addresses[self.number]} has {name} = {own}, and that of number "
                    f"{question['from']} has {question.get(name)}: all proxies of a run need the same list"
                )
                raise RequestError(409, "other_proxies", text)

    @property
    def others(self) -> list[int]:
        """The numbers of the others."""
        return [number for number in range(len(self.addresses)) if number != self.number]

    def knows(self, token: str) -> bool:
        """Whether a token is that of this run's proxies."""
        return hmac.compare_digest(token.encode(errors="replace"), self.token.encode())

    async def post(self, to: int, kind: str, words: Json, patience_s: float = ANSWER_S) -> Json:
        """Send a message to another proxy, and return its answer.

        Raises:
            UnreachableError: no answer in time, or none that a proxy of this run would give.
            MovedError: the question is not for that proxy to answer.
            RequestError: what it raised.
        """
        body = orjson.dumps({"from": self.number, "process": self.process, **words})
        timeout = aiohttp.ClientTimeout(total=patience_s, sock_connect=min(patience_s, CONNECT_S))
        headers = {TOKEN_HEADER: self.token, "content-type": "application/json"}
        url = f"{self.addresses[to]}{PREFIX}{kind}"
        try:
            async with self.session.post(url, data=body, headers=headers, timeout=timeout) as reply:
                answer = check_answer(kind, orjson.loads(await reply.read())) if reply.status == 200 else {}
        except (aiohttp.ClientError, OSError, TimeoutError, orjson.JSONDecodeError) as error:
            raise UnreachableError(f"{url}: {error or type(error).__name__}") from error
        except RequestError as error:
            raise UnreachableError(f"{url} answers what no proxy does: {error.message}") from error
        if reply.status != 200:
            raise UnreachableError(f"{url} answers {reply.status}: is it a proxy of this store and run?")
        if "error" in answer:
            raise RequestError(*answer["error"])
        if answer.get("moved"):
            raise MovedError
        return answer


def answer_of(outcome: Any) -> bytes:
    """The body of an answer: words, or what was raised instead of them."""
    match outcome:
        case MovedError():
            return orjson.dumps({"moved": True})
        case RequestError():
            return orjson.dumps({"error": [outcome.status, outcome.code, outcome.message]})
    return orjson.dumps(outcome)
