"""What a log promises, whatever it is made of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories.records import turn_completed, turn_requested

from rollbook.store import Event
from rollbook.store.errors import CutError, LaneLockedError, WriteFailedError
from rollbook.store.events import (
    RECORDS,
    BodyStored,
    RewardAssigned,
    StepPlanned,
    TrajectoryOpened,
    TurnFailed,
    VersionSpan,
)
from rollbook.store.fold.trajectory import prompt_sha256
from rollbook.store.log.tail import Filter

Log = Any
BIG = "a long system prompt " * 1000


def _append(log: Log, lane: str, *appends: list[Event]) -> list[int]:
    with log.writer(lane) as writer:
        return [writer.append(events).result(30) for events in appends]


def _errors(log: Log, *args: Any) -> list[str]:
    return [e.record.error for e in log.events(*args)]


def _request(turn: str, messages: Any, request: Any) -> Event:
    record = turn_requested(
        "t", turn, root_reason="first", messages=messages, request=request, context_key="key"
    )
    return Event(record, "run")


def _turn(ids: Any, logprobs: Any = None, spans: Any = (), version: Any = 0) -> Event:
    record = turn_completed(
        "t",
        "u",
        policy_version=version,
        prompt_ids=ids,
        completion_ids=ids,
        logprobs=logprobs,
        version_spans=spans,
        prompt_length=1,
        prompt_sha256=prompt_sha256(np.array([1], np.int32)),
    )
    return Event(record, "run")


# Appending ------------------------------------------------------------------------------------------


def test_events_come_back_as_they_were(
    log: Log, story: dict[str, list[Event]], upkeep: list[Event], plain: Any
) -> None:
    """Every field of every kind of event, bit for bit, in the order of the appends, lane by lane."""
    written = {"serve": story["serve"], "train": story["train"], "upkeep": upkeep}
    assert {e.kind for events in written.values() for e in events} == set(RECORDS)
    for lane, events in written.items():
        half = len(events) // 2
        assert _append(log, lane, events[:half], events[half:]) == [0, half]
    back = list(log.events())
    assert [(e.lane, e.seq) for e in back] == [(k, i) for k, v in written.items() for i in range(len(v))]
    assert [plain(e, place=False) for e in back] == [
        plain(e, place=False) for v in written.values() for e in v
    ]


def test_an_append_gets_the_number_of_its_first_event(log: Log, notes: Callable[..., list[Event]]) -> None:
    """Numbers rise without gaps, also over a closed and reopened lane."""
    assert _append(log, "a", notes(3), notes(1, 3), notes(9, 4)) == [0, 3, 4]
    assert _append(log, "a", notes(2, 13)) == [13]
    assert _errors(log) == [f"note {i}" for i in range(15)]
    assert [e.seq for e in log.events()] == list(range(15))


def test_an_event_is_stored_once(log: Log, notes: Callable[..., list[Event]]) -> None:
    """A repeated event keeps its number: in one append, in a later one, and after a reopening."""
    a, b, c, d = notes(4)
    assert _append(log, "a", [a, b, a], [b], [c, b]) == [0, 1, 2]
    assert _append(log, "a", [a], [b, d], [d, a]) == [0, 1, 3]
    assert _errors(log) == [f"note {i}" for i in range(4)]
    assert log.head() == {"a": 4}


def test_the_first_of_two_events_with_one_id_counts(log: Log, notes: Callable[..., list[Event]]) -> None:
    """What is appended again under an id is not looked at: the log never changes."""
    first = notes(1)[0]
    other = replace(first, record=TurnFailed("t", "u", "other"), time_us=1)
    assert _append(log, "a", [first], [other]) == [0, 0]
    assert _errors(log) == ["note 0"]
    assert _append(log, "b", [other]) == [0]  # lanes know nothing of each other
    assert _errors(log) == ["note 0", "other"]


def test_an_append_that_cannot_be_stored_leaves_nothing(log: Log, notes: Callable[..., list[Event]]) -> None:
    """One bad value fails its whole append, and no other one before, with or after it."""
    bad = Event(TurnFailed("t", "u", "\ud800"), "run")
    with log.writer("a") as writer:
        futures = [writer.append(e) for e in (notes(1), [*notes(2, 90), bad], [bad], notes(9, 1))]
        assert (futures[0].result(30), futures[3].result(30)) == (0, 1)
        for future in futures[1:3]:
            with pytest.raises(ValueError, match="cannot be stored"):
                future.result(30)
        assert writer.failure is None
        assert writer.append(notes(1, 10)).result(30) == 10
    assert _errors(log) == [f"note {i}" for i in range(11)]


INT = np.int32
BAD_VALUES: dict[str, Any] = {
    "a lone surrogate in a column": lambda: Event(TurnFailed("\ud800", "u", "x"), "run"),
    "a value that is no JSON": lambda: Event(TrajectoryOpened("t", "n", labels={"x": object()}), "run"),
    "a number beyond int64": lambda: Event(TurnFailed("t", "u", "x"), "run", time_us=2**63),
    "a version beyond int64": lambda: _turn(np.array([1], INT), version=2**63),
    "a version that is no integer": lambda: _turn(np.array([1], INT), version=1.5),
    "a reward that is no number": lambda: Event(RewardAssigned("t", None, "high"), "run"),  # type: ignore[arg-type]
    "a token id beyond int32": lambda: _turn([2**31]),
    "an array of ids beyond int32": lambda: _turn(np.array([2**31])),
    "token ids that are no integers": lambda: _turn(np.array([1.5])),
    "token ids in two dimensions": lambda: _turn(np.array([[1, 2], [3, 4]], INT)),
    "token ids that are no list": lambda: _turn(7),
    "logprobs that are no numbers": lambda: _turn(np.array([1], INT), ["high"]),
    "a span beyond int32": lambda: _turn(np.array([1], INT), None, (VersionSpan("actor", 0, 0, 2**31),)),
    "a span of no integers": lambda: _turn(np.array([1], INT), None, (VersionSpan("actor", 0, 0.5, 1),)),  # type: ignore[arg-type]
    "a span's version beyond int64": lambda: _turn(
        np.array([1], INT), None, (VersionSpan("a", 2**63, 0, 1),)
    ),
    "a span of a policy that is no text": lambda: _turn(
        np.array([1], INT),
        None,
        (VersionSpan(7, 0, 0, 1),),  # type: ignore[arg-type]
    ),
    "messages that are no JSON": lambda: _request("u", [{"content": object()}], {}),
}


@pytest.mark.parametrize("company", [0, 8], ids=["alone", "in company"])
@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values_are_refused(log: Log, notes: Callable[..., list[Event]], name: str, company: int) -> None:
    """What has no stored form is a ValueError, whether few or many events are appended; the lane goes on."""
    with log.writer("a") as writer:
        with pytest.raises(ValueError, match="cannot be stored"):
            writer.append([BAD_VALUES[name](), *notes(company)]).result(30)
        assert writer.append(notes(1)).result(30) == 0
    assert _errors(log) == ["note 0"]


@pytest.mark.parametrize("company", [0, 8], ids=["alone", "in company"])
def test_odd_values_are_kept(log: Log, notes: Callable[..., list[Event]], plain: Any, company: int) -> None:
    """Extremes and oddities that do have a stored form come back the same bit for bit."""
    logprobs = np.array([0xBF000000, 0x7FC00001, 0xFF800000], np.uint32).view(np.float32)
    spans = (VersionSpan("é", -(2**63), -(2**31), 2**31 - 1), VersionSpan("", 2**63 - 1, 0, 0))
    odd = [
        _turn(np.array([-(2**31), 2**31 - 1, 0], INT), logprobs, spans, -(2**63)),
        _turn(np.array([], INT), np.array([], np.float32), (), None),
        Event(RewardAssigned("", "\0", 5e-324, "é✓\U0001f600"), "", time_us=-(2**63)),
        Event(RewardAssigned("t", None, -0.0), "r", time_us=2**63 - 1),
    ]
    _append(log, "a", [*odd, *notes(company)])
    back = list(log.events())[:4]
    assert [plain(e, place=False) for e in back] == [plain(e, place=False) for e in odd]
    assert str(back[3].record.reward) == "-0.0"


def test_what_was_appended_is_no_longer_the_callers(log: Log) -> None:
    """An array that the caller changes after the append is unchanged in the log."""
    ids = np.array([1, 2, 3], INT)
    _append(log, "a", [_turn(ids)])
    ids[0] = 99
    assert next(log.events()).record.completion_ids.tolist() == [1, 2, 3]


def test_an_append_of_nothing_is_refused(log: Log) -> None:
    """It has no first event whose number it could give."""
    with log.writer("a") as writer, pytest.raises(ValueError, match="at least one"):
        writer.append([]).result(30)
    assert log.head() == {}


# Writers --------------------------------------------------------------------------------------------


def test_a_closed_writer_takes_nothing(log: Log, notes: Callable[..., list[Event]]) -> None:
    """Closing commits what is pending; later appends fail; closing again does nothing."""
    writer = log.writer("a")
    pending = [writer.append(notes(1, i)) for i in range(5)]
    writer.close()
    assert [f.result(0) for f in pending] == list(range(5))
    writer.close()
    with pytest.raises(WriteFailedError, match=r"lane 'a'.*closed"):
        writer.append(notes(1)).result(30)
    assert _errors(log) == [f"note {i}" for i in range(5)]


def test_a_lane_has_one_writer(log: Log, notes: Callable[..., list[Event]]) -> None:
    """A second writer is refused while there is one, and another lane is free."""
    with log.writer("a") as writer:
        with pytest.raises(LaneLockedError, match="'a'"):
            log.writer("a")
        assert _append(log, "b", notes(1)) == [0]
        assert writer.append(notes(1)).result(30) == 0
    assert _append(log, "a", notes(1, 1)) == [1]


@pytest.mark.parametrize("name", ["", "A", "a/b", "..", "a" * 64])
def test_a_lane_has_a_proper_name(log: Log, name: str) -> None:
    """A name that is no lane name is refused, and nothing is made."""
    with pytest.raises(CutError, match="lane name"):
        log.writer(name)
    assert log.lanes() == []


@pytest.mark.more_but("wal", "memory")
def test_many_threads_append(log: Log, notes: Callable[..., list[Event]]) -> None:
    """Each append's events stay together, at the number its future gave; each thread's are in its order."""
    got: dict[str, int] = {}

    def work(name: str) -> None:
        for i in range(5):
            got[f"{name}{i}"] = writer.append(notes(1 + i % 2, text=f"{name}{i}")).result(60)

    with log.writer("a") as writer:
        threads = [threading.Thread(target=work, args=(name,)) for name in "stuvwxyz"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    errors = _errors(log)
    assert log.head() == {"a": 8 * 7}
    assert len(errors) == 8 * 7
    for name in "stuvwxyz":
        numbers = [got[f"{name}{i}"] for i in range(5)]
        assert numbers == sorted(numbers)
        for i, seq in enumerate(numbers):
            count = 1 + i % 2
            assert errors[seq : seq + count] == [f"{name}{i} {j}" for j in range(count)]


# Cuts -----------------------------------------------------------------------------------------------


def test_lanes_and_head(log: Log, notes: Callable[..., list[Event]]) -> None:
    """A lane that was opened is listed; the head holds those with events."""
    assert (log.lanes(), log.head(), list(log.events())) == ([], {}, [])
    _append(log, "b", notes(2))
    log.writer("a").close()
    assert (log.lanes(), log.head()) == (["a", "b"], {"b": 2})
    assert log.cut() == log.cut("b=2") == {"b": 2}


def test_a_cut_is_a_prefix(log: Log, notes: Callable[..., list[Event]]) -> None:
    """Events of a cut are the first so many of each lane, the same for ever; `start` leaves a cut out."""
    _append(log, "a", notes(3), notes(3, 3))
    _append(log, "b", notes(2, 90))
    cut = log.cut("a=4,b=1")
    expected = [*(f"note {i}" for i in range(4)), "note 90"]
    assert _errors(log, cut) == expected
    _append(log, "a", notes(9, 6))
    assert _errors(log, cut) == expected
    assert _errors(log, cut, {"a": 2}) == expected[2:]
    assert _errors(log, {"a": 4}, {"a": 4}) == []
    assert _errors(log, {}) == []
    assert len(_errors(log)) == 17


@pytest.mark.parametrize("text", ["a=3", "b=1", "a=2,c=1", "a", "a=x", "A=1", "step:0", "step:x", ""])
def test_a_cut_that_is_not_held_is_refused(log: Log, notes: Callable[..., list[Event]], text: str) -> None:
    """More than the log holds, a lane it does not have, a step nobody planned, or no cut at all."""
    _append(log, "a", notes(2))
    with pytest.raises(CutError, match="cut"):
        log.cut(text)
    with pytest.raises(CutError, match="'a'"):
        list(log.events({"a": 3}))


def test_the_cut_of_a_step(log: Log, story: dict[str, list[Event]]) -> None:
    """`step:N` is where the step was planned, by its last attempt; a run may have to be named."""
    _append(log, "serve", story["serve"])
    _append(log, "train", story["train"])
    assert log.cut("step:0") == {"serve": 14, "train": 2}
    assert log.cut("step:1", "demo") == {"serve": 18, "train": 7}
    plan = next(e.record for e in story["train"] if isinstance(e.record, StepPlanned))
    _append(log, "train", [Event(replace(plan, cut="serve=1"), "other")])
    with pytest.raises(CutError, match="run"):
        log.cut("step:0")
    assert log.cut("step:0", "other") == {"serve": 1}


# Tails ----------------------------------------------------------------------------------------------


def test_a_tail_hands_out_each_event_once(log: Log, notes: Callable[..., list[Event]]) -> None:
    """Polls give what came since the last one; a new tail resumes at the cut of the old one."""
    tail = log.tail()
    assert tail.poll() == []
    _append(log, "a", notes(3))
    _append(log, "b", notes(1, 90))
    assert [e.record.error for e in tail.poll()] == ["note 0", "note 1", "note 2", "note 90"]
    assert (tail.poll(), tail.cut()) == ([], {"a": 3, "b": 1})
    _append(log, "a", notes(2, 3))
    resumed = log.tail(tail.cut())
    for reader in (tail, resumed):
        assert [(e.lane, e.seq) for e in reader.poll()] == [("a", 3), ("a", 4)]
        assert reader.cut() == {"a": 5, "b": 1} == log.head()


def test_a_tail_begins_anywhere(log: Log, notes: Callable[..., list[Event]]) -> None:
    """A tail starts in the middle of an append, after all, or is refused beyond the end."""
    _append(log, "a", notes(5))
    assert [e.seq for e in log.tail({"a": 3}).poll()] == [3, 4]
    assert log.tail({"a": 5}).poll() == []
    for start in ({"a": 6}, {"b": 1}):
        with pytest.raises(CutError, match="cut"):
            log.tail(start)


def test_a_tail_with_a_limit_goes_on_where_it_stopped(log: Log, notes: Callable[..., list[Event]]) -> None:
    """Limited polls hand out all events, each once, in order; any cut between them can be resumed from."""
    _append(log, "a", notes(3), notes(2, 3))
    _append(log, "b", notes(4, 90))
    tail, seen = log.tail(), []
    for _ in range(20):
        cut = tail.cut()
        part = tail.poll(1)
        assert [(e.lane, e.seq) for e in log.tail(cut).poll()][: len(part)] == [(e.lane, e.seq) for e in part]
        seen += part
    assert [(e.lane, e.seq) for e in seen] == [*(("a", i) for i in range(5)), *(("b", i) for i in range(4))]


def test_a_tail_of_some_events(
    log: Log, story: dict[str, list[Event]], notes: Callable[..., list[Event]]
) -> None:
    """Kinds, a run, all but some kinds, and lanes that are not read; the others count as passed over."""
    _append(log, "serve", story["serve"])
    _append(log, "other", notes(2))
    opened = log.tail(None, Filter(kinds=frozenset({"trajectory.opened"})))
    assert [e.record.name for e in opened.poll()] == ["alpha", "beta"]
    assert opened.cut() == log.head()
    rest = log.tail(None, Filter(without=frozenset({"turn.failed"}), run="demo", skip_lanes=frozenset({"x"})))
    assert len(rest.poll()) == len(story["serve"]) - 1
    skipping = log.tail(None, Filter(skip_lanes=frozenset({"serve"})))
    assert [e.lane for e in skipping.poll()] == ["other", "other"]
    assert skipping.cut() == {"other": 2}


# Trajectories and bodies ----------------------------------------------------------------------------


def test_trajectories_at_a_cut(log: Log, story: dict[str, list[Event]]) -> None:
    """Trajectories fold out of the events of a cut, all or by id."""
    _append(log, "serve", story["serve"][:9], story["serve"][9:])
    everything = log.trajectories()
    assert sorted(everything) == ["t1", "t2"]
    t1 = log.trajectory("t1")
    assert list(t1.turns) == ["u1", "u2", "u3"]
    assert t1.turns["u2"].completed.completion_ids.tolist() == [12, 13, 14]
    assert (t1.turns["u3"].failed.error, t1.finished.success) == ("the engine is gone", True)
    assert log.trajectory("t2").opened.split == "eval"
    assert (log.trajectory("t3"), log.trajectories(None, ["t3"])) == (None, {})
    early = log.trajectory("t1", {"serve": 6})
    assert (list(early.turns), early.turns["u2"].completed, early.finished) == (["u1", "u2"], None, None)
    assert log.trajectory("t2", {"serve": 7}) is None
    assert sorted(log.trajectories({"serve": 18}, ["t1", "t2", "t3"])) == ["t1", "t2"]


def test_large_parts_of_requests_are_stored_apart(log: Log, notes: Callable[..., list[Event]]) -> None:
    """A request reads back whole; what it refers to comes before it; the number is the request's own."""
    messages = [{"role": "system", "content": BIG}, {"role": "user", "content": "hi"}]
    image = {"type": "image", "data": ["x" * 20] * 1000}
    requests = [_request("u1", messages, {"tools": [image]}), _request("u2", messages, {"tools": [image]})]
    numbers = _append(log, "a", notes(1), [requests[0]], [requests[1]])
    events = list(log.events())
    assert [e.seq for e in events] == list(range(len(events)))
    assert [events[n].event_id for n in numbers[1:]] == [e.event_id for e in requests]
    assert [events[n].record for n in numbers[1:]] == [e.record for e in requests]
    kinds = [e.kind for e in events]
    assert kinds[:4] == ["turn.failed", "body.stored", "body.stored", "turn.requested"]
    assert {len(e.record.body) for e in events if isinstance(e.record, BodyStored)} == {len(BIG), 1}
    # A reader that begins at the second request gets it whole too.
    assert [e.record for e in log.events(log.head(), {"a": numbers[2]})] == [requests[1].record]
    assert [e.record for e in log.tail({"a": numbers[2]}).poll()] == [requests[1].record]
    assert log.trajectories() == {}


@pytest.mark.parametrize("value", [{"$body": "mine"}, {"$body": {"$body": 1}, "x": 2}, {"a": {"$body": []}}])
def test_what_looks_like_a_reference_is_data(log: Log, value: Any) -> None:
    """A client's own object with the key `$body` comes back as it was sent, wherever it stands."""
    request = _request("u", [{"content": value}, {"content": [value, "$body"]}], {"metadata": value})
    _append(log, "a", [request])
    assert list(log.events())[-1].record == request.record
