"""Where ranks meet: what no rank of a training signed is not read, and nothing listens where it need not."""

from __future__ import annotations

import os
import pickle
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import HashStore

from rollbook import store as rb
from rollbook.store.errors import ConfigError, RankError
from rollbook.train.ranks import meeting as meetings
from rollbook.train.ranks.meeting import SECRET, Meeting, MeetingPoint, Signer, meet
from rollbook.train.ranks.ranks import Place, follow, place_in, shared_secret
from rollbook.train.step.reference import serve
from rollbook.train.sync.transports import INTERFACE, gloo_at

REFUSED = "is not signed by a rank of this training, and was not read"


class Harm:
    """What makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.fixture
def harm(tmp_path: Path) -> Any:
    """Bytes that, unpickled, make a file; it is not there afterwards."""
    yield pickle.dumps(Harm(tmp_path / "harmed"))
    assert not (tmp_path / "harmed").exists()


def _meeting(store: Any, secret: str = "ours") -> Meeting:
    return Meeting(store, MeetingPoint("127.0.0.1", 1, secret))


def _agreed(count: int = 3) -> list[Meeting]:
    """The ranks of a training, which have met."""
    store = HashStore()
    ranks = [_meeting(store) for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        coming = [pool.submit(ranks[rank].come, rank) for rank in range(1, count)]
        store.wait([meetings.presence_key(rank) for rank in range(1, count)])
        ranks[0].agree(count)
        for future in coming:
            future.result(10)
    return ranks


def test_ranks_hear_each_other() -> None:
    """By a key that is of this meeting: neither their secret's, nor that of their next one."""
    ranks, others = _agreed(), _agreed()
    ranks[0].say("said/0", b"words")
    assert [rank.heard("said/0") for rank in ranks] == [b"words"] * 3
    assert len({rank.signer.key for rank in ranks}) == 1
    assert ranks[0].signer.key not in (others[0].signer.key, b"ours")


@pytest.mark.parametrize("changed", ["the words", "the key", "the training", "all"])
def test_what_is_not_signed_is_not_read(changed: str) -> None:
    """Nor what was signed for another place, or at another meeting."""
    (rank, *_), (other, *_) = _agreed(), _agreed()
    signed = (other if changed == "the training" else rank).signer.signed("said/0", b"words")
    key = "said/1" if changed == "the key" else "said/0"
    sent = {"the words": signed[:-1] + b"!", "all": b""}.get(changed, signed)
    rank.store.set(key, sent)
    with pytest.raises(RankError, match=f"'{key}', as ranks were told it at 127.0.0.1 port 1, {REFUSED}"):
        rank.heard(key)


def test_a_rank_with_another_secret() -> None:
    """Is refused, and the error says how they have one."""
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(_meeting(store, "theirs").come, 1)
        store.wait([meetings.presence_key(1)])
        with pytest.raises(RankError, match=rf"'here/1'.*{REFUSED}.*{SECRET} has, the same on every host"):
            _meeting(store).agree(2)
        _meeting(store).say(meetings.AGREED, bytes(64))  # who knows the secret, and did not hear this rank
        with pytest.raises(RankError, match=REFUSED):
            coming.result(10)


def test_an_answer_to_another_rank() -> None:
    """What rank 0 of an earlier training said, whose secret this one has too, is not taken for an answer."""
    store = HashStore()
    _meeting(store).say(meetings.AGREED, bytes(64))
    with pytest.raises(RankError, match="rank 1 was not answered"):
        _meeting(store).come(1)


# Who reads ----------------------------------------------------------------------------------------


def test_a_rank_that_follows(harm: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpickles nothing that rank 0 did not say."""
    monkeypatch.setattr("rollbook.train.ranks.ranks._import_all", lambda: None)
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follow, _meeting(store), 1, 2)
        store.wait([meetings.presence_key(1)])
        _meeting(store).agree(2)
        store.set("said/0", harm)
        with pytest.raises(RankError, match=REFUSED):
            following.result(10)


def test_a_reference_apart(harm: bytes) -> None:
    """Nor does the reference's process."""
    store = HashStore()
    store.set("asked/0", harm)
    with pytest.raises(RankError, match=REFUSED):
        serve(_meeting(store))


def test_objects_of_torch(harm: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that ranks send each other by gloo, by our own calls or by Megatron's."""
    from torch.distributed import distributed_c10d as c10d

    for name in ("_object_to_tensor", "_tensor_to_object"):
        monkeypatch.setattr(c10d, name, getattr(c10d, name))
    meetings.sign_objects(Signer(b"ours", "here"))
    packed, size = c10d._object_to_tensor({"a": torch.ones(2)}, torch.device("cpu"), None)
    packed.resize_(len(packed) + 9)  # as it is, where another rank sends more
    assert c10d._tensor_to_object(packed, size, None)["a"].tolist() == [1.0, 1.0]
    sent = torch.frombuffer(bytearray(harm), dtype=torch.uint8)
    with pytest.raises(RankError, match=REFUSED):
        c10d._tensor_to_object(sent, torch.tensor([len(sent)]), None)


# Where anything listens ---------------------------------------------------------------------------


def test_one_address_is_listened_at() -> None:
    """At a port that was free; it is closed with the store."""
    met = meet(MeetingPoint("127.0.0.1", 0, "ours"), leads=True)
    port = met.point.port
    addresses = [
        c.laddr for c in psutil.Process().net_connections("tcp") if c.laddr.port == port and not c.raddr
    ]
    assert addresses == [("127.0.0.1", port)]
    with pytest.raises(RankError, match=f"cannot meet at 127.0.0.1 port {port}, which this host is to serve"):
        meet(MeetingPoint("127.0.0.1", port, "ours"), leads=True)
    del met
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_groups_are_formed_at_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """By several threads at once; afterwards at what it was before."""
    monkeypatch.setenv(INTERFACE, "other")
    with gloo_at("127.0.0.1"):
        with gloo_at("127.0.0.1"):
            assert os.environ[INTERFACE].startswith("lo")
        assert os.environ[INTERFACE].startswith("lo")
    assert os.environ[INTERFACE] == "other"


# Under a launcher ---------------------------------------------------------------------------------


def test_the_secret_of_ranks_that_a_launcher_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's, which is taken out of it; else the store's, where it is seen."""
    place = Place(1, 2, 0, "a", 9)
    monkeypatch.setenv(SECRET, "x" * 32)
    assert shared_secret(place, tmp_path) == "x" * 32
    assert SECRET not in os.environ
    with pytest.raises(
        ConfigError, match=f"rank 1 of 2 does not see the store .*: set {SECRET} on every host"
    ):
        shared_secret(place, tmp_path / "runs")
    rb.open(tmp_path / "runs", create=True)
    assert shared_secret(place, tmp_path / "runs") == shared_secret(place, tmp_path / "runs")
    monkeypatch.setenv(SECRET, "short")
    with pytest.raises(ConfigError, match=f"{SECRET} has 5 characters: take 32 or more"):
        shared_secret(place, tmp_path)


@pytest.mark.parametrize(
    ("changes", "one_host"),
    [
        ({"LOCAL_WORLD_SIZE": "2"}, True),
        ({"LOCAL_WORLD_SIZE": "1"}, False),
        ({"SLURM_NNODES": "1"}, True),
        ({}, False),
    ],
)
def test_ranks_of_one_host(changes: dict[str, str], one_host: bool) -> None:
    """Meet on its loopback."""
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "9"}
    place = place_in(env | changes)
    assert place is not None
    assert place.one_host is one_host
