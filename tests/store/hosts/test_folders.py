"""Folders between hosts, such as checkpoints: whole and checked, or not there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.store.hosts.conftest import Hosts

from rollbook.store.errors import ConfigError, CorruptionError, MediumError
from rollbook.store.events import CheckpointWritten, Event
from rollbook.store.safe_paths import reading
from rollbook.store.settings import MediumSettings
from rollbook.store.upkeep.checkpoints import remove_checkpoint
from rollbook.store.upkeep.claim import training_claim
from rollbook.store.upkeep.sealer import Sealer

if TYPE_CHECKING:
    from tests.fakes.storage.s3_server import ObjectStorage

NAMED = "checkpoints/run/actor/v00000003"


def _write(folder: Path) -> dict[str, bytes]:
    files = {
        "weights.bin": bytes(range(256)) * 40_000,
        "config.json": b"{}",
        "parts/0.bin": b"",
        "parts/1.bin": b"x",
    }
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return files


def _files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_folder_is_the_same_on_another_host(object_hosts: Hosts) -> None:
    """Fetched when it is asked for; one that nobody shares is a path where nothing is."""
    a, b = object_hosts.open("a"), object_hosts.open("b")
    files = _write(a.path / NAMED)
    a.share(NAMED)
    assert not (b.path / NAMED).exists()
    assert _files(b.folder(NAMED)) == files
    assert b.located(Path("/somewhere/else") / NAMED) == b.path / NAMED
    assert not b.folder("checkpoints/run/actor/v00000004").exists()
    assert b.located(Path("/models/mine")) == Path("/models/mine")


def test_one_that_was_changed_is_refused(object_hosts: Hosts, storage: ObjectStorage) -> None:
    """By name, and nothing of it is here."""
    a, b = object_hosts.open("a"), object_hosts.open("b")
    _write(a.path / NAMED)
    a.share(NAMED)
    key = f"team/{a.store_id}/{NAMED}/weights.bin"
    storage.client.put_object(Bucket=storage.BUCKET, Key=key, Body=b"other")
    with pytest.raises(CorruptionError, match=r"weights\.bin is not what was shared"):
        b.folder(NAMED)
    assert not (b.path / NAMED).exists()
    assert [p for p in (b.path / NAMED).parent.iterdir() if p.name.startswith(".")] == []


def test_one_that_was_removed_is_not_there(object_hosts: Hosts) -> None:
    """Who has it keeps it; nobody else gets it."""
    a, b = object_hosts.open("a"), object_hosts.open("b")
    _write(a.path / NAMED)
    a.share(NAMED)
    a.carrier.unshare(NAMED)
    assert not b.folder(NAMED).exists()
    a.carrier.unshare(NAMED)  # again: nothing to do


def test_one_that_was_removed_goes_from_who_fetched_it(object_hosts: Hosts) -> None:
    """With its sealer's next pass: not while somebody reads it or trains the policy there, nor where it
    was written again."""
    a, b, c = (object_hosts.open(host) for host in "abc")
    files = _write(a.path / NAMED)
    written = CheckpointWritten("actor", 3, NAMED, "w", None, None, 1)
    with a.writer("train") as writer:
        writer.append([Event(written, "run")]).result(10)
        a.share(NAMED)
        for other in (b, c):
            other.carrier.catch_up()
            assert _files(other.folder(NAMED)) == files
        assert remove_checkpoint(
            a, "run", written, "too old", lambda record: writer.append([Event(record, "run")]).result(10)
        )
        for other in (b, c):
            other.carrier.catch_up()
        sealer = Sealer(b)
        with b.claim(training_claim("run", "actor"), "", of_host=True):
            sealer.run_once(10)
            assert (b.path / NAMED).exists()
        with reading(b.path / NAMED):
            sealer.run_once(10)
            assert (b.path / NAMED).exists()
        sealer.run_once(10)
        assert not (b.path / NAMED).exists()
        assert not list((b.path / NAMED).parent.iterdir())
        writer.append([Event(written, "run")]).result(10)
    c.carrier.catch_up()
    Sealer(c).run_once(10)
    assert _files(c.path / NAMED) == files


def test_what_is_cut_short_is_not_there(object_hosts: Hosts, storage: ObjectStorage) -> None:
    """The service fails in the middle of sharing: nobody fetches a part, and sharing again completes it."""
    a, b = object_hosts.open("a"), object_hosts.open("b")
    files = _write(a.path / NAMED)

    def refuse(number: int) -> None:
        if "config.json" in storage.requests[-1]:
            raise ConnectionError

    storage.before = refuse
    with pytest.raises(MediumError, match=NAMED):
        a.share(NAMED)
    storage.before = lambda number: None
    assert not b.folder(NAMED).exists()
    a.share(NAMED)
    assert _files(b.folder(NAMED)) == files


def test_checkpoints_of_before_are_shared(folder_hosts: Hosts) -> None:
    """Those that were written when the store had one host."""
    files = _write(folder_hosts.folder / "a" / NAMED)
    a = folder_hosts.open("a")
    a.carrier._share_missing()
    assert _files(folder_hosts.open("b").folder(NAMED)) == files


def test_nats_alone_has_no_room_for_them(
    tmp_path: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to set."""
    monkeypatch.setenv("ROLLBOOK_ALLOW", nats_url.removeprefix("nats://"))
    hosts = Hosts(tmp_path, MediumSettings(url=nats_url))
    a = hosts.open("a")
    _write(a.path / NAMED)
    with pytest.raises(ConfigError, match=r"set `uri` under \[remote\]"):
        a.share(NAMED)
    hosts.close()
