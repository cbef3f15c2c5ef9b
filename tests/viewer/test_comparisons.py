"""Comparisons of runs, versions, steps and rules give the numbers that SQL and the trainer give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories.records import turn_completed, turn_requested
from tests.viewer.conftest import Viewer

from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.events import VersionSpan
from rollbook.viewer.comparisons import interval_of

STEP, BEFORE = 11, 10


def attempt(run: str, task: str | None, reward: float, version: int = 0, **opened: Any) -> list[Event]:
    """A finished trajectory of one turn by a version."""
    name = f"{run}-{task}-{reward}-{version}-{opened}"
    span = VersionSpan("actor", version, 0, 1)
    completed = turn_completed(
        name, "t", policy_version=version, version_spans=(span,), completion_ids=np.zeros(1, np.int32)
    )
    records = [
        kinds.TrajectoryOpened(name, name, task=task, **opened),
        turn_requested(name, "t"),
        completed,
        kinds.RewardAssigned(name, None, reward),
        kinds.TrajectoryFinished(name, "completed", None),
    ]
    return [Event(record, run) for record in records]


@pytest.fixture
def runs(store: Store, view: Callable[..., Viewer]) -> Viewer:
    """Two runs on tasks of which they share two; the first has two versions."""
    events = [
        *attempt("a", "x", 0.0),
        *attempt("a", "x", 1.0, version=3),
        *attempt("a", "y", 1.0),
        *attempt("a", "only a", 1.0),
        *attempt("b", "x", 1.0),
        *attempt("b", "y", 0.0),
        *attempt("b", "y", 0.5),
        *attempt("b", None, 1.0, group="only b"),
        *attempt("b", "x", 0.0, split="eval"),
    ]
    with store.writer("serve") as writer:
        writer.append(events).result(30)
    return view(store)


def test_two_runs_on_the_same_tasks(runs: Viewer) -> None:
    """Means of tasks, not of trajectories; those that differ most first; what one did alone is counted."""
    page = runs.json("/compare/tasks", left="a", right="b")
    assert (page["shared"], page["alone"], page["means"]) == (2, [1, 1], [0.75, 0.625])
    assert [(t["task"], t["left"], t["right"], t["trajectories"]) for t in page["tasks"]] == [
        ("y", 1.0, 0.25, [1, 2]),
        ("x", 0.5, 1.0, [2, 1]),
        ("only a", 1.0, None, [1, 0]),
        ("only b", None, 1.0, [0, 1]),
    ]
    assert page["difference"] == pytest.approx(-0.125)
    assert page["interval"] == pytest.approx(interval_of(np.array([-0.75, 0.5])))
    assert "only b" in runs.html("/compare/tasks", left="a", right="b")


def test_two_versions_of_one_run(runs: Viewer) -> None:
    """By the newest version of each trajectory."""
    page = runs.json("/compare/tasks", left="a", right="a", left_last=2, right_first=3)
    first = page["tasks"][0]
    assert (first["task"], first["left"], first["right"]) == ("x", 0.0, 1.0)
    assert (page["shared"], page["difference"], page["interval"]) == (1, 1.0, None)
    assert runs.get("/compare/tasks", left_first="many").status_code == 400


def test_the_interval_is_that_of_the_mean() -> None:
    """Of ten numbers, by hand; as wide as 1.96 standard errors on either side."""
    values = np.arange(10.0)
    error = np.sqrt(((values - 4.5) ** 2).sum() / 9 / 10)
    assert interval_of(values) == pytest.approx((4.5 - 1.96 * error, 4.5 + 1.96 * error))
    assert interval_of(values[:1]) is None


def test_two_steps(trained_view: Viewer) -> None:
    """A GRPO step beside the one before: what differs of their settings is all that does."""
    query = {"left": f"demo/actor/{BEFORE}", "right": f"demo/actor/{STEP}"}
    page = trained_view.json("/compare/steps", **query)
    alike = trained_view.json("/compare/steps", left=query["left"], right=query["left"])
    assert (alike["settings"], alike["alone"], set(alike["digests"].values())) == ([], [0, 0], {True})
    assert page["digests"]["weights"] is False
    losses = trained_view.json("/runs/demo/curves/actor")["metrics"]["loss"]
    assert page["metrics"]["loss"] == [losses[BEFORE], losses[STEP]]
    assert trained_view.get("/compare/steps", **query).status_code == 200
    for wrong in ("demo/actor", "demo/actor/x", ""):
        assert trained_view.get("/compare/steps", left=wrong, right=query["left"]).status_code == 400
    assert trained_view.get("/compare/steps", left="demo/actor/99", right=query["left"]).status_code == 404


def test_the_advantages_of_another_rule(trained_view: Viewer) -> None:
    """Without changes they are the recorded ones; without a deviation they are rewards less one number."""
    path = f"/runs/demo/steps/actor/{STEP}/what-if"
    same = trained_view.json(path)
    assert (same["proven"], same["why"], same["advantages"]["mean"]) == (True, "", 0.0)
    other = trained_view.json(path, set="algorithm.deviation=none")
    assert other["why"] == ""
    groups: dict[str, list[Any]] = {}
    for sample in other["samples"]:
        groups.setdefault(sample["group"], []).append(sample["other"])
    assert any(len(members) > 1 for members in groups.values())
    for members in groups.values():  # less one number: the mean also counts members that were dropped
        gaps = [member["reward"] - member["advantage"] for member in members]
        assert gaps == pytest.approx([gaps[0]] * len(gaps), abs=1e-6)
    recorded = [sample["recorded"]["advantage"] for sample in other["samples"]]
    assert recorded == [sample["recorded"]["advantage"] for sample in same["samples"]]
    assert "by these keys" in trained_view.html(path)


@pytest.mark.parametrize(
    ("keys", "words"), [("algorithm.foo=1", "unknown key"), ("algorithm.name=ppo", "critic"), ("x", "--set")]
)
def test_a_rule_that_cannot_be(trained_view: Viewer, keys: str, words: str) -> None:
    """It is said on the page."""
    page = trained_view.json(f"/runs/demo/steps/actor/{STEP}/what-if", set=keys)
    assert words in page["why"]
    assert words in trained_view.html(f"/runs/demo/steps/actor/{STEP}/what-if", set=keys)
