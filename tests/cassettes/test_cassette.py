"""Which recorded answer a request gets: in what order, on which branch, from which trajectory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollbook.cassettes.cassette import Cassette, Hit, Miss
from rollbook.cassettes.tape import ComparedRequest, read_request, read_tapes
from rollbook.ingest.endpoints.api import no_history
from rollbook.ingest.endpoints.chat import API
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.errors import ReplayError

NONE = np.empty(0, np.int32)


def _asked(*messages: Any, **more: Any) -> ComparedRequest:
    """A chat request; a text is what the user says."""
    chat = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    return read_request(API, {"model": "m", "messages": chat} | more, no_history)


def _called(call_id: str) -> list[Any]:
    """A call of that id, and its result."""
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "7"},
    ]


class Told:
    """Trajectories as they are told, turn by turn."""

    def __init__(self, log: Store) -> None:
        self._log, self._records, self._turns = log, [], 0
        self._names: list[str] = []

    def opens(self, name: str) -> None:
        """A trajectory begins; the turns that follow are of it."""
        self._names.append(name)
        self._records.append(kinds.TrajectoryOpened(f"id-{name}", name))

    def turn(self, *messages: Any, says: Any = None, request: str = "", **wire: Any) -> str:
        """A turn; `says` is a text, an error, or None where it never ended."""
        key, self._turns = f"id-{self._names[-1]}", self._turns + 1
        turn_id = f"u{self._turns}"
        chat = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        finish = wire.pop("finish", "stop")
        delivered = wire.pop("delivered", finish != "abort")
        fields = (key, turn_id, request or f"r{self._turns}", None, "first_turn", None, 0, chat)
        self._records.append(kinds.TurnRequested(*fields, {"model": "m"}, "m", {}, {}, "c", wire))
        if isinstance(says, Exception):
            self._records.append(kinds.TurnFailed(key, turn_id, repr(says)))
        elif says is not None:
            reply = {"role": "assistant", "content": says}
            numbers = (None, None, NONE, NONE, None, (), 0, "", finish)
            self._records.append(kinds.TurnCompleted(key, turn_id, *numbers, reply, {}, [], {}))
        if delivered:
            self._records.append(kinds.TurnDelivered(key, turn_id, "sent"))
        return turn_id

    def cassette(self, ignored: Any = ()) -> Cassette:
        """What was told, by a store that holds it."""
        with self._log.writer("serve") as writer:
            writer.append([Event(record, "run") for record in self._records]).result(30)
        ids = [f"id-{name}" for name in self._names]
        return Cassette(read_tapes(self._log, self._log.head(), ids), ignored)


@pytest.fixture
def teller(store: Store) -> Told:
    """Nothing so far."""
    return Told(store)


def _says(cassette: Cassette, query: ComparedRequest, named: str | None = None, **how: Any) -> Any:
    """The text of the answer, or the status of the failure, and whether it was given before."""
    hit = cassette.answer(query, named, **how)
    assert isinstance(hit, Hit)
    request = hit.request
    outcome = request.failure.status if request.failure else [t.reply["content"] for t in request.turns]
    return outcome, hit.answer, hit.answers, hit.repeated


def test_answers_come_in_order_and_the_last_one_again(teller: Told) -> None:
    """Resampled turns one after the other, whatever was asked between them."""
    teller.opens("t")
    for says in ("one", "two"):
        teller.turn("hi", says=says)
        teller.turn("other", says="between")
    cassette = teller.cassette()
    assert [_says(cassette, _asked("hi")) for _ in range(3)] == [
        (["one"], 1, 2, False),
        (["two"], 2, 2, False),
        (["two"], 2, 2, True),
    ]
    assert _says(cassette, _asked("other")) == (["between"], 1, 2, False)
    assert [r.number for r in cassette.unused] == [4]
    cassette.rewind()
    assert _says(cassette, _asked("hi")) == (["one"], 1, 2, False)


def test_choices_are_one_answer(teller: Told) -> None:
    """In the order of their places, though they ended in another."""
    teller.opens("t")
    teller.turn("hi", says="second", request="r", choice=1)
    teller.turn("hi", says="first", request="r")
    assert _says(teller.cassette(), _asked("hi")) == (["first", "second"], 1, 1, False)


def test_ids_of_calls_tell_branches_apart(teller: Told) -> None:
    """The same words behind two calls: each goes on as it did; of a third id either may be meant."""
    teller.opens("t")
    teller.turn("hi", *_called("a"), says="after a")
    teller.turn("hi", *_called("b"), says="after b")
    cassette = teller.cassette()
    assert _says(cassette, _asked("hi", *_called("b")))[0] == ["after b"]
    assert _says(cassette, _asked("hi", *_called("b"))) == (["after b"], 1, 1, True)
    assert _says(cassette, _asked("hi", *_called("a")))[0] == ["after a"]
    assert [_says(cassette, _asked("hi", *_called("c")))[0] for _ in range(2)] == [["after a"], ["after b"]]


def test_a_failure_is_an_answer_and_a_retry_gets_the_next(teller: Told) -> None:
    """A retry of what was answered gets the same again, as the proxy would give it."""
    teller.opens("t")
    teller.turn("hi", says=kinds_error())
    teller.turn("hi", says="well", retry=1)
    teller.turn("hi", says="more")
    cassette = teller.cassette()
    assert _says(cassette, _asked("hi")) == (502, 1, 3, False)
    assert _says(cassette, _asked("hi"), retry=True) == (["well"], 2, 3, False)
    assert _says(cassette, _asked("hi"), retry=True) == (["well"], 2, 3, False)
    assert _says(cassette, _asked("hi")) == (["more"], 3, 3, False)


def kinds_error() -> Exception:
    """An engine's failure."""
    from rollbook.store.errors import EngineError

    return EngineError("lost")


def test_what_no_client_saw_is_no_answer(teller: Told) -> None:
    """Neither a turn that was started over, nor a reply cut off because its client left, unless it is all."""
    teller.opens("t")
    first = teller.turn("hi", says=kinds_error(), request="r")
    teller.turn("hi", says="half", finish="abort")
    teller.turn("hi", says="whole", request="r", instead_of=first)
    teller.turn("alone", says="hal", finish="abort")
    teller.turn("never")
    cassette = teller.cassette()
    assert _says(cassette, _asked("hi")) == (["whole"], 1, 1, False)
    assert _says(cassette, _asked("alone"))[0] == ["hal"]
    assert _says(cassette, _asked("never"))[0] == 502


def test_a_trajectory_is_chosen_by_its_name_or_by_what_it_has(teller: Told) -> None:
    """A name that none has stays with the trajectory that it was first answered from."""
    for name in ("a", "b"):
        teller.opens(name)
        teller.turn("hi", says=f"hi from {name}")
        teller.turn("same", says=f"same from {name}")
    teller.turn("b's own", says="b's own")
    cassette = teller.cassette()
    assert _says(cassette, _asked("hi"), "b")[0] == ["hi from b"]
    assert _says(cassette, _asked("hi"), "id-a")[0] == ["hi from a"]
    assert [_says(cassette, _asked("hi"))[0] for _ in range(2)] == [["hi from a"], ["hi from b"]]
    assert _says(cassette, _asked("b's own"), "anybody")[0] == ["b's own"]
    assert _says(cassette, _asked("same"), "anybody") == (["same from b"], 1, 1, False)
    assert isinstance(cassette.answer(_asked("b's own"), "a"), Miss)


@pytest.mark.parametrize(
    ("asked", "number", "wheres"),
    [
        (lambda: _asked("a", "b", "x", "d"), 4, ["messages[2]"]),
        (lambda: _asked("a", "x"), 2, ["messages[1]"]),
        (lambda: _asked("a", "b", "c", "d", "e"), 4, ["messages[4]"]),
        (lambda: _asked("a", "b", "d"), 4, ["messages[2]"]),
        (lambda: _asked("a", temperature=1, stop=["x"]), 1, ["stop", "temperature"]),
        (lambda: _asked("a", "b", tools=[{"type": "function", "function": {"name": "f"}}]), 2, ["tools.f"]),
        (lambda: _asked("a", "c", {"role": "system", "content": "c"}), 3, ["messages[1]", "messages[2]"]),
    ],
)
def test_the_nearest_is_the_one_that_shares_most(
    teller: Told, asked: Callable[[], ComparedRequest], number: int, wheres: list[str]
) -> None:
    """Of a conversation that grows, the turn at which the request is; and only what differs is told."""
    teller.opens("t")
    for count in range(1, 5):
        teller.turn(*"abcd"[:count], says="x")
    missed = teller.cassette().answer(asked())
    assert isinstance(missed, Miss)
    assert missed.near is not None
    assert missed.near.request.number == number
    assert [d.where for d in missed.near.differences] == wheres


def test_of_roots_the_nearest_is_the_one_whose_text_is_most_alike(teller: Told) -> None:
    """And its difference is shown in lines, however long the text is."""
    teller.opens("t")
    text = "\n".join(f"line {i}" for i in range(100))
    teller.turn("something else", says="x")
    teller.turn(text, says="x")
    near = teller.cassette().answer(_asked(text.replace("line 50", "line fifty")))
    assert isinstance(near, Miss)
    assert near.near is not None
    assert near.near.request.number == 2
    assert near.near.differences[0].diff[3:] == (
        *(" line 48", " line 49", "-line 50", "+line fifty", " line 51", " line 52"),
    )


def test_ignored_fields_do_not_count(teller: Told) -> None:
    """Neither for the match nor among the differences."""
    teller.opens("t")
    teller.turn("hi", says="x")
    cassette = teller.cassette(ignored=["model", "tools"])
    other = {"model": "another", "tools": [{"type": "web_search"}]}
    assert _says(cassette, _asked("hi", **other))[0] == ["x"]
    missed = cassette.answer(_asked("ho", **other))
    assert isinstance(missed, Miss)
    assert missed.near is not None
    assert [d.where for d in missed.near.differences] == ["messages[0]"]


def test_nothing_to_answer_from_is_an_error(teller: Told, store: Store) -> None:
    """Neither an unknown trajectory, nor one without a request."""
    teller.opens("empty")
    with pytest.raises(ReplayError, match="hold no request yet"):
        teller.cassette()
    with pytest.raises(ReplayError, match="no trajectory 'gone' at that cut"):
        read_tapes(store, store.head(), ["gone"])
