"""Lanes are found by the names that their writers put, not by listing all."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from tests.store.hosts.conftest import Hosts, rows

from rollbook.store.errors import MediumError
from rollbook.store.events import Event
from rollbook.store.hosts import follower, openings, shipper
from rollbook.store.hosts.openings import Openings, announce
from rollbook.store.medium.medium import OPENED, Medium

Note = Callable[..., Event]


def test_names_come_in_order(medium: Medium) -> None:
    """First all lanes there are; then each that is taken, once."""
    medium.put("lanes/a/x", 0, b"a chunk")
    announce(medium, "lanes/a/x")
    reading = Openings(medium)
    assert reading.since() == ["lanes/a/x"]
    assert reading.since() == []
    names = [f"lanes/a/{number}" for number in range(40)]
    for name in names:
        announce(medium, name)
    assert reading.since() == names
    assert reading.since() == []


def test_who_has_missed_some_lists_all(medium: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old names are removed; whoever was away for longer cannot know what they were."""
    monkeypatch.setattr(openings, "KEPT", 8)
    reading = Openings(medium)
    assert reading.since() == []
    medium.put("lanes/a/1", 0, b"a chunk")
    for number in range(30):
        announce(medium, f"lanes/a/{number}")
    assert medium.first(OPENED) > 0
    monkeypatch.setattr(openings, "GAP_LOOK_S", 0.0)
    assert reading.since() == ["lanes/a/1"]
    announce(medium, "lanes/a/new")
    assert reading.since() == ["lanes/a/new"]


def test_a_new_lane_is_found_without_listing(
    hosts: Hosts, note: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a process has begun."""
    a, b = hosts.open("a"), hosts.open("b")

    def listed(kind: str) -> list[str]:
        raise AssertionError(f"{kind} are listed")

    monkeypatch.setattr(b.carrier.medium, "sequences", listed)
    for lane in ("one", "two"):
        with a.writer(lane) as writer:
            writer.append([note(lane)]).result(10)
    b.carrier.catch_up()
    assert rows(b) == rows(a)
    assert len(rows(b)) == 2


def test_a_lane_that_is_taken_before_a_follower_begins_and_written_afterwards(
    hosts: Hosts, note: Note
) -> None:
    """The follower has listed lanes, and this one was not among them."""
    a = hosts.open("a")
    hosts.open("b").carrier.close()
    with a.writer("serve") as writer:
        b = hosts.open("b")
        writer.append([note("late")]).result(10)
        until = time.monotonic() + 20
        while rows(b) != rows(a):
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_lane_that_was_idle_for_long_is_heard_of(
    folder_hosts: Hosts, note: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at once a minute by then, and at once when something is put there."""
    a, b = folder_hosts.open("a"), folder_hosts.open("b")
    with a.writer("serve") as writer:
        writer.append([note("early")]).result(10)
        while not rows(b):
            b.carrier.catch_up()
        for module in (follower, shipper):
            monkeypatch.setattr(module, "IDLE_S", 0.2)
        monkeypatch.setattr(follower, "LONGEST_PAUSE_S", 60.0)
        time.sleep(1.0)
        assert b.carrier._follower._lanes[writer.lane].due > time.clock_gettime(time.CLOCK_BOOTTIME) + 5
        begun = time.monotonic()
        writer.append([note("late")]).result(10)
        while len(rows(b)) < 2:
            assert time.monotonic() < begun + 10
            time.sleep(0.02)


def test_a_lane_is_found_although_the_medium_went_away_in_between(
    hosts: Hosts, note: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name was read, and then nothing answered."""
    a, b = hosts.open("a"), hosts.open("b")
    medium = b.carrier.medium
    first, failures = medium.first, [1, 2, 3]

    def refuses(sequence: str) -> int | None:
        if failures and sequence.startswith("lanes/"):
            failures.pop()
            raise MediumError("no answer")
        return first(sequence)

    monkeypatch.setattr(medium, "first", refuses)
    with a.writer("serve") as writer:
        writer.append([note("early")]).result(10)
    until = time.monotonic() + 20
    while rows(b) != rows(a):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert failures == []
