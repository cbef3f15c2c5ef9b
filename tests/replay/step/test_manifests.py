"""Manifests that no training wrote: whatever is missing in one, or of another type, is said in one line."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.replay.conftest import Tamper

from rollbook import store as rb
from rollbook.replay.step.manifest import checked
from rollbook.replay.step.step import replay_step
from rollbook.replay.verdict import StepReplay
from rollbook.store import Event, Store
from rollbook.store.errors import ReplayError, RollbookError
from rollbook.store.events import StepPlanned

STEP = 2
"""The last step of the trained store; its learning goes on from the checkpoint before it."""
READ = (
    *("recipe.reward_source", "samples.0.turn_id", "samples.3.trajectory_id", "environment.threads"),
    *("environment.device", "environment.dtype", "optimizer.lr", "schedule.seed", "schedule.steps"),
)
"""Keys within others, without which no replay is possible."""
OTHERS: tuple[Any, ...] = (None, 7.5, "odd", [], {}, True, [[1]], {"a": 1})
SCHEDULE = {"number": 0, "steps": 3, "seed": 3, "micro_batch_size": 5, "tokens_per_micro_batch": None}


@pytest.fixture(scope="module")
def plan(root: Path) -> StepPlanned:
    """The manifest of the step, with a schedule, which its release did not record."""
    log = rb.open(root / "tests/data/trained-1")
    plans = [e.record for e in log.events_of([StepPlanned.KIND]) if isinstance(e.record, StepPlanned)]
    [planned] = [record for record in plans if record.step == STEP]
    return StepPlanned(**_values(planned) | {"schedule": SCHEDULE | {"slice": None}})


def _values(plan: StepPlanned) -> dict[str, Any]:
    return {field.name: copy.deepcopy(getattr(plan, field.name)) for field in fields(plan)}


def _changed(plan: StepPlanned, path: str, change: Callable[[Any, Any], None]) -> StepPlanned:
    """The manifest with a change of what holds the end of a path."""
    values: Any = asdict(plan)
    inside, *keys = values, *path.split(".")
    for key in keys[:-1]:
        inside = inside[int(key) if isinstance(inside, list) else key]
    change(inside, int(keys[-1]) if isinstance(inside, list) else keys[-1])
    return StepPlanned(**values)


def _paths(value: Any, depth: int = 3) -> Iterator[str]:
    """Paths to all that a value holds."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in items:
        yield str(key)
        if depth:
            yield from (f"{key}.{rest}" for rest in _paths(inside, depth - 1))


def _remove(inside: Any, key: Any) -> None:
    del inside[key]


def test_a_manifest_as_trainings_write_it(plan: StepPlanned) -> None:
    """Is passed on."""
    assert [event.record for event in checked([Event(plan, "demo")])] == [plan]


@pytest.mark.parametrize("key", READ)
def test_a_key_that_is_missing_is_named(plan: StepPlanned, key: str) -> None:
    """With the step and the run."""
    if key == "optimizer.lr":
        changed = _changed(plan, key, lambda inside, k: inside.update({k: "fast"}))
    else:
        changed = _changed(plan, key, _remove)
    with pytest.raises(ReplayError) as raised:
        list(checked([Event(changed, "demo")]))
    assert f"step 2 of run 'demo': the manifest's {key} cannot be read" in str(raised.value)


def test_micro_batches_that_divide_other_samples(plan: StepPlanned) -> None:
    """A place twice, one left out, or one that is not there."""
    for partition in ([[[0, 0]]], [[]], [[[0, 1, 99]]]):
        changed = StepPlanned(**_values(plan) | {"partition": partition})
        with pytest.raises(ReplayError, match="manifest's partition cannot be read"):
            list(checked([Event(changed, "demo")]))


@given(data=st.data())
def test_whatever_a_key_is(plan: StepPlanned, data: st.DataObject) -> None:
    """Each key of another kind is passed on or refused by an error that names its beginning; never anything
    else."""
    path = data.draw(st.sampled_from(list(_paths(asdict(plan)))))
    other = data.draw(st.sampled_from(OTHERS))
    changed = _changed(plan, path, lambda inside, key: inside.__setitem__(key, other))
    message = _refused(changed)
    assert (
        message is None or f"the manifest's {path.partition('.')[0]}" in message or path.startswith("samples")
    )
    assert "\n" not in (message or "")


def _refused(plan: StepPlanned) -> str | None:
    """Why a manifest is refused; None if it is not."""
    try:
        list(checked([Event(plan, "demo")]))
    except ReplayError as error:
        return str(error)
    return None


def test_a_replay_says_it_in_one_line(
    plan: StepPlanned, root: Path, tmp_path: Path, tamper: Any, cli: Callable[..., tuple[int, str, str]]
) -> None:
    """Exit code 2, of replays of a step and of all; nothing on standard output, and no traceback."""
    log = rb.open(shutil.copytree(root / "tests/data/trained-1", tmp_path / "store"))
    lane = log.path / "lanes/train"
    saved = {file: file.read_bytes() for file in lane.iterdir()}
    for path in ("environment.threads", "recipe.reward_source", "samples.0.turn_id", "optimizer.betas"):
        tamper.event(log, "step.planned", lambda p, path=path: _changed(p, path, _odd), step=STEP, attempt=1)
        for command in (("step", STEP), ("run",)):
            code, out, err = cli("replay", *command, "--store", log.path)
            assert (code, out) == (2, ""), (path, err)
            printed = " ".join(err.split())
            assert f"step 2 of run 'demo': the manifest's {path.rpartition('.')[0]}" in printed
            assert "Traceback" not in err
        for file, data in saved.items():
            file.write_bytes(data)


def _odd(inside: Any, key: Any) -> None:
    inside[key] = {"odd": 1}


@pytest.mark.more_but("None-*")
@pytest.mark.parametrize(
    "path",
    [
        *("attempt", "phase", "cut", "recipe", "recipe_digest", "samples", "seed"),
        *("algorithm", "algorithm.name", "algorithm.groups", "algorithm.clip_low", "recipe.splits"),
        *("input_digests", "environment.packages", "environment.variables", "optimizer.warmup_steps"),
    ],
)
@pytest.mark.parametrize("other", [None, "odd", 7, {}])
def test_a_replay_of_an_odd_manifest_ends(
    root: Path, tmp_path: Path, tamper: Tamper, path: str, other: Any
) -> None:
    """With an error of the tree, or with a verdict."""
    log = rb.open(shutil.copytree(root / "tests/data/trained-1", tmp_path / "store"))

    def change(record: Any) -> Any:
        return _changed(record, path, lambda inside, key: inside.__setitem__(key, other))

    tamper.event(log, "step.planned", change, step=STEP, attempt=1)
    assert _ended(rb.open(log.path))


def _ended(log: Store) -> bool:
    try:
        return isinstance(replay_step(log, STEP), StepReplay)
    except RollbookError as error:
        return bool(str(error))
