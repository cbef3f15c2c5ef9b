"""What the views say of how a turn came in, and of whether its tokens are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.events import (
    TrajectoryFinished,
    TrajectoryOpened,
    TurnCompleted,
    TurnRequested,
    token_ids,
)
from rollbook.store.fold.trajectory import prompt_sha256
from rollbook.store.sealed.derived import DERIVED, TRAJECTORIES, build_derived
from rollbook.store.sealed.seal import seal_closed
from rollbook.store.sealed.unit import current_units, derived_folder
from rollbook.store.settings import AppendSettings, SealSettings
from rollbook.store.upkeep.erase import erase_trajectory

ENDED: dict[str, list[list[int] | None]] = {
    "exact": [[1], [2, 3]],
    "text": [[], []],
    "both": [[], [4], None],
    "running": [None],
    "none": [],
}
"""Trajectory -> the ids of each of its turns; none: it did not end."""
FIDELITY = [("both", "mixed"), ("exact", "exact"), ("none", None), ("running", None), ("text", "text_only")]


def _requested(name: str, number: int, wire: dict[str, Any]) -> TurnRequested:
    return TurnRequested(
        trajectory_id=f"id-{name}",
        turn_id=f"{name}-{number}",
        request_id="r",
        parent_turn_id=None,
        root_reason="first_turn",
        base_turn_id=None,
        shared_messages=0,
        messages=[],
        request={},
        requested_model=None,
        sampling={},
        honoured={},
        context_key="",
        wire=wire,
    )


def _completed(name: str, number: int, ids: list[int]) -> TurnCompleted:
    nothing = token_ids([])
    return TurnCompleted(
        trajectory_id=f"id-{name}",
        turn_id=f"{name}-{number}",
        policy=None,
        policy_version=None,
        prompt_ids=nothing,
        completion_ids=token_ids(ids),
        logprobs=None,
        version_spans=(),
        prompt_length=0,
        prompt_sha256=prompt_sha256(nothing),
        finish_reason="stop",
        reply={},
        logprob_semantics={},
        flags=[],
        timings={},
    )


def _events() -> list[Event]:
    records: list[Any] = []
    for name, turns in ENDED.items():
        records.append(TrajectoryOpened(f"id-{name}", name))
        for number, ids in enumerate(turns):
            wire = {"endpoint": "/v1/messages", "choice": number, "retry": 3} if number else {}
            records.append(_requested(name, number, wire))
            records += [] if ids is None else [_completed(name, number, ids)]
    records.append(TrajectoryFinished("id-exact"))
    return [Event(record, "demo") for record in records]


@pytest.fixture(params=[1, 10**9], ids=["an event a segment", "one segment"])
def written(store: Store, request: pytest.FixtureRequest) -> Store:
    """All of it, in segments of many sizes."""
    with store.writer("serve", AppendSettings(segment_bytes=request.param)) as writer:
        for event in _events():
            writer.append([event]).result(30)
    return store


def _sealed(store: Store) -> list[Path]:
    """Seal all that can be sealed, and derive; the folders of what was derived."""
    list(seal_closed(store.path, "serve", SealSettings()))
    units = current_units(store.path, "serve")
    for unit in units:
        build_derived(store.path, unit)
    return [derived_folder(store.path, unit) for unit in units]


def _fidelity(store: Store) -> list[Any]:
    query = "select trajectory, fidelity from trajectories order by trajectory"
    return rb.connect(store.path).execute(query).fetchall()


def test_how_a_turn_came_in(written: Store) -> None:
    """Its endpoint, choice and retry; what says nothing of it was a chat completion's first attempt."""
    query = "select turn_id, endpoint, choice, retry, fidelity from turns order by turn_id"
    first, later = ("/v1/chat/completions", 0, 0), ("/v1/messages", 1, 3)
    expected = [
        ("both-0", *first, "text_only"),
        ("both-1", *later, "exact"),
        ("both-2", "/v1/messages", 2, 3, None),
        ("exact-0", *first, "exact"),
        ("exact-1", *later, "exact"),
        ("running-0", *first, None),
        ("text-0", *first, "text_only"),
        ("text-1", *later, "text_only"),
    ]
    assert rb.connect(written.path).execute(query).fetchall() == expected
    _sealed(written)
    assert rb.connect(written.path).execute(query).fetchall() == expected


def test_a_trajectorys_fidelity(written: Store) -> None:
    """Exact, text only or mixed, by its completed turns: live, sealed and derived."""
    assert _fidelity(written) == FIDELITY
    _sealed(written)
    assert _fidelity(written) == FIDELITY


@pytest.mark.more_but("an event*")
def test_what_an_older_release_derived_is_not_read(written: Store) -> None:
    """Units whose derived files have other names answer from their events, until the files are made anew."""
    folders = _sealed(written)
    for folder in folders[::2]:
        (folder / TRAJECTORIES).rename(folder / "trajectories.parquet")
    assert _fidelity(written) == FIDELITY
    assert rb.connect(written.path).execute("select sum(turns) from trajectories").fetchall() == [(6,)]
    _sealed(written)
    assert all({file.name for file in folder.iterdir()} == set(DERIVED) for folder in folders)
    assert _fidelity(written) == FIDELITY


@pytest.mark.more_but("an event a segment")
def test_erased_tokens_show_in_the_fidelity(written: Store) -> None:
    """Whose tokens were erased is told, as by `rollbook show`; who kept them is exact as before."""
    query = "select turn_id, fidelity from turns where fidelity is not null order by turn_id"
    for name in ("exact", "both"):
        with written.writer("ends") as writer:
            writer.append([Event(TrajectoryFinished(f"id-{name}"), "demo")]).result(30)
        erase_trajectory(written, f"id-{name}", "asked", keep_tokens=name == "both")
    expected = [
        (trajectory, "erased" if trajectory == "exact" else fidelity) for trajectory, fidelity in FIDELITY
    ]
    assert _fidelity(written) == expected
    assert rb.connect(written.path).execute(query).fetchall() == [
        *(("both-0", "text_only"), ("both-1", "exact")),
        *(("exact-0", "erased"), ("exact-1", "erased")),
        *(("text-0", "text_only"), ("text-1", "text_only")),
    ]
    _sealed(written)
    assert _fidelity(written) == expected


@pytest.mark.more_but("an event*")
def test_who_does_not_ask_does_not_pay(written: Store) -> None:
    """Neither column adds a join or a file to a question about others."""
    _sealed(written)
    connection = rb.connect(written.path)

    def plan(query: str) -> str:
        return str(connection.execute(f"explain {query}").fetchall()[0][1])

    assert "Join" in plan("select max(reward) from trajectories")
    assert "Join" not in plan("select count(*), max(opened) from trajectories")
    assert "Join" not in plan("select fidelity, count(*) from trajectories group by 1")
    assert "Join" not in plan("select fidelity, max(latency_ms) from turns group by 1")
    assert "Join" in plan("select endpoint, count(*) from turns group by 1")
    assert "exact_turns" not in plan("select max(opened), max(turns) from trajectories")
