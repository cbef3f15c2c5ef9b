"""An exported page is one file that asks nothing, runs nothing, and has no secrets."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.records import turn_completed, turn_requested

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.viewer.export import Export, only_run
from rollbook.viewer.snapshots import Snapshots

SECRET = "sk-proj-" + "Ab3" * 16
STEP = 11


def exported(log: Store, make: Callable[[Export], str], patterns: tuple[str, ...] = ()) -> str:
    """A page of a log as a file."""
    snapshots = Snapshots(log)
    try:
        with snapshots.reading() as snapshot:
            return make(Export(snapshot, patterns))
    finally:
        snapshots.close()


@pytest.fixture(scope="module")
def step() -> str:
    """A trained step as a file."""
    return exported(rb.open(fabric.trained_path()), lambda export: export.step("demo", "actor", STEP))


def check_alone(html: str) -> None:
    """It loads, asks and runs nothing."""
    assert re.findall(r"<script|<link|<img|hx-get|javascript:|\bon\w+=|src=|url\(", html) == []
    assert "default-src 'none'" in html
    assert set(re.findall(r'href="([^"]*)"', html)) - {"#"} <= {
        f"#{a}" for a in re.findall(r'id="([^"]*)"', html)
    }


def test_a_step(step: str) -> None:
    """Its samples with their advantages, and a conversation for each trajectory, to which its line leads."""
    check_alone(step)
    assert "their digest is the step" in step
    with rb.connect(fabric.trained_path()) as connection:
        query = f"""SELECT DISTINCT trajectory_id, trajectory FROM samples
            JOIN trajectories USING (trajectory_id) WHERE step = {STEP}"""
        consumed = connection.execute(query).fetchall()
    assert len(consumed) > 2
    for trajectory_id, name in consumed:
        assert f'<details id="{trajectory_id}"' in step
        assert f'href="#{trajectory_id}">{name}</a>' in step
    assert "planned 20" in step
    assert " ago" not in step


def test_a_trajectory_token_by_token(step: str) -> None:
    """As the last step had it, by each colour that there are values of."""
    log = rb.open(fabric.trained_path())
    with rb.connect(log.path) as connection:
        [(trajectory_id,)] = connection.execute(
            f"SELECT trajectory_id FROM samples WHERE step = {STEP} LIMIT 1"
        ).fetchall()
    html = exported(log, lambda export: export.trajectory(trajectory_id))
    check_alone(html)
    for by in ("logprob", "version", "mask", "advantage"):
        assert f"token by token, by {by}" in html
    assert f"as step {STEP} had it" in html
    assert "<i class=c" in html


def test_no_secret_leaves(store: Store) -> None:
    """Neither in a message, nor in a label, nor in a reply; and none that a pattern names."""
    messages = [{"role": "user", "content": f"my key is {SECRET}; <b>4711-0815</b>"}]
    records: list[Any] = [
        kinds.TrajectoryOpened("t", "T", labels={"note": SECRET}),
        turn_requested("t", "t1", messages=messages),
        turn_completed("t", "t1", reply={"content": f"{SECRET} is yours"}),
        kinds.LabelAdded("t", None, "said", f"x {SECRET}", "human"),
    ]
    with store.writer("serve") as writer:
        writer.append([Event(record, "r") for record in records]).result(30)
    html = exported(store, lambda export: export.trajectory("t"), ("[0-9]{4}-[0-9]{4}",))
    check_alone(html)
    assert SECRET not in html
    assert SECRET[12:] not in html
    assert "4711" not in html
    assert "&lt;b&gt;" in html
    assert "is yours" in html


def test_tokens_that_spell_a_secret(store: Store) -> None:
    """Are left out, and said to be."""
    with_secret = exported(store, lambda export: export._tokens([1, 2], ["key ", SECRET], ".."))
    assert SECRET not in with_secret
    assert "left out" in with_secret
    assert "key" in exported(store, lambda export: export._tokens([1], ["key "], "."))


def test_by_the_command(cli: Callable[..., Any], tmp_path: Path) -> None:
    """To a new file, which it does not write over; the run is found where one alone has the step."""
    out, store = tmp_path / "step.html", str(fabric.trained_path())
    code, _, _ = cli("view", "export", str(STEP), "--store", store, "-o", str(out))
    assert code == 0
    check_alone(out.read_text())
    code, _, error = cli("view", "export", str(STEP), "--store", store, "-o", str(out))
    assert (code, "is there" in error) == (2, True)
    absent = str(tmp_path / "x.html")
    code, _, error = cli("view", "export", "99", "--store", store, "-o", absent)
    assert (code != 0, "step 99" in error, Path(absent).exists()) == (True, True, False)
    with Snapshots(rb.open(fabric.trained_path())).reading() as snapshot:
        assert only_run(snapshot, "actor", STEP) == "demo"
