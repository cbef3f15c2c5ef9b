"""`rollbook tail` for people: a line per turn, joined of events that come in any order, in bounded memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from rollbook.cli import app as cli
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.events.event_json import json_bytes
from rollbook.transcript import traffic as print_turns
from rollbook.transcript.traffic import KINDS, Traffic, Words

LINES = """\
2023-11-14 UTC
22:13:21 alpha            opened  train, group g, task task-7
22:13:23 alpha              1 first               3+2 v0    stop         1.0 s  -0.375 4
22:13:26 alpha              2 extends 1           7+3 v0-1  length       1.0 s  -2.333 yes
22:13:29 alpha              3 history_changed failed after 1.0 s: the engine is gone
22:13:30 alpha            reward  0.25 from agent for turn 1
22:13:31 alpha            reward  0.5 from agent
22:13:32 alpha            reward  1 from agent, instead of an earlier one
22:13:33 alpha            reward  0.75 from judge
22:13:34 alpha            finished  completed, success, 3 turns
22:13:35 beta             opened  eval
22:13:37 actor            v1 serves, on embedded
"""


def _lines(traffic: Traffic, events: list[Event]) -> list[str]:
    return [_plain(line) for event in events for line in traffic.lines(event)]


def _plain(line: Words) -> str:
    return "".join(text for text, _ in line)


def _without(event: Event, **changes: Any) -> Event:
    record: Any = event.record
    return replace(event, record=replace(record, **changes))


def test_each_turn_outcome_and_version_has_a_line(story: dict[str, list[Event]]) -> None:
    """Turns, outcomes, rewards and versions have a line each; what is not of them has none."""
    assert _lines(Traffic(), story["serve"]) == LINES.splitlines()
    assert _lines(Traffic(), [e for e in story["serve"] if e.kind in KINDS]) == LINES.splitlines()
    assert _lines(Traffic(), story["train"]) == []


def test_a_tail_from_the_middle_shows_what_is_known(story: dict[str, list[Event]]) -> None:
    """What was opened or asked before the tail began has a line with what is known of it."""
    of_t2 = [e for e in story["serve"] if getattr(e.record, "turn_id", "") == "u2"]
    assert _lines(Traffic(), of_t2) == [
        "2023-11-14 UTC",
        "22:13:26 ..t1                 extends u1          7+3 v0-1  length       1.0 s  -2.333 yes",
    ]
    assert _lines(Traffic(), of_t2[1:]) == [
        "2023-11-14 UTC",
        "22:13:26 ..t1                                     7+3 v0-1  length              -2.333 yes",
    ]


def test_turns_read_before_their_opening_have_no_number(story: dict[str, list[Event]]) -> None:
    """A turn that is read before its trajectory's opening is shown without a number."""
    opened, *rest = [e for e in story["serve"] if getattr(e.record, "trajectory_id", "") == "t1"]
    lines = _lines(Traffic(), [*rest[:3], opened, *rest[3:]])
    assert lines[1].startswith("22:13:23 ..t1                 first ")
    assert lines[3].startswith("22:13:26 alpha                extends u1  ")
    assert lines[-1].endswith("finished  completed, success")


def test_odd_turns_have_one_line_each(story: dict[str, list[Event]]) -> None:
    """Turns of text, without logprobs or versions, with calls, and with escapes, on one line each."""
    opened, requested, done = story["serve"][1:4]
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    nothing = np.array([], np.int32)
    odd = _without(
        done,
        reply={"role": "assistant", "content": "x\ny\x1b[31m", "tool_calls": [call]},
        finish_reason="tool_calls",
        logprobs=None,
        version_spans=(),
        completion_ids=nothing,
        prompt_length=0,
    )
    named = _without(opened, name="a-very-long-name-of-\x1b-a-task-17", task="t\x1b")
    lines = _lines(Traffic(), [named, requested, odd])
    assert lines[1:] == [
        "22:13:21 a-very..-task-17 opened  train, group g, task t\\x1b",
        "22:13:23 a-very..-task-17   1 first         text only       tool_calls   1.0 s         "
        "x y\\x1b[31m f(a=1)",
    ]
    evil = [
        _without(requested, root_reason="\x1b"),
        _without(odd, finish_reason="\x1b"),
        _without(story["serve"][9], turn_id="u1", error="\x1b"),
    ]
    evil += [_without(story["serve"][13], source="\x1b"), _without(story["serve"][14], status="\x1b")]
    evil += [_without(story["serve"][17], policy="\x1b", engine="\x1b")]
    assert not any("\x1b" in line for line in _lines(Traffic(), evil))


def test_the_width_is_used(story: dict[str, list[Event]]) -> None:
    """A reply is cut where the terminal ends; on a narrow one it keeps half of what it has elsewhere."""
    events = [
        *story["serve"][1:3],
        _without(story["serve"][3], reply={"role": "assistant", "content": "w" * 500}),
    ]
    assert [len(_lines(Traffic(width), events)[-1]) for width in (150, 120, 40, None)] == [149, 119, 117, 147]


def test_failures_are_red_and_cut_turns_yellow(story: dict[str, list[Event]]) -> None:
    """What fails is red, what is cut short is yellow, and a trajectory's name has one colour."""
    traffic = Traffic()
    lines = {_plain(line)[26:39].strip(): line for e in story["serve"] for line in traffic.lines(e)}

    def styles(line: Words) -> dict[str, str]:
        return {text.strip(): style for text, style in line}

    assert styles(lines["3 history_c"])["failed after 1.0 s: the engine is gone"] == "red"
    assert styles(lines["2 extends 1"])["length"] == "yellow"
    assert styles(lines["1 first"])["stop"] == "green"
    assert len({styles(line)["alpha"] for line in lines.values() if "alpha" in _plain(line)}) == 1


def test_open_turns_and_trajectories_take_bounded_memory(
    monkeypatch: pytest.MonkeyPatch, story: dict[str, list[Event]]
) -> None:
    """Memory for turns and trajectories that never end is bounded."""
    for name in ("TRAJECTORIES", "RUNNING", "NUMBERS"):
        monkeypatch.setattr(print_turns, name, 10)
    traffic = Traffic()
    opened, requested, done = story["serve"][1:4]
    for i in range(500):
        traffic.lines(_without(opened, trajectory_id=f"t{i}", name=f"n{i}"))
        traffic.lines(_without(requested, trajectory_id=f"t{i}", turn_id=f"u{i}"))
    assert [len(m) for m in (traffic._trajectories, traffic._running, traffic._numbers)] == [10, 10, 10]
    last, first = (traffic.lines(_without(done, trajectory_id=f"t{i}", turn_id=f"u{i}")) for i in (499, 0))
    assert _plain(last[0]).startswith("22:13:23 n499               1 first ")
    assert _plain(first[0]).startswith("22:13:23 ..t0                             ")
    assert len(traffic._running) == 9  # one was answered


# The command ----------------------------------------------------------------------------------------


@pytest.fixture
def tail(
    story_store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run `rollbook tail ARGS --no-follow` on a store with the story: (exit code, stdout, stderr)."""

    def run(*args: str) -> tuple[int, str, str]:
        words = ["rollbook", "tail", "--store", str(story_store.path), "--no-follow", *args]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return int(stop.value.code or 0), *capsys.readouterr()

    return run


def test_the_default_is_a_line_per_turn(tail: Callable[..., tuple[int, str, str]]) -> None:
    """And nothing of other kinds; a cut and a run leave out what they leave out."""
    assert tail() == (0, LINES, "")
    assert tail("--from", "serve=16")[1].splitlines()[1:] == LINES.splitlines()[-2:][1:]
    assert tail("--run", "none")[1] == ""


def test_events_can_be_printed_one_per_line(
    tail: Callable[..., tuple[int, str, str]], story: dict[str, list[Event]]
) -> None:
    """With `--events` each event has one; with `--kinds` each of those; escapes of names are shown."""
    lines = tail("--events")[1].splitlines()
    assert [line.split()[2] for line in lines] == [
        f"{lane}={e.seq}" for lane in story for e in _numbered(story, lane)
    ]
    assert lines[2].startswith(
        "11-14 22:13:22.000 serve=2        turn.requested         t1       first: user: 2+2?"
    )
    assert tail("--kinds", "turn.failed")[1] == (
        "11-14 22:13:29.000 serve=9        turn.failed            t1       the engine is gone\n"
    )


def test_json_is_as_it_was(tail: Callable[..., tuple[int, str, str]], story_store: Store) -> None:
    """One event per line, all kinds, with or without `--events`."""
    expected = "".join(json_bytes(e).decode() + "\n" for e in story_store.events())
    assert tail("--json")[1] == tail("--json", "--events")[1] == expected
    assert {orjson.loads(line)["kind"] for line in expected.splitlines()} - KINDS


def test_names_do_not_drive_the_terminal_in_either_form(
    tail: Callable[..., tuple[int, str, str]], story_store: Store
) -> None:
    """A client chooses its trajectories' names, and a judge its own."""
    with story_store.writer("judge") as writer:
        records = [
            kinds.TrajectoryOpened("t9", "\x1b[2J", task="\x07"),
            kinds.RewardAssigned("t9", None, 1.0, "\x9b"),
        ]
        writer.append([Event(record, "demo") for record in records]).result(30)
    for form in ((), ("--events",)):
        out = tail(*form)[1]
        assert "\\x1b[2J" in out
        assert not {"\x1b", "\x07", "\x9b"} & set(out)


def _numbered(story: dict[str, list[Event]], lane: str) -> list[Event]:
    return [replace(e, seq=i) for i, e in enumerate(story[lane])]
