"""Trajectories that were finished as void: another one has their place, and nothing of them is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.forests import SMALL

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.errors import IdleError
from rollbook.store.fold.history import History
from rollbook.store.upkeep.sealer import Sealer
from rollbook.train.sources.source import make_source


def _taken(log: Store, source: str, **changes: Any) -> list[str]:
    """Names of the samples of the next step."""
    values = {"algorithm": {"name": "grpo", "groups": 1, "group_size": 2}, "idle_timeout_s": 0.05}
    config = fabric.config(fabric.GRPO, **(values | changes))
    cut = log.head() if source == "cut" else {}
    reader = make_source(config, log, History(fabric.RUN, "actor"), source, cut, "family", 0)
    selection = reader.take(0, 0, lambda drops: None)
    assert selection is not None
    assert selection.drops == []
    return [sample.name for sample in selection.samples]


def _group(log: Store) -> None:
    """A group of two, of whom the second is in the place of one that failed after its answer."""
    for name, reward, status in (("a", 0.0, "completed"), ("lost", None, "void"), ("b", 1.0, "completed")):
        events = fabric.events(fabric.records(name, group="g", reward=reward, status=status))
        with log.writer("serve", SMALL) as writer:
            for event in events:
                writer.append([event]).result(30)


@pytest.mark.more_but("cut-True", "tail-False")
@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("source", ["cut", "tail"])
def test_another_has_its_place(tmp_path: Path, source: str, *, sealed: bool) -> None:
    """Neither its tokens nor its lack of a reward count in the group."""
    log = rb.open(tmp_path / "store", create=True)
    _group(log)
    if sealed:
        Sealer(log).run_once()
    assert _taken(log, source) == ["a", "b"]
    assert sorted(_taken(log, source, algorithm={"name": "sft", "batch_size": 2})) == ["a", "b"]


def test_while_the_training_looks_on(tmp_path: Path) -> None:
    """One that ends as void after its group's others began takes no place from them."""
    log = rb.open(tmp_path / "store", create=True)
    fabric.append(log, fabric.records("lost", group="g", finished=False))
    config = fabric.config(
        fabric.GRPO, algorithm={"name": "grpo", "groups": 1, "group_size": 2}, idle_timeout_s=0.05
    )
    source = make_source(config, log, History(fabric.RUN, "actor"), "tail", {}, "family", 0)
    with pytest.raises(IdleError):
        source.take(0, 0, lambda drops: None)
    fabric.append(log, [fabric.records("lost", status="void")[-1]])
    for name, reward in (("a", 0.0), ("b", 1.0)):
        fabric.append(log, fabric.records(name, group="g", reward=reward))
    selection = source.take(0, 0, lambda drops: None)
    assert selection is not None
    assert [sample.name for sample in selection.samples] == ["a", "b"]


@pytest.mark.parametrize("sealed", [False, True])
def test_the_ledger_keeps_it_out(tmp_path: Path, *, sealed: bool) -> None:
    """Under a rule of its own."""
    log = rb.open(tmp_path / "store", create=True)
    _group(log)
    if sealed:
        Sealer(log).run_once()
    with rb.connect(log.path) as connection:
        rows = connection.execute("SELECT term, rule, sum(tokens) FROM ledger GROUP BY ALL ORDER BY ALL")
        assert rows.fetchall() == [("kept out", "void", 2), ("waiting", None, 4)]
        splits = connection.execute("SELECT trajectory, split, status FROM trajectories ORDER BY ALL")
        assert splits.fetchall() == [
            ("a", "train", "completed"),
            ("b", "train", "completed"),
            ("lost", "void", "void"),
        ]
