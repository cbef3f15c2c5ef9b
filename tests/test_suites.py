"""Every suite is one of `.ci/run`'s steps, and what one leaves out another runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def _targets(root: Path) -> dict[str, str]:
    """Target of the Makefile -> its commands, of those that run tests."""
    text = (root / "Makefile").read_text()
    return dict(re.findall(r"^(test[a-z-]*):.*\n((?:\t.*\n)+)", text, re.MULTILINE))


def test_all_suites_are_run(root: Path) -> None:
    """By `.ci/run`; and the README names each but that of the benchmarks."""
    steps = set(re.findall(r"make (test[a-z-]*)", (root / ".ci/run").read_text()))
    assert steps == set(_targets(root))
    named = set(re.findall(r"make (test[a-z-]*)", (root / "README.md").read_text()))
    assert named == steps - {"test-bench"}


@pytest.mark.parametrize("mark", ["crashes", "ranks", "service", "more"])
def test_what_is_left_out_is_run_elsewhere(root: Path, mark: str) -> None:
    """A mark takes a test out of one suite, and its own suite finds it."""
    targets = _targets(root)
    assert f"not {mark}" in targets["test"]
    assert f"$(call MARKED,{mark})" in targets[f"test-{mark}"]
    assert not re.search(rf"not {mark}\b", targets[f"test-{mark}"])


@settings(max_examples=40)
@given(st.integers())
def test_a_property_of_forty_examples(value: int) -> None:
    """What the next test looks at."""
    assert value == value


def test_few_examples_where_they_are_asked_for(request: pytest.FixtureRequest) -> None:
    """`make test` caps what a property gives itself; every other suite takes all."""
    few = request.config.getoption("--hypothesis-profile") == "few"
    own = test_a_property_of_forty_examples._hypothesis_internal_use_settings  # type: ignore[attr-defined]
    assert own.max_examples == (10 if few else 40)


def test_what_stays_is_there(request: pytest.FixtureRequest, kept_parameters: dict[str, int]) -> None:
    """Every `more_but` names parameters that its test has: with another name, all of them would be `more`."""
    if any("::" in argument for argument in request.config.args):
        pytest.skip("only some tests were asked for")
    assert [test for test, kept in kept_parameters.items() if not kept] == []
