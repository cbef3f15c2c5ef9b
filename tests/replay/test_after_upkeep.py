"""What upkeep does to a store changes no replay: sealing, a move, a catalog made anew, removed checkpoints,
erasure of all but tokens."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollbook import store as rb
from rollbook.replay.step import replay_step
from rollbook.store import Store

Stores = Callable[..., Store]
STEPS = (5, 11)
"""One of supervised training between checkpoints, and the last of GRPO."""


def _proven(path: Path) -> None:
    log = rb.open(path)
    for step in STEPS:
        stages = replay_step(log, step).stages
        assert {str(one.verdict) for one in stages.values()} == {"equal"}, step
        assert {"selection", "schedule", "metrics"} <= stages.keys()


@pytest.fixture
def sealed(trained: Stores, cli: Any) -> Path:
    """The trained store, of which every segment is sealed."""
    path = trained().path
    code, _, err = cli("store", "seal", "--store", path)
    assert code == 0, err
    return path


def test_sealed_and_moved(sealed: Path, tmp_path: Path, cli: Any) -> None:
    """Units in the place of segments; then the whole store elsewhere, its catalog and all that is derived
    made anew."""
    _proven(sealed)
    moved = sealed.rename(tmp_path / "elsewhere")
    shutil.rmtree(moved / "derived", ignore_errors=True)
    (moved / "catalog.db").unlink(missing_ok=True)
    assert cli("store", "rebuild-catalog", "--store", moved)[0] == 0
    _proven(moved)


def test_erased_but_for_tokens(fabric: Any, sealed: Path, cli: Any) -> None:
    """What a trajectory said is gone, and its steps replay."""
    ref = fabric.steps_of(rb.open(sealed)).steps[STEPS[1]].planned.samples[0]
    arguments = ("store", "erase", "--trajectory", ref["trajectory_id"], "--reason", "asked", "--keep-tokens")
    code, _, err = cli(*arguments, "--store", sealed)
    assert code == 0, err
    _proven(sealed)


def test_in_object_storage(sealed: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that are nowhere but there."""
    pytest.importorskip("moto", reason="object storage is tested against moto: install the [dev] extra")
    from s3_server import ObjectStorage, set_credentials

    set_credentials(monkeypatch)
    server = ObjectStorage()
    try:
        remote = f'[remote]\nuri = "{server.uri}"\nendpoint = "{server.endpoint}"\n'
        (sealed / "store.toml").write_text(remote)
        code, _, err = cli("store", "upload", "--store", sealed)
        assert code == 0, err
        assert not list((sealed / "sealed").rglob("*.parquet"))
        _proven(sealed)
    finally:
        server.stop()


def test_without_the_checkpoints_that_may_go(trained: Stores) -> None:
    """A start before the ones that are gone."""
    path = trained().path
    for version in (4, 11):
        shutil.rmtree(path / f"checkpoints/demo/actor/v{version:08d}")
    log = rb.open(path)
    for step, start in ((5, 0), (11, 9)):
        found = replay_step(log, step)
        assert (found.bit_for_bit, found.from_version) == (True, start)
        assert found.first_difference is None
