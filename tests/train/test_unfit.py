"""Samples that cannot be trained are dropped by a rule before a step is planned, and counted at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollbook.store import Store
from rollbook.store.errors import IdleError
from rollbook.store.events import SampleDropped, StepFailed, StepPlanned

Stores = Callable[..., Store]


def _of(log: Store, *kinds: type[Any]) -> list[Any]:
    return [e.record for e in log.events() if isinstance(e.record, kinds)]


def _odd_group(fabric: Any, name: str) -> list[Any]:
    """Four members: one is beyond the vocabulary of 100, one beyond the context of 64, two are well."""
    turns = [fabric.T(), fabric.T(completion=(3, 100)), fabric.T(completion=[5] * 63), fabric.T()]
    return [
        record
        for i, turn in enumerate(turns)
        for record in fabric.records(f"{name}.{i}", [turn], group=name, reward=float(i))
    ]


@pytest.mark.parametrize("source", ["cut", "tail"])
def test_a_group_with_members_that_the_model_cannot_be_given(
    fabric: Any, store: Store, source: str, cli: Any, tmp_path: Path
) -> None:
    """They are dropped with their numbers, and the others are compared, as after any other rule."""
    fabric.append(store, [*_odd_group(fabric, "a"), *_odd_group(fabric, "b")])
    settings = fabric.config(fabric.GRPO, steps=1)
    (tmp_path / "train.toml").write_text(fabric.toml(settings))
    code, _, said = cli("train", tmp_path / "train.toml", "--store", store.path, "--source", source)
    assert code == 0, said
    [plan] = _of(store, StepPlanned)
    assert [ref["trajectory_id"] for ref in plan.samples] == ["a.0", "a.3", "b.0", "b.3"]
    drops = {(d.trajectory_id, d.rule): d.detail for d in _of(store, SampleDropped)}
    assert drops == {
        ("a.1", "outside_vocabulary"): {"token": 100, "vocabulary": 100},
        ("a.2", "too_long"): {"tokens": 65, "context": 64},
        ("b.1", "outside_vocabulary"): {"token": 100, "vocabulary": 100},
        ("b.2", "too_long"): {"tokens": 65, "context": 64},
    }
    assert _of(store, StepFailed) == []


def test_supervised_samples(fabric: Any, store: Store, cli: Any, tmp_path: Path) -> None:
    """The same without groups; where none is left, the training is not begun and says why."""
    fabric.append(store, _odd_group(fabric, "a")[5:])
    fabric.append(store, fabric.records("first", [fabric.T((), (3,))]))
    (tmp_path / "train.toml").write_text(
        fabric.toml(fabric.config(fabric.SFT, steps=1, recipe={"splits": ["train"]}))
    )
    command = ("train", tmp_path / "train.toml", "--store", store.path)
    code, _, said = cli(*command)
    assert code == 0, said
    assert {d.rule for d in _of(store, SampleDropped)} == {
        "outside_vocabulary",
        "too_long",
        "nothing_trainable",
    }
    assert {ref["trajectory_id"] for plan in _of(store, StepPlanned) for ref in plan.samples} == {"a.3"}


def test_the_reasons_are_counted(fabric: Any, store: Store) -> None:
    """At a cut before a run begins, and by the tail when its patience ends."""
    odd = [*_odd_group(fabric, "a"), *fabric.records("open", finished=False)]
    fabric.append(store, odd)
    settings = fabric.config(fabric.GRPO, steps=1, idle_timeout_s=0.2)
    with pytest.raises(IdleError) as told:
        fabric.train(store, settings, "tail")
    text = str(told.value)
    assert "no complete batch for 0.2 s" in text
    assert "0 of 1 steps; the log at serve=" in text
    assert "of 5 trajectories" in text
    for line in (
        "1 are dropped by the rule outside_vocabulary",
        "1 are dropped by the rule too_long",
        "1 are not finished",
        "2 are in groups of fewer than 4",
    ):
        assert line in text
