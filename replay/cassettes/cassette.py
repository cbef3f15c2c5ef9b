"""Recorded trajectories as a source of answers: which recorded request a new one is. No I/O.

A request is answered from the trajectory that it names, if there is one of that name or id; else from the one
that the same agent was answered from before, if that has it; else from the first that has it. The k-th time
that the same request comes it gets the k-th recorded answer, and after the last one the last one again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rollbook.ingest.endpoints.history import EarlierTurn
from rollbook.replay.cassettes.asked import Asked, differs
from rollbook.replay.cassettes.nearest import NearMiss, nearest
from rollbook.replay.cassettes.tape import RecordedRequest, Tape


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A recorded request that a new one is the same as.

    Attributes:
        answer, answers: which of the recorded answers it gets, from 1, and how many there are.
        repeated: it got this one before.
    """

    request: RecordedRequest
    answer: int
    answers: int
    repeated: bool


@dataclass(frozen=True, slots=True, eq=False)
class Missed:
    """A request that was not recorded, and the recorded one that comes nearest."""

    asked: Asked
    near: NearMiss | None


class Cassette:
    """Answers requests from tapes, and keeps account of what was asked for.

    Args:
        ignored: names of request fields by which requests are not compared.
    """

    def __init__(self, tapes: Iterable[Tape], ignored: Iterable[str] = ()) -> None:
        self.tapes = tuple(tapes)
        self.ignored = frozenset(ignored)
        self.misses: list[Missed] = []
        self._requests = [request for tape in self.tapes for request in tape.requests]
        self._by_digest: dict[bytes, list[int]] = defaultdict(list)
        for place, request in enumerate(self._requests):
            self._by_digest[request.asked.digest].append(place)
        self._renamed = {given: ours for tape in self.tapes for given, ours in tape.renamed.items()}
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

    def renamed(self, given: str) -> str:
        """The id of a response or item in the form that is made of its turn's id."""
        return self._renamed.get(given, given)

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

    def answer(self, asked: Asked, named: str | None = None, *, retry: bool = False) -> Found | Missed:
        """The recorded request that this one is, which counts as asked for, or what comes nearest.

        Args:
            named: what the agent calls its trajectory.
            retry: the client says that it repeats a request: it gets the same answer again, if it had one.
        """
        places = self._places(asked, named)
        if not places:
            near = nearest(asked, list(self._of(named)) or self._requests, self.ignored)
            self.misses.append(Missed(asked, near))
            return self.misses[-1]
        agent = named or ""
        count = self._times.get((agent, places), 0)
        if retry and count and self._requests[places[min(count, len(places)) - 1]].failure is None:
            count -= 1
        self._times[agent, places] = count + 1
        place = places[min(count, len(places) - 1)]
        found = self._requests[place]
        self._served.add(place)
        self._last_tape[agent] = found.tape
        return Found(found, min(count + 1, len(places)), len(places), count >= len(places))

    def _of(self, named: str | None) -> Iterator[RecordedRequest]:
        """The requests of the trajectory that is named, if there is one."""
        return (r for r in self._requests if named and named in (r.tape, r.name))

    def _places(self, asked: Asked, named: str | None) -> tuple[int, ...]:
        """Where the recorded requests are that this one is the same as, in the order of their answers."""
        same = [place for place in self._by_digest.get(asked.digest, ()) if self._is_same(asked, place)]
        own = {id(request) for request in self._of(named)}
        if own:
            same = [place for place in same if id(self._requests[place]) in own]
        elif named:
            last = self._last_tape.get(named)
            same = [place for place in same if self._requests[place].tape == last] or same
        # The same words on another branch: ids of calls, which the engine made, tell which one it is.
        same = [place for place in same if self._requests[place].asked.ids == asked.ids] or same
        # Of a reply that was cut off because its client left, no agent saw the end.
        return tuple([place for place in same if self._requests[place].taken] or same)

    def _is_same(self, asked: Asked, place: int) -> bool:
        recorded = self._requests[place]
        return not differs(asked, recorded.asked, self.ignored, in_part=recorded.in_part)
