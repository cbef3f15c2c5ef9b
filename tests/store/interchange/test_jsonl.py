"""Export as JSONL: exact lines, float32 that survive, forks, open trajectories, cuts, runs and splits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tests.fakes.stories.records import turn_completed, turn_requested

from rollbook.store import Event, Store
from rollbook.store.errors import CutError, InterchangeError
from rollbook.store.events import RewardAssigned, TrajectoryFinished, TrajectoryOpened, token_ids
from rollbook.store.fold.trajectory import prompt_sha256
from rollbook.store.interchange.export import as_row, export_store
from rollbook.store.interchange.paths import paths
from rollbook.store.interchange.selection import TrajectorySet, trajectories
from rollbook.train.select.samples import samples_of


def test_a_line_has_exactly_this(story_store: Store, chats: Callable[..., list[dict[str, Any]]]) -> None:
    """Messages as sent and the final reply; head; turns; tokens. A superseded reward does not count."""
    [line] = chats(story_store)
    assert line == {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "sure? é✓"},
            {"role": "assistant", "content": "yes"},
        ],
        "trajectory": "alpha",
        "trajectory_id": "t1",
        "run": "demo",
        "group": "g",
        "task": "task-7",
        "split": "train",
        "status": "completed",
        "labels": {"k": "v"},
        "reward": 1.0,
        "success": True,
        "turns": [
            {
                "turn_id": "u1",
                "message": 2,
                "reward": 0.25,
                "delivered": "sent",
                "flags": [],
                "prompt_length": 3,
                "completion_ids": [10, 11],
                "logprobs": [-0.5, -0.25],
                "version_spans": [{"policy": "actor", "version": 0, "start": 0, "end": 2}],
            },
            {
                "turn_id": "u2",
                "message": 4,
                "reward": None,
                "delivered": "echoed",
                "flags": [],
                "prompt_length": 7,
                "completion_ids": [12, 13, 14],
                "logprobs": [-1.0, -2.0, -4.0],
                "version_spans": [
                    {"policy": "actor", "version": 0, "start": 0, "end": 1},
                    {"policy": "actor", "version": 1, "start": 1, "end": 3},
                ],
            },
        ],
        "tokens": {
            "input_ids": [1, 2, 3, 10, 11, 4, 5, 12, 13, 14],
            "loss_mask": [0, 0, 0, 1, 1, 0, 0, 1, 1, 1],
            "logprobs": [0.0, 0.0, 0.0, -0.5, -0.25, 0.0, 0.0, -1.0, -2.0, -4.0],
            "versions": [None, None, None, 0, 0, None, None, 0, 1, 1],
        },
    }


def test_a_fork_is_two_lines(woods: Store, chats: Callable[..., list[dict[str, Any]]]) -> None:
    """Each leaf has a line with its own messages; the turn they share is trained in the first one only."""
    first, second = chats(woods, run="woods", split="train")
    call = first["messages"][2]
    assert call["tool_calls"][0]["function"] == {"name": "look_up", "arguments": '{"q": "é✓"}'}
    assert [m["content"] for m in first["messages"][2:]] == [None, "42", "42 ✓"]
    assert [m["content"] for m in second["messages"][2:]] == [None, 'nothing\n"quoted"\u2028\\', ""]
    assert first["messages"][:3] == second["messages"][:3]
    assert first["messages"][1]["content"][1] == {"type": "text", "text": "文字 🙂"}
    assert first["tools"] == second["tools"]
    assert first["tools"][0]["function"]["name"] == "look_up"
    assert first["tokens"]["loss_mask"] == [0, 0, 0, 1, 1, 1, 0, 1]
    assert second["tokens"]["loss_mask"] == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert [t["reward"] for t in second["turns"]] == [None, 0.125]
    heads = [(x["trajectory"], x["status"], x["success"], x["reward"]) for x in (first, second)]
    assert heads == [("fork/ü", "truncated", False, -2.5)] * 2, "the later lane's reward is in force"


def test_logprobs_come_back_bit_for_bit(woods: Store, chats: Callable[..., list[dict[str, Any]]]) -> None:
    """What JSON says of a float32 reads back to its very bits, by way of any float64."""
    first, _ = chats(woods, run="woods", split="train")
    stored = woods.trajectories(ids=["fork"])["fork"].turns["f1"].completed
    assert stored is not None
    assert stored.logprobs is not None
    read = np.array(first["turns"][0]["logprobs"], np.float64)
    assert read.astype(np.float32).tobytes() == stored.logprobs.tobytes()
    assert read.astype(np.float32)[1] == np.float32(-1e-40) != 0
    inside = np.array(first["tokens"]["logprobs"][3:6], np.float64)
    assert inside.astype(np.float32).tobytes() == stored.logprobs.tobytes()


def test_an_open_trajectory_of_a_teacher(woods: Store, chats: Callable[..., list[dict[str, Any]]]) -> None:
    """It is exported as far as it got; there is no logprob, no version and no outcome."""
    [line] = chats(woods, split="teacher")
    assert (line["status"], line["success"], line["reward"]) == ("open", None, None)
    assert line["messages"] == [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert line["turns"][0]["logprobs"] is None
    assert line["tokens"] == {
        "input_ids": [7, 8, 9],
        "loss_mask": [0, 0, 1],
        "logprobs": [0.0, 0.0, None],
        "versions": [None, None, None],
    }


def test_an_empty_store_gives_an_empty_file(empty: Store, chats: Callable[..., list[dict[str, Any]]]) -> None:
    """Nothing is nothing, and no error."""
    assert chats(empty) == []


def test_a_cut_is_what_was_known_then(story_store: Store, chats: Callable[..., list[dict[str, Any]]]) -> None:
    """Events after the cut do not count: turns, rewards, the outcome. A step names its own cut."""
    [line] = chats(story_store, as_of="serve=5")
    assert [m["content"] for m in line["messages"]] == ["be brief", "2+2?", "4"]
    assert (line["status"], line["reward"], line["turns"][0]["reward"]) == ("open", None, None)
    assert chats(story_store, as_of="serve=12")[0]["reward"] == 0.5
    assert chats(story_store, as_of="serve=13")[0]["reward"] == 1.0
    assert chats(story_store, as_of="step:0", run="demo")[0]["status"] == "open"
    assert chats(story_store, as_of="empty") == []
    with pytest.raises(CutError, match="99 events of lane 'serve'"):
        chats(story_store, as_of="serve=99")


def test_runs_and_splits_are_chosen(woods: Store, chats: Callable[..., list[dict[str, Any]]]) -> None:
    """Each line belongs to what was asked for; an unknown run names the known ones."""
    assert sorted(x["trajectory"] for x in chats(woods)) == ["alpha", "fork/ü", "fork/ü", "taught"]
    assert [x["trajectory"] for x in chats(woods, run="demo")] == ["alpha"]
    assert chats(woods, split="eval") == []
    with pytest.raises(InterchangeError, match=r"run 'nope' has no trajectory at 'head'; .*: demo, woods$"):
        chats(woods, run="nope")
    with pytest.raises(InterchangeError, match="split is 'test': use one of train, eval, teacher, or all"):
        chats(woods, split="test")


def test_tokens_are_those_of_the_samples(woods: Store) -> None:
    """The arrays of each path are those that training makes of it."""
    count = 0
    for trajectory in woods.trajectories().values():
        for path, sample in zip(paths(trajectory), samples_of(trajectory), strict=True):
            count += 1
            assert [t.turn_id for t in path.turns] == list(sample.turn_ids)
            assert path.tokens.tokens.tobytes() == sample.tokens.tobytes()
            for name in ("loss_mask", "logprobs", "versions"):
                ours, theirs = getattr(path.tokens, name), getattr(sample, name)
                assert (ours.dtype, ours.tobytes()) == (theirs.dtype, theirs.tobytes()), name
    assert count == 4


def test_an_erased_turn_has_no_line(woods: Store) -> None:
    """Of a path whose text or tokens were erased nothing is written; other paths stay."""
    trajectory = woods.trajectories(ids=["fork"])["fork"]
    for turn_id, flag, left in (("f2", "text_erased", ["f3"]), ("f1", "tokens_erased", [])):
        turn = trajectory.turns[turn_id]
        assert turn.completed is not None
        gone = replace(turn, completed=replace(turn.completed, flags=[flag]))
        erased = replace(trajectory, turns={**trajectory.turns, turn_id: gone})
        assert [path.turns[-1].turn_id for path in paths(erased)] == left


def test_few_trajectories_are_held(store: Store) -> None:
    """A trajectory is handed out after its last event, although its reward is in a lane further on."""
    with store.writer("a-proxy") as writer:
        for i in range(5):
            records = [TrajectoryOpened(f"t{i}", f"t{i}"), TrajectoryFinished(f"t{i}")]
            writer.append([Event(r, "run") for r in records]).result(30)
    with store.writer("z-judge") as writer:
        late = [Event(RewardAssigned(f"t{i % 5}", None, float(i)), "run") for i in range(10)]
        writer.append(late).result(30)
    read = 0

    def advance(count: int) -> None:
        nonlocal read
        read += count

    rows = []
    cut = {"a-proxy": 10, "z-judge": 5}  # the second rewards came after it
    for trajectory in trajectories(TrajectorySet(store, cut), advance):
        rows.append((trajectory.opened.name, trajectory.reward(), read))
    assert rows == [(f"t{i}", float(i), 5 + 2 * (i + 1)) for i in range(5)]


def test_nothing_is_overwritten_and_nothing_half_is_left(woods: Store, tmp_path: Path) -> None:
    """An existing file or folder is refused, with the remedy; an export that fails leaves no file."""
    out = tmp_path / "out"
    out.write_text("mine")
    for format_ in ("jsonl", "parquet", "datasets"):
        with pytest.raises(InterchangeError, match=r"/out exists: an export never overwrites; remove it or"):
            export_store(woods.path, out, format_, as_of="not even read")
        with pytest.raises(CutError):
            export_store(woods.path, tmp_path / "new", format_, as_of="woods=999")
    assert out.read_text() == "mine"
    with pytest.raises(InterchangeError, match=r"cannot write .*/out/below: .*name another place with --to"):
        export_store(woods.path, out / "below", "jsonl")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "store"]


def test_folders_on_the_way_are_made(story_store: Store, tmp_path: Path) -> None:
    """The answer says what was written where."""
    out = tmp_path / "a" / "b" / "chats.jsonl"
    done = export_store(story_store.path, out, "jsonl")
    cut = "serve=18,train=8"
    rows = {"trajectories": 2, "paths": 1}
    assert done == {"to": str(out), "format": "jsonl", "cut": cut, "rows": rows}
    assert orjson.loads(out.read_bytes())["trajectory"] == "alpha"


@pytest.mark.parametrize(
    ("endpoint", "sent", "given"),
    [
        (None, {"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        (
            "/v1/chat/completions",
            {"reasoning_effort": "low", "reasoning": {"effort": "x"}},
            {"reasoning_effort": "low"},
        ),
        (
            "/v1/responses",
            {"reasoning": {"effort": "high"}, "reasoning_effort": "x"},
            {"reasoning_effort": "high"},
        ),
        (
            "/v1/responses",
            {"reasoning": {"effort": "high"}, "chat_template_kwargs": {"reasoning_effort": "low", "a": 1}},
            {"reasoning_effort": "low", "a": 1},
        ),
        ("/v1/messages", {"reasoning_effort": "x", "chat_template_kwargs": {"a": 1}}, {"a": 1}),
        (None, {"reasoning": "x", "chat_template_kwargs": None}, None),
    ],
)
def test_what_a_template_was_given(
    empty: Store,
    chats: Callable[..., list[dict[str, Any]]],
    tmp_path: Path,
    endpoint: str | None,
    sent: Any,
    given: Any,
) -> None:
    """Whatever API it came by; in a dataset as JSON text. A line without it was given nothing."""
    messages, reply = [{"role": "user", "content": "x"}], {"role": "assistant", "content": "y"}
    wire = {} if endpoint is None else {"endpoint": endpoint}
    none = token_ids([])
    records = [
        TrajectoryOpened("t", "t"),
        turn_requested("t", "u", messages=messages, request=sent, wire=wire),
        turn_completed(
            "t",
            "u",
            policy=None,
            prompt_ids=none,
            completion_ids=none,
            prompt_sha256=prompt_sha256(none),
            reply=reply,
        ),
    ]
    with empty.writer("serve") as writer:
        writer.append([Event(record, "r") for record in records]).result(30)
    [line] = chats(empty)
    assert line.get("chat_template_kwargs") == given
    [path] = paths(empty.trajectories()["t"])
    row = as_row(path)["chat_template_kwargs"]
    assert (None if row is None else orjson.loads(row)) == given
