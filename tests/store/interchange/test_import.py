"""Import of chats: turns without tokens, nothing half-done, nothing twice, errors with line and remedy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest

from rollbook import store as rb
from rollbook.cli import app as cli
from rollbook.store import Store
from rollbook.store.errors import CutError, InterchangeError, LaneLockedError, WriteFailedError
from rollbook.store.events import RunOpened, TurnCompleted
from rollbook.store.interchange import importing
from rollbook.store.interchange.export import export_store
from rollbook.store.interchange.importing import import_chats, records_of
from rollbook.store.log.writer import LaneWriter
from rollbook.train.config.recipe import RecipeConfig
from rollbook.train.select.recipe import is_candidate
from rollbook.train.select.samples import samples_of

USER, REPLY = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
MORE = [{"role": "user", "content": "sure? 文字"}, {"role": "assistant", "content": "yes", "weight": 1}]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write lines (objects, or bytes as they are) to a file."""

    def to_file(*lines: Any, name: str = "chats.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(b"\n".join(x if isinstance(x, bytes) else orjson.dumps(x) for x in lines))
        return path

    return to_file


def test_each_reply_is_a_turn_without_tokens(store: Store, write: Callable[..., Path]) -> None:
    """Requests as deltas over the turn before, empty arrays, the flag; rewards and outcome at the end."""
    chat = {"id": "a", "messages": [USER, REPLY, *MORE], "tools": [TOOL], "model": "m", "group": "g"}
    file = write(chat | {"task": "t", "reward": 1, "success": True, "source": "web"})
    done = import_chats(file, store.path, "r")
    counts = {
        name: done[name] for name in ("lines", "trajectories", "added", "already_there", "turns", "events")
    }
    assert counts == {"lines": 1, "trajectories": 1, "added": 1, "already_there": 0, "turns": 2, "events": 10}
    kinds = [event.kind for event in store.events()]
    turn = ["turn.requested", "turn.completed", "turn.delivered"]
    ends = ["reward.assigned", "trajectory.finished"]
    assert kinds == ["run.opened", "trajectory.opened", *turn, *turn, *ends]
    [trajectory] = store.trajectories().values()
    assert trajectory.opened.labels == {"source": "web"}
    assert (trajectory.opened.name, trajectory.opened.split, trajectory.reward()) == ("a", "teacher", 1.0)
    first, second = trajectory.turns.values()
    assert (first.requested.messages, first.requested.root_reason) == ([USER], "first_turn")
    assert second.requested.messages == [REPLY, MORE[0]]
    assert (second.requested.base_turn_id, second.requested.shared_messages) == (first.turn_id, 1)
    assert second.requested.parent_turn_id == first.turn_id
    assert trajectory.messages(second) == [USER, REPLY, MORE[0]]
    assert second.requested.request == {"tools": [TOOL], "model": "m"}
    done_2 = second.completed
    assert isinstance(done_2, TurnCompleted)
    assert done_2.reply == MORE[1]
    assert (done_2.logprobs, done_2.version_spans, done_2.flags) == (None, (), ["without_tokens"])
    assert len(done_2.prompt_ids) == len(done_2.completion_ids) == done_2.prompt_length == 0
    assert len(trajectory.prompt_ids(second)) == 0
    assert second.delivered == "imported"
    opened = next(e.record for e in store.events())
    assert isinstance(opened, RunOpened)
    assert (opened.command, opened.config["lines"], opened.config["added"]) == ("import", 1, 1)


def test_replies_that_their_owner_excludes_are_context(store: Store, write: Callable[..., Path]) -> None:
    """`weight: 0` and `train: false`: later turns read them; what follows the last turn is a label."""
    unsaid = REPLY | {"weight": 0}
    tail = [{"role": "user", "content": "and?"}, REPLY | {"train": False}]
    import_chats(write({"id": "a", "messages": [USER, unsaid, *MORE, *tail]}), store.path, "r")
    [trajectory] = store.trajectories().values()
    [turn] = trajectory.turns.values()
    assert turn.completed is not None
    assert (turn.requested.messages, turn.completed.reply) == ([USER, unsaid, MORE[0]], MORE[1])
    assert trajectory.opened.labels == {"messages_after": tail}
    with pytest.raises(InterchangeError, match="with other content already"):
        import_chats(write({"id": "a", "messages": [USER, REPLY, *MORE, *tail]}), store.path, "r")


def test_an_export_keeps_what_is_context(store: Store, write: Callable[..., Path], tmp_path: Path) -> None:
    """Replies that were given with a request are no turns after export and import either."""
    import_chats(write({"id": "a", "messages": [USER, REPLY, *MORE], "context": 2}), store.path, "r")
    export_store(store.path, tmp_path / "out.jsonl", "jsonl")
    import_chats(tmp_path / "out.jsonl", tmp_path / "other", "r")
    [trajectory] = rb.open(tmp_path / "other").trajectories().values()
    assert [turn.completed.reply for turn in trajectory.turns.values() if turn.completed] == [MORE[1]]


def test_sql_can_tell_and_training_never_takes_them(store: Store, write: Callable[..., Path]) -> None:
    """The flag is a column of `turns`; no token, whatever splits a recipe takes: never a candidate."""
    import_chats(write({"messages": [USER, REPLY], "split": "train"}), store.path, "r")
    query = "SELECT count(*) FROM turns WHERE json_contains(flags, '\"without_tokens\"')"
    connection = rb.connect(store.path)
    assert connection.execute(query).fetchall() == [(1,)]
    assert connection.execute("SELECT count(*) FROM tokens").fetchall() == [(0,)]
    [trajectory] = store.trajectories().values()
    [sample] = samples_of(trajectory)
    assert (len(sample), sample.split, bool(sample.loss_mask.any())) == (0, "train", False)
    assert sample.tokens.dtype == np.int32
    assert not is_candidate(sample, RecipeConfig(splits=("train", "teacher")))


def test_again_adds_nothing(store: Store, write: Callable[..., Path]) -> None:
    """The same file, the same lines in another order, a longer file: only what is new is added, once."""
    a, b = {"id": "a", "messages": [USER, REPLY]}, {"messages": [USER, *MORE]}
    first = import_chats(write(a, b, b), store.path, "r")
    assert (first["added"], first["already_there"]) == (3, 0)
    head, ids = store.head(), [e.event_id for e in store.events()]
    again = import_chats(write(a, b, b), store.path, "r")
    assert (again["added"], again["already_there"], again["events"]) == (0, 3, 0)
    assert store.head() == head
    more = import_chats(write(b, a, b, {"messages": [USER, REPLY]}), store.path, "r", lane="other")
    assert (more["added"], more["already_there"]) == (1, 3)
    assert [e.event_id for e in store.events({"import": head["import"]})] == ids
    ids = [(t.opened.trajectory_id, *t.turns) for t in store.trajectories().values()]
    apart = rb.open(store.path.parent / "apart", create=True)
    import_chats(write(a, b, b), apart.path, "r")
    assert [(t.opened.trajectory_id, *t.turns) for t in apart.trajectories().values()] == ids[:3]
    elsewhere = import_chats(write(a, b, b), store.path, "r2")
    assert elsewhere["added"] == 3
    runs = [t.run for t in store.trajectories().values()]
    assert sorted(runs) == ["r"] * 4 + ["r2"] * 3, "another run holds its own"
    all_ids = [e.event_id for e in store.events()]
    assert len(set(all_ids)) == len(all_ids)


def test_a_name_is_taken_once(store: Store, write: Callable[..., Path]) -> None:
    """Other content under a name that the run has, or twice in a file, is refused; nothing is written."""
    import_chats(write({"id": "a", "messages": [USER, REPLY]}), store.path, "r")
    head = store.head()
    other = {"id": "a", "messages": [USER, {"role": "assistant", "content": "5"}]}
    for options in ({}, {"split": "eval"}):
        line = other if not options else {"id": "a", "messages": [USER, REPLY]}
        with pytest.raises(
            InterchangeError, match=r"chats\.jsonl, line 2: run 'r' has a trajectory 'a' with other .* --run$"
        ):
            import_chats(write({"messages": [USER, REPLY]}, line), store.path, "r", **options)
    with pytest.raises(
        InterchangeError, match=r'line 3: trajectory "b" is named at line 1 already; .*rename'
    ):
        import_chats(
            write({"id": "b", "messages": [USER, REPLY]}, b"", {"id": "b", "messages": [USER, REPLY]}),
            store.path,
            "r",
        )
    assert store.head() == head


def test_lines_of_one_trajectory(store: Store, write: Callable[..., Path]) -> None:
    """As many paths as lines, whichever comes first, also where one goes on from another; one head only."""
    head = {"trajectory": "x", "trajectory_id": "of-an-export", "reward": 1.0}
    short, long = head | {"messages": [USER, REPLY]}, head | {"messages": [USER, REPLY, *MORE]}
    for run, lines in (("r1", [short, long, short]), ("r2", [long, short, short])):
        import_chats(write(*lines), store.path, run)
        [trajectory] = [t for t in store.trajectories().values() if t.run == run]
        lengths = [len(path) for path in trajectory.paths()]
        assert sorted(lengths) == [1, 1, 2]
        assert len(trajectory.turns) == 4
    for key, value in (("reward", 0.5), ("split", "eval"), ("labels", {"k": 1}), ("success", True)):
        with pytest.raises(
            InterchangeError, match=r'line 2: trajectory "x" has another group.* at line 1: make'
        ):
            import_chats(write(short, long | {key: value}), store.path, "r3")


GOOD = orjson.dumps({"messages": [USER, REPLY]})
BAD = {
    "not json": (b'{"messages": [', r"no JSON \(.*\): '\{\"messages\": \['; write one object per line"),
    "not utf-8": (b'{"a": "\xff"}', r"no JSON"),
    "no object": (b"[1]", r"\[1\] is no object: write"),
    "no messages": (b"{}", r"messages is null: write a list"),
    "empty messages": (b'{"messages": []}', r"messages is \[\]: write a list"),
    "no role": ({"messages": [{"content": "x"}]}, r'messages\[0\] is \{"content":"x"\}: .* role of system'),
    "not a message": ({"messages": ["hi"]}, r'messages\[0\] is "hi": write an object'),
    "no reply": (
        {"messages": [USER]},
        r'its last message is \{"role":"user".*no message of the assistant counts',
    ),
    "none counts": ({"messages": [USER, REPLY | {"weight": 0}]}, ".*no message of the assistant counts"),
    "weight": (
        {"messages": [USER, REPLY | {"weight": 0.5}]},
        r"messages\[1\]\.weight is 0\.5: write 0 or 1, or leave it out",
    ),
    "train": ({"messages": [REPLY | {"train": "no"}]}, r'messages\[0\]\.train is "no": write true or false'),
    "user trained": (
        {"messages": [USER | {"train": True}, REPLY]},
        r"messages\[0\]\.train is true of a message of role user: the assistant's alone are trained",
    ),
    "two marks": (
        {"messages": [REPLY | {"train": True, "weight": 0}]},
        r"messages\[0\]: weight and train say two different things",
    ),
    "kwargs": (
        {"messages": [REPLY], "chat_template_kwargs": "x"},
        r'chat_template_kwargs is "x": write an object',
    ),
    "calls": ({"messages": [REPLY | {"tool_calls": ["f"]}]}, r'messages\[0\]\.tool_calls is \["f"\]: write'),
    "reward": ({"messages": [REPLY], "reward": "high"}, r'reward is "high": write a finite number'),
    "reward true": ({"messages": [REPLY], "reward": True}, r"reward is true: write a finite number"),
    "infinite": (b'{"messages": [], "reward": 1e999}', r"no JSON|reward is"),
    "split": ({"messages": [REPLY], "split": "test"}, r'split is "test": use one of train, eval, teacher'),
    "status": ({"messages": [REPLY], "status": "done"}, r'status is "done": use one of completed'),
    "success": ({"messages": [REPLY], "success": 1}, r"success is 1: write true, false or null"),
    "group": ({"messages": [REPLY], "group": 3}, r"group is 3: write a text"),
    "name": ({"messages": [REPLY], "id": ""}, r'id is "": write a text of 1 to 256 characters'),
    "labels": ({"messages": [REPLY], "labels": [1]}, r"labels is \[1\]: write an object"),
    "twice": (
        {"messages": [REPLY], "x": 1, "labels": {"x": 2}},
        r"'x' is a key of the line and of its labels",
    ),
    "tools": ({"messages": [REPLY], "tools": "f"}, r'tools is "f": write a list of objects'),
    "deep": (
        b'{"messages": [{"role": "assistant", "content": ' + b"[" * 250 + b"]" * 250 + b"}]}",
        "it cannot be .*: nest it less",
    ),
    "turns": (
        {"messages": [USER, REPLY], "trajectory_id": "t", "turns": [{"turn_id": "u", "message": 0}]},
        r"turns\[0\] is .*: write a turn_id, and as message the place of its reply",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_line_stops_all_of_it(tmp_path: Path, write: Callable[..., Path], what: str) -> None:
    """The message names file, line, value and remedy; no store was even made."""
    line, message = BAD[what]
    with pytest.raises(InterchangeError, match=rf"chats\.jsonl, line 3: {message}") as caught:
        import_chats(write(GOOD, b"", line), tmp_path / "new", "r")
    assert len(str(caught.value)) < 300 + len(str(tmp_path))
    assert not (tmp_path / "new").exists()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """A missing file and a folder are refused by name."""
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(InterchangeError, match=rf"cannot read {path}: .*; name a JSONL file"):
            import_chats(path, tmp_path / "new", "r")


def test_lane_run_and_split_are_checked(store: Store, write: Callable[..., Path]) -> None:
    """A lane of a bad name or in use, an empty run, an unknown split: nothing is written."""
    file = write(GOOD)
    with pytest.raises(InterchangeError, match="the run has no name"):
        import_chats(file, store.path, "")
    with pytest.raises(InterchangeError, match="split is 'test': use one of"):
        import_chats(file, store.path, "r", split="test")
    with pytest.raises(CutError, match="lane name 'No'"):
        import_chats(file, store.path, "r", lane="No")
    with store.writer("import"), pytest.raises(LaneLockedError, match="name another lane with --lane"):
        import_chats(file, store.path, "r")
    with store.claim("importing into run r", "wait"), pytest.raises(LaneLockedError, match="importing into"):
        import_chats(file, store.path, "r")
    assert store.head() == {}


def test_what_a_crash_leaves_is_whole_and_is_completed(
    store: Store, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import that stops in the middle has added whole trajectories; the next run adds the others."""
    lines = [{"id": f"c{i}", "messages": [USER, REPLY, *MORE], "reward": i} for i in range(5)]
    real, calls = LaneWriter.append, 0

    def append(self: LaneWriter, events: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise WriteFailedError("the disk is full")
        return real(self, events)

    with monkeypatch.context() as patch:
        patch.setattr(LaneWriter, "append", append)
        with pytest.raises(WriteFailedError, match="the disk is full"):
            import_chats(write(*lines), store.path, "r")
    there = store.trajectories().values()
    assert [(t.opened.name, t.reward(), len(t.turns)) for t in there] == [(f"c{i}", i, 2) for i in range(3)]
    assert all(t.finished for t in there)
    done = import_chats(write(*lines), store.path, "r")
    assert (done["added"], done["already_there"]) == (2, 3)
    imported = [(t.opened.name, t.reward(), len(t.turns)) for t in store.trajectories().values()]
    assert imported == [(f"c{i}", i, 2) for i in range(5)]


def test_a_write_that_fails_at_the_very_end(
    store: Store, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last trajectory's flush counts too: nothing is said to be added that is not durable."""

    def append(self: LaneWriter, events: Any) -> Any:
        future: Future[int] = Future()
        future.set_exception(WriteFailedError("lane 'import': no space"))
        return future

    monkeypatch.setattr(LaneWriter, "append", append)
    with pytest.raises(WriteFailedError, match="no space"):
        import_chats(write(GOOD), store.path, "r")


def test_a_file_that_changes_meanwhile(
    store: Store, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was checked is what is written: a line that became another is refused."""
    file = write(GOOD)
    fresh = importing._fresh

    def change(*args: Any) -> Any:
        file.write_bytes(GOOD.replace(b"2+2?", b"2+3?"))
        return fresh(*args)

    monkeypatch.setattr(importing, "_fresh", change)
    with pytest.raises(
        InterchangeError, match="line 1: it changed while it was imported; import the file ag"
    ):
        import_chats(file, store.path, "r")
    assert store.trajectories() == {}


def test_odd_files_are_imported(store: Store, write: Callable[..., Path]) -> None:
    """A byte order mark, CRLF, no newline at the end, blank lines, numbers as ids, no line at all."""
    file = write(b"\xef\xbb\xbf" + GOOD + b"\r", b"   ", orjson.dumps({"id": 7, "messages": [REPLY]}))
    assert import_chats(file, store.path, "r")["lines"] == 2
    named = [t.opened.name for t in store.trajectories().values()]
    assert named[0].startswith("chat-")
    assert named[1] == "7"
    assert import_chats(write(GOOD, name="other.jsonl"), store.path, "r")["already_there"] == 1
    assert import_chats(write(b""), store.path, "r")["trajectories"] == 0


def test_many_trajectories_wait_for_the_disk_together(store: Store, write: Callable[..., Path]) -> None:
    """More trajectories than may be in flight are all added, in the file's order."""
    count = importing.IN_FLIGHT * 2 + 1
    import_chats(write(*[{"id": i, "messages": [USER, REPLY]} for i in range(count)]), store.path, "r")
    assert [t.opened.name for t in store.trajectories().values()] == [str(i) for i in range(count)]


def test_equal_numbers_of_different_type_are_not_shared(write: Callable[..., Path], store: Store) -> None:
    """1, 1.0 and true are equal in Python and not in JSON: each request keeps its own."""
    lines = [
        {
            "trajectory": "x",
            "trajectory_id": "o",
            "messages": [{"role": "user", "content": "q", "n": n}, REPLY],
        }
        for n in (1, 1.0, True)
    ]
    import_chats(write(*lines), store.path, "r")
    [trajectory] = store.trajectories().values()
    got = [orjson.dumps(trajectory.messages(t)[0]["n"]) for t in trajectory.turns.values()]
    assert got == [b"1", b"1.0", b"true"]


def test_large_messages_come_out_whole(store: Store, write: Callable[..., Path], tmp_path: Path) -> None:
    """What the log keeps once and refers to (long prompts, tool schemas) is exported as it was sent."""
    long = {"role": "system", "content": "é" * 30_000}
    tool = {"type": "function", "function": {"name": "f", "description": "d" * 30_000, "$body": "mine"}}
    line = {"id": "a", "messages": [long, USER, REPLY, *MORE], "tools": [tool]}
    import_chats(write(line), store.path, "r")
    for format_ in ("jsonl", "parquet"):
        export_store(store.path, tmp_path / format_, format_)
    back = orjson.loads((tmp_path / "jsonl").read_bytes())
    assert (back["messages"], back["tools"]) == (line["messages"], line["tools"])
    last = pq.read_table(tmp_path / "parquet" / "turns.parquet").to_pylist()[-1]
    assert orjson.loads(last["messages"]) == line["messages"][:-1]
    assert orjson.loads(last["request"])["tools"] == [tool]


def test_records_are_the_same_every_time(write: Callable[..., Path], store: Store) -> None:
    """Ids follow from the trajectory's: two makings of the same chats give equal records."""
    from rollbook.store.interchange.chats import read_chat

    chat = read_chat(GOOD, "x", "teacher")
    key = "8d90a791-8574-56dc-942c-dec368db6802"
    once, twice = (records_of(key, "n", [chat]) for _ in range(2))
    assert [getattr(r, "turn_id", None) for r in once] == [getattr(r, "turn_id", None) for r in twice]
    assert once[1] == twice[1]


def test_the_commands_print_what_they_did(
    tmp_path: Path,
    write: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`rollbook import` and `rollbook export`: a sentence, JSON with --json, exit code 2 with the remedy."""
    file, log = write({"id": "a", "messages": [USER, REPLY]}), tmp_path / "log"

    def rollbook(*args: Any) -> int:
        monkeypatch.setattr(sys, "argv", ["rollbook", *map(str, args)])
        try:
            cli.main()
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    assert rollbook("import", file, "--store", log, "--run", "r") == 0
    assert capsys.readouterr().out == f"imported 1 trajectories (1 turns) into run r of {log}\n"
    assert rollbook("import", file, "--store", log, "--run", "r", "--json") == 0
    answer = orjson.loads(capsys.readouterr().out)
    assert (answer["added"], answer["already_there"], answer["lane"]) == (0, 1, "import")
    assert (
        rollbook("export", "--store", log, "--to", tmp_path / "o", "--format", "jsonl", "--split", "all") == 0
    )
    assert capsys.readouterr().out == (f"wrote {tmp_path / 'o'}: 1 trajectories, 1 paths, as of import=6\n")
    assert rollbook("export", "--store", log, "--to", tmp_path / "o", "--format", "jsonl") == 2
    assert "exists: an export never overwrites" in capsys.readouterr().err
    out = tmp_path / "p"
    assert (
        rollbook("export", "--store", log, "--to", out, "--format", "parquet", "--split", "eval", "--json")
        == 0
    )
    assert orjson.loads(capsys.readouterr().out)["rows"]["turns"] == 0
    assert rollbook("import", write(b"{}"), "--store", log, "--run", "r") == 2
    assert "line 1: messages is null" in capsys.readouterr().err
