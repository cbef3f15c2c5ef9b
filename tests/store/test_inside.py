"""A store that somebody handed on leads nowhere: not by links, pipes, names, numbers or addresses."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import make_url

from rollbook import store as rb
from rollbook.store import Event
from rollbook.store.catalog import Catalog
from rollbook.store.catalog.catalog import catalog_url
from rollbook.store.catalog.database import refuse_outside
from rollbook.store.errors import CatalogError, CorruptionError, LaneLockedError, OutsideError, RemoteError
from rollbook.store.permissions import open_file, replace_small
from rollbook.store.safe_paths import look_inside, open_plain, place_inside, read_small
from rollbook.store.sealed.derived import build_derived
from rollbook.store.sealed.leases import removing, take_lease
from rollbook.store.sealed.remote import remote_addresses, remote_place
from rollbook.store.sealed.seal import seal_closed
from rollbook.store.sealed.unit import current_units, manifest_bytes, parse_manifest, unit_folder
from rollbook.store.secret import store_secret
from rollbook.store.settings import AppendSettings, OwnRemoteSettings, RemoteSettings, SealSettings
from rollbook.store.upkeep.sealer import Sealer
from rollbook.store.upkeep.verify import verify_store
from rollbook.store.wal.files import Watermark, quarantine, read_watermark, take_lock, write_watermark

KEPT = b"what stands outside"


@pytest.fixture(scope="module")
def whole(story: dict[str, list[Event]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with everything in it that a store can have: to be copied."""
    log = rb.open(tmp_path_factory.mktemp("whole") / "store", create=True)
    for lane, events in story.items():
        with log.writer(lane, AppendSettings(segment_bytes=1)) as writer:
            for event in events:
                writer.append([event]).result(30)
    for unit in seal_closed(log.path, "serve", SealSettings()):
        build_derived(log.path, unit)
    store_secret(log.path, "test")
    with log.claim("sealing", "wait"), take_lease(log.path, {}):
        pass
    (log.path / "checkpoints" / "demo").mkdir(parents=True)
    (log.path / "checkpoints" / "demo" / "rollbook.json").write_text("{}")
    quarantine(log.path / "lanes" / "train", "a note")
    (log.path / "store.toml").write_text("")
    return log.path


@pytest.fixture
def given(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, for a test to spoil."""
    return Path(shutil.copytree(whole, tmp_path / "store"))


PLACES = [
    "store.toml",
    "SECRET",
    "catalog.db",
    "lanes",
    "lanes/serve",
    "lanes/serve/WATERMARK",
    "lanes/serve/LOCK",
    "lanes/serve/00000018.wal",
    "lanes/train/QUARANTINED",
    "sealed",
    "sealed/serve",
    "sealed/serve/{unit}",
    "sealed/serve/{unit}/UNIT.json",
    "sealed/serve/{unit}/turns.parquet",
    "derived",
    "derived/serve/{unit}",
    "derived/serve/{unit}/locations.arrow",
    "leases",
    "leases/LOCK",
    "claims",
    "claims/sealing.lock",
    "checkpoints",
    "checkpoints/demo",
    "checkpoints/demo/rollbook.json",
]


def _everything(folder: Path) -> Iterator[Callable[[], Any]]:
    """What one does with a store: each is to be refused."""

    def written() -> None:
        rb.open(folder).writer("serve").close()

    def stored() -> None:
        with closing(Catalog.of(rb.open(folder).path)) as catalog:
            catalog.rows()

    yield lambda: verify_store(rb.open(folder))
    yield lambda: rb.connect(folder).close()
    yield lambda: Sealer(rb.open(folder)).run_once()
    yield lambda: list(rb.open(folder).events())
    yield written
    yield stored


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_plain_file_is_refused(given: Path, tmp_path: Path, place: str, kind: str) -> None:
    """Whatever it stands for: nothing behind a link is read or written, and no pipe is waited for."""
    [unit] = [folder.name for folder in (given / "sealed" / "serve").iterdir()]
    path, outside = given / place.format(unit=unit), tmp_path / "outside"
    if path.is_dir():
        shutil.move(path, outside)
        before = sorted(outside.rglob("*"))
    else:
        outside.write_bytes(path.read_bytes() if kind == "link" else KEPT)
        path.unlink()
        before = [outside]
    content = {file: file.read_bytes() for file in before if file.is_file()}
    if kind == "link":
        path.symlink_to(outside)
    else:
        os.mkfifo(path)
    for act in _everything(given):
        with pytest.raises(OutsideError, match=str(path.relative_to(given))):
            act()
    assert {file: file.read_bytes() for file in before if file.is_file()} == content
    assert (sorted(outside.rglob("*")) if outside.is_dir() else [outside]) == before


def test_the_marker_is_a_link(given: Path, tmp_path: Path) -> None:
    """It is read first, and not through a link."""
    shutil.move(given / "STORE.json", tmp_path / "marker")
    (given / "STORE.json").symlink_to(tmp_path / "marker")
    with pytest.raises(OutsideError, match=r"STORE.json"):
        rb.open(given)


def test_a_whole_store_is_let_be(given: Path) -> None:
    """What Rollbook itself writes is never refused; and what is looked at is every folder."""
    assert len(rb.open(given).head()) == 2
    look_inside(given)
    (given / "notes").mkdir()
    (given / "notes" / "link").symlink_to("/etc/passwd")  # nothing of ours: nobody opens it
    look_inside(given)


def test_a_link_that_the_operator_allows(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sealed files on another disk, by a link: once its target is named."""
    large = tmp_path / "large" / "sealed"
    large.parent.mkdir()
    shutil.move(given / "sealed", large)
    (given / "sealed").symlink_to(large)
    with pytest.raises(OutsideError, match=f"ROLLBOOK_ALLOW={large}"):
        rb.open(given)
    monkeypatch.setenv("ROLLBOOK_ALLOW", f"db.example, {tmp_path / 'large'}")
    with rb.connect(given) as connection:
        assert connection.execute("select count(*) from turns").fetchall() == [(4,)]
    assert [lane.fault for lane in verify_store(rb.open(given))] == [None, None]
    (large / "evil").symlink_to("/etc")
    with pytest.raises(OutsideError, match="evil"):
        rb.open(given)
    monkeypatch.setenv("ROLLBOOK_ALLOW", f"{tmp_path / 'lar'}")
    with pytest.raises(OutsideError, match="sealed is a link"):
        rb.open(given)


# Put there after the store was looked at -------------------------------------------------------------


WRITES: dict[str, Callable[[Path], Any]] = {
    "lock": lambda path: os.close(take_lock(path, "it", "wait")),
    "watermark": lambda path: write_watermark(path.parent, Watermark(1, 2, 3)),
    "secret": lambda path: store_secret(path.parent, "test"),
    "file": lambda path: os.close(open_file(path, os.O_RDWR | os.O_CREAT)),
    "new": lambda path: os.close(open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)),
    "read": read_small,
    "marks": lambda path: read_watermark(path.parent),
}
NAMES = {"watermark": "WATERMARK", "marks": "WATERMARK", "secret": "SECRET"}


@pytest.mark.parametrize("act", WRITES)
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "device"])
def test_nothing_is_opened_through_a_link(tmp_path: Path, act: str, kind: str) -> None:
    """Each file that is opened for itself: at once an error, and what a link leads to is as it was."""
    outside, path = tmp_path / "outside", tmp_path / "in" / NAMES.get(act, "X")
    path.parent.mkdir()
    outside.write_bytes(KEPT)
    match kind:
        case "link":
            path.symlink_to(outside)
        case "dangling":
            path.symlink_to(tmp_path / "new")
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
    with pytest.raises(OutsideError, match=f"{path} is no plain file"):
        WRITES[act](path)
    assert outside.read_bytes() == KEPT
    assert not (tmp_path / "new").exists()


def test_a_note_replaces_a_link(tmp_path: Path) -> None:
    """What is written whole takes the place of what has its name, and is not written through it."""
    outside = tmp_path / "outside"
    outside.write_bytes(KEPT)
    (tmp_path / "lane").mkdir()
    (tmp_path / "lane" / "QUARANTINED").symlink_to(outside)
    quarantine(tmp_path / "lane", "damaged")
    assert outside.read_bytes() == KEPT
    assert (tmp_path / "lane" / "QUARANTINED").read_text() == "damaged\n"
    os.link(outside, tmp_path / "hard")
    replace_small(tmp_path / "hard", b"new")
    assert outside.read_bytes() == KEPT


def test_a_lock_is_never_another_file(tmp_path: Path) -> None:
    """By a hard link it may be any file: one with more in it than a lock has is not cut off."""
    outside = tmp_path / "precious"
    outside.write_bytes(KEPT * 10)
    os.link(outside, tmp_path / "LOCK")
    with pytest.raises(OutsideError, match="no lock"):
        take_lock(tmp_path / "LOCK", "it", "wait")
    assert outside.read_bytes() == KEPT * 10


def test_the_lock_of_a_live_writer_is_not_touched(given: Path) -> None:
    """Whoever is refused a lock has changed none of its bytes."""
    log = rb.open(given)
    with log.writer("train"):
        before = (given / "lanes" / "train" / "LOCK").read_bytes()
        assert before == f"{os.getpid()}\n".encode()
        with pytest.raises(LaneLockedError):
            log.writer("train")
        assert (given / "lanes" / "train" / "LOCK").read_bytes() == before


def test_a_lease_through_a_link(given: Path, tmp_path: Path) -> None:
    """The lock of leases, too."""
    (given / "leases" / "LOCK").unlink()
    (given / "leases" / "LOCK").symlink_to(tmp_path / "new")
    with pytest.raises(OutsideError), removing(given):
        pass
    with pytest.raises(OutsideError):
        take_lease(given, {})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("place", ["store.toml", "STORE.json", "SECRET", "lanes/serve/WATERMARK", "UNIT"])
def test_a_huge_file_is_not_read(given: Path, place: str) -> None:
    """A terabyte of holes in the place of a small file is an error, at once and in little memory."""
    path = next((given / "sealed").glob("*/*/UNIT.json")) if place == "UNIT" else given / place
    os.truncate(path, 1 << 40)

    def refused(act: Callable[[], Any]) -> bool:
        try:
            act()
        except OutsideError:
            return True
        return False

    acts = (lambda: rb.open(given).settings(), lambda: store_secret(given, "x"), lambda: rb.connect(given))
    assert any(refused(act) for act in acts)
    with pytest.raises(OutsideError, match="bytes, which no such file"):
        read_small(path)


def test_a_huge_segment_is_not_searched(given: Path) -> None:
    """Nor a terabyte of holes in the place of a segment: it is damage, and said so at once."""
    os.truncate(given / "lanes" / "train" / "00000001.wal", 1 << 40)
    [fault] = [lane.fault for lane in verify_store(rb.open(given)) if lane.fault]
    assert "which no segment has" in str(fault)


# What names other places -----------------------------------------------------------------------------


@pytest.mark.parametrize("named", ["/etc", "../x", "a/../../x", "", "a\0b", "checkpoints/../../x"])
def test_paths_of_the_log_stay_inside(tmp_path: Path, named: str) -> None:
    """A checkpoint's path, whoever wrote the event."""
    with pytest.raises(OutsideError, match="not in the store"):
        place_inside(tmp_path, named)


def test_a_path_through_a_link(tmp_path: Path) -> None:
    """A link on the way is not followed; a path without one is as it is."""
    (tmp_path / "a").mkdir()
    assert place_inside(tmp_path, "a/b") == tmp_path / "a" / "b"
    (tmp_path / "out").symlink_to("/etc")
    with pytest.raises(OutsideError, match="is a link"):
        place_inside(tmp_path, "out/passwd")


def _spoiled(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest.update(changes)


def _file(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["files"][0].update(changes)


def _segment(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["segments"][-1].update(changes)


SPOILED = {
    "a file above": _file(name="../../../outside"),
    "an absolute file": _file(name="/etc/passwd"),
    "a negative size": _file(bytes=-1),
    "too many rows": _file(rows=1 << 60),
    "a lane above": _spoiled(lane="../../x"),
    "a lane of a letter": _spoiled(lane="A"),
    "no segment": _spoiled(segments=[]),
    "endless events": _segment(events=1 << 62),
    "a number of 400 digits": _segment(events=10**400),
    "a segment of no number": _segment(number=0),
    "a generation": _spoiled(generation=1 << 60),
    "a chain": _spoiled(chain_before="zz" * 16),
    "another address": _spoiled(remote="s3://your-bucket/"),
    "an address above": _spoiled(remote="s3://your-bucket/sealed/serve/../../x"),
    "no object": lambda manifest: manifest.clear(),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_manifest_that_no_unit_has(given: Path, what: str) -> None:
    """Paths and memory come of its names and numbers: it is damage, and is read no further."""
    [unit] = current_units(given, "serve")
    manifest = orjson.loads(manifest_bytes(unit))
    if what == "a number of 400 digits":
        text = orjson.dumps(manifest).replace(b'"events":1', b'"events":1' + b"0" * 400)
    else:
        SPOILED[what](manifest)
        text = orjson.dumps(manifest)
    with pytest.raises(CorruptionError):
        parse_manifest(text, "it")
    (unit_folder(given, unit) / "UNIT.json").write_bytes(text)
    [fault] = [lane.fault for lane in verify_store(rb.open(given)) if lane.lane == "serve"]
    assert fault is not None
    with pytest.raises(CorruptionError):
        rb.connect(given)


def test_deep_and_wide_manifests(tmp_path: Path) -> None:
    """Nested ten thousand deep, or no text: an error like any other."""
    for text in (b"[" * 10_000, b'{"a":' * 10_000, b"\xff\xfe", b"", b"null", b"[1]"):
        with pytest.raises(CorruptionError):
            parse_manifest(text, "it")


def test_more_events_than_the_files_have(given: Path) -> None:
    """A manifest's count is compared before memory is taken for it."""
    [unit] = current_units(given, "serve")
    segment = replace(unit.segments[-1], events=1 << 45)
    text = manifest_bytes(replace(unit, segments=(*unit.segments[:-1], segment)))
    (unit_folder(given, unit) / "UNIT.json").write_bytes(text)
    [fault] = [lane.fault for lane in verify_store(rb.open(given)) if lane.lane == "serve"]
    assert "do not hold events" in str(fault)


# The catalog -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:////etc/rollbook.db",
        "sqlite:///../catalog.db",
        "sqlite:///a/../../catalog.db",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file:/tmp/x.db?uri=true",
        "sqlite:///file:x.db",
        "sqlite:///catalog.db?mode=ro",
        "sqlite+pysqlcipher:///x.db",
        "duckdb:///x.db",
        "mysql+pymysql://root@localhost/x?read_default_file=/etc/x",
        "postgresql://db.example/x",
        "postgresql+psycopg:///x",
        "postgresql+psycopg:///x?host=/run/postgresql",
        "postgresql+psycopg://localhost/x?host=evil.example",
        "postgresql+psycopg://ours.example,evil.example/x",
        "postgresql+psycopg://ours.example/x?service=evil",
        "postgresql+psycopg://ours.example/x?sslkey=/root/.ssh/id_rsa",
        "postgresql+psycopg://ours.example/x?passfile=/etc/x",
        "postgresql+psycopg://ours.example/x?options=-c%20x",
    ],
)
def test_a_stores_own_word_for_its_catalog(given: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names a file in the store or a server that the operator named; nothing else is even looked at."""
    monkeypatch.setenv("ROLLBOOK_ALLOW", "ours.example")
    monkeypatch.setattr("rollbook.store.catalog.database.create_engine", pytest.fail)
    (given / "store.toml").write_text(f'[catalog]\nurl = "{url}"\n')
    with pytest.raises(CatalogError, match=r"is not opened.*ROLLBOOK_CATALOG_URL"):
        Catalog.of(rb.open(given).path)


def test_where_a_catalog_may_be(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the store; at a server or in a folder that is allowed; wherever ROLLBOOK_CATALOG_URL says."""
    (given / "store.toml").write_text('[catalog]\nurl = "sqlite:///other.db"\n')
    with closing(Catalog.of(rb.open(given).path)):
        assert (given / "other.db").exists()
    for allowed, url in (
        ("ours.example", "postgresql://ours.example/x?sslmode=require"),
        ("ours.example:5433", "postgresql://ours.example:5433/x"),
        ("/run/postgresql", "postgresql:///x?host=/run/postgresql"),
        ("localhost", "postgresql:///x"),
        (str(tmp_path / "else"), f"sqlite:///{tmp_path / 'else' / 'x.db'}"),
    ):
        monkeypatch.setenv("ROLLBOOK_ALLOW", f"{allowed},other.example")
        refuse_outside(make_url(url), given)
        monkeypatch.setenv("ROLLBOOK_ALLOW", "other.example,ours.example:1")
        with pytest.raises(CatalogError, match=f"ROLLBOOK_ALLOW={allowed.split(':')[0]}"):
            refuse_outside(make_url(url), given)
    monkeypatch.delenv("ROLLBOOK_ALLOW")
    monkeypatch.setenv("ROLLBOOK_CATALOG_URL", "postgresql://db.example/x?service=mine")
    assert catalog_url(given).host == "db.example"


def test_a_catalog_that_is_refused_stops_no_writer(given: Path) -> None:
    """Nothing in the log depends on it."""
    (given / "store.toml").write_text('[catalog]\nurl = "postgresql://db.example/x"\n')
    with rb.open(given).writer("judge"):
        pass


# Object storage --------------------------------------------------------------------------------------


def test_credentials_go_nowhere_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket, and a service that is not AWS, are asked only if the operator named both."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    theirs = RemoteSettings(uri="s3://theirs/x", endpoint="https://evil.example:9000")
    with pytest.raises(RemoteError, match=r"ROLLBOOK_ALLOW=s3://theirs,evil\.example:9000"):
        remote_place("s3://theirs/x", theirs)
    monkeypatch.setenv("ROLLBOOK_ALLOW", "s3://theirs")
    with pytest.raises(RemoteError, match=r"ROLLBOOK_ALLOW=evil\.example:9000"):
        remote_place("s3://theirs/x", theirs)
    monkeypatch.setenv("ROLLBOOK_ALLOW", "s3://thei,evil.example")
    with pytest.raises(RemoteError, match=r"ROLLBOOK_ALLOW=s3://theirs$"):
        remote_place("s3://theirs/x", theirs)
    monkeypatch.setenv("ROLLBOOK_ALLOW", "s3://theirs/, EVIL.example")
    assert remote_place("s3://theirs/x", theirs)[1] == "theirs/x"
    monkeypatch.delenv("ROLLBOOK_ALLOW")
    own = OwnRemoteSettings(endpoint="https://evil.example:9000")
    assert remote_place("s3://theirs/x", own)[1] == "theirs/x"


def test_a_store_cannot_say_that_it_is_the_operator(given: Path) -> None:
    """No key of store.toml makes its address the operator's own."""
    (given / "store.toml").write_text('[remote]\nuri = "s3://theirs/x"\n')
    settings = rb.open(given).settings().remote
    assert not isinstance(settings, OwnRemoteSettings)
    with pytest.raises(RemoteError):
        remote_place("s3://theirs/x", settings)


@pytest.mark.parametrize(
    "address", ["s3://mine/", "s3://mine/sealed/serve", "s3://mine/sealed/train/{name}", "s3://mine/x/{name}"]
)
def test_only_a_units_own_address_is_taken_away(given: Path, address: str) -> None:
    """What is removed in object storage lies where a unit of that lane would: nothing else of the bucket."""
    [unit] = current_units(given, "serve")
    folder = unit_folder(given, unit)
    (folder / "UPLOADING").write_text(address.format(name=unit.name))
    assert remote_addresses(folder) == set()
    (folder / "UPLOADING").write_text(f"s3://mine/prefix/id/sealed/serve/{unit.name}")
    assert remote_addresses(folder) == {f"s3://mine/prefix/id/sealed/serve/{unit.name}"}


def test_plain_files_stay_what_they_are(tmp_path: Path) -> None:
    """Opening one is as ever: its flags, and the errors of the system."""
    with pytest.raises(FileNotFoundError):
        open_plain(tmp_path / "x", os.O_RDONLY)
    fd = open_plain(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"abc")
    os.close(fd)
    assert read_small(tmp_path / "x", 3) == b"abc"
    with pytest.raises(OutsideError, match="more than 2 bytes"):
        read_small(tmp_path / "x", 2)
    with pytest.raises(OutsideError):
        open_plain(tmp_path, os.O_RDONLY)


def test_an_unreadable_lane_is_no_missing_lane(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane whose folder may not be listed is an error: left out, the store would be called whole."""
    real = os.listdir

    def refused(path: Any = ".") -> list[str]:
        if str(path).endswith("lanes/train"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr("os.listdir", refused)
    with pytest.raises(PermissionError):
        verify_store(rb.open(given))
    monkeypatch.undo()
    shutil.rmtree(given / "lanes")
    with pytest.raises(CorruptionError, match="lanes is missing"):
        verify_store(rb.open(given))
