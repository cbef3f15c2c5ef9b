"""The pytest plugin: tests of a user's, run by a pytest of their own, are answered from a recording."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.ids import new_id
from rollbook.store.interchange.export import export_store

MODULE = "rollbook.testing.pytest_cassette"
NONE = np.empty(0, np.int32)
OTHERS = ("anyio", "hypothesispytest", "schemathesis", "xdist")
"""Plugins of pytest."""
TESTS = '''
import os
import sys

import openai
import pytest

STORE, FILE = os.environ["THE_STORE"], os.environ["THE_FILE"]


def ask(text):
    """One request of an agent that knows nothing of tests."""
    said = [{"role": "user", "content": text}]
    with openai.OpenAI(max_retries=0) as client:
        return client.chat.completions.create(model="m", messages=said).choices[0].message.content


def test_before():
    assert "OPENAI_BASE_URL" not in os.environ
    assert not [name for name in sys.modules if name.startswith("rollbook.") and "testing" not in name]


def test_by_call(rollbook_cassette):
    played = rollbook_cassette(STORE, trajectory="task-1")
    assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"] == played.base_url
    assert ask("2+2?") == "4"
    assert played.unused == ["turn 2 of task-1"]
    with pytest.raises(AssertionError, match="turn 2 of task-1"):
        played.assert_all_used()
    assert ask("sure?") == "yes"
    played.assert_all_used()
    played.assert_no_misses()


@pytest.mark.rollbook_cassette(STORE, query="select trajectory_id from trajectories")
def test_by_marker():
    assert ask("2+2?") == "4"


def test_of_an_exported_file(rollbook_cassette):
    played = rollbook_cassette(FILE)
    assert (ask("2+2?"), ask("sure?")) == ("4", "yes")
    played.assert_all_used()


def test_that_allows_misses(rollbook_cassette):
    played = rollbook_cassette(STORE, allow_misses=True)
    with pytest.raises(openai.NotFoundError):
        ask("2+3?")
    assert "-2+2?" in played.misses[0]
    with pytest.raises(AssertionError, match="not recorded"):
        played.assert_no_misses()


@pytest.mark.rollbook_cassette(STORE)
def test_that_hides_a_miss():
    try:
        ask("2+3?")
    except openai.NotFoundError:
        pass


def test_after():
    assert "OPENAI_BASE_URL" not in os.environ
    assert "torch" not in sys.modules
'''


@pytest.fixture
def recorded(store: Store) -> Store:
    """A store with one trajectory of two requests."""
    records: list[Any] = [kinds.TrajectoryOpened("id-task-1", "task-1")]
    for number, (question, answer) in enumerate([("2+2?", "4"), ("sure?", "yes")]):
        turn_id, messages = new_id(), [{"role": "user", "content": question}]
        place = ("id-task-1", turn_id, f"r{number}", None, "first_turn", None, 0, messages)
        records.append(kinds.TurnRequested(*place, {"model": "m"}, "m", {}, {}, "c"))
        numbers = (None, None, NONE, NONE, None, (), 0, "", "stop")
        reply = {"role": "assistant", "content": answer}
        records.append(kinds.TurnCompleted("id-task-1", turn_id, *numbers, reply, {}, [], {}))
    with store.writer("serve") as writer:
        writer.append([Event(record, "run") for record in records]).result(30)
    return store


def test_tests_are_answered_from_a_recording(recorded: Store, tmp_path: Path, root: Path) -> None:
    """By call, by marker, from a store and a file; a miss that a test hides fails it; no torch comes in."""
    export_store(recorded.path, tmp_path / "chats.jsonl", "jsonl")
    (tmp_path / "test_agent.py").write_text(TESTS)
    environment = os.environ | {
        "PYTHONPATH": str(root / "src"),
        "THE_STORE": str(recorded.path),
        "THE_FILE": str(tmp_path / "chats.jsonl"),
    }
    for name in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    installed = any(point.value == MODULE for point in entry_points(group="pytest11"))
    loaded = [] if installed else ["-p", MODULE]
    # Others that are installed here would take most of the time.
    others = [word for name in OTHERS for word in ("-p", f"no:{name}")]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--durations=12",
        "--strict-markers",
        "-p",
        "no:cacheprovider",
        *loaded,
        *others,
    ]
    done = subprocess.run(
        [*command, "test_agent.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "7 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "ERROR test_agent.py::test_that_hides_a_miss" in done.stdout
    assert "requests that were not recorded:" in done.stdout
    assert "+2+3?" in done.stdout


def test_the_plugin_is_installed_with_the_package(
    root: Path, run_python: Callable[..., tuple[int, str, str]]
) -> None:
    """Under its name; and importing it, as every run of pytest does, brings in nothing heavy."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {"pytest11": {"rollbook_cassette": MODULE}}
    code = f"import pytest, sys; before = set(sys.modules); import {MODULE}\n"
    code += "print(sorted(n for n in set(sys.modules) - before if not n.startswith('rollbook')))"
    status, out, err = run_python(code)
    assert (status, err) == (0, "")
    assert out.strip() == "[]"
