"""What upkeep does to a store changes no replay: sealing, compaction, a move, a catalog made anew, removed
checkpoints, retention of other steps, erasure of all but tokens."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ReplayError
from rollbook.store.sealed.unit import current_units
from rollbook.store.upkeep.retain import retain
from rollbook.store.upkeep.retire import retire_steps
from rollbook.store.upkeep.sealer import Sealer

Stores = Callable[..., Store]
STEPS = (5, 11)
"""One of supervised training between checkpoints, and the last of GRPO."""


def _proven(path: Path, steps: Sequence[int] = STEPS) -> None:
    log = rb.open(path)
    for step in steps:
        stages = replay_step(log, step).stages
        assert {str(stage.verdict) for stage in stages.values()} == {"equal"}, step
        assert {"selection", "schedule", "metrics"} <= stages.keys()


@pytest.fixture(scope="module")
def sealed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained store, of which every segment is sealed. Copy it; never write."""
    path = shutil.copytree(fabric.trained_path(), tmp_path_factory.mktemp("sealed") / "store")
    assert Sealer(rb.open(path)).run_once().damage == {}
    return path


@pytest.fixture
def sealed(sealed_once: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(sealed_once, tmp_path / "sealed")


def test_sealed_and_moved(sealed: Path, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    """Units in the place of segments; then the whole store elsewhere, its catalog and all that is derived
    made anew."""
    _proven(sealed)
    moved = sealed.rename(tmp_path / "elsewhere")
    shutil.rmtree(moved / "derived", ignore_errors=True)
    (moved / "catalog.db").unlink(missing_ok=True)
    assert cli("store", "rebuild-catalog", "--store", moved)[0] == 0
    _proven(moved)


@pytest.fixture(scope="module")
def in_units_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two supervised steps and two of GRPO: what they used lies in units of their own. Copy it."""
    log = rb.open(tmp_path_factory.mktemp("in-units") / "store", create=True)
    (log.path / "store.toml").write_text("[seal]\ncompact_bytes = 0\n")
    used = [fabric.teacher_records(12), *(fabric.rollout_records(1, 4, first=n) for n in range(4))]
    for records in used:
        fabric.append(log, records)
        assert Sealer(log).run_once().damage == {}
    fabric.train(log, fabric.config(fabric.SFT, steps=2))
    fabric.train(log, fabric.config(fabric.GRPO, steps=2))
    assert Sealer(log).run_once().damage == {}
    assert len(current_units(log.path, "serve")) == len(used)
    return log.path


@pytest.fixture
def in_units(in_units_once: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(in_units_once, tmp_path / "in-units")


@pytest.mark.more
def test_compacted(in_units: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    """Units that were merged."""
    (in_units / "store.toml").unlink()
    assert cli("store", "seal", "--store", in_units)[0] == 0
    assert len(current_units(in_units, "serve")) == 1
    _proven(in_units, (1, 3))


def test_what_other_steps_used_is_dropped(in_units: Path) -> None:
    """Those that are not retired replay; the retired ones cannot be, and it is said what is missing."""
    log = rb.open(in_units)
    retire_steps(log, "demo", "actor", "space", steps=(0, 1))
    report = retain(log, "0s")
    assert [unit.dropped for unit in report.units if unit.lane == "serve"] == [True, *[False] * 4]
    _proven(in_units, (3,))
    with pytest.raises(ReplayError, match="step 0: the log no longer holds its sample"):
        replay_step(log, 1)


def test_erased_but_for_tokens(sealed: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    """What a trajectory said is gone, and its steps replay."""
    ref = fabric.steps_of(rb.open(sealed)).steps[STEPS[1]].planned.samples[0]
    arguments = ("store", "erase", "--trajectory", ref["trajectory_id"], "--reason", "asked", "--keep-tokens")
    code, _, err = cli(*arguments, "--store", sealed)
    assert code == 0, err
    _proven(sealed)


@pytest.mark.more
def test_in_object_storage(
    sealed: Path, cli: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units that are nowhere but there."""
    pytest.importorskip("moto", reason="object storage is tested against moto: install the [dev] extra")
    from tests.fakes.storage.s3_server import ObjectStorage, set_credentials

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


@pytest.mark.more
def test_without_the_checkpoints_that_may_go(trained: Stores) -> None:
    """A start before the ones that are gone."""
    path = trained().path
    for version in (4, 11):
        shutil.rmtree(path / f"checkpoints/demo/actor/v{version:08d}")
    log = rb.open(path)
    for step, start in ((5, 0), (11, 9)):
        result = replay_step(log, step)
        assert (result.bit_for_bit, result.from_version) == (True, start)
        assert result.first_difference is None
