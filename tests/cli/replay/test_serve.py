"""`rollbook replay serve`: which trajectories it takes, what it prints, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from tests.fakes.processes.warm import WarmProcess
from typer.testing import CliRunner

from rollbook.cli.app import app
from rollbook.cli.replay.serve import read_cassette
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.errors import CutError, QueryError
from rollbook.store.ids import new_id
from rollbook.transcript.finding import NotFoundError

NONE = np.empty(0, np.int32)


@pytest.fixture
def recorded(store: Store) -> Store:
    """Two trajectories of one request each, of which the second has a reward."""
    records: list[Any] = []
    for name in ("task-1", "task-2"):
        key, turn_id, messages = f"id-of-{name}", new_id(), [{"role": "user", "content": name}]
        request = (key, turn_id, f"r-{name}", None, "first_turn", None, 0, messages, {"model": "m"}, "m")
        numbers = (None, None, NONE, NONE, None, (), 0, "", "stop")
        reply = {"role": "assistant", "content": f"answer to {name}"}
        records += [
            kinds.TrajectoryOpened(key, name),
            kinds.TurnRequested(*request, {}, {}, "c"),
            kinds.TurnCompleted(key, turn_id, *numbers, reply, {}, [], {}),
        ]
    records.append(kinds.RewardAssigned("id-of-task-2", None, 1.0))
    with store.writer("serve") as writer:
        writer.append([Event(record, "run") for record in records]).result(30)
    return store


@pytest.mark.parametrize(
    ("names", "query", "as_of", "found"),
    [
        (["task-2", "task-1"], None, "head", ["task-2", "task-1"]),
        (["-task-1"], None, "head", ["task-1"]),
        (["task-2"], "select trajectory_id from trajectories", "head", ["task-2", "task-1"]),
        ([], "select trajectory, trajectory_id from trajectories where reward = 1", "head", ["task-2"]),
        ([], "select trajectory_id from trajectories", "serve=3", ["task-1"]),
    ],
)
def test_trajectories_are_named_or_queried(
    recorded: Store, names: list[str], query: str | None, as_of: str, found: list[str]
) -> None:
    """By name, id or its end, or by SQL, as of a cut; each once."""
    cassette = read_cassette(recorded.path, names, query, None, as_of)
    assert [tape.name for tape in cassette.tapes] == found


@pytest.mark.parametrize(
    ("names", "query", "run", "error", "text"),
    [
        (["task-3"], None, None, NotFoundError, "near names: task-1, task-2"),
        ([], "select nothing", None, QueryError, "nothing"),
        (
            [],
            "select run, trajectory from trajectories",
            None,
            QueryError,
            "run, trajectory: select trajectory_id",
        ),
        ([], "select trajectory_id from trajectories where reward > 1", None, QueryError, "no trajectory"),
        (["task-1"], None, "walk", CutError, "no run 'walk'; there are: run"),
    ],
)
def test_what_cannot_be_found_is_said(
    recorded: Store, names: list[str], query: str | None, run: str | None, error: type[Exception], text: str
) -> None:
    """With what there is instead."""
    with pytest.raises(error, match=text):
        read_cassette(recorded.path, names, query, run)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "--trajectory"),
        (["--trajectory", "task-1", "--on-miss", "engine"], "--engine"),
        (["--trajectory", "task-1", "--engine", "http://127.0.0.1:1"], "--on-miss"),
    ],
)
def test_options_that_belong_together(recorded: Store, words: list[str], text: str) -> None:
    """What is missing is named."""
    done = CliRunner().invoke(app, ["replay", "serve", "--store", str(recorded.path), *words])
    assert done.exit_code == 2
    assert text in done.output


def _started(*words: str) -> WarmProcess:
    """`rollbook replay serve WORDS` in a process of its own."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return WarmProcess([sys.executable, "-m", "rollbook", "replay", "serve", *words], text=True, **pipes)


def _lines(out: Any) -> Iterator[Any]:
    for line in out:
        yield orjson.loads(line)


def test_it_prints_what_is_asked_and_what_was_not_recorded(recorded: Store) -> None:
    """A line of JSON for each, and the account at the end; SIGINT ends it."""
    words = ["--store", str(recorded.path), "--trajectory", "task-1", "--port", "0", "--json"]
    process = _started(*words)
    try:
        lines = _lines(process.stdout)
        listening = next(lines)
        assert (listening["event"], listening["requests"]) == ("listening", 1)
        asks = [
            {"model": "m", "messages": [{"role": "user", "content": text}]} for text in ("task-1", "task-9")
        ]
        replies = [httpx.post(f"{listening['url']}/v1/chat/completions", json=ask) for ask in asks]
        assert [r.status_code for r in replies] == [200, 404]
        assert replies[0].json()["choices"][0]["message"]["content"] == "answer to task-1"
        answered, missed = next(lines), next(lines)
        assert (answered["event"], answered["trajectory"], answered["turn"]) == ("answered", "task-1", 1)
        assert (missed["event"], missed["nearest"]["turn"]) == ("not recorded", 1)
        assert missed["nearest"]["differences"][0]["diff"][3:] == ["-task-1", "+task-9"]
        process.send_signal(signal.SIGINT)
        stopped = next(lines)
        assert (stopped["event"], stopped["used"], len(stopped["misses"])) == ("stopped", 1, 1)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.communicate()


def test_a_person_is_shown_the_difference(recorded: Store) -> None:
    """On standard error, as a diff."""
    query = "select trajectory_id from trajectories order by trajectory"
    process = _started("--store", str(recorded.path), "--query", query, "--port", "0")
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == "answering from 2 trajectories, 2 requests\n"
        url = process.stderr.readline().rpartition(" ")[2].partition("/t/")[0]
        ask = {"model": "m", "messages": [{"role": "user", "content": "task-9"}], "temperature": 1}
        assert httpx.post(f"{url}/v1/chat/completions", json=ask).status_code == 404
        shown = [process.stderr.readline() for _ in range(9)]
        assert shown[0] == "not recorded: /v1/chat/completions, 1 messages\n"
        assert shown[6:] == [
            "    -task-1\n",
            "    +task-9\n",
            "  temperature: 1 was asked, nothing is recorded\n",
        ]
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith("0 of 2 recorded requests were asked for, and 1 that")
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.communicate()
