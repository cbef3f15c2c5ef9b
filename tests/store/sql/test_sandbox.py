"""A query reads the store and reaches nothing else: every way out of DuckDB is tried, live and sealed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook import store as rb
from rollbook.cli.sql import sql
from rollbook.store import Event, Store
from rollbook.store.errors import QueryError, RollbookError
from rollbook.store.sealed.derived import build_derived
from rollbook.store.sealed.seal import seal_closed
from rollbook.store.settings import AppendSettings, SealSettings
from rollbook.store.sql.sandbox import refuse_writing

SECRET = "what stands outside of the store"

OUT = [
    # reads
    "select * from read_csv('{outside}')",
    "select * from read_text('{outside}')",
    "select * from read_blob('{outside}')",
    "select * from read_json('{outside}')",
    "select * from read_parquet('{outside}')",
    "select * from parquet_metadata('{outside}')",
    "select * from sniff_csv('{outside}')",
    "select * from '{outside}'",
    "select * from query_table('{outside}')",
    "select * from query('select * from read_text(''{outside}'')')",
    "select * from read_text('{store}/sealed/../../outside.txt')",
    "select * from read_text('{store}/sealed/serve/*/../../../../outside.txt')",
    "select * from read_text('file://{outside}')",
    "select * from read_text('{store}/store.toml')",
    "select * from read_text('{store}/SECRET')",
    "select * from glob('{folder}/*')",
    "select * from glob('{store}/*')",
    "select * from read_duckdb('{folder}/other.db')",
    "copy (select 1) from '{outside}'",
    "select * from read_text('http://127.0.0.1:1/x')",
    "select * from read_text('s3://bucket/x')",
    "select * from read_text('/proc/self/environ')",
    "import database '{folder}/dump'",
    "select getenv('HOME')",
    # writes
    "copy (select 1) to '{folder}/new.csv'",
    "copy (select 1) to '{file}'",
    "copy (select 1 as x) to '{file}' (use_tmp_file false)",
    "copy (select 1) to '{store}/sealed/new.parquet'",
    "copy (select 1) to '{store}/derived/new.csv' (per_thread_output)",
    "CoPy/**/(select 1) to '{store}/sealed/new.parquet'",
    "select 1; copy (select 1) to '{store}/sealed/new.parquet'",
    "begin; copy (select 1) to '{store}/sealed/new.parquet'; commit",
    "explain analyze copy (select 1) to '{store}/sealed/new.parquet'",
    "explain analyze\u00a0copy (select 1) to '{store}/sealed/new.parquet'",
    "explain (analyze, format json) copy (select 1) to '{store}/sealed/new.parquet'",
    "prepare p as copy (select 1) to '{store}/sealed/new.parquet'",
    "with a as (copy (select 1) to '{store}/sealed/new.parquet') select 1",
    "with a as\u2003(copy (select 1) to '{store}/sealed/new.parquet') select 1",
    "select 'é', 1; -- \r copy (select 1) to '{store}/sealed/new.parquet'",
    "export database '{store}/sealed/dump'",
    "export database '{folder}/dump'",
    "attach '{store}/sealed/new.db'",
    "attach '{folder}/new.db'",
    "attach if not exists '{store}/derived/new.db' as d",
    "create persistent secret s (type http)",
    # the net, code, and switches
    "install httpfs",
    "install httpfs from '{folder}'",
    "force install httpfs from community",
    "load httpfs",
    "load '{folder}/evil.duckdb_extension'",
    "update extensions",
    "set enable_external_access = true",
    "reset enable_external_access",
    "set lock_configuration = false",
    "set allowed_directories = ['/']",
    "set allowed_paths = ['{outside}']",
    "set allowed_configs = ['enable_external_access']",
    "set python_enable_replacements = true",
    "set python_scan_all_frames = true",
    "set temp_directory = '{folder}'",
    "set max_temp_directory_size = '1TB'",
    "set memory_limit = '1TB'",
    "set file_search_path = '{folder}'",
    "set home_directory = '{folder}'",
    "set extension_directories = ['{folder}']",
    "set secret_directory = '{folder}'",
    "set log_query_path = '{folder}/log'",
    "set profile_output = '{folder}/profile'",
    "pragma profile_output = '{folder}/profile'",
    "pragma enable_profiling = 'json'",
    "call enable_logging(storage = 'file', storage_config = {{'path': '{folder}/log'}})",
    "set autoload_known_extensions = true",
    "set custom_extension_repository = 'http://127.0.0.1:1'",
    "select * from secret_of_python",
]

ALLOWED = [
    "select count(*) from turns",
    "select * from events where extra like '%copy (select 1) to%'",
    'select 1 as "copy", \'export\' as "attach"',
    "explain select * from trajectories",
    "describe turns",
    "summarize select turn_id from turns",
    "create temp table mine as select trajectory, reward from trajectories; select * from mine",
    "create macro twice(x) as 2 * x; select twice(reward) from trajectories",
    "prepare p as select count(*) from turns; execute p",
    "set threads = 1; set timezone = 'UTC'; select 1",
    "pivot (select kind, run from events) on run using count(*)",
    "set variable wanted = 't1'; select * from turns where trajectory_id = getvariable('wanted')",
    "select json_extract_string(extra, '$.name'), regexp_matches(kind, 'turn') from events",
]


def _grown(folder: Path, story: Any, *, sealed: bool) -> Store:
    log = rb.open(folder / "store", create=True)
    for lane, events in story.items():
        with log.writer(lane, AppendSettings(segment_bytes=1)) as writer:
            for event in events:
                writer.append([event]).result(30)
        if sealed:
            for unit in seal_closed(log.path, lane, SealSettings(row_group=2)):
                build_derived(log.path, unit)
    (log.path / "store.toml").write_text("")
    (log.path / "SECRET").write_bytes(b"s" * 32)
    return log


@pytest.fixture(scope="module", params=["live", "sealed"])
def log(
    request: pytest.FixtureRequest, story: dict[str, list[Event]], tmp_path_factory: pytest.TempPathFactory
) -> Store:
    """The story, in WAL segments or in sealed units; beside the store lies a file that is no part of it."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "outside.txt").write_text(SECRET)
    (folder / "dump").mkdir()
    duckdb.connect(str(folder / "other.db")).close()
    return _grown(folder, story, sealed=request.param == "sealed")


@pytest.fixture(scope="module")
def connection(log: Store) -> Iterator[Any]:
    """A connection in its sandbox."""
    with rb.connect(log.path) as connection:
        yield connection


def _state(folder: Path) -> dict[str, str]:
    """Every file below the folder, and the digest of its content."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "leases"]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _filled(query: str, log: Store) -> str:
    folder = log.path.parent
    sealed = sorted(log.path.glob("sealed/serve/*/turns.parquet"))
    file = sealed[0] if sealed else log.path / "STORE.json"
    return query.format(folder=folder, outside=folder / "outside.txt", store=log.path, file=file)


@pytest.mark.parametrize("query", OUT)
def test_no_way_leads_out(log: Store, connection: Any, query: str) -> None:
    """Each is refused with an error, no file is made or changed, and nothing from outside is told."""
    secret_of_python = pa.table({"secret": [SECRET]})
    before = _state(log.path.parent)
    with pytest.raises((QueryError, duckdb.Error)) as error:
        connection.execute(_filled(query, log)).fetchall()
    assert SECRET not in str(error.value)
    assert _state(log.path.parent) == before
    assert secret_of_python.num_rows == 1
    with pytest.raises((QueryError, duckdb.Error)):
        connection.sql(_filled(query, log)).fetchall()
    assert _state(log.path.parent) == before


@pytest.mark.parametrize("query", ALLOWED)
def test_what_reads_the_store_goes_on(log: Store, query: str) -> None:
    """Questions, tables of one's own in memory, macros and the words in a text are no way out."""
    with rb.connect(log.path) as connection:
        assert connection.execute(query).fetchall() is not None


def test_every_door_has_a_key(log: Store, tmp_path: Path) -> None:
    """With allow_files a query reads and writes files."""
    mine = tmp_path / "mine.parquet"
    with rb.connect(log.path, allow_files=True) as connection:
        connection.execute(f"copy (select 't1' as trajectory_id, 7 as grade) to '{mine}'")
        joined = f"select grade from turns join '{mine}' using (trajectory_id) limit 1"
        assert connection.execute(joined).fetchall() == [(7,)]
        connection.execute("set memory_limit = '100MB'")


@pytest.mark.parametrize("query", ["select * from read_text('/etc/hostname')", "copy (select 1) to '/tmp/x'"])
def test_the_command_names_the_key(log: Store, query: str) -> None:
    """Who meant it is told of --allow-files."""
    with pytest.raises(RollbookError, match="--allow-files"):
        sql(query, log.path)


def test_another_cursor_has_the_same_walls(connection: Any) -> None:
    """A cursor for another thread is in the same sandbox."""
    cursor = connection.cursor()
    assert cursor.execute("select 7").fetchall() == [(7,)]
    with pytest.raises(duckdb.PermissionException):
        cursor.execute("select * from read_text('/etc/hostname')")
    with pytest.raises(QueryError, match="COPY"):
        cursor.execute("copy turns to 'x.csv'")
    with pytest.raises(QueryError, match="COPY"):
        cursor.executemany("copy turns to 'x.csv'", [])
    with pytest.raises(QueryError, match="COPY"):
        connection.execute(duckdb.extract_statements("copy turns to 'x.csv'")[0])


def test_it_spills_into_a_folder_of_its_own(
    log: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the system's place for temporary files, for its owner alone, bounded, gone with the connection."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    connection = rb.connect(log.path)
    [folder] = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    [(set_to, most)] = connection.execute(
        "select current_setting('temp_directory'), current_setting('max_temp_directory_size')"
    ).fetchall()
    assert set_to == str(folder)
    assert "90%" not in most
    connection.close()
    del connection
    assert list(tmp_path.iterdir()) == []


def test_without_room_for_spilling_queries_run_in_memory(log: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no temporary folder can be made, a small question still has its answer."""

    def full(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    with rb.connect(log.path) as connection:
        assert connection.execute("select count(*) from turns").fetchall() == [(4,)]


@given(st.text(), st.text(), st.sampled_from(["copy", "COPY", "Export", "aTTach"]))
def test_in_a_text_every_word_is_free(before: str, after: str, word: str) -> None:
    """What stands in quotes, whatever it is, makes nothing of a question."""
    text = f"{before}{word}{after}".replace("'", "''").replace("\0", "")
    refuse_writing(f"select * from events where extra = '{text}'")


@given(
    st.sampled_from([" ", "\t", "\n", "(", ";", ")", "/* */", "\u00a0", "\u2003", "--\n", "'x'", '"x"', "1"])
)
def test_outside_of_a_text_none_is(before: str) -> None:
    """Whatever stands before the word, it is seen."""
    with pytest.raises(QueryError, match="COPY"):
        refuse_writing(f"select é{before}copy (select 1) to 'x'")


def test_a_fork_leaves_the_folder(log: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that was forked and ends takes nothing from its parent."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    from rollbook.store.spill import Spill

    spill = Spill()
    if (child := os.fork()) == 0:
        spill.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 1
    spill.release()
    assert list(tmp_path.iterdir()) == []
