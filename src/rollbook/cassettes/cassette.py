"""Recorded trajectories as a source of answers: finds the recorded request that equals a new one, or
else the nearest one and how the two differ. No I/O.

A request is answered from the trajectory that it names, if there is one of that name or id; else
from the one that the same agent was answered from before, if that has it; else from the first that
has it. The k-th time that the same request comes, it gets the k-th recorded answer; after the last
one, the last one again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, unified_diff
from itertools import zip_longest
from typing import Any

import orjson

from rollbook.cassettes.tape import ComparedRequest, RecordedRequest, Tape, compared_names, differs
from rollbook.ingest.endpoints.api import EarlierTurn
from rollbook.store.events import Json


@dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """A recorded request that equals a new one.

    Attributes:
        answer, answers: which of the recorded answers it gets, from 1, and how many there are.
        repeated: whether it got this one before.
    """

    request: RecordedRequest
    answer: int
    answers: int
    repeated: bool


@dataclass(frozen=True, slots=True, eq=False)
class Miss:
    """A request that was not recorded, and the recorded one that comes nearest."""

    asked: ComparedRequest
    near: NearMiss | None


class Cassette:
    """Answers requests from tapes, and keeps account of what was asked for.

    Args:
        ignored: names of request fields by which requests are not compared.
    """

    def __init__(self, tapes: Iterable[Tape], ignored: Iterable[str] = ()) -> None:
        self.tapes = tuple(tapes)
        self.ignored = frozenset(ignored)
        self.misses: list[Miss] = []
        self._requests = [request for tape in self.tapes for request in tape.requests]
        self._by_digest: dict[bytes, list[int]] = defaultdict(list)
        for place, request in enumerate(self._requests):
            self._by_digest[request.asked.digest].append(place)
        self._renamed = {theirs: ours for tape in self.tapes for theirs, ours in tape.renamed.items()}
        self.rewind()

    def rewind(self) -> None:
        """Begin anew: nothing was asked for yet."""
        self.misses.clear()
        self._served: set[int] = set()
        self._times: dict[tuple[str, tuple[int, ...]], int] = {}
        self._last_tape: dict[str, str] = {}

    def earlier(self, turn_id: str) -> EarlierTurn | None:
        """A recorded turn, for requests that name it."""
        return next((tape.known[turn_id] for tape in self.tapes if turn_id in tape.known), None)

    def renamed(self, item_id: str) -> str:
        """The id of a response or item in the form that is made of its turn's id."""
        return self._renamed.get(item_id, item_id)

    @property
    def models(self) -> list[str]:
        """The names of models that were asked for, sorted."""
        return sorted({request.asked.call.fields.model or "" for request in self._requests} - {""})

    @property
    def unused(self) -> list[RecordedRequest]:
        """The recorded requests that nothing asked for so far."""
        return [request for place, request in enumerate(self._requests) if place not in self._served]

    @property
    def requests(self) -> Sequence[RecordedRequest]:
        """All recorded requests, trajectory by trajectory."""
        return self._requests

    def answer(
        self, incoming: ComparedRequest, named: str | None = None, *, retry: bool = False
    ) -> Hit | Miss:
        """The recorded request that equals this one, which then counts as asked for; or what comes nearest.

        Args:
            named: what the agent calls its trajectory.
            retry: the client says that it repeats a request: it gets the same answer again, if it had
                one.
        """
        places = self._places(incoming, named)
        if not places:
            near = nearest(incoming, list(self._requests_of(named)) or self._requests, self.ignored)
            self.misses.append(Miss(incoming, near))
            return self.misses[-1]
        agent = named or ""
        count = self._times.get((agent, places), 0)
        if retry and count and self._requests[places[min(count, len(places)) - 1]].failure is None:
            count -= 1
        self._times[agent, places] = count + 1
        place = places[min(count, len(places) - 1)]
        recorded = self._requests[place]
        self._served.add(place)
        self._last_tape[agent] = recorded.tape
        return Hit(recorded, min(count + 1, len(places)), len(places), count >= len(places))

    def _requests_of(self, named: str | None) -> Iterator[RecordedRequest]:
        """The requests of the trajectory that is named, if there is one."""
        return (r for r in self._requests if named and named in (r.tape, r.name))

    def _places(self, incoming: ComparedRequest, named: str | None) -> tuple[int, ...]:
        """The places of the recorded requests that equal this one, in the order of their answers."""
        same = [place for place in self._by_digest.get(incoming.digest, ()) if self._is_same(incoming, place)]
        own = {id(request) for request in self._requests_of(named)}
        if own:
            same = [place for place in same if id(self._requests[place]) in own]
        elif named:
            last = self._last_tape.get(named)
            same = [place for place in same if self._requests[place].tape == last] or same
        # The same words on another branch: ids of calls, which the engine made, tell which one it is.
        same = [place for place in same if self._requests[place].asked.ids == incoming.ids] or same
        # Of a reply that was cut off because its client left, no agent saw the end.
        return tuple([place for place in same if self._requests[place].taken] or same)

    def _is_same(self, incoming: ComparedRequest, place: int) -> bool:
        recorded = self._requests[place]
        return not differs(incoming, recorded.asked, self.ignored, in_part=recorded.in_part)


MOST_ALIKE = 32
"""Of so many requests that are equally near by whole messages the texts are compared."""
TEXT_COMPARED = 4_000
"""Characters of a message that are compared to find the nearest request."""
MOST_LINES, CONTEXT = 40, 2
"""Lines that are shown of one difference, and equal lines around each change."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between a request and a recorded one.

    Attributes:
        where: messages[3], tools[0], or the name of a parameter.
        what: in words.
        diff: lines of a unified diff from the recorded text to the requested one; may be empty.
    """

    where: str
    what: str
    diff: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class NearMiss:
    """The nearest recorded request, and what differs, conversation first."""

    request: RecordedRequest
    differences: tuple[Difference, ...]

    @property
    def text(self) -> str:
        """The differences for people, a line or more each."""
        request = self.request
        head = f"turn {request.number} of trajectory {request.name!r} comes nearest; what differs:"
        lines = [f"{d.where}: {d.what}" + "".join(f"\n  {line}" for line in d.diff) for d in self.differences]
        return "\n".join([head, *lines])

    def as_json(self) -> Json:
        """The same for machines."""
        request = self.request
        return {
            "trajectory": request.name,
            "trajectory_id": request.tape,
            "turn": request.number,
            "turn_id": request.turn_ids[0],
            "differences": [
                {"where": d.where, "what": d.what, "diff": list(d.diff)} for d in self.differences
            ],
        }


def nearest(
    incoming: ComparedRequest, requests: Sequence[RecordedRequest], ignored: frozenset[str] = frozenset()
) -> NearMiss | None:
    """The recorded request that shares most with a new one; None where nothing is recorded.

    Whole messages at the beginning and the end count first, then how many there are, then tools and
    parameters, then how alike the first differing messages are; of equals the earliest is taken.
    """
    if not requests:
        return None
    scores = [_score(incoming, request, ignored) for request in requests]
    best = max(scores)
    alike = [r for r, score in zip(requests, scores, strict=True) if score == best][:MOST_ALIKE]
    closest = max(alike, key=lambda request: _likeness(incoming, request)) if len(alike) > 1 else alike[0]
    return NearMiss(closest, tuple(differences(incoming, closest, ignored)))


def _score(
    incoming: ComparedRequest, request: RecordedRequest, ignored: frozenset[str]
) -> tuple[float, int, bool]:
    new, old = incoming.messages, request.asked.messages
    head = _shared(new, old)
    tail = _shared(new[head:][::-1], old[head:][::-1])
    share = (head + tail) / max(len(new), len(old), 1)
    closeness = -abs(len(new) - len(old))
    return share, closeness, not differs(incoming, request.asked, ignored, in_part=request.in_part)


def _shared(first: Sequence[str], second: Sequence[str]) -> int:
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _likeness(incoming: ComparedRequest, request: RecordedRequest) -> float:
    """How alike the first differing messages are, from 0 to 1."""
    place = _shared(incoming.messages, request.asked.messages)
    new, old = (
        m[place][:TEXT_COMPARED] if place < len(m) else ""
        for m in (incoming.messages, request.asked.messages)
    )
    return SequenceMatcher(None, new, old, autojunk=False).quick_ratio()


def differences(
    incoming: ComparedRequest, request: RecordedRequest, ignored: frozenset[str] = frozenset()
) -> Iterator[Difference]:
    """All differences between a request and a recorded one: messages, then tools, then parameters."""
    recorded = request.asked
    yield from _of_messages(incoming.messages, recorded.messages)
    if incoming.tools != recorded.tools and "tools" not in ignored:
        yield from _of_tools(incoming.tools, recorded.tools)
    for name in compared_names(incoming, recorded, ignored, in_part=request.in_part):
        new, old = incoming.parameters.get(name), recorded.parameters.get(name)
        if new != old:
            yield Difference(name, f"{_or_absent(new)} was asked, {_or_absent(old)} is recorded")


def _or_absent(value: str | None) -> str:
    return "nothing" if value is None else value


def _of_messages(incoming: Sequence[str], recorded: Sequence[str]) -> Iterator[Difference]:
    matcher = SequenceMatcher(None, recorded, incoming, autojunk=False)
    for _, first, last, start, end in (op for op in matcher.get_opcodes() if op[0] != "equal"):
        for shift, (old, new) in enumerate(zip_longest(recorded[first:last], incoming[start:end])):
            yield _of_message(old, new, start + shift if new is not None else first + shift)


def _of_message(old: str | None, new: str | None, place: int) -> Difference:
    where = f"messages[{place}]"
    if old is None:
        return Difference(where, f"{_role(new)}: it was asked, and is not recorded", _diff("", _text(new)))
    if new is None:
        return Difference(where, f"{_role(old)}: it is recorded, and was not asked", _diff(_text(old), ""))
    same = _role(old) == _role(new)
    what = f"{_role(old)}: its text differs" if same else f"{_role(new)} was asked, {_role(old)} is recorded"
    return Difference(where, what, _diff(_text(old), _text(new)))


def _role(message: str | None) -> str:
    return str(orjson.loads(message or "[null]")[0])


def _text(message: str | None) -> str:
    """All that is compared of a message, as lines to be read."""
    if message is None:
        return ""
    _, content, calls, reasoning, marks = orjson.loads(message)
    lines = [f"reasoning: {reasoning}"] if reasoning else []
    lines += [
        content if isinstance(content, str) else orjson.dumps(content, option=orjson.OPT_INDENT_2).decode()
    ]
    for call in calls or ():
        name, arguments = call if isinstance(call, list) and len(call) == 2 else ("", call)
        lines.append(
            f"calls {name}({arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()})"
        )
    lines += [f"{name}: {value}" for name, value in marks.items()]
    return "\n".join(lines)


def _of_tools(incoming: Sequence[str], recorded: Sequence[str]) -> Iterator[Difference]:
    incoming_tools, recorded_tools = [
        {_tool_name(tool): tool for tool in tools} for tools in (incoming, recorded)
    ]
    for name in sorted(incoming_tools.keys() | recorded_tools.keys()):
        new, old = incoming_tools.get(name), recorded_tools.get(name)
        if old is None or new is None:
            what = "was asked, and is not recorded" if old is None else "is recorded, and was not asked"
            yield Difference(f"tools.{name}", f"this tool {what}")
        elif new != old:
            yield Difference(
                f"tools.{name}", "its description or parameters differ", _diff(_pretty(old), _pretty(new))
            )
    if sorted(incoming) == sorted(recorded):
        names = [", ".join(map(_tool_name, tools)) for tools in (incoming, recorded)]
        yield Difference("tools", f"they come in the order {names[0]}; recorded is {names[1]}")


def _tool_name(tool: str) -> str:
    definition: Any = orjson.loads(tool)
    return str(definition.get("name") or definition.get("type")) if isinstance(definition, dict) else tool


def _pretty(value: str) -> str:
    return orjson.dumps(orjson.loads(value), option=orjson.OPT_INDENT_2).decode()


def _diff(recorded: str, incoming: str) -> tuple[str, ...]:
    lines = [
        line.rstrip("\n")
        for line in unified_diff(
            recorded.splitlines(), incoming.splitlines(), "recorded", "asked", n=CONTEXT, lineterm=""
        )
    ]
    more = len(lines) - MOST_LINES
    return tuple(lines if more <= 0 else [*lines[:MOST_LINES], f"... and {more} lines more"])
