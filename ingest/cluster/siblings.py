"""Which worker of a proxy a request belongs to: by its head, by its body, or by asking the workers.

The head of a request may name a trajectory before any of its body is read: as `identify` finds it
without a body, or in the path of a route about a trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import unquote

from fastapi import FastAPI
from starlette.requests import Request
from starlette.routing import compile_path

from rollbook.edge.errors import add_error_replies
from rollbook.edge.keys import key_name, sent_key
from rollbook.ingest.access import RULES
from rollbook.ingest.cluster.bus import Asks, Bus
from rollbook.ingest.cluster.shared_connections import SETTLED, ElsewhereError, give_away
from rollbook.ingest.endpoints.registry import error_body
from rollbook.ingest.recording.metrics import Metrics
from rollbook.ingest.settings import TRAJECTORY_HEADER
from rollbook.ingest.trajectories.identity import HINT_HEADERS, header_text, hinted, split_path
from rollbook.ingest.trajectories.place import FIRST, Place, owner_of
from rollbook.store.errors import RequestError
from rollbook.store.events import Json

KNOWS = "knows"


class RequestRouter(Protocol):
    """Whoever else may own what a request is about: workers of the same proxy, or proxies of the run."""

    def check_name(self, request: Request, name: str, raw: bytes, *, plain: bool = True) -> None:
        """See that a trajectory is this one's: see `Siblings`."""

    async def check_unnamed(
        self, request: Request, reply_ids: Sequence[str], raw: bytes, *, plain: bool = True, kept: bool = True
    ) -> None:
        """See that a request without a name is this one's: see `Siblings`."""


async def knower_of(
    reply_ids: Sequence[str], own: Callable[[str], bool], bus: Asks
) -> tuple[bool, int | None]:
    """(whether this one knows the first reply that anybody knows; the number of another one that does)"""
    wanted = [named for named in reply_ids if isinstance(named, str)]
    first = first_known(wanted, own)
    if not wanted or first == 0:
        return bool(wanted), None
    answers = await bus.ask_all(KNOWS, {"replies": wanted[:first]})
    indices = {number: answer[0]["knows"] for number, answer in answers.items() if answer is not None}
    places = {number: place for number, place in indices.items() if place is not None}
    if places:
        return False, min(places, key=lambda number: places[number])
    return first is not None, None


def first_known(reply_ids: Sequence[str], knows: Callable[[str], bool]) -> int | None:
    """The place of the first of some replies that is known."""
    return next((place for place, reply_id in enumerate(reply_ids) if knows(reply_id)), None)


@dataclass(slots=True, eq=False)
class Siblings:
    """What a worker knows of the others.

    Attributes:
        lanes: those of all workers.
        naming: the headers that name a trajectory.
        cleaned: takes secrets out of a hint, as it is done before one becomes a name.
        knows: whether this worker knows a reply of that id; the application sets it.
    """

    place: Place
    bus: Bus
    lanes: Sequence[str] = ()
    naming: Sequence[str] = (TRAJECTORY_HEADER,)
    cleaned: Callable[[str], str] = str
    knows: Callable[[str], bool] = field(default=lambda reply_id: False)

    def __post_init__(self) -> None:
        self.bus.on(KNOWS, self._knows)

    def of_head(self, method: str, raw_path: str, headers: list[tuple[bytes, bytes]]) -> int | None:
        """The worker that a request is for, if its head says so and it is another one."""
        if moves_cursor(method, raw_path):
            return self._other(FIRST)
        name, is_hint = named_by_head(method, raw_path, headers, self.naming)
        if name is None:
            return None
        return self._other(owner_of(self.cleaned(name) if is_hint else name, self.place.workers))

    def _other(self, number: int) -> int | None:
        return None if number == self.place.number else number

    def check_name(self, request: Request, name: str, raw: bytes, *, plain: bool = True) -> None:
        """See that a trajectory is this worker's.

        Args:
            raw: the body of the request that names it; `plain`: without its content encoding.

        Raises:
            ElsewhereError: it is another one's.
        """
        other = self._other(owner_of(name, self.place.workers))
        if other is not None:
            raise ElsewhereError(other, raw, plain=plain)

    async def check_unnamed(
        self, request: Request, reply_ids: Sequence[str], raw: bytes, *, plain: bool = True, kept: bool = True
    ) -> None:
        """See that a request without a name is this worker's.

        Args:
            reply_ids: the earlier replies that it refers to: it is for who knows the first that is known.
            kept: it is a turn, and where no reply is known, the first worker keeps it.

        Raises:
            ElsewhereError: it is another one's.
        """
        if request.scope.get(SETTLED):
            return
        known, number = await knower_of(reply_ids, self.knows, self.bus)
        if number is None and not known and kept and not self.place.is_first:
            number = FIRST
        if number is not None:
            raise ElsewhereError(number, raw, plain=plain)

    async def _knows(self, _: int, __: int, question: Json) -> tuple[Json, bytes]:
        return {"knows": first_known(question["replies"], self.knows)}, b""


def answer_errors(app: FastAPI, metrics: Metrics) -> None:
    """Have an application answer every error, and give away what is another worker's."""
    add_error_replies(app, metrics.refused, error_body)
    app.state.refused = metrics.refused
    app.add_exception_handler(ElsewhereError, give_away)


_KEYS = ("authorization", "x-api-key")
_BEFORE = "/v1/trajectories/"
_NAMED = [
    (rule.method, compile_path(rule.path)[0]) for rule in RULES if rule.path.startswith(f"{_BEFORE}{{name")
]
_CURSORS = "/v1/cursors/"


def moves_cursor(method: str, raw_path: str) -> bool:
    """Whether a request moves a consumer's cursor: one worker moves them, so that none goes back."""
    return method == "PUT" and raw_path.startswith(_CURSORS)


def named_by_head(
    method: str, raw_path: str, headers: Iterable[tuple[bytes, bytes]], naming: Sequence[str]
) -> tuple[str | None, bool]:
    """(the trajectory that a request names, or None; whether that is a hint, which may hold a secret).

    Args:
        raw_path: with its percent signs, without the query.
        headers: raw, by lower-case name.
        naming: the headers that name a trajectory.
    """
    named = _by_path(method, raw_path)
    if named:
        return named, False
    sent = _interesting(headers, naming)
    by_header = (header_text(sent.get(name)) for name in naming)
    named = next((name for name in by_header if name), None) or key_name(sent_key(sent))
    if named:
        return named, False
    return hinted(header_text(sent.get(name)) for name in HINT_HEADERS), True


def _by_path(method: str, raw_path: str) -> str | None:
    if raw_path.startswith("/t/"):
        try:
            return str(split_path(raw_path)[0]["id"])
        except RequestError:
            return None  # is answered with that error, by whom it may be
    path = unquote(raw_path)
    if path.startswith(_BEFORE):
        for verb, pattern in _NAMED:
            if verb == method and (match := pattern.match(path)):
                return match["name"]
    return None


def _interesting(headers: Iterable[tuple[bytes, bytes]], naming: Sequence[str]) -> Mapping[str, str]:
    """Those headers that may name a trajectory; the first of each."""
    selected: dict[str, str] = {}
    for raw, value in headers:
        name = raw.decode("latin-1")
        if name in naming or name in _KEYS or name in HINT_HEADERS:
            selected.setdefault(name, value.decode("latin-1"))
    return selected
