"""The first step at which something holds: by a bound on a metric, and by SQL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.replay.stretch.first_bad import NUMBERS, Predicate, first_step_where, threshold
from rollbook.store import Store
from rollbook.store.errors import QueryError
from rollbook.store.events import StepAbandoned, StepFailed

NORMS = {0: 1.0, 1: 30.0, 2: 4.0, 3: float("nan"), 5: 8.0, 6: 0.5}
"""Step -> gradient norm of those that were committed; 1 was abandoned, 4 failed."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A run of seven steps, and another run. Never write to it."""
    log = rb.open(tmp_path_factory.mktemp("predicates") / "store", create=True)
    records: list[Any] = []
    for step in range(7):
        records.append(fabric.planned(step, step))
        if step == 4:
            records.append(StepFailed(step, 1, "actor", "out of memory"))
        else:
            metrics = {"gradient_norm": NORMS[step], "trained_tokens": 10 + step, "own": step / 2}
            metrics |= {"kl": 0.25} if step >= 5 else {}
            records.append(replace(fabric.committed(step, step + 1), metrics=metrics))
    records.append(StepAbandoned(1, 1, "actor", 2, 1, 9))
    fabric.append(log, records, "train")
    other = [fabric.planned(0, 0), replace(fabric.committed(0, 1), metrics={"gradient_norm": 99.0})]
    fabric.append(log, other, "train2", run="other")
    return log


@pytest.mark.parametrize(
    ("bounds", "step"),
    [
        ({"above": 0.9}, 0),
        ({"above": 3}, 2),
        ({"above": 4}, 5),
        ({"above": 9}, None),
        ({"below": 0.9}, 6),
        ({"below": 0.5}, None),
        ({"above": 5, "below": 2}, 0),
        ({"below": float("inf")}, 0),
        ({"above": float("-inf")}, 0),
    ],
)
def test_a_bound(log: Store, bounds: dict[str, float], step: int | None) -> None:
    """The first committed step beyond it: what was abandoned or failed is passed over, and so is NaN."""
    assert first_step_where(log, "demo", "actor", threshold("gradient_norm", **bounds)) == step


@pytest.mark.parametrize(
    ("condition", "step"),
    [
        ("gradient_norm > 3 AND trained_tokens > 12", 5),
        ("kl > 0.1 -- a comment", 5),
        ("kl IS NULL AND step > 0", 2),
        ("(metrics->>'$.own')::DOUBLE >= 2.5", 5),
        ("output_version = 7 AND attempt = 1", 6),
        ("false", None),
    ],
)
def test_a_condition(log: Store, condition: str, step: int | None) -> None:
    """Over the columns of `metrics` and of `steps`; what was not recorded does not hold."""
    assert first_step_where(log, "demo", "actor", Predicate(condition)) == step


def test_of_one_run_and_policy(log: Store) -> None:
    """Steps of others are not looked at; nor are those after the cut."""
    wild = threshold("gradient_norm", above=50)
    assert first_step_where(log, "other", "actor", wild) == 0
    assert first_step_where(log, "demo", "critic", wild) is None
    assert first_step_where(log, "demo", "actor", threshold("kl", above=0.1)) == 5
    assert first_step_where(log, "demo", "actor", threshold("kl", above=0.1), as_of="train=9") is None


def test_no_such_metric() -> None:
    """An unknown name gets near ones; a metric needs a bound."""
    with pytest.raises(QueryError, match="no metric 'grad_norm'; near names: gradient_norm"):
        threshold("grad_norm", above=1)
    with pytest.raises(QueryError, match="no metric 'status'"):
        threshold("status", above=1)
    with pytest.raises(QueryError, match="say what it should be above, or below"):
        threshold("loss")


@pytest.mark.parametrize("condition", ["", "nope > 1", "gradient_norm >", "true); SELECT (1", "true) --"])
def test_no_condition(log: Store, condition: str) -> None:
    """What is no condition is refused, and so are several statements."""
    with pytest.raises(QueryError):
        first_step_where(log, "demo", "actor", Predicate(condition))


@given(st.sampled_from(NUMBERS), st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_any_bound_is_one_condition(metric: str, above: float, below: float) -> None:
    """Of any finite or infinite bounds DuckDB reads two comparisons."""
    condition = threshold(metric, above=above, below=below).condition
    value = duckdb.execute(f"SELECT {condition} FROM (SELECT 0.0::DOUBLE AS {metric})").fetchall()
    assert value == [(above < 0.0 or below > 0.0,)]
