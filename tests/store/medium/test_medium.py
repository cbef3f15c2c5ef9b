"""What every medium promises: numbered entries, each put once, read back the same by all."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import Mock
from urllib.parse import unquote

import pytest

from rollbook.store.errors import ConfigError, MediumError
from rollbook.store.ids import new_id
from rollbook.store.medium import objects
from rollbook.store.medium.medium import Medium, claim_sequence, lane_of, lane_sequence
from rollbook.store.medium.open import opened_medium
from rollbook.store.medium.register import Register
from rollbook.store.settings import MediumSettings

if TYPE_CHECKING:
    from tests.fakes.storage.s3_server import ObjectStorage


def test_an_entry_is_put_once(medium: Medium) -> None:
    """Other bytes at a number are refused; the same ones are taken for an answer that was lost."""
    assert medium.put("lanes/a/x", 0, b"one")
    assert not medium.put("lanes/a/x", 0, b"two")
    assert medium.put("lanes/a/x", 0, b"one")
    assert medium.read("lanes/a/x", 0) == [b"one"]


def test_entries_are_read_in_order_up_to_the_first_that_is_not_there(medium: Medium) -> None:
    """Also many at once, and where the number asked for is the last, or beyond it."""
    entries = [bytes([i]) * (i + 1) for i in range(70)]
    assert all(medium.put("lanes/a/x", i, entry) for i, entry in enumerate(entries))
    assert medium.read("lanes/a/x", 0, 32) == entries[:32]
    assert medium.read("lanes/a/x", 60, 32) == entries[60:]
    assert medium.read("lanes/a/x", 69, 2) == entries[69:]
    assert medium.read("lanes/a/x", 70, 8) == []
    assert (medium.first("lanes/a/x"), medium.last("lanes/a/x")) == (0, 69)


def test_what_is_not_there_is_empty(medium: Medium) -> None:
    """A sequence that nobody has put anything into."""
    assert medium.read("lanes/a/none", 0) == []
    assert (medium.first("lanes/a/none"), medium.last("lanes/a/none")) == (None, None)
    assert medium.sequences("lanes") == []


def test_sequences_are_listed_by_their_first_part(medium: Medium) -> None:
    """Names with dots, dashes and quoted characters come back as they were."""
    names = ["lanes/host-1/serve.host-1", "lanes/host-1/train", "lanes/host-2/serve.host-2.2"]
    for name in (*names, "sessions/host-1.0199", "claims/recording%20run%20a%2Fb"):
        assert medium.put(name, 0, b"x")
    assert medium.sequences("lanes") == names
    assert medium.sequences("sessions") == ["sessions/host-1.0199"]
    assert medium.sequences("claims") == ["claims/recording%20run%20a%2Fb"]


def test_old_entries_are_forgotten_but_never_the_newest(medium: Medium) -> None:
    """What is before a number goes; the newest stays, so that the next number is known."""
    for i in range(10):
        medium.put("sessions/a", i, bytes([i]))
    medium.forget("sessions/a", 6)
    assert (medium.first("sessions/a"), medium.last("sessions/a")) == (6, 9)
    assert medium.read("sessions/a", 5) == []
    assert medium.read("sessions/a", 6, 8) == [bytes([i]) for i in range(6, 10)]
    medium.forget("sessions/a", 100)
    assert (medium.first("sessions/a"), medium.last("sessions/a")) == (9, 9)
    assert medium.put("sessions/a", 10, b"next")
    assert not medium.put("sessions/a", 9, b"other")


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 65, 201])
def test_the_ends_of_a_long_sequence(
    storage: ObjectStorage, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a listing has more than one page: found without reading all of them, whatever was removed."""
    monkeypatch.setattr(objects, "PAGE", 8)
    medium = opened_medium(MediumSettings(url=f"s3://{storage.BUCKET}/long", endpoint=storage.endpoint), "id")
    listed = Mock(wraps=objects.obstore.list)
    monkeypatch.setattr(objects.obstore, "list", listed)
    try:
        for number in range(count):
            storage.client.put_object(
                Bucket=storage.BUCKET, Key=f"long/id/log/lanes/a/x/{number:012d}", Body=b"x"
            )
        for removed in sorted({0, count // 3, count - 1}):
            medium.forget("lanes/a/x", removed)
            listed.reset_mock()
            assert (medium.first("lanes/a/x"), medium.last("lanes/a/x")) == (removed, count - 1)
            assert listed.call_count <= 2 + 2 * count.bit_length()
    finally:
        medium.close()


def test_of_two_that_race_each_number_is_one_s(medium: Medium) -> None:
    """Two writers put the next number until each has put twenty: distinct, without gaps, none lost."""
    won: list[tuple[int, str]] = []

    def put(name: str) -> None:
        number, mine = 0, 0
        while mine < 20:
            if medium.put("lanes/a/race", number, f"{name}{number}".encode()):
                won.append((number, name))
                mine += 1
            number += 1

    racers = [threading.Thread(target=put, args=(name,)) for name in "ab"]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert sorted(number for number, _ in won) == list(range(40))
    assert medium.read("lanes/a/race", 0, 64) == [f"{name}{number}".encode() for number, name in sorted(won)]


@pytest.mark.parametrize("same", [True, False], ids=["of the same bytes", "of other bytes"])
def test_of_those_that_race_over_three_servers_each_has_an_answer(
    same: bool, nats_cluster_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers refuse a put while another is with the copies: that is no answer yet, and may be one's own from
    before."""
    monkeypatch.setenv("ROLLBOOK_ALLOW", nats_cluster_url.removeprefix("nats://"))
    store_id = new_id()
    media = [opened_medium(MediumSettings(url=nats_cluster_url), store_id) for _ in range(4)]

    def put(number: int, k: int) -> bool:
        return media[k].put("lanes/a/race", number, b"x" if same else b"%d" % k)

    with ThreadPoolExecutor(4) as threads:
        for number in range(30):
            answers = list(threads.map(partial(put, number), range(4)))
            assert sorted(answers) == ([True] * 4 if same else [False, False, False, True])
            assert same or media[0].read("lanes/a/race", number) == [b"%d" % answers.index(True)]
    for medium in media:
        medium.close()


def test_a_large_entry_comes_back_the_same(medium: Medium) -> None:
    """As large as one may be."""
    entry = bytes(range(256)) * (medium.most_bytes // 256)
    assert medium.put("lanes/a/large", 0, entry)
    assert medium.read("lanes/a/large", 0) == [entry]


def test_a_register_is_replaced_by_who_has_seen_its_value(medium: Medium) -> None:
    """One that saw an older value fails, and sees the new one when it reads again."""
    first, second = Register(medium, "claims/x"), Register(medium, "claims/x")
    assert first.read() is None
    assert second.read() is None
    assert first.replace({"holder": 1})
    assert not second.replace({"holder": 2})
    assert second.read() == {"holder": 1}
    assert second.replace({"holder": 2})
    for i in range(3, 60):
        assert second.replace({"holder": i})
    assert first.read() == {"holder": 59}
    assert Register(medium, "claims/x").read() == {"holder": 59}


def test_names_come_back() -> None:
    """A lane's sequence says whose it is, and a claim's what it is of."""
    assert lane_of(lane_sequence("node-7", "serve.node-7")) == ("node-7", "serve.node-7")
    claim = claim_sequence("recording run a/b, proxy 3")
    assert unquote(claim.removeprefix("claims/")) == "recording run a/b, proxy 3"
    with pytest.raises(MediumError, match="no lane's"):
        lane_of("lanes/node-7/serve/more")


@pytest.mark.parametrize("url", ["ftp://x/y", "s3://key:secret@bucket/x", "s3://bucket/x?y=1"])
def test_an_address_that_cannot_be_used_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what can be, and without its password."""
    monkeypatch.setenv("ROLLBOOK_ALLOW", "s3://bucket,ftp://x")
    with pytest.raises((ConfigError, MediumError)) as refused:
        opened_medium(MediumSettings(url=url), "id")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "missing"),
    [
        ("s3://bucket/x", "s3://bucket"),
        ("file:///elsewhere/x", "/elsewhere/x"),
        ("nats://a:4222,b", "a:4222,b"),
    ],
)
def test_a_store_leads_nowhere_that_the_operator_does_not_name(
    url: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log would go there, and credentials with it."""
    monkeypatch.delenv("ROLLBOOK_ALLOW", raising=False)
    with pytest.raises(MediumError, match=f"ROLLBOOK_ALLOW={missing}"):
        opened_medium(MediumSettings(url=url), "id")


def test_a_copy_that_is_behind_hides_nothing(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of NATS, any copy answers who reads: one that has nothing yet. Who must know asks the leader, so that
    nobody takes a session for ended, or his own entry for another's."""
    from rollbook.store.medium.nats import At, NatsMedium

    monkeypatch.setenv("ROLLBOOK_ALLOW", nats_url.removeprefix("nats://"))
    store_id = new_id()
    one, other = (opened_medium(MediumSettings(url=nats_url), store_id) for _ in range(2))
    for i in range(5):
        assert one.put("sessions/a", i, b"%d" % i)

    def behind(medium: NatsMedium) -> None:
        of_any = medium._next

        async def _next(sequence: str, place: int, most: int, *, leader: bool) -> list[tuple[At, bytes]]:
            found = await of_any(sequence, place, most, leader=leader)
            return found if leader else [entry for entry in found if entry[0][0] < 3]

        monkeypatch.setattr(medium, "_next", _next)

    assert isinstance(other, NatsMedium)
    behind(other)
    assert other.read_each([("sessions/a", 2, 8)]) == [[b"2"]]
    assert other.read_each([("sessions/a", 2, 8)], newest=True) == [[b"2", b"3", b"4"]]
    assert other.read("sessions/a", 4) == [b"4"]
    assert Register(other, "sessions/a").read() == 4
    assert other.put("sessions/a", 4, b"4")
    assert not other.put("sessions/a", 4, b"other")
    for medium in (one, other):
        medium.close()
