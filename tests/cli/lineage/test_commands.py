"""`rollbook lineage`: what it prints, and what it says of what is not there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.lineage import A, B

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.events import RunOpened

Told = Callable[..., str]


@pytest.fixture
def lineage(
    cli: Callable[..., tuple[int, str, str]], lineages: Store, monkeypatch: pytest.MonkeyPatch
) -> Told:
    """What `rollbook lineage ...` prints of the story, which it must; a space between the cells of a row."""
    monkeypatch.setenv("COLUMNS", "300")

    def run(*words: object) -> str:
        code, out, err = cli("lineage", *words, "--store", lineages.path)
        assert (code, err) == (0, ""), err
        return _of_single_spaces(out)

    return run


def _of_single_spaces(out: str) -> str:
    return re.sub(r" +", " ", re.sub(r" +$", "", out, flags=re.MULTILINE))


@pytest.fixture
def refused(cli: Callable[..., tuple[int, str, str]], lineages: Store) -> Told:
    """What `rollbook lineage ...` says of bad input."""

    def run(*words: object) -> str:
        code, out, err = cli("lineage", *words, "--store", lineages.path)
        assert (code, out) == (2, "")
        return " ".join(err.replace("│", " ").split())

    return run


def test_a_trajectory(lineage: Told) -> None:
    """Both ways, a row each."""
    output = lineage("trajectory", "one")
    assert "run demo, split train, completed, written by serve" in output
    assert re.search(rf"^actor v0 {A} \d{{4}}-\d\d-\d\d \S+ serve=0 read by itself$", output, re.MULTILINE)
    assert re.search(rf"^actor v1 {A} .* {A}/1 by tensor finished 4096 0.25$", output, re.MULTILINE)
    assert f"actor v1 {B} never {B}/1 by tensor failed timed out" in output
    assert re.search(r"^agent 0.25 serve=\d+ step 0$", output, re.MULTILINE)
    assert re.search(r"^judge 1 .*serve=\d+ no step that trained on it$", output, re.MULTILINE)
    assert "turns, 7 sampled tokens (7 trained): 3" in output
    assert "step attempt status sample place rank micro with loss version\n" in output
    assert "actor 0 1 committed one.1 0 0 0 4 v0 to v1" in output
    assert "descendants: v2 to v5, 4 versions, 1 of them abandoned" in output
    assert "reward 0.75" in output
    assert "actor v4 w2 v2 renumbered c/4" in output


@pytest.mark.more
def test_an_adopted_and_a_dropped_one(lineage: Told) -> None:
    """The lanes in order, and the rule."""
    output = lineage("trajectory", "four")
    assert "written by serve then other" in output
    assert "completed 2 no known version kept out no version" in output
    assert "staleness 0 1 committed two." in lineage("trajectory", "two")
    assert "compared with, not trained on, by: 1" in lineage("trajectory", "six")


def test_a_sample(lineage: Told) -> None:
    """The turns of its path."""
    output = lineage("sample", "one.2")
    assert "turns, 5 sampled tokens (5 trained): 2" in output
    assert "one.1" not in output


def test_a_token(lineage: Told) -> None:
    """By its turn or its trajectory; what a step made of it, and why."""
    output = lineage("token", "one:6")
    assert output == lineage("token", "one.2:2")
    assert "id 7, logprob -1.0000" in output
    assert "\ntrained actor 0 1 committed one.2" in output
    output = lineage("token", "three.0:2")
    assert "no committed step trained on it" in output
    assert "not trained: cut off actor 1 2 committed" in output


def test_a_step_and_a_version(lineage: Told) -> None:
    """From and to."""
    output = lineage("step", 1)
    assert "committed, attempt 2, planned at other=5,serve=" in output
    assert "attempt status error\n1 failed out of memory" in output.replace("\n ", "\n")
    assert re.search(r"^ ?0 three three.1 2 serve=\d+ ", output, re.MULTILINE)
    assert re.search(r"^ ?2 3 actor v1 ", output, re.MULTILINE)
    assert "steps that consumed samples with them: 1" in output
    assert "samples dropped: 1 by staleness" in lineage("step", 0)
    output = lineage("policy", 5)
    assert "made from: v4 to v0, 4 versions" in output
    assert "no earlier version" in lineage("policy", 0)


def test_long_lists_are_shortened(
    cli: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To their first eight, unless all are asked for."""
    monkeypatch.setenv("COLUMNS", "300")
    store = fabric.trained_path()
    _, short, _ = cli("lineage", "step", 10, "--store", store)
    _, full, _ = cli("lineage", "step", 10, "--store", store, "--full")
    assert "and 4 more: --full" in short
    rows = [
        re.findall(r"^ +\d+ +\S+ .* train=|^ +\d+  \S+ +\S+ +\d+ +\S+=\d+ ", out, re.MULTILINE)
        for out in (short, full)
    ]
    assert [len(matches) for matches in rows] == [8, 12]
    _, output, _ = cli("lineage", "policy", 12, "--store", store)
    assert "made from: v11 to v0, 12 versions" in output
    assert [f"actor v{n} " in output.split("made from")[1] for n in (10, 8)] == [False, True]


@pytest.mark.more_but("words3-*")
@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (("trajectory", "one"), {"trajectory_id": "one", "sample": None, "lanes": ["serve"]}),
        (("sample", "one.2"), {"trajectory_id": "one", "sample": "one.2"}),
        (("token", "one:6"), {"token_id": 7, "index": 2, "reached": True, "logprob": -1.0}),
        (("step", 1), {"step": 1, "attempt": 2, "drops": {}, "status": "committed"}),
        (("policy", 5), {"sampled": {"trajectories": 0, "turns": 0, "tokens": 0}}),
    ],
)
def test_json(lineage: Told, words: tuple[Any, ...], keys: dict[str, Any]) -> None:
    """All of it, for machines."""
    value = orjson.loads(lineage(*words, "--json"))
    assert {key: value[key] for key in keys} == keys


def test_at_an_earlier_cut(cli: Callable[..., tuple[int, str, str]], lineages: Store) -> None:
    """What came later is not there: neither the later versions nor the late reward."""
    planned = next(
        e for e in rb.open(lineages.path).events() if e.kind == "step.planned" and e.record.step == 1
    )
    cut = f"{planned.record.cut},train={planned.seq}"
    code, out, _ = cli("lineage", "trajectory", "one", "--store", lineages.path, "--as-of", cut, "--json")
    value = orjson.loads(out)
    assert code == 0
    assert [v["version"] for v in value["made"]] == [1]
    assert (value["descendants"], [r["reward"] for r in value["rewards"]]) == ([], [0.25])


@pytest.mark.more_but(*(f"words{place}-*" for place in (0, 3, 5, 6, 7, 9)))
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("trajectory", "on"), "no trajectory 'on' among 6; near names: one; list them: rollbook sql"),
        (("trajectory", "one", "--run", "nope"), "no run 'nope'; there are: demo"),
        (("sample", "nope"), "no turn 'nope': give the id of a sample's last turn"),
        (("sample", "one.0"), "the leaves of its samples are: one.1, one.2"),
        (("token", "one"), "'one' is not TURN:INDEX or TRAJECTORY:INDEX, such as task-7:0"),
        (("token", "nope:1"), "no turn 'nope', and no trajectory 'nope' among 6"),
        (("token", "one:99"), "trajectory 'one' has no sampled token 99: its tokens are 0 to 6"),
        (("step", 9), "this store has no step 9 of policy 'actor'; list them: rollbook sql"),
        (("policy", 9, "--policy", "critic"), "this store has no version 9 of policy 'critic'; list them"),
        (("step", 1, "--as-of", "serve=1"), "this store has no step 1"),
    ],
)
def test_what_is_not_there(refused: Told, words: tuple[Any, ...], reason: str) -> None:
    """The thing, and the remedy; exit code 2."""
    assert reason in refused(*words)


@pytest.mark.more_but("step")
@pytest.mark.parametrize("what", [("step", 0), ("policy", 1)], ids=["step", "policy"])
def test_a_step_of_several_runs(
    cli: Callable[..., tuple[int, str, str]], tmp_path: Path, what: tuple[str, int]
) -> None:
    """The runs are named; --run chooses."""
    log = rb.open(tmp_path / "store", create=True)
    for run in ("a", "b"):
        records = [RunOpened("train", {}), fabric.planned(0, 0), fabric.committed(0, 1)]
        fabric.append(log, records, f"train-{run}", run)
    code, _, err = cli("lineage", *what, "--store", log.path)
    assert (code, "runs a, b each have a" in " ".join(err.split())) == (2, True)
    assert cli("lineage", *what, "--store", log.path, "--run", "b")[0] == 0
