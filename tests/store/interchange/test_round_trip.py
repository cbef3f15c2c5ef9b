"""Export, import into another store, export again: the same chats, rewards and outcomes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.stories.records import turn_completed, turn_requested

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.errors import InterchangeError
from rollbook.store.events import (
    Record,
    RewardAssigned,
    TrajectoryFinished,
    TrajectoryOpened,
    token_ids,
)
from rollbook.store.fold.trajectory import Trajectory, fold, prompt_sha256
from rollbook.store.interchange.chats import ChatFile, Entry
from rollbook.store.interchange.export import as_json, export_store
from rollbook.store.interchange.importing import import_chats, records_of
from rollbook.store.interchange.paths import paths

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
CALL = st.fixed_dictionaries(
    {"id": TEXT, "function": st.fixed_dictionaries({"name": TEXT, "arguments": TEXT})}
)
CONTENT = st.sampled_from(["a", "b", None]) | JSON
ASKED = st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool"]), "content": CONTENT})
REPLY = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": CONTENT}, optional={"tool_calls": st.lists(CALL, max_size=2)}
)
REWARD = st.none() | st.floats(allow_nan=False, allow_infinity=False)
# A turn: which earlier one it extends (-1: none), messages before its reply, the reply, whether it shows
# the earlier messages as its own (a changed history), a reward, and what its template is given besides.
REQUEST = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.just([{"type": "function"}]),
        "chat_template_kwargs": st.dictionaries(TEXT, JSON, max_size=2),
        "reasoning_effort": st.sampled_from([None, "low", "high"]),
    },
)
TURN = st.tuples(st.integers(-1, 4), st.lists(ASKED | REPLY, max_size=2), REPLY, REWARD, REQUEST)
HEAD = st.fixed_dictionaries(
    {
        "group": st.none() | TEXT,
        "task": st.none() | TEXT,
        "split": st.sampled_from(["train", "eval", "teacher"]),
        "labels": st.dictionaries(TEXT, JSON, max_size=2),
    }
)
END = st.none() | st.tuples(st.sampled_from(["completed", "truncated"]), st.none() | st.booleans())
TRAJECTORY = st.tuples(HEAD, st.lists(TURN, min_size=1, max_size=5), REWARD, END)
NONE = token_ids([])


def _records(name: str, trajectory: Any) -> list[Record]:
    """A trajectory told as the proxy would: extended, forked, started anew with the history it had."""
    head, turns, reward, end = trajectory
    records: list[Record] = [TrajectoryOpened(name, name, **head)]
    recorded: list[Any] = []
    for i, (wanted, new, reply, turn_reward, request) in enumerate(turns):
        turn = f"{name}.{i}"
        before = recorded[wanted] if 0 <= wanted < len(recorded) else None
        messages = [*before[1], before[2], *new] if before else new
        # Every other one says that it is a root, although it shows an earlier conversation.
        parent = before[0] if before and i % 2 else None
        records += [
            turn_requested(name, turn, parent_turn_id=parent, messages=messages, request=request),
            turn_completed(
                name,
                turn,
                policy=None,
                prompt_ids=NONE,
                completion_ids=NONE,
                prompt_sha256=prompt_sha256(NONE),
                reply=reply,
            ),
        ]
        if turn_reward is not None:
            records.append(RewardAssigned(name, turn, turn_reward))
        recorded.append((turn, messages, reply))
    if reward is not None:
        records.append(RewardAssigned(name, None, reward))
    if end is not None:
        records.append(TrajectoryFinished(name, *end))
    return records


def _export(trajectories: Iterable[Trajectory], file: Path) -> Path:
    lines = [orjson.dumps(as_json(path)) for t in trajectories for path in paths(t)]
    file.write_bytes(b"\n".join(lines))
    return file


def _import(file: Path) -> list[Trajectory]:
    with ChatFile(file, "other", "teacher", lambda _: None) as chats:
        return [t for entry in chats.entries for t in _fold(_records_of(chats, entry))]


def _records_of(chats: ChatFile, entry: Entry) -> list[Record]:
    return records_of(entry.trajectory_id, entry.name, chats.chats(entry))


def _fold(records: list[Record]) -> list[Trajectory]:
    return list(fold(Event(record, "run") for record in records).values())


def _said(file: Path) -> list[bytes]:
    """What each line says, but for ids, tokens and the run: as JSON, which tells 1 from 1.0."""
    lines = []
    for line in map(orjson.loads, file.read_bytes().splitlines()):
        # A root's earlier replies become turns of their own: without a reward they say nothing new.
        rewards = [(t["message"], t["reward"]) for t in line["turns"] if t["reward"] is not None]
        kept = {k: v for k, v in line.items() if k not in ("trajectory_id", "run", "turns", "tokens")}
        lines.append(orjson.dumps(kept | {"turn_rewards": rewards}, option=orjson.OPT_SORT_KEYS))
    return lines


@settings(max_examples=150)
@given(st.lists(TRAJECTORY, max_size=3))
def test_chats_and_rewards_come_back(trajectories: Any) -> None:
    """Whatever was recorded, forks and repeated histories included, line by line; and once more."""
    recorded = [t for i, trajectory in enumerate(trajectories) for t in _fold(_records(f"t{i}", trajectory))]
    with tempfile.TemporaryDirectory() as name:
        first = _export(recorded, Path(name) / "1.jsonl")
        second = _export(_import(first), Path(name) / "2.jsonl")
        assert _said(second) == _said(first)
        third = _export(_import(second), Path(name) / "3.jsonl")
        assert _said(third) == _said(first)


def test_a_real_fork(woods: Store, tmp_path: Path) -> None:
    """Tool calls, unicode, a superseded reward, an open trajectory: one run's export, and back."""
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    export_store(woods.path, first, "jsonl", run="woods")
    done = import_chats(first, tmp_path / "other", "again")
    assert (done["lines"], done["trajectories"], done["turns"]) == (3, 2, 4)
    other = rb.open(tmp_path / "other")
    export_store(other.path, second, "jsonl")
    assert len(_said(first)) == 3
    assert _said(first) == _said(second)
    fork = next(t for t in other.trajectories().values() if t.opened.name == "fork/ü")
    taught = next(t for t in other.trajectories().values() if t.opened.name == "taught")
    assert (taught.finished, taught.opened.split, fork.finished is None) == (None, "teacher", False)
    root, left, right = fork.turns.values()
    assert left.requested.parent_turn_id == right.requested.parent_turn_id == root.turn_id
    assert (fork.reward(), fork.reward(turn_id=right.turn_id)) == (-2.5, 0.125)


def test_runs_do_not_mix(woods: Store, tmp_path: Path) -> None:
    """Two runs may have one name each: imported as one run, that is refused with the remedy."""
    with woods.writer("twin") as writer:
        records = [
            TrajectoryOpened("t9", "alpha"),
            *_records("t9", ({}, [(-1, [], {"role": "assistant"}, None, {})], None, None))[1:],
        ]
        writer.append([Event(r, "twin") for r in records]).result(30)
    out = tmp_path / "all.jsonl"
    export_store(woods.path, out, "jsonl")
    with pytest.raises(InterchangeError, match=r'trajectory "alpha" is named at line \d .*export --run'):
        import_chats(out, tmp_path / "other", "one")
