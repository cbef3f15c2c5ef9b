"""Rules of early stopping, over values made to meet them or to miss them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.store.errors import ConfigError
from rollbook.store.events import EvalFinished, StepCommitted
from rollbook.train.config.config import StopRule, parse_config
from rollbook.train.loop.judge import EarlyStop, judged_by


@pytest.mark.parametrize(
    ("rule", "values", "judged"),
    [
        ({"above": 1.0}, [2.0], [2.0]),
        ({"above": 1.0}, [2.0, 1.0], None),
        ({"below": 1.0, "patience": 2}, [0.5], None),
        ({"below": 1.0, "patience": 2}, [2.0, 0.5, 0.25], [0.5, 0.25]),
        ({"below": 1.0, "patience": 2}, [0.5, 2.0, 0.25], None),
        ({"better": "lower"}, [3.0, 2.0], None),
        ({"better": "lower"}, [3.0, 2.0, 2.0], [2.0, 2.0]),
        ({"better": "lower", "patience": 2}, [3.0, 2.0, 2.5], None),
        ({"better": "lower", "patience": 2}, [3.0, 2.0, 2.5, 1.0], None),
        ({"better": "lower", "patience": 2}, [3.0, 2.0, 2.5, 2.1], [2.0, 2.5, 2.1]),
        ({"better": "higher", "patience": 2}, [0.1, 0.3, 0.2, 0.3], [0.3, 0.2, 0.3]),
        ({"better": "lower", "min_delta": 0.5}, [3.0, 2.6], [3.0, 2.6]),
        ({"better": "lower", "min_delta": 0.5}, [3.0, 2.4], None),
        ({"better": "higher"}, [], None),
        ({"above": 1.0}, [], None),
    ],
)
def test_when_a_rule_holds(rule: dict[str, Any], values: list[float], judged: list[float] | None) -> None:
    """And by which values."""
    points = judged_by(StopRule(metric="loss", **rule), list(enumerate(values)))
    assert (None if points is None else [value for _, value in points]) == judged


@given(st.lists(st.integers(-3, 3), max_size=12), st.integers(1, 4))
def test_higher_is_lower_turned_round(values: list[int], patience: int) -> None:
    """A rule about the negatives holds when the one about the values does."""
    low, high = (StopRule(metric="loss", better=b, patience=patience) for b in ("lower", "higher"))
    turned = judged_by(high, [(at, float(-value)) for at, value in enumerate(values)])
    points = judged_by(low, [(at, float(value)) for at, value in enumerate(values)])
    assert (points is None) == (turned is None)
    if points is not None and turned is not None:
        assert [at for at, _ in points] == [at for at, _ in turned]
        assert len(points) == patience + 1 or points[0][1] == min(values)


def test_an_evaluation_that_is_not_whole_is_no_value_of_agents() -> None:
    """No rule judges by a part of the trajectories; the loss of held-out samples is whole all the same."""
    rules = [StopRule(metric="evaluation.reward", below=0.5), StopRule(metric="evaluation.loss", above=9.0)]
    early = EarlyStop(rules)
    part = EvalFinished("actor", 1, "p", "", "", 0, 0, 22, 1, 1, {"reward": 0.1, "loss": 1.0}, 32, False)
    early.evaluated(part)
    assert early.values == {"evaluation.loss": [(1, 1.0)]}
    assert early.fired() is None
    early.evaluated(replace(part, policy_version=2, trajectories=32, whole=True))
    assert early.fired() is not None


def test_a_value_that_is_missing_or_not_finite_is_passed_over() -> None:
    """It neither breaks a row nor counts in it."""
    early = EarlyStop([StopRule(metric="entropy", below=1.0, patience=2)])
    for version, value in enumerate([0.5, None, float("nan"), 0.25]):
        assert early.fired() is None
        early.stepped(version, {} if value is None else {"entropy": value})
    fired = early.fired()
    assert fired is not None
    assert fired.values == [(0, 0.5), (3, 0.25)]
    assert fired.text() == "entropy was 0.5, 0.25: below 1"


def test_the_past_counts() -> None:
    """Steps and evaluations of the log, each to its own rules."""
    early = EarlyStop(
        [StopRule(metric="loss", above=5.0), StopRule(metric="evaluation.loss", better="lower")]
    )
    evaluations = [
        EvalFinished("actor", version, "p", "", "", 1, 1, 0, None, None, {"loss": loss})
        for version, loss in ((0, 2.0), (4, 9.0))
    ]
    early.past([StepCommitted(0, 1, "actor", 1, {}, {"loss": 3.0})], evaluations)
    fired = early.fired()
    assert fired is not None
    assert fired.rule.metric == "evaluation.loss"
    assert fired.text() == "evaluation.loss was 9, and never better than 2 at version 0"


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({"metric": "loss"}, "exactly one of above, below and better (got none)"),
        (
            {"metric": "loss", "above": 1.0, "below": 0.0},
            "exactly one of above, below and better (got above and",
        ),
        ({"metric": "loss", "above": 1.0, "min_delta": 0.1}, "min_delta goes with better"),
        ({"metric": "entropi", "below": 0.1}, "metric 'entropi' is none of a step: did you mean entropy?"),
        ({"metric": "evaluation.loss", "below": 0.1}, "there is no [evaluation]"),
        ({"metric": "loss", "better": "smaller"}, "stop.0.better"),
        (
            {"metric": "loss", "below": 0.1, "patients": 2},
            "stop.0.patients: unknown key: did you mean patience?",
        ),
    ],
)
def test_a_rule_that_is_wrong(rule: dict[str, Any], reason: str) -> None:
    """Is an error that names it, when the CONFIG is read."""
    values = {"model": "m", "steps": 3, "algorithm": {"name": "sft"}, "stop": [rule]}
    with pytest.raises(ConfigError, match="stop") as raised:
        parse_config(values, "train.toml")
    assert reason in str(raised.value)


def test_an_algorithm_of_ones_own_may_measure_anything() -> None:
    """So its metrics are not known beforehand, but those of evaluations need evaluations all the same."""
    rule = StopRule(metric="surprise", above=1.0)
    early = EarlyStop([rule])
    early.stepped(1, {"surprise": 2})
    assert early.fired() is not None
