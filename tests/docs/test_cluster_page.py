"""docs/cluster.md: its commands run on two hosts, its query finds orphans, and its table is what `sizing`
prints."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from tests.fakes.processes.warm import run_warm

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.events import Event, EventOrphaned
from rollbook.store.hosts.sizing import Load, Prices, sizing


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    """The text of the page."""
    return (root / "docs" / "cluster.md").read_text()


def _run(words: list[str], folder: Path) -> str:
    done = run_warm(
        [sys.executable, "-m", *words], cwd=folder, text=True, env=os.environ | {"COLUMNS": "160"}
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def test_the_hosts_are_made_as_the_page_says(
    page: str, one_of_everything: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a folder in the place of the bucket: the other host has every event, and says who is there."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    shutil.copytree(one_of_everything.path, first / "runs")
    monkeypatch.setenv("ROLLBOOK_ALLOW", str(tmp_path))
    [settings] = re.findall(r"^```toml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (first / "runs" / "store.toml").write_text(
        settings.replace("s3://rollouts/team", f"file://{tmp_path}/medium")
    )
    info = json.loads(_run(["rollbook", "store", "info", "--store", "runs", "--json"], first))
    _run(["rollbook", "store", "follow", "--store", "runs", "--once"], first)
    shell = re.findall(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[1]
    shell = shell.replace("s3://rollouts/team/STORE-ID", info["medium"])
    join, hosts = (shlex.split(line) for line in shell.splitlines())
    assert "is host" in _run(join, second)
    table = _run(hosts, second)
    head = rb.open(one_of_everything.path).head()
    assert all(
        re.search(rf"^{lane}\s.*\s{count}\s+{count}\s", table, re.MULTILINE) for lane, count in head.items()
    )
    assert rb.open(second / "runs").head() == head


def test_its_query_finds_what_was_moved_away(page: str, tmp_path: Path) -> None:
    """By the lane that it was in."""
    [query] = re.findall(r"^```sql\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    log = rb.open(tmp_path / "store", create=True)
    with log.writer("orphans.b") as writer:
        writer.append([Event(EventOrphaned("t", "serve.b", 4, {}), "r")]).result()
    assert rb.connect(log.path).execute(query).fetchall() == [("orphans.b", "serve.b", 1)]


def test_its_table_is_what_the_command_says(page: str) -> None:
    """Row by row."""
    rows = re.findall(
        r"^\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| (.*?) \| ([\d,]+) \|$", page, re.MULTILINE
    )
    assert len(rows) == 3
    for hosts, puts, gets, mb, parts, month in rows:
        size = sizing(Load(int(hosts.replace(",", ""))), Prices())
        said = (f"{size.puts_s:,.0f}", f"{size.gets_s:,.0f}", f"{size.mb_s:,.0f}")
        assert (puts, gets, mb) == said
        assert parts == f"{size.put_month:,.0f} + {size.get_month:,.0f} + {size.chunks_month:,.0f}"
        assert month == f"{size.month:,.0f}"
    assert f"about {sizing(Load(1), Prices()).hosts_a_follower} such hosts" in page
