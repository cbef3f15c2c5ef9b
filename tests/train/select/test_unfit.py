"""Samples that cannot be trained are dropped by a rule before a step is planned, and counted at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import IdleError
from rollbook.store.events import SampleDropped, StepCommitted, StepFailed, StepPlanned
from rollbook.store.fold.trajectory import fold
from rollbook.train.select.samples import all_samples

Stores = Callable[..., Store]


def _odd_group(name: str) -> list[Any]:
    """Four members: one is beyond the vocabulary of 100, one beyond the context of 64, two are well."""
    turns = [fabric.T(), fabric.T(completion=(3, 100)), fabric.T(completion=[5] * 63), fabric.T()]
    return [
        record
        for i, turn in enumerate(turns)
        for record in fabric.records(f"{name}.{i}", [turn], group=name, reward=float(i))
    ]


@pytest.mark.parametrize("source", ["cut", "tail"])
def test_a_group_with_members_that_the_model_cannot_be_given(
    store: Store, source: str, cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """They are dropped with their numbers, and the others are compared, as after any other rule."""
    fabric.append(store, [*_odd_group("a"), *_odd_group("b")])
    settings = fabric.config(fabric.GRPO, steps=1)
    (tmp_path / "train.toml").write_text(fabric.toml(settings))
    code, _, err = cli("train", tmp_path / "train.toml", "--store", store.path, "--source", source)
    assert code == 0, err
    [plan] = records_of(store, StepPlanned)
    assert [ref["trajectory_id"] for ref in plan.samples] == ["a.0", "a.3", "b.0", "b.3"]
    drops = {(d.trajectory_id, d.rule): d.detail for d in records_of(store, SampleDropped)}
    assert drops == {
        ("a.1", "outside_vocabulary"): {"token": 100, "vocabulary": 100},
        ("a.2", "too_long"): {"tokens": 65, "context": 64},
        ("b.1", "outside_vocabulary"): {"token": 100, "vocabulary": 100},
        ("b.2", "too_long"): {"tokens": 65, "context": 64},
    }
    assert records_of(store, StepFailed) == []


def test_supervised_samples(store: Store, cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """The same without groups; where none is left, the training is not begun and says why."""
    fabric.append(store, _odd_group("a")[5:])
    fabric.append(store, fabric.records("first", [fabric.T((), (3,))]))
    (tmp_path / "train.toml").write_text(
        fabric.toml(fabric.config(fabric.SFT, steps=1, recipe={"splits": ["train"]}))
    )
    command = ("train", tmp_path / "train.toml", "--store", store.path)
    code, _, err = cli(*command)
    assert code == 0, err
    assert {d.rule for d in records_of(store, SampleDropped)} == {
        "outside_vocabulary",
        "too_long",
        "nothing_trainable",
    }
    assert {ref["trajectory_id"] for plan in records_of(store, StepPlanned) for ref in plan.samples} == {
        "a.3"
    }


def test_the_reasons_are_counted(store: Store) -> None:
    """At a cut before a run begins, and by the tail when its patience ends."""
    odd = [*_odd_group("a"), *fabric.records("open", finished=False)]
    fabric.append(store, odd)
    settings = fabric.config(fabric.GRPO, steps=1, idle_timeout_s=0.2)
    with pytest.raises(IdleError) as raised:
        fabric.train(store, settings, "tail")
    text = str(raised.value)
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


@pytest.mark.more_but("tail")
@pytest.mark.parametrize("source", ["cut", "tail"])
def test_a_sample_that_is_cut(store: Store, source: str) -> None:
    """As far as the context goes it is trained on; the manifest says so, and a replay cuts it there, too."""
    turns = [
        fabric.T(completion=[5] * 63),
        fabric.T(completion=[6] * 40),
        fabric.T(completion=[7] * 40, parent=0),
    ]
    records = [
        record
        for i, turn in enumerate([[turns[0]], [turns[1]], [turns[1], turns[2]]])
        for record in fabric.records(f"a.{i}", turn, group="a", reward=float(i))
    ]
    fabric.append(store, records)
    recipe = {"too_long": "cut"}
    algorithm = {"name": "grpo", "groups": 1, "group_size": 3}
    fabric.train(store, fabric.config(fabric.GRPO, steps=1, recipe=recipe, algorithm=algorithm), source)
    [plan], [commit] = records_of(store, StepPlanned), records_of(store, StepCommitted)
    cut = {ref["turn_id"]: ref.get("tokens") for ref in plan.samples}
    assert cut == {"a.0.0": 64, "a.1.0": None, "a.2.1": 64}
    assert commit.metrics["trained_tokens"] == 62 + 40 + (40 + 20)
    assert records_of(store, SampleDropped) == []
    assert replay_step(store, 0).differs_in is None


def test_within_a_context() -> None:
    """Arrays and turns end together; what fits is the same object."""
    records = fabric.records("a", [fabric.T(), fabric.T((8,), (9, 10, 11), parent=0), fabric.T(parent=1)])
    [sample] = all_samples(fold(fabric.events(records)).values())
    assert sample.turn_ends == (4, 8, 12)
    assert sample.within(12) is sample
    cut = sample.within(7)
    assert (cut.turn_ids, cut.turn_ends, len(cut)) == (("a.0", "a.1"), (4, 7), 7)
    assert cut.tokens.tolist() == [1, 2, 3, 4, 8, 9, 10]
    assert cut.reference == sample.reference | {"tokens": 7}
    assert sample.within(4).turn_ends == (4,)
