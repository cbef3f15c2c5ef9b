"""Preflight tries a reward function of the user's own on recorded completions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.store.events import Json
from rollbook.train.doctor.reward_function import MOST, Completion, completions, reward_function

MODULE = """
import time

def second(row):
    print("printed")
    return row["tokens"]["input_ids"][1] % 2

def constant(row):
    return 1

def broken(row):
    return row["answer"]

def sometimes(row):
    if row["trajectory"] == "3":
        raise SystemExit("left")
    return float(row["trajectory"]) / 10

def nan(row):
    return float("nan") if row["trajectory"] == "3" else float(row["trajectory"])

def words(row):
    return "good" if row["trajectory"] == "3" else float(row["trajectory"])

async def later(row):
    return 1.0

def group(row):
    return row["group_number"]

def seldom(row):
    return row["trajectory"] == "3"

def mostly_flat(row):
    return row["group_number"] + (row["trajectory"] == "3")

def slow(row):
    time.sleep(0 if row["trajectory"] < "2" else 60)
    return float(row["trajectory"])

def stuck(row):
    time.sleep(60)

NUMBER = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of reward functions in the current folder; another in each test, for what was
    imported stays."""
    name = f"rewards_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def _row(i: int) -> Json:
    return {"trajectory": str(i), "group_number": i // 2, "tokens": {"input_ids": [5, i]}}


FEW = [Completion(f"g{i // 2}", _row(i)) for i in range(8)]
MANY = [Completion(None, _row(i)) for i in range(40)]
CASES = [
    ("second", FEW, "green", "8 rewards, mean 0.5, deviation 0.5, most often 0 (50%); 0 of 4 groups"),
    ("constant", FEW, "red", "all are equal"),
    ("broken", FEW, "red", "8 of them raised exceptions, 8 times KeyError('answer')"),
    ("sometimes", FEW, "red", "1 of them raised exceptions, 1 times SystemExit('left')"),
    ("nan", FEW, "red", "1 rewards are not finite"),
    ("words", FEW, "red", "1 of them gave no number, 1 times 'good'"),
    ("later", FEW, "red", "8 of them gave no number, 8 times coroutine"),
    ("seldom", MANY, "yellow", "nearly all are equal"),
    ("group", FEW, "red", "no step would have a gradient"),
    (
        "mostly_flat",
        FEW,
        "yellow",
        "3 of 4 groups have one reward throughout; most groups have no advantages",
    ),
    ("nowhere", FEW, "red", "cannot be loaded"),
    ("NUMBER", FEW, "red", "is no function: it is int"),
    ("second", [], "yellow", "no finished trajectory with a completion to try it on"),
]


@pytest.mark.parametrize(("name", "asked", "verdict", "words"), CASES)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_what_it_gives(module: str, name: str, asked: list[Completion], verdict: str, words: str) -> None:
    """Mean and deviation, the share that is equal, what is not finite, exceptions."""
    check = reward_function(f"{module}:{name}", asked)
    assert (check.verdict, words in check.said) == (verdict, True), check
    assert verdict == "green" or check.lever


def test_a_name_that_is_none() -> None:
    """Is said to be none."""
    check = reward_function("rewards.score", FEW)
    assert (check.verdict, check.said) == (
        "red",
        "'rewards.score' names no function: write --reward module:function",
    )


def test_the_time_is_bounded(module: str) -> None:
    """What was answered in time is told; a function that never returns is left."""
    began = time.monotonic()
    slow = reward_function(f"{module}:slow", FEW, patience_s=0.5)
    stuck = reward_function(f"{module}:stuck", FEW, patience_s=0.1)
    assert time.monotonic() - began < 30
    assert (slow.verdict, "2 rewards" in slow.said) == ("yellow", True)
    assert "no answer to 6 of them within 0.5 s" in slow.said
    assert (stuck.verdict, "no answer to 8 of them" in stuck.said) == ("red", True)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "reward_function")


def test_the_completions(tmp_path: Path) -> None:
    """Finished trajectories of the recipe's split with a completed turn, so many of them, in whole groups:
    each by its last path as `rollbook export` writes it."""
    log = rb.open(tmp_path / "store", create=True)
    records = [
        record
        for g in range(30)
        for i in range(4)
        for record in fabric.records(f"g{g}.{i}", group=f"g{g}", reward=float(i))
    ]
    records += fabric.records("open", finished=False) + fabric.records("failed", [fabric.T(failed=True)])
    fabric.append(log, records + fabric.records("held-out", split="eval"))
    config = fabric.config(fabric.GRPO)
    picked = completions(log, log.head(), config)
    assert len(picked) == MOST == 64
    members: dict[str | None, set[str]] = {}
    for completion in picked:
        members.setdefault(completion.group, set()).add(completion.row["trajectory"])
    assert [len(names) for names in members.values()] == [4] * 16
    assert members["demo/" + sorted(members[picked[0].group])[0].split(".")[0]] == members[picked[0].group]
    assert picked[0].row["tokens"]["input_ids"] == [1, 2, 3, 4]
    assert completions(log, log.head(), config) == picked
    other = completions(log, log.head(), fabric.config(fabric.GRPO, seed=4))
    assert [completion.row["trajectory"] for completion in other] != [
        completion.row["trajectory"] for completion in picked
    ]


def test_the_command(recorded_path: Path, module: str, tmp_path: Path, cli: Callable[..., Any]) -> None:
    """The check is one more; what the function prints is not among the answer; without a store it cannot
    be."""
    path = tmp_path / "c.toml"
    path.write_text(fabric.toml(fabric.config(fabric.GRPO)))
    code, out, err = cli(
        "preflight", path, "--store", recorded_path, "--reward", f"{module}:second", "--json"
    )
    checks = {check["name"]: check for check in orjson.loads(out)}
    assert (code, checks["reward_function"]["verdict"]) == (0, "green"), checks
    assert f"{module}:second on 24 recorded completions" in checks["reward_function"]["said"]
    assert err.count("printed") == 24
    code, out, _ = cli("preflight", path, "--store", recorded_path, "--reward", f"{module}:broken")
    assert (code, "24 times KeyError" in " ".join(out.split())) == (1, True)
    code, _, err = cli("preflight", path, "--reward", f"{module}:second")
    assert (code, "on recorded completions" in err) == (2, True), err
