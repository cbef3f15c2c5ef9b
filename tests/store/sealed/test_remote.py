"""Sealed units in object storage: no answer changes, nothing is lost, and every failure says what it is."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pytest
from tests.fakes.processes.warm import run_warm
from tests.fakes.stories.scattered import SEAL, Before, answers, scatter, seal_in_units

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.catalog.rebuild import rebuild_catalog
from rollbook.store.errors import ConfigError, CorruptionError, NotAStoreError, RemoteError, StoreError
from rollbook.store.events import TrajectoryFinished, TrajectoryOpened, TurnFailed
from rollbook.store.sealed.derived import DERIVED, build_derived
from rollbook.store.sealed.leases import take_lease
from rollbook.store.sealed.remote import place, remote_folder
from rollbook.store.sealed.seal import remove_sealed_wal, seal_closed
from rollbook.store.sealed.unit import all_units, current_units, unit_folder
from rollbook.store.settings import RemoteSettings
from rollbook.store.sql.object_storage import file_system, outage
from rollbook.store.upkeep.attach import attach
from rollbook.store.upkeep.erase import erase_trajectory
from rollbook.store.upkeep.retain import retain
from rollbook.store.upkeep.sealer import Sealer
from rollbook.store.upkeep.upload import upload_units
from rollbook.store.upkeep.verify import verify_store

if TYPE_CHECKING:
    from tests.fakes.storage.s3_server import ObjectStorage


pytestmark = pytest.mark.usefixtures("some_tokens_are_outliers")

LANES = ("serve", "train", "upkeep")
CUTS = ["head", *[f"serve={n},train=4" for n in (1, 8, 13)]]


def _configure(store: Store, storage: Any, uri: str | None = None, more: str = "") -> None:
    text = f'[remote]\nuri = "{uri or storage.uri}"\nendpoint = "{storage.endpoint}"\n{more}'
    (store.path / "store.toml").write_text(text)


@pytest.fixture(scope="module")
def sealed_once(
    tmp_path_factory: pytest.TempPathFactory, story: dict[str, list[Event]], upkeep: list[Event]
) -> Store:
    """The story, one event a segment, most of it sealed, a lane of it in three units; only read it."""
    store = rb.open(tmp_path_factory.mktemp("sealed") / "store", create=True)
    for lane in scatter(store, {**story, "upkeep": upkeep}).lanes():
        seal_in_units(store, lane, at_once=7 if lane == "serve" else 100)
    return store


@pytest.fixture(scope="module")
def before(sealed_once: Store) -> Before:
    """The answers at each cut while everything is here."""
    return Before(sealed_once)


@pytest.fixture
def sealed(sealed_once: Store, storage: ObjectStorage, tmp_path: Path) -> Store:
    """A copy of that store, of which nothing is uploaded yet."""
    store = rb.open(shutil.copytree(sealed_once.path, tmp_path / "store"))
    _configure(store, storage, more="[seal]\ncompact_bytes = 0\n")
    return store


@pytest.fixture(scope="module")
def small_once(tmp_path_factory: pytest.TempPathFactory, story: dict[str, list[Event]]) -> Store:
    """The story, each of its two lanes in one unit; only read it."""
    store = rb.open(tmp_path_factory.mktemp("small") / "store", create=True)
    for lane, events in story.items():
        with store.writer(lane) as writer:
            writer.append(events).result(30)
        assert len(list(seal_closed(store.path, lane, SEAL, all_of_it=True))) == 1
    return store


@pytest.fixture
def small(small_once: Store, storage: ObjectStorage, tmp_path: Path) -> Store:
    """A copy of that store: `sealed` where it does not matter how many units there are."""
    store = rb.open(shutil.copytree(small_once.path, tmp_path / "store"))
    _configure(store, storage, more="[seal]\ncompact_bytes = 0\n")
    return store


def _units(store: Store) -> list[Any]:
    return [unit for lane in store.lanes() for unit in current_units(store.path, lane)]


def _parquet(store: Store) -> list[Path]:
    return sorted((store.path / "sealed").rglob("*.parquet"))


def _without_wal(store: Store) -> None:
    for lane in store.lanes():
        remove_sealed_wal(store.path, lane, current_units(store.path, lane), 0)


# Moved -------------------------------------------------------------------------------------------


@pytest.mark.more_but("head")
@pytest.mark.parametrize("cuts", [CUTS, CUTS[:1]], ids=["all", "head"])
def test_no_answer_changes(
    sealed: Store, storage: ObjectStorage, before: Before, plain: Callable[[Event], Any], cuts: list[str]
) -> None:
    """Every view at every cut, every event, trajectory and derived file: from object storage the same."""
    assert all(len(rows) > 0 for rows in before["head"].values())
    events = [plain(event) for event in sealed.events()]
    folded = sealed.trajectory("t1")
    units = _units(sealed)
    local = {f"{u.lane}/{u.name}/{f.name}" for u in units for f in u.files}
    report = upload_units(sealed)
    _without_wal(sealed)
    assert report.units == [f"{u.lane}/{u.name}" for u in units]
    assert report.bytes == report.freed == sum(u.bytes for u in units)
    assert _parquet(sealed) == []
    base = f"some prefix/{sealed.store_id}"
    there = {key.removeprefix(f"{base}/sealed/") for key in storage.objects()} - {f"{base}/STORE.json"}
    assert there == local | {f"{u.lane}/{u.name}/UNIT.json" for u in units}
    for cut in cuts:
        assert answers(sealed, cut) == before[cut]
    assert [plain(event) for event in sealed.events()] == events
    assert repr(rb.open(sealed.path).trajectory("t1")) == repr(folded)
    for unit in _units(sealed):
        assert build_derived(sealed.path, unit) == list(DERIVED)
    assert answers(sealed) == before["head"]
    assert repr(rb.open(sealed.path).trajectory("t1")) == repr(folded)
    assert [lane.fault for lane in verify_store(sealed)] == [None, None, None]
    rebuilt = rebuild_catalog(sealed)
    assert rebuilt.events == len(events)
    [first] = sealed.events({"serve": 1})
    with sealed.writer("serve") as writer:  # a retry is still recognised, by the ids in object storage
        again = Event(first.record, first.run, first.event_id, first.time_us)
        assert writer.append([again]).result(30) == 0


def test_a_second_upload_does_nothing(small: Store, storage: ObjectStorage) -> None:
    """What is there is not sent, read or removed again."""
    upload_units(small)
    keys = storage.objects()
    storage.requests.clear()
    report = upload_units(small)
    assert (report.units, report.bytes, report.freed) == ([], 0, 0)
    assert storage.requests == []
    assert storage.objects() == keys


def test_a_query_reads_each_file_once(small: Store, storage: ObjectStorage) -> None:
    """A connection asks for no footer and no bytes that it has."""
    upload_units(small)
    connection = rb.connect(small.path)
    question = "SELECT count(*), sum(length(extra)) FROM events"
    first = connection.execute(question).fetchall()
    storage.requests.clear()
    assert connection.execute(question).fetchall() == first
    assert storage.requests == []


def test_threads_share_a_handle(storage: ObjectStorage) -> None:
    """What one thread reads of a file is where it sought, though others seek in it meanwhile."""
    storage.write("numbers", bytes(range(200)))
    settings = RemoteSettings(endpoint=storage.endpoint)
    file = file_system(settings).open(f"s3://{storage.BUCKET}/numbers")
    sought = threading.Barrier(4)

    def read(position: int) -> bytes:
        file.seek(position)
        sought.wait(60)
        return file.read(3) + file.read(2)

    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(read, (0, 50, 100, 150)))
    assert parts == [bytes(range(start, start + 5)) for start in (0, 50, 100, 150)]


def test_leased_files_stay_until_they_are_released(small: Store) -> None:
    """A connection that was opened before goes on with the local files; the next upload removes them."""
    connection = rb.connect(small.path)
    unit = current_units(small.path, "serve")[0]
    report = upload_units(small)
    assert len(report.kept) == len(_units(small))
    assert len(_parquet(small)) > 0
    assert connection.execute("SELECT count(*) FROM events").fetchall()[0][0] == sum(small.head().values())
    connection.close()
    del connection
    import gc

    gc.collect()
    with take_lease(small.path, {"serve": [unit.name]}):
        assert upload_units(small).kept == [f"serve/{unit.name}"]
    assert upload_units(small).kept == []
    assert _parquet(small) == []


# Attached ----------------------------------------------------------------------------------------


@pytest.mark.more
def test_another_machine_reads_the_same(
    sealed: Store, storage: ObjectStorage, tmp_path: Path, plain: Callable[[Event], Any]
) -> None:
    """A store made from the manifests alone ends where the sealed units end; up to there it answers alike."""
    upload_units(sealed)
    ends = {lane: current_units(sealed.path, lane)[-1].next_seq for lane in LANES}
    cut = ",".join(f"{lane}={end}" for lane, end in ends.items())
    uri = remote_folder(storage.uri, sealed.store_id)
    report = attach(tmp_path / "other", uri, storage.endpoint)
    other = rb.open(tmp_path / "other")
    assert report.lanes == other.head() == ends
    assert (other.store_id, report.units) == (sealed.store_id, len(_units(sealed)))
    assert [plain(e) for e in other.events()] == [plain(e) for e in sealed.events(ends)]
    assert answers(other) == answers(sealed, cut)
    assert [lane.fault for lane in verify_store(other)] == [None, None, None]
    assert rebuild_catalog(other).events == sum(ends.values())
    with pytest.raises(ConfigError, match="names no place"):
        upload_units(other)
    keys = storage.objects()
    with pytest.raises(StoreError, match="only reads what is in object storage"):
        retain(other, "0B")
    assert Sealer(other).run_once().damage == {}
    assert storage.objects() == keys
    with pytest.raises(NotAStoreError, match="not empty"):
        attach(tmp_path / "other", uri, storage.endpoint)
    with pytest.raises(NotAStoreError, match=r"holds no STORE\.json"):
        attach(tmp_path / "third", storage.uri, storage.endpoint)


def test_an_attached_store_can_take_over(
    small: Store, storage: ObjectStorage, tmp_path: Path, notes: Callable[..., list[Event]]
) -> None:
    """With `[remote] uri` set it writes on where the lane ended; the old one's uploads are refused then."""
    upload_units(small)
    uri = remote_folder(storage.uri, small.store_id)
    attach(tmp_path / "other", uri, storage.endpoint)
    other = rb.open(tmp_path / "other")
    _configure(other, storage, more="[seal]\ncompact_bytes = 0\n")
    end = other.head()["serve"]
    with other.writer("serve") as writer:
        assert writer.append(notes(2)).result(30) == end
    assert Sealer(other).run_once().damage == {}
    assert [e.seq for e in other.events({"serve": end + 2}, {"serve": end})] == [end, end + 1]
    assert current_units(other.path, "serve")[-1].remote is not None
    with small.writer("serve") as writer:
        writer.append(notes(1, 7)).result(30)
    report = Sealer(small).run_once()
    assert "two copies upload to the same place" in report.damage["serve"]


def test_a_unit_of_another_copy_stops_the_upload(sealed: Store, storage: ObjectStorage) -> None:
    """Nothing more of the lane is moved where a unit is that this copy does not know."""
    first, *_, last = current_units(sealed.path, "serve")
    base = f"some prefix/{sealed.store_id}/sealed/serve"
    storage.write(f"{base}/00000090-00000091.1/turns.parquet", b"")  # never finished: nobody's
    storage.write(f"{base}/00000091-00000092.1/UNIT.json", b"{}")
    with pytest.raises(StoreError, match=r"00000091-00000092\.1 is not of this copy of the store"):
        upload_units(sealed)
    assert (first.remote, last.remote) == (None, None)
    assert len(_parquet(sealed)) == sum(len(u.files) for u in _units(sealed))


def test_a_missing_manifest_stops_the_attachment(
    sealed: Store, storage: ObjectStorage, tmp_path: Path
) -> None:
    """Without one of the manifests in the middle nothing is attached."""
    upload_units(sealed)
    middle = current_units(sealed.path, "serve")[1]
    key = f"some prefix/{sealed.store_id}/sealed/serve/{middle.name}/UNIT.json"
    storage.client.delete_object(Bucket=storage.BUCKET, Key=key)
    with pytest.raises(CorruptionError, match="lane 'serve' is not whole in object storage"):
        attach(tmp_path / "other", remote_folder(storage.uri, sealed.store_id), storage.endpoint)
    assert not (tmp_path / "other").exists()
    assert list(tmp_path.glob(".other*")) == []


# Merged, erased, dropped -------------------------------------------------------------------------


@pytest.mark.more
def test_units_in_object_storage_are_merged(sealed: Store, storage: ObjectStorage, before: Before) -> None:
    """The sealer merges them, uploads what it made, and only then removes what it was made of."""
    upload_units(sealed)
    _without_wal(sealed)
    old = {u.name for u in current_units(sealed.path, "serve")}
    _configure(sealed, storage)
    assert Sealer(sealed).run_once().damage == {}
    [merged, *_] = current_units(sealed.path, "serve")
    assert merged.generation > 1
    assert merged.remote is not None
    prefix = f"some prefix/{sealed.store_id}/sealed/serve/"
    names = {key.removeprefix(prefix).split("/")[0] for key in storage.objects() if key.startswith(prefix)}
    assert names == {u.name for u in all_units(sealed.path, "serve")}
    assert not names & (old - {u.name for u in current_units(sealed.path, "serve")})
    assert answers(sealed) == before["head"]


@pytest.mark.crashes
def test_what_was_merged_stays_until_the_merged_unit_is_there(
    sealed: Store, storage: ObjectStorage, tmp_path: Path
) -> None:
    """While nothing can be stored, the lane in object storage stays whole for others."""
    upload_units(sealed)
    ends = {lane: current_units(sealed.path, lane)[-1].next_seq for lane in LANES}
    _configure(sealed, storage)
    storage.before = _failing(storage, lambda request: request.startswith(("PUT", "POST")))
    assert set(Sealer(sealed).run_once().damage) == set(LANES)
    assert [u.remote for u in current_units(sealed.path, "serve")] == [None]
    storage.before = lambda number: None
    report = attach(tmp_path / "other", remote_folder(storage.uri, sealed.store_id), storage.endpoint)
    assert report.lanes == ends
    assert len(list(rb.open(tmp_path / "other").events())) == sum(ends.values())


def test_erasure_reaches_object_storage(small: Store, storage: ObjectStorage) -> None:
    """No object holds the text any more; what took the units' place is uploaded by the next call."""
    with small.writer("serve"):
        pass
    upload_units(small)
    everything = _stored_extra(small)
    assert any("be brief" in text for text in everything)
    before = set(storage.objects())
    erase_trajectory(small, "t1", "a leaked key")
    assert before - set(storage.objects())
    report = upload_units(small)
    assert report.units
    assert not any("be brief" in text for text in _stored_extra(small))
    names = {key.split("/")[-2] for key in storage.objects() if "/sealed/" in key}
    assert names == {unit.name for lane in small.lanes() for unit in all_units(small.path, lane)}
    assert [lane.fault for lane in verify_store(small)] == [None, None, None]


def _stored_extra(store: Store) -> list[str]:
    """The JSON of every row of every object."""
    import pyarrow.parquet as pq

    texts = []
    for unit in _units(store):
        if unit.remote is not None:
            system, folder = place(store.path, unit)
            for file in unit.files:
                table = pq.read_table(f"{folder}/{file.name}", columns=["extra"], filesystem=system)
                texts += table["extra"].to_pylist()
    return [t if isinstance(t, str) else bytes(t).decode() for t in texts if t is not None]


@pytest.mark.crashes
def test_an_upload_cut_short_leaves_no_text_behind(sealed: Store, storage: ObjectStorage) -> None:
    """A unit whose upload failed in the middle is erased: what had been sent of it goes too."""
    half = next(unit for unit in current_units(sealed.path, "serve") if len(unit.files) == 2)
    storage.before = _failing(storage, lambda request: f"{half.name}/marks.parquet" in request)
    with pytest.raises(RemoteError):
        upload_units(sealed)
    storage.before = lambda number: None
    assert [key for key in storage.objects() if f"/{half.name}/" in key]
    with sealed.writer("serve"):
        pass
    erase_trajectory(sealed, "t1", "a leaked key")
    assert [key for key in storage.objects() if f"/{half.name}/" in key] == []


def _failing(storage: Any, which: Callable[[str], bool]) -> Callable[[int], None]:
    """Drops the connections of these requests."""

    def before(number: int) -> None:
        if which(storage.requests[number - 1]):
            raise ConnectionError

    return before


def test_retention_reaches_object_storage(
    store: Store, storage: ObjectStorage, tmp_path: Path, plain: Callable[[Event], dict[str, Any]]
) -> None:
    """A dropped unit leaves its manifest there, so that a store made from it has its whole history."""
    _configure(store, storage, more="[seal]\ncompact_bytes = 0\nkeep_wal_bytes = 0\n")
    for name in "abc":
        records = [TrajectoryOpened(name, name), TurnFailed(name, f"u{name}", "no"), TrajectoryFinished(name)]
        with store.writer("serve") as writer:
            writer.append([Event(record, "r") for record in records]).result(30)
        if name == "b":
            (store.path / "store.toml").write_text(
                f'[remote]\nendpoint = "{storage.endpoint}"\n[seal]\ncompact_bytes = 0\nkeep_wal_bytes = 0\n'
            )
        if name != "c":
            assert Sealer(store).run_once().damage == {}
        if name == "a":
            assert current_units(store.path, "serve")[0].remote is not None
    _configure(store, storage, more="[seal]\ncompact_bytes = 0\n")
    report = retain(store, "0B")
    # One was in object storage, one was not yet; both went.
    assert [u.dropped for u in report.units if u.lane == "serve"] == [True, True]
    assert [key for key in storage.objects() if key.endswith(".parquet")] == []
    assert Sealer(store).run_once().damage == {}
    assert [unit.remote is not None for unit in _units(store)] == [True] * len(_units(store))
    attach(tmp_path / "other", remote_folder(storage.uri, store.store_id), storage.endpoint)
    other = rb.open(tmp_path / "other")
    dropped = [unit.dropped_us is not None for unit in current_units(other.path, "serve")]
    assert dropped == [True, True, False]
    assert [plain(e) for e in other.events()] == [plain(e) for e in store.events()]
    assert [lane.fault for lane in verify_store(other)] == [None, None]


# Failures ----------------------------------------------------------------------------------------


def test_a_bucket_that_is_not_there(small: Store, storage: ObjectStorage) -> None:
    """It is named, and everything stays here."""
    _configure(small, storage, "s3://no-such-bucket/x")
    files = _parquet(small)
    with pytest.raises(RemoteError, match=r"s3://no-such-bucket/x/.*NO_SUCH_BUCKET"):
        upload_units(small)
    assert _parquet(small) == files
    assert [unit.remote for unit in _units(small)] == [None] * len(_units(small))


@pytest.mark.parametrize("uri", ["http://bucket/x", "s3://", "s3://key:secret@bucket/x", "s3://b/x?y=1"])
def test_addresses_that_cannot_be(small: Store, storage: ObjectStorage, uri: str) -> None:
    """They are refused before anything is sent; what looks like a secret is not repeated."""
    _configure(small, storage, uri)
    with pytest.raises(ConfigError, match="use s3://bucket/prefix") as error:
        upload_units(small)
    assert "secret" not in str(error.value)
    (small.path / "store.toml").write_text('[remote]\nuri = "s3://b/x"\nendpoint = "https://k:secret@h:1"\n')
    with pytest.raises(ConfigError, match="credentials come from the environment") as error:
        upload_units(small)
    assert "secret" not in str(error.value)


def _command(root: Path, *words: object, **environment: str) -> tuple[int, str]:
    done = run_warm(
        [sys.executable, "-m", "rollbook", *map(str, words)],
        env=os.environ | {"PYTHONPATH": str(root / "src")} | environment,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_wrong_credentials(small: Store, storage: ObjectStorage, root: Path) -> None:
    """One line with the address and what to look at, exit code 2, and no secret; then all is as before."""
    storage.check_credentials(True)
    try:
        code, output = _command(
            root, "store", "upload", "--store", small.path, AWS_SECRET_ACCESS_KEY="very-secret-1"
        )
    finally:
        storage.check_credentials(False)
    assert code == 2
    assert output.strip().count("\n") == 0
    assert f"{storage.uri}/{small.store_id}" in output
    assert "AWS_ACCESS_KEY_ID" in output
    assert "secret-1" not in output
    assert len(_parquet(small)) == sum(len(u.files) for u in _units(small))
    code, output = _command(root, "store", "upload", "--store", small.path)
    assert (code, _parquet(small)) == (0, [])
    assert f"{storage.uri}/{small.store_id}: {len(_units(small))} units more" in output


@pytest.mark.crashes
def test_a_server_that_goes(
    sealed: Store, storage: ObjectStorage, plain: Callable[[Event], dict[str, Any]]
) -> None:
    """In the middle of an upload: what was moved is there, the rest is here, and the next call finishes."""
    events = [plain(event) for event in sealed.events()]
    storage.before = _failing(storage, lambda request: "/train/" in request)
    with pytest.raises(RemoteError, match=r"some prefix.*/train"):
        upload_units(sealed)
    storage.before = lambda number: None
    assert {unit.lane for unit in _units(sealed) if unit.remote is not None} == {"serve"}
    assert [plain(event) for event in sealed.events()] == events
    assert len(upload_units(sealed).units) > 0
    _without_wal(sealed)
    assert [plain(event) for event in sealed.events()] == events


@pytest.mark.crashes
def test_a_server_that_is_gone(
    sealed: Store, storage: ObjectStorage, root: Path, plain: Callable[[Event], dict[str, Any]]
) -> None:
    """Reads, questions, verification and the sealer say so, and blame no file."""
    events = [plain(event) for event in sealed.events()]
    upload_units(sealed)
    _without_wal(sealed)
    connection = rb.connect(sealed.path)
    there = "s3://rollouts/some prefix/"
    storage.stop()
    try:
        with pytest.raises(RemoteError, match=there):
            list(sealed.events())
        with pytest.raises(RemoteError, match=there):
            rb.open(sealed.path).trajectory("t1")
        with pytest.raises(RemoteError, match=there):
            verify_store(sealed)
        with pytest.raises(duckdb.Error, match=there) as error:
            connection.execute("SELECT sum(length(extra)) FROM events").fetchall()
        assert str(outage(error.value)).startswith(there)
        code, output = _command(root, "sql", "select count(*) from events", "--store", sealed.path)
        assert (code, output.count("\n")) == (2, 1)
        assert output.startswith(f"error: {there}")
        _configure(sealed, storage)
        damage = Sealer(sealed).run_once().damage
        assert set(damage) == set(LANES)
        assert all(there in text for text in damage.values())
        assert not list(sealed.path.glob("lanes/*/QUARANTINED"))
    finally:
        storage.start()
    assert [plain(event) for event in sealed.events()] == events


@pytest.mark.crashes
def test_recording_goes_on_without_it(
    sealed: Store, storage: ObjectStorage, notes: Callable[..., list[Event]]
) -> None:
    """With its WAL files kept, a lane is written, sealed and read, and moved when the server is back."""
    upload_units(sealed)
    end = sealed.head()["serve"]
    storage.stop()
    try:
        with sealed.writer("serve") as writer:
            assert writer.append(notes(2)).result(30) == end
        damage = Sealer(sealed).run_once().damage
        assert "s3://rollouts/some prefix/" in damage["serve"]
        assert current_units(sealed.path, "serve")[-1].next_seq == end + 2
        assert len(list(sealed.events())) == sum(sealed.head().values())
    finally:
        storage.start()
    assert Sealer(sealed).run_once().damage == {}
    assert current_units(sealed.path, "serve")[-1].remote is not None


def test_what_is_stored_wrong_is_found(small: Store, storage: ObjectStorage) -> None:
    """An object that is not the file is sent again; one that changed afterwards is damage, and is named."""
    unit = current_units(small.path, "serve")[0]
    key = f"some prefix/{small.store_id}/sealed/serve/{unit.name}/{unit.files[0].name}"
    storage.write(key, bytes(unit.files[0].bytes))
    upload_units(small)
    _without_wal(small)
    whole = storage.read(key)
    assert whole != bytes(unit.files[0].bytes)
    storage.write(key, whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    faults = {lane.lane: lane.fault for lane in verify_store(small)}
    assert key in str(faults["serve"])
    assert faults["train"] is None


def test_a_damaged_file_is_not_moved(small: Store) -> None:
    """Its sha256 is checked before it is sent, and nothing of it is removed."""
    unit = current_units(small.path, "serve")[0]
    path = unit_folder(small.path, unit) / unit.files[0].name
    data = path.read_bytes()
    path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    with pytest.raises(CorruptionError, match=str(path)):
        upload_units(small)
    assert path.exists()
    assert current_units(small.path, "serve")[0].remote is None


def test_without_fsspec_sql_names_the_extra(
    small: Store, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQL names the extra that it needs; events are read without it."""
    upload_units(small)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigError, match=r'pip install "rollbook\[s3\]"'):
        rb.connect(small.path)
    assert len(list(small.events())) == sum(small.head().values())


def test_only_an_outage_is_called_one() -> None:
    """Other errors of a query stay what they are."""
    assert outage(duckdb.Error("Parser Error: syntax error")) is None
