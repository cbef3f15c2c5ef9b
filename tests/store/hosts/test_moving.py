"""A store of one host becomes one of several, and one of one host again: every event and bit the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.store.hosts.conftest import Hosts, rows
from typer.testing import CliRunner

from rollbook import store as rb
from rollbook.cli.app import app
from rollbook.store import Store
from rollbook.store.errors import ConfigError, LaneLockedError
from rollbook.store.events import Event, LabelAdded
from rollbook.store.hosts.leave import leave
from rollbook.store.sealed.parquet import same_bits
from rollbook.store.sealed.seal import seal_closed
from rollbook.store.settings import MediumSettings, SealSettings, read_settings
from rollbook.store.upkeep.sealer import Sealer
from rollbook.store.upkeep.verify import verify_store


def test_in_and_out_again(
    story_store: Store, upkeep: list[Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events of every kind: on the other host the same table, bit for bit; and on that one alone, once it has
    left."""
    monkeypatch.setenv("ROLLBOOK_ALLOW", str(tmp_path))
    with story_store.writer("upkeep") as writer:
        writer.append(upkeep).result(10)
    list(seal_closed(story_store.path, "serve", SealSettings(), all_of_it=True))
    before = story_store.table()
    shutil.copytree(story_store.path, tmp_path / "a")
    hosts = Hosts(tmp_path, MediumSettings(url=f"file://{tmp_path}/medium"))
    a = hosts.open("a")
    a.carrier._ship_leftovers()
    b = hosts.open("b")
    assert same_bits(b.table(), before) is None
    with b.writer("more") as writer:
        writer.append([Event(LabelAdded("t", None, "n", 1), "r")]).result(10)
        with pytest.raises(LaneLockedError, match=f"{b.carrier.host}, process .* writes this store too"):
            leave(a, a.carrier)
        more = writer.lane
    b.carrier.close()
    a.carrier.close()
    a = hosts.open("a")
    report = leave(a, a.carrier)
    assert report.lanes[more] == 1
    alone = rb.open(tmp_path / "a")
    assert alone.carrier is None
    assert rows(alone) == rows(b)
    assert same_bits(alone.table({k: n for k, n in alone.head().items() if k != more}), before) is None
    assert [lane.fault for lane in verify_store(alone) if lane.fault] == []
    with alone.writer(more) as writer:
        assert writer.append([Event(LabelAdded("t", None, "n", 2), "r")]).result(10) == 1
    assert Sealer(alone).run_once(10).damage == {}
    assert rb.open(tmp_path / "a").head()[more] == 2
    left = {
        path.name
        for path in (tmp_path / "a").rglob("*")
        if path.name in ("REPLICA", "FOLLOWED", "SHIPPED", "HOST")
    }
    assert left == set()


def test_a_host_that_joins_is_told_where_sealed_files_are(folder_hosts: Hosts) -> None:
    """By the command's options, which are in its settings from then on; a service alone says too little."""
    folder_hosts.first().close()
    url, there = f"{folder_hosts.settings.url}/{folder_hosts.store_id}", folder_hosts.folder / "b"
    words = ["store", "join", url, "--store", str(there), "--remote-endpoint", "http://127.0.0.1:9"]
    refused = CliRunner().invoke(app, words).exception
    assert isinstance(refused, ConfigError)
    assert "--remote-endpoint http://127.0.0.1:9: say with --remote what is there" in str(refused)
    assert not there.exists()
    assert CliRunner().invoke(app, [*words, "--remote", "s3://rollouts/units"]).exit_code == 0
    remote = read_settings(there).remote
    assert (remote.uri, remote.endpoint) == ("s3://rollouts/units", "http://127.0.0.1:9")
