"""Leases, claims and fences: of two hosts that could both do a thing, one does it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from tests.store.hosts.conftest import Hosts, rows

from rollbook.store.errors import FencedError, LaneLockedError, MediumError
from rollbook.store.events import Event, EventOrphaned
from rollbook.store.hosts.session import Session, Witness
from rollbook.store.medium.medium import Medium
from rollbook.store.wal.files import lane_folder

Note = Callable[..., Event]
LEASE_S = 0.8


class Cut:
    """A medium that can be cut off from one host: nothing of it arrives, or is answered; or what is put
    arrives, and the answer does not.

    Beside it every test runs over real ones.
    """

    def __init__(self, medium: Medium) -> None:
        self._medium, self.is_cut, self.is_mute = medium, False, False

    def put(self, sequence: str, number: int, data: bytes) -> bool:
        """See `Medium`."""
        done = self._refuse() if self.is_cut else self._medium.put(sequence, number, data)
        return self._refuse() if self.is_mute else done

    def __getattr__(self, name: str) -> object:
        if self.is_cut and name not in ("address", "most_bytes", "pace_s", "close", "listen"):
            return self._refuse
        return getattr(self._medium, name)

    def _refuse(self, *_: object) -> bool:
        raise MediumError("no answer")


def cut_off(log) -> Cut:
    """Put a `Cut` before the medium of a host whose process has just begun."""
    log.carrier.medium = cut = Cut(log.carrier.medium)
    return cut


def shipped(writer, count: int) -> None:
    """Wait until so many events of a lane are in the medium."""
    until = time.monotonic() + 10
    while writer._shipment.shipped < count:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_session_is_over_when_it_is_closed(medium: Medium) -> None:
    """Who watches sees it at once, without waiting for the lease."""
    session = Session(medium, "host", 60)
    witness = Witness(medium, "other")
    session.add_lane("lanes/host/x")
    assert session.valid
    assert not witness.gone(session.name)
    assert witness.lanes(session.name) == ["lanes/host/x"]
    session.close()
    assert witness.gone(session.name)
    assert session.fenced is None


@pytest.mark.more_but("nats")
def test_a_session_that_is_renewed_is_never_ended(medium: Medium) -> None:
    """However long one watches."""
    session = Session(medium, "host", 3.0)
    witness = Witness(medium, "other")
    until = time.monotonic() + 5.0
    while time.monotonic() < until:
        assert not witness.gone(session.name)
        assert session.valid
        time.sleep(0.05)
    session.close()


def test_a_silent_session_is_ended_after_its_owner_stopped(medium: Medium) -> None:
    """The owner stops at three quarters of the lease, and the other does not end it before a lease and a
    quarter; when the owner comes back it finds the fence."""
    cut = Cut(medium)
    session, witness = Session(cut, "host", LEASE_S), Witness(medium, "other.1")
    assert not witness.gone(session.name)
    cut.is_cut = True
    begun, stopped, ended = time.monotonic(), 0.0, 0.0
    while not ended:
        if not session.valid and not stopped:
            stopped = time.monotonic() - begun
        if witness.gone(session.name):
            ended = time.monotonic() - begun
        time.sleep(0.01)
    assert 0 < stopped < ended
    assert ended > LEASE_S
    assert session.fenced is None, "it cannot know yet"
    cut.is_cut = False
    until = time.monotonic() + 5
    while session.fenced is None and time.monotonic() < until:
        time.sleep(0.02)
    assert session.fenced == "other.1"
    assert not session.valid


def test_a_lease_of_zero_is_never_ended(medium: Medium) -> None:
    """Nobody may take over, and nothing stops where the medium is away."""
    cut = Cut(medium)
    session, witness = Session(cut, "host", 0), Witness(medium, "other")
    cut.is_cut = True
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        assert session.valid
        assert not witness.gone(session.name)
        time.sleep(0.1)
    cut.is_cut = False
    session.close()


def test_a_claim_is_one_host_s(hosts: Hosts) -> None:
    """The other one is told which host has it, and has it once it is given back."""
    a, b = hosts.open("a"), hosts.open("b")
    with a.claim("training policy actor of run r", "train another run"):
        with (
            pytest.raises(
                LaneLockedError, match=f"is being done by {a.carrier.host}, process .*train another run"
            ),
            b.claim("training policy actor of run r", "train another run"),
        ):
            pass
        with b.claim("training policy actor of run s", "train another run"):
            pass
    with b.claim("training policy actor of run r", "train another run"):
        pass


def test_a_claim_may_be_shared(folder_hosts: Hosts) -> None:
    """By those who say so; then nobody has it alone."""
    a, b, c = (folder_hosts.open(name) for name in "abc")
    with a.claim("x", "wait", shared=True), b.claim("x", "wait", shared=True):
        _is_held(lambda: c.claim("x", "wait"))
    with c.claim("x", "wait"):
        _is_held(lambda: a.claim("x", "wait", shared=True))


def _is_held(claim: Callable[[], AbstractContextManager[None]]) -> None:
    with pytest.raises(LaneLockedError), claim():
        pass


def test_a_claim_is_free_though_an_answer_was_lost(folder_hosts: Hosts) -> None:
    """Its process goes on, and has it not: whether it was taken it cannot know, or it could not give it
    back."""
    a, b = folder_hosts.open("a"), folder_hosts.open("b")
    with a.claim("something else", "wait"):
        pass
    cut = cut_off(a)
    cut.is_mute = True
    with pytest.raises(MediumError), a.claim("x", "wait"):
        pass
    cut.is_mute = False
    with b.claim("x", "wait", 5):
        pass
    with a.claim("x", "wait", 5):
        cut.is_cut = True
    cut.is_cut = False
    with b.claim("x", "wait", 5):
        pass
    with a.claim("x", "wait", 5):
        pass


@pytest.mark.more_but("file", "nats")
def test_a_claim_of_a_lost_host_is_taken_over_and_its_lanes_end(hosts: Hosts, note: Note) -> None:
    """The host is cut off: the other waits for its lease, ends its lane where the medium has it, and sees all
    of that first. What the lost one goes on with is refused; when it begins again, what it had alone is an
    orphan."""
    a, b = hosts.open("a", lease_s=LEASE_S), hosts.open("b", lease_s=LEASE_S)
    cut = cut_off(a)
    with a.claim("x", "wait"), a.writer("work") as writer:
        for i in range(5):
            writer.append([note(str(i))]).result(10)
        shipped(writer, 5)
        cut.is_cut = True
        alone = writer.append([note("alone", "trajectory-1")])
        assert alone.result(1) == 5, "acknowledged here, as its lease has not ended"
        read_here = a.head()
        late = None
        with b.claim("x", "wait", 20):
            assert [e.record.value for e in b.events()] == ["0", "1", "2", "3", "4"]
            late = writer.append([note("late")])
            with pytest.raises(TimeoutError):
                late.result(0.3)
            cut.is_cut = False
            with pytest.raises(FencedError, match=f"lane '{writer.lane}' was ended at event 5"):
                late.result(10)
            with pytest.raises(FencedError):
                writer.append([note("later")]).result(10)
            assert writer.fenced is not None
    lane = writer.lane
    a.carrier.close()
    a = hosts.open("a", lease_s=LEASE_S)
    with a.writer("work") as writer:
        assert writer.lane == f"{lane}.2"
        writer.append([note("again")]).result(10)
    for log in (a, b):
        log.carrier.catch_up()
    assert rows(a) == rows(b)
    orphans = [e.record for e in b.events() if isinstance(e.record, EventOrphaned)]
    assert [(o.of_lane, o.of_seq, o.event["value"]) for o in orphans] == [
        (lane, 5, "alone"),
        (lane, 6, "late"),
    ]
    assert orphans[0].trajectory_id == "trajectory-1"
    assert b.head()[lane] == a.head()[lane] == 5
    assert read_here[lane] == 6
    with a.tail(read_here) as tail:  # who read it here goes on
        kinds = [event.kind for event in tail.poll()]
        assert (kinds.count("event.orphaned"), kinds.count("label.added")) == (2, 1)
        assert tail.cut() == a.head()


def test_a_claim_is_waited_for_only_while_its_holder_may_be_lost(folder_hosts: Hosts) -> None:
    """Without patience: one whose holder runs is refused once that is seen, well before its lease; one of a
    host that was lost is taken by the same call."""
    a, b = folder_hosts.open("a", lease_s=6.0), folder_hosts.open("b", lease_s=6.0)
    cut = cut_off(a)
    claim = a.claim("x", "wait")
    claim.__enter__()
    begun = time.monotonic()
    _is_held(lambda: b.claim("x", "wait"))
    assert time.monotonic() - begun < 5.0
    begun = time.monotonic()
    _is_held(lambda: b.claim("x", "wait", at_once=True))
    assert time.monotonic() - begun < 3.0
    cut.is_cut = True
    with b.claim("x", "wait"):
        assert a.carrier.session.fenced is None, "it cannot know yet"


def test_with_ack_medium_nothing_that_was_acknowledged_is_an_orphan(folder_hosts: Hosts, note: Note) -> None:
    """What the medium does not have was not acknowledged, and cannot be read on its own host either."""
    a = folder_hosts.open("a", lease_s=LEASE_S, ack="medium")
    b = folder_hosts.open("b", lease_s=LEASE_S, ack="medium")
    cut = cut_off(a)
    with a.claim("x", "wait"), a.writer("work") as writer:
        writer.append([note("0")]).result(10)
        cut.is_cut = True
        alone = writer.append([note("alone")])
        with pytest.raises(TimeoutError):
            alone.result(0.3)
        assert str(writer.waiting).startswith("the medium does not answer: ")
        assert a.head() == {writer.lane: 1}
        with b.claim("x", "wait", 20):
            assert [e.record.value for e in b.events()] == ["0"]
        cut.is_cut = False
        with pytest.raises(FencedError):
            alone.result(10)


@pytest.mark.parametrize("ack", ["local", "medium"])
def test_a_chunk_whose_answer_was_lost_is_one_s_own(folder_hosts: Hosts, note: Note, ack: str) -> None:
    """Whoever put it knows it again, though there is more to put by then."""
    a = folder_hosts.open("a", ack=ack)
    cut = cut_off(a)
    with a.writer("work") as writer:
        writer.append([note("0")]).result(10)
        shipped(writer, 1)
        cut.is_mute = True
        first = writer.append([note("1")])
        time.sleep(0.5)
        second = writer.append([note("2")])
        time.sleep(0.5)
        cut.is_mute = False
        assert (first.result(10), second.result(10)) == (1, 2)
        shipped(writer, 3)
        assert writer.fenced is None
    b = folder_hosts.open("b")
    assert rows(a) == rows(b)
    assert len(rows(b)) == 3


def test_a_lease_that_was_not_taken_over_goes_on(folder_hosts: Hosts, note: Note) -> None:
    """The medium is away for longer than the lease, and nobody ended it: what waited is acknowledged then."""
    a = folder_hosts.open("a", lease_s=LEASE_S)
    cut = cut_off(a)
    with a.writer("work") as writer:
        writer.append([note("0")]).result(10)
        assert writer.waiting is None
        cut.is_cut = True
        time.sleep(LEASE_S)
        assert "lease has run out" in str(writer.waiting), "though nothing waits yet"
        late = writer.append([note("1")])
        with pytest.raises(TimeoutError):
            late.result(0.3)
        cut.is_cut = False
        assert late.result(10) == 1
        assert writer.waiting is None
    b = folder_hosts.open("b")
    assert rows(a) == rows(b)
    assert len(rows(b)) == 2


def test_two_that_stand_in_race_and_one_has_it(folder_hosts: Hosts) -> None:
    """Both wait for the lost host's lease; one gets the claim, the other sees that one."""
    import threading

    a = folder_hosts.open("a", lease_s=LEASE_S)
    others = [folder_hosts.open(name, lease_s=LEASE_S) for name in "bc"]
    cut = cut_off(a)
    claim = a.claim("x", "wait")
    claim.__enter__()
    cut.is_cut = True
    got: list[str] = []
    held = threading.Barrier(2)

    def take(log) -> None:
        try:
            with log.claim("x", "wait", 3):
                got.append(log.carrier.host)
                time.sleep(4)
        except LaneLockedError as error:
            got.append(str(error))
        held.wait(60)

    threads = [threading.Thread(target=take, args=(log,)) for log in others]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    hosts = {log.carrier.host for log in others}
    winner = next(host for host in got if host in hosts)
    assert len([host for host in got if host in hosts]) == 1
    assert any(winner in text for text in got if text not in hosts)


def test_orphans_are_moved_once_wherever_that_is_cut_short(
    folder_hosts: Hosts, note: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before the lane is cut: the next time nothing is written twice."""
    from rollbook.store.hosts import orphans

    a, b = folder_hosts.open("a", lease_s=LEASE_S), folder_hosts.open("b", lease_s=LEASE_S)
    cut = cut_off(a)
    with a.claim("x", "wait"), a.writer("work") as writer:
        writer.append([note("0")]).result(10)
        shipped(writer, 1)
        cut.is_cut = True
        writer.append([note("alone")]).result(10)
        with b.claim("x", "wait", 20):
            cut.is_cut = False
            with pytest.raises(FencedError):
                writer.append([note("late")]).result(10)
    a.carrier.close()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(orphans, "cut_behind", killed)
        again = folder_hosts.open("a")
        with pytest.raises(KeyboardInterrupt):
            again.writer("work")
        again.carrier.close()
    again = folder_hosts.open("a")
    with again.writer("work"):
        pass
    values = [e.record.event["value"] for e in again.events() if isinstance(e.record, EventOrphaned)]
    assert values == ["alone", "late"]
    assert again.head()[writer.lane] == 1
    assert (lane_folder(again.path, writer.lane) / "FENCED").exists()


def test_a_lane_of_orphans_may_be_ended_too(folder_hosts: Hosts, note: Note) -> None:
    """Whoever moves orphans is cut off with what it has moved, once and again: each time the host begins
    again, and all of it is there once."""
    a, b = folder_hosts.open("a", lease_s=LEASE_S), folder_hosts.open("b", lease_s=LEASE_S)
    for number in range(3):
        cut = cut_off(a)
        with a.claim("x", "wait"), a.writer("work") as writer:
            shipped(writer, 0)
            cut.is_cut = True
            writer.append([note(f"alone {number}")]).result(10)
            with b.claim("x", "wait", 20):
                cut.is_cut = False
                with pytest.raises(FencedError):
                    writer.append([note(f"late {number}")]).result(10)
        a.carrier.close()
        a = folder_hosts.open("a", lease_s=LEASE_S)
        cut = cut_off(a)
        with a.writer("other"), a.claim("x", "wait"):  # moves them
            cut.is_cut = True
            with b.claim("x", "wait", 20):
                pass
        a.carrier.close()
        a = folder_hosts.open("a", lease_s=LEASE_S)
    with a.writer("work") as writer:
        writer.append([note("again")]).result(10)
    for log in (a, b):
        log.carrier.catch_up()
    assert rows(a) == rows(b)
    values = [e.record.event["value"] for e in b.events() if isinstance(e.record, EventOrphaned)]
    assert sorted(values) == sorted(f"{what} {n}" for what in ("alone", "late") for n in range(3))
