"""examples/arithmetic: a program and a class on the same tasks, a GRPO step on each, replayed bit for bit."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollbook import store as rb
from rollbook.demo.model import make_model
from rollbook.demo.processes import Server, rollbook_command
from rollbook.replay.stretch import history_of, prove_stretch
from rollbook.store import Store

HERE = Path(__file__).parents[2]
EXAMPLE = HERE / "examples" / "arithmetic"


def rollbook(folder: Path, *words: object) -> Any:
    """A command's JSON, from a folder in which `examples` is."""
    environment = os.environ | {"PYTHONPATH": str(HERE / "src"), "OMP_NUM_THREADS": "1"}
    command = [*rollbook_command(), *map(str, words)]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=200)
    assert ran.returncode == 0, ran.stderr.decode()[-2000:] + ran.stdout.decode()[-500:]
    return ran.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, dict[str, Any]]:
    """The store after both rollouts and two steps, and what the rollouts said."""
    folder = tmp_path_factory.mktemp("arithmetic")
    (folder / "examples").symlink_to(HERE / "examples")
    make_model(folder / "my-model", 0)
    options = ["--store", folder / "runs", "--model", folder / "my-model", "--run", "arithmetic"]
    said = {}
    with Server("serve", folder, *options, "--threads", 1, "--no-admission") as server:
        server.await_ready()
        for name in ("program", "class"):
            words = ["rollout", f"examples/arithmetic/{name}.toml", "--json", "--set", "limit=2"]
            words += ["--set", f'proxy="{server.url}"', "--set", 'agent.isolation="session"']
            said[name] = orjson.loads(rollbook(folder, *words))
    grpo = [EXAMPLE / "grpo.toml", "--store", folder / "runs", "--source", "tail"]
    rollbook(folder, "train", *grpo)
    return rb.open(folder / "runs"), said


def test_both_ways_give_the_same_log(trained: tuple[Store, dict[str, Any]]) -> None:
    """Groups of four of each task, exact tokens with their versions, and rewards."""
    log, said = trained
    for name in ("program", "class"):
        assert (said[name]["done"], said[name]["by_status"], said[name]["rewarded"]) == (8, {"done": 8}, 8)
    with rb.connect(log.path) as connection:
        query = """
            SELECT rollout, t."group", count(*), count(DISTINCT t.reward) > 1, min(t.fidelity),
                   min(t.min_version)
            FROM launches l JOIN trajectories t USING (trajectory_id) GROUP BY ALL ORDER BY ALL"""
        rows = connection.execute(query).fetchall()
        assert [(row[0], row[1].split(".")[-1]) for row in rows] == [
            (name, task) for name in ("class", "program") for task in ("minus", "plus")
        ]
        assert {row[2:] for row in rows} == {(4, True, "exact", 0)}
        parts = connection.execute("SELECT DISTINCT source FROM rewards ORDER BY 1").fetchall()
    assert parts == [("agent",), ("brief",), ("correct",)]


def test_its_steps_replay_bit_for_bit(trained: tuple[Store, dict[str, Any]]) -> None:
    """Two groups each."""
    log, _ = trained
    found = prove_stretch(log, history_of(log, None, "actor"), 0, 1)
    assert [one.replay is not None and one.replay.bit_for_bit for one in found.steps] == [True, True]
    taken = {
        ref["trajectory_id"]
        for s in history_of(log, None, "actor").steps.values()
        for ref in s.planned.samples
    }
    assert len(taken) == 16


def test_the_program_knows_nothing_of_rollbook() -> None:
    """It is of Python's own library, and no longer than 60 lines."""
    text = (EXAMPLE / "agent.py").read_text()
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name.partition(".")[0] for node in imported for alias in node.names}
    assert names <= sys.stdlib_module_names
    assert len(text.splitlines()) <= 60
