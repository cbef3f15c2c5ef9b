"""SQL over a store with one of everything: exact rows of every view, and the `sql` command."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from rollbook import store as rb
from rollbook.cli import app as cli
from rollbook.store import Event, Store
from rollbook.store.errors import CutError, NotAStoreError
from rollbook.store.events import PreferenceAdded, RewardAssigned, StepPlanned, TrajectoryOpened
from rollbook.store.events.schema import LOG_SCHEMA
from rollbook.store.fold.trajectory import fold
from rollbook.store.spill import private_database
from rollbook.store.sql.views import VIEWS

EPOCH = datetime(2023, 11, 14, 22, 13, 20)


def _at(second: int) -> datetime:
    return EPOCH + timedelta(seconds=second)


def _rows(store: Store, query: str, **options: Any) -> list[tuple[Any, ...]]:
    return rb.connect(store.path, **options).execute(query).fetchall()


def test_the_views_are_the_documented_ones() -> None:
    """Every view has its name, a sentence, and only reads views before it."""
    names = ["events", "runs", "rewards", "preferences", "turns", "trajectories", "tokens"]
    names += ["outliers", "paths", "bodies", "launches"]
    names += ["policies", "syncs", "activations", "steps", "evaluations", "metrics", "samples", "drops"]
    names += ["lineage", "ledger"]
    assert [v.name for v in VIEWS] == names
    assert all(v.doc.endswith(".") for v in VIEWS)


@pytest.mark.more_but("*show tables)")
@pytest.mark.parametrize(
    "listing",
    [
        "select name from (show tables)",
        "select name from (show all tables) where schema = 'main'",
        "select table_name from information_schema.tables where table_schema = 'main'",
    ],
)
def test_only_the_views_are_listed(story_store: Store, listing: str) -> None:
    """What the views read stands in a schema of its own, the live tail too; nothing is temporary."""
    connection = rb.connect(story_store.path)
    assert sorted(_rows(story_store, listing)) == sorted((view.name,) for view in VIEWS)
    schemas = connection.execute("select distinct table_schema from information_schema.tables order by 1")
    assert schemas.fetchall() == [("internal",), ("main",)]


def test_a_cursor_sees_what_is_not_sealed(story_store: Store) -> None:
    """The views are those of the connection, for another thread too."""
    with rb.connect(story_store.path) as connection:
        assert connection.cursor().execute("select count(*) from events").fetchall() == [(26,)]


def test_events_has_the_logs_columns(story_store: Store) -> None:
    """`events` has the log's columns with the lane first, one row per event."""
    connection = rb.connect(story_store.path)
    assert [c[0] for c in connection.execute("select * from events").description] == [
        "lane",
        *LOG_SCHEMA.names,
    ]
    assert _rows(
        story_store, "select lane, count(*), min(seq), max(seq) from events group by 1 order by 1"
    ) == [
        ("serve", 18, 0, 17),
        ("train", 8, 0, 7),
    ]
    assert _rows(story_store, "select time, kind, run from events where event_id = 'e-serve-02'") == [
        (_at(2), "turn.requested", "demo")
    ]


def test_runs_has_the_command_and_its_configuration(story_store: Store) -> None:
    """`runs` has the command and its configuration."""
    assert _rows(story_store, "select * from runs") == [
        ("demo", _at(0), "serve", "serve", "toy", '{"port":1}', '{"python":"3"}')
    ]


def test_turns_joins_the_events_of_a_turn(story_store: Store) -> None:
    """`turns` joins the request, answer, delivery, failure and reward of each turn."""
    columns = (
        "trajectory, turn_id, parent_turn_id, root_reason, status, delivered, policy, policy_version, "
        "prompt_delta, prompt_length, completion_ids, logprobs, completion_length, finish_reason, content, "
        "requested_model, reward, requested, completed, latency_ms, lane, seq"
    )
    assert _rows(story_store, f"select {columns} from turns order by seq") == [
        (
            *("alpha", "u1", None, "first", "completed", "sent", "actor", 0, [1, 2, 3], 3, [10, 11]),
            *([-0.5, -0.25], 2, "stop", "4", "gpt-x", 0.25, _at(2), _at(3), 1000.0, "serve", 2),
        ),
        (
            *("alpha", "u2", "u1", None, "completed", "echoed", "actor", 1, [4, 5], 7, [12, 13, 14]),
            *([-1.0, -2.0, -4.0], 3, "length", "yes", "gpt-x", None, _at(5), _at(6), 1000.0, "serve", 5),
        ),
        (
            *("alpha", "u3", None, "history_changed", "failed", None, None, None, None, None, None),
            *(None, None, None, None, "gpt-x", None, _at(8), None, None, "serve", 8),
        ),
        (
            *("beta", "u4", None, "first", "running", None, None, None, None, None, None),
            *(None, None, None, None, None, None, _at(16), None, None, "serve", 16),
        ),
    ]
    assert _rows(
        story_store, "select new_messages->>'$[1].content', version_spans from turns where turn_id = 'u2'"
    ) == [
        (
            "sure? é✓",
            [
                {"policy": "actor", "version": 0, "start": 0, "end": 1},
                {"policy": "actor", "version": 1, "start": 1, "end": 3},
            ],
        )
    ]


def test_trajectories_has_outcome_reward_and_versions(story_store: Store) -> None:
    """`trajectories` has the outcome, the reward in force, and the versions of all sampled tokens."""
    columns = 'trajectory, "group", task, split, labels, status, success, reward, turns, '
    columns += "min_version, max_version, finished, lane"
    assert _rows(story_store, f"select {columns} from trajectories order by opened") == [
        ("alpha", "g", "task-7", "train", '{"k":"v"}', "completed", True, 1.0, 2, 0, 1, _at(14), "serve"),
        ("beta", None, None, "eval", "{}", "open", None, None, 0, None, None, None, "serve"),
    ]


def test_tokens_have_the_version_of_their_span(story_store: Store) -> None:
    """`tokens` gives each sampled token its own policy version, not the turn's last one."""
    assert _rows(
        story_store, "select turn_id, position, token_id, logprob, policy, policy_version from tokens"
    ) == [
        ("u1", 0, 10, -0.5, "actor", 0),
        ("u1", 1, 11, -0.25, "actor", 0),
        ("u2", 0, 12, -1.0, "actor", 0),
        ("u2", 1, 13, -2.0, "actor", 1),
        ("u2", 2, 14, -4.0, "actor", 1),
    ]


def test_tokens_of_a_teacher(store: Store, story: Any) -> None:
    """Tokens without logprobs and spans are there, with null for both."""
    from dataclasses import replace

    completed = story["serve"][3].record
    bare = replace(completed, logprobs=None, version_spans=(), policy=None, policy_version=None)
    empty = replace(bare, turn_id="u9", completion_ids=np.empty(0, np.int32))
    with store.writer("a") as writer:
        writer.append([Event(bare, "run"), Event(empty, "run")]).result(30)
    assert _rows(
        store, "select turn_id, position, token_id, logprob, policy, policy_version from tokens"
    ) == [
        ("u1", 0, 10, None, None, None),
        ("u1", 1, 11, None, None, None),
    ]


def test_rewards_marks_the_superseded(story_store: Store) -> None:
    """`rewards` keeps every reward, and marks the superseded one."""
    columns = "trajectory, turn_id, reward, source, event_id, superseded, lane, seq"
    assert _rows(story_store, f"select {columns} from rewards order by seq") == [
        ("alpha", "u1", 0.25, "agent", "e-serve-10", False, "serve", 10),
        ("alpha", None, 0.5, "agent", "e-serve-11", True, "serve", 11),
        ("alpha", None, 1.0, "agent", "e-serve-12", False, "serve", 12),
        ("alpha", None, 0.75, "judge", "e-serve-13", False, "serve", 13),
    ]


def test_preferences(story_store: Store, upkeep: list[Event]) -> None:
    """Both trajectories by id and by name; of one that is not in the log there is no name."""
    with story_store.writer("upkeep") as writer:
        writer.append([*upkeep, Event(PreferenceAdded("t9", "t1"), "demo", "e-last")]).result(30)
    columns = (
        "trajectory_id, trajectory, rejected_trajectory_id, rejected, margin, source, event_id, lane, key"
    )
    assert _rows(story_store, f"select {columns} from preferences order by event_id") == [
        ("t9", None, "t1", "alpha", None, "label", "e-last", "upkeep", None),
        ("t1", "alpha", "t2", "beta", 0.5, "judge", "e-upkeep-14", "upkeep", "nightly-judge"),
    ]


def test_the_reward_in_force_is_the_last_of_the_log(store: Store) -> None:
    """SQL and the fold agree on the last reward, also when a clock that was set back made a smaller id."""
    records = [TrajectoryOpened("t", "x"), RewardAssigned("t", None, 1.0), RewardAssigned("t", None, 2.0)]
    events = [Event(r, "run", i) for r, i in zip(records, ("a", "z", "b"), strict=True)]
    with store.writer("a") as writer:
        writer.append(events).result(30)
    assert fold(store.events())["t"].reward() == 2.0
    assert _rows(store, "select reward from trajectories") == [(2.0,)]


def test_policies_joins_publication_and_activation(story_store: Store) -> None:
    """`policies` joins publication and first activation of a version."""
    assert _rows(story_store, "select * from policies") == [
        ("demo", "actor", 1, 0, "w1", "checkpoints/1", _at(0), _at(17), None),
    ]


def test_steps_has_each_attempt(story_store: Store) -> None:
    """`steps` has each attempt with its fate, manifest and results."""
    columns = (
        "step, attempt, status, policy, policy_version, output_version, algorithm, cut, learning_rate, "
        "samples, loss, metrics, digests, planned, committed"
    )
    assert _rows(story_store, f"select {columns} from steps order by planned") == [
        (0, 0, "failed", "actor", 0, None, "grpo", "serve=13", 0.001, 1, *[None] * 3, _at(3), None),
        (
            *(0, 1, "committed", "actor", 0, 1, "grpo", "serve=14,train=2", 0.001, 2, 0.125),
            *('{"loss":0.125,"tokens":5}', '{"weights":"w1"}', _at(5), _at(6)),
        ),
        (1, 0, "planned", "actor", 1, None, "grpo", "serve=18,train=7", 0.001, 0, *[None] * 3, _at(7), None),
    ]
    assert _rows(story_store, "select manifest->>'$.seed' from steps where step = 1") == [("7",)]


def test_samples_lists_what_attempts_consumed(story_store: Store) -> None:
    """`samples` lists what each attempt consumed, in the manifest's order."""
    columns = "step, attempt, status, position, trajectory_id, turn_id"
    assert _rows(story_store, f"select {columns} from samples order by step, attempt, position") == [
        (0, 0, "failed", 0, "t1", "u1"),
        (0, 1, "committed", 0, "t1", "u2"),
        (0, 1, "committed", 1, "t1", "u1"),
    ]


def test_samples_whose_references_say_more(store: Store, story: dict[str, list[Event]]) -> None:
    """A manifest may note more of each sample than its ids; the view reads what it needs."""
    from dataclasses import replace

    planned = next(e.record for e in story["train"] if isinstance(e.record, StepPlanned))
    more = [{"turn_id": "u1", "weight": 0.5, "trajectory_id": "t1", "path": ["u1"]}]
    with store.writer("a") as writer:
        writer.append([Event(replace(planned, samples=more), "run")]).result(30)
    assert _rows(store, "select position, trajectory_id, turn_id from samples") == [(0, "t1", "u1")]


def test_drops_has_rule_recipe_and_reason(story_store: Store) -> None:
    """`drops` has the rule, the recipe and the reason."""
    assert _rows(
        story_store, "select trajectory_id, turn_id, rule, recipe, step, detail, time from drops"
    ) == [
        ("t2", "u4", "split", "rd", 0, '{"split":"eval"}', _at(2)),
    ]


def test_every_view_reads_an_empty_store(store: Store) -> None:
    """All views give no rows, and no error, before the first event."""
    connection = rb.connect(store.path)
    assert [connection.execute(f"select count(*) from {v.name}").fetchall() for v in VIEWS] == [[(0,)]] * len(
        VIEWS
    )


def test_views_at_an_earlier_cut(story_store: Store) -> None:
    """At an earlier cut the views say what was known then."""
    before = {"as_of": "serve=12"}
    assert _rows(story_store, "select reward, status from trajectories", **before) == [(0.5, "open")]
    assert _rows(story_store, "select count(*) from steps", **before) == [(0,)]
    assert _rows(
        story_store, "select reward from trajectories where trajectory = 'alpha'", as_of="step:0"
    ) == [(1.0,)]
    with pytest.raises(CutError, match="holds 99 events"):
        rb.connect(story_store.path, as_of="serve=99")


def test_a_connection_keeps_its_cut(store: Store, notes: Callable[..., list[Event]]) -> None:
    """A connection sees what was durable when it was made; a later one sees more."""
    with store.writer("a") as writer:
        writer.append(notes(1)).result(30)
        connection = rb.connect(store.path)
        writer.append(notes(1, 1)).result(30)
        assert connection.execute("select count(*) from events").fetchall() == [(1,)]
        assert _rows(store, "select count(*) from events") == [(2,)]


def test_connecting_to_nothing(tmp_path: Path) -> None:
    """A folder that is no store raises NotAStoreError and stays as it was."""
    with pytest.raises(NotAStoreError):
        rb.connect(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def rollbook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run the `rollbook` command as its entry point does: (exit code, stdout, stderr)."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rollbook", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return int(stop.value.code or 0), *capsys.readouterr()

    return run


def test_sql_as_json(story_store: Store, rollbook: Callable[..., tuple[int, str, str]]) -> None:
    """`--format json` prints a list of objects with lists, times and nulls as JSON."""
    query = "select turn_id, completion_ids, requested, reward from turns order by seq limit 2"
    status, out, err = rollbook("sql", query, "--store", story_store.path, "--format", "json")
    assert (status, err) == (0, "")
    assert orjson.loads(out) == [
        {"turn_id": "u1", "completion_ids": [10, 11], "requested": "2023-11-14T22:13:22", "reward": 0.25},
        {"turn_id": "u2", "completion_ids": [12, 13, 14], "requested": "2023-11-14T22:13:25", "reward": None},
    ]


def test_sql_as_csv(story_store: Store, rollbook: Callable[..., tuple[int, str, str]]) -> None:
    """`--format csv` prints a header and rows that a CSV reader gives back."""
    query = "select turn_id, completion_ids, reward from turns order by seq limit 2"
    status, out, _ = rollbook("sql", query, "--store", story_store.path, "--format", "csv")
    assert status == 0
    assert list(csv.reader(io.StringIO(out))) == [
        ["turn_id", "completion_ids", "reward"],
        ["u1", "[10,11]", "0.25"],
        ["u2", "[12,13,14]", ""],
    ]


def test_sql_rows_wider_than_the_terminal(
    story_store: Store, rollbook: Callable[..., tuple[int, str, str]]
) -> None:
    """Rows that do not fit are printed a line per value, whole, instead of squeezed into columns."""
    query = "select turn_id, * exclude (turn_id) from turns order by seq limit 2"
    status, out, _ = rollbook("sql", query, "--store", story_store.path)
    lines = out.splitlines()
    assert status == 0
    assert lines[0] == "-- row 1 --"
    assert lines[1].split() == ["turn_id", "u1"]
    second = lines.index("-- row 2 --")
    assert lines[second + 1].split() == ["turn_id", "u2"]
    assert ["completion_ids", "[12,13,14]"] in [line.split() for line in lines[second:]]


def test_sql_as_table(story_store: Store, rollbook: Callable[..., tuple[int, str, str]]) -> None:
    """The default is a table, numbers to the right, long cells shortened, the count on stderr."""
    query = (
        "select turn_id, completion_length as n, repeat('x', 80) as long from turns where n > 0 order by seq"
    )
    status, out, err = rollbook("sql", query, "--store", story_store.path)
    header, *rows = [line.split() for line in out.splitlines()]
    assert (status, header) == (0, ["turn_id", "n", "long"])
    assert rows == [["u1", "2", "x" * 59 + "…"], ["u2", "3", "x" * 59 + "…"]]
    assert err == "2 rows\n"


@pytest.mark.parametrize("text", ["[/]", "a[bold]b", "\\[/x]", "[red]"])
def test_sql_prints_brackets_as_they_are(
    story_store: Store, rollbook: Callable[..., tuple[int, str, str]], text: str
) -> None:
    """What agents wrote is printed, never read as the table's markup."""
    status, out, _ = rollbook("sql", f"select '{text}' as said", "--store", story_store.path)
    assert (status, out.split()) == (0, ["said", text])


def test_sql_as_of(story_store: Store, rollbook: Callable[..., tuple[int, str, str]]) -> None:
    """`--as-of` and `--run` choose the cut."""
    query = "select count(*) as n from events"
    for cut, count in (("serve=3,train=1", 4), ("step:0", 16), ("empty", 0)):
        options = ("--store", story_store.path, "--format", "csv", "--as-of", cut, "--run", "demo")
        assert rollbook("sql", query, *options)[:2] == (0, f"n\n{count}\n")


def test_bad_sql_is_exit_code_2(story_store: Store, rollbook: Callable[..., tuple[int, str, str]]) -> None:
    """DuckDB's message is one error on stderr; nothing is printed as a result."""
    status, out, err = rollbook("sql", "select nope from turns", "--store", story_store.path)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert '"nope"' in err
    assert "Traceback" not in err


def test_bad_input_is_exit_code_2(
    story_store: Store, rollbook: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """No store, a bad cut and an unknown format each end with code 2 and a message that names them."""
    assert rollbook("sql", "select 1", "--store", tmp_path / "none") == (
        2,
        "",
        f"error: {tmp_path / 'none'} is not a Rollbook store (it holds no STORE.json)\n",
    )
    status, _, err = rollbook("sql", "select 1", "--store", story_store.path, "--as-of", "serve=99")
    assert (status, err) == (
        2,
        "error: cut 'serve=99' holds 99 events of lane 'serve', but the store has 18\n",
    )
    assert rollbook("sql", "select 1", "--store", story_store.path, "--format", "xml")[0] == 2
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("query", ["", "  ;"])
def test_an_empty_query(
    story_store: Store, rollbook: Callable[..., tuple[int, str, str]], query: str
) -> None:
    """Nothing to run is an error that says so."""
    status, _, err = rollbook("sql", query, "--store", story_store.path)
    assert (status, "the query is empty" in err) == (2, True)


def test_python_variables_are_no_tables(
    story_store: Store, rollbook: Callable[..., tuple[int, str, str]]
) -> None:
    """A table that is not there is DuckDB's own error, whatever Python variables have that name."""
    status, _, err = rollbook("sql", "select * from store", "--store", story_store.path)
    assert status == 2
    assert "does not exist" in err


def test_a_lane_without_its_watermark_is_refused(
    story_store: Store, rollbook: Callable[..., tuple[int, str, str]]
) -> None:
    """A lost watermark is damage: the lane's events are not passed over."""
    lane = story_store.lanes()[0]
    (story_store.path / "lanes" / lane / "WATERMARK").unlink()
    status, _, err = rollbook("sql", "select count(*) from events", "--store", story_store.path)
    assert (status, "the watermark is missing" in err) == (2, True)


def test_no_progress_is_printed_among_the_rows(story_store: Store) -> None:
    """DuckDB's own bar goes where the rows go; only a command at a terminal asks for it."""
    asked = "SELECT current_setting('enable_progress_bar')"
    with rb.connect(story_store.path) as connection, connection.cursor() as cursor:
        assert connection.execute(asked).fetchall() == cursor.execute(asked).fetchall() == [(False,)]
        connection.execute("SET enable_progress_bar = true")
        assert connection.execute(asked).fetchall() == [(True,)]
    with private_database() as database:
        assert database.execute(asked).fetchall() == [(False,)]
