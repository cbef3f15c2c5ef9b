"""Two trajectories are compared token by token: the first difference is the first difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories.records import turn_completed, turn_requested
from tests.viewer.conftest import Viewer

from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.events import token_ids
from rollbook.store.fold.trajectory import prompt_sha256


def story(name: str, sampled: list[list[int]], prompt: int = 5, **opened: Any) -> list[Any]:
    """A trajectory whose turns sampled these tokens, each a root of its own."""
    records: list[Any] = [kinds.TrajectoryOpened(name, name.upper(), **opened)]
    for at, ids in enumerate(sampled):
        turn_id = f"{name}-{at}"
        records.append(turn_requested(name, turn_id))
        asked, logprobs = token_ids([prompt, 6]), np.full(len(ids), -0.25, np.float32)
        tokens = {"prompt_ids": asked, "completion_ids": token_ids(ids), "logprobs": logprobs}
        digest = {"prompt_length": 2, "prompt_sha256": prompt_sha256(asked)}
        records.append(turn_completed(name, turn_id, **tokens, **digest))
    return records


@pytest.fixture
def compared(store: Store, view: Callable[..., Viewer]) -> Callable[..., Any]:
    """Compares two stories."""

    def make(left: list[Any], right: list[Any]) -> Any:
        with store.writer("serve") as writer:
            writer.append([Event(record, "r") for record in (*left, *right)]).result(30)
        query = {"left": left[0].trajectory_id, "right": right[0].trajectory_id}
        viewer = view(store)
        assert viewer.get("/compare/trajectories", **query).status_code == 200
        return viewer.json("/compare/trajectories", **query)

    return make


def test_where_they_part(compared: Callable[..., Any]) -> None:
    """In the second turn, at its third token; before it both have the same, without a tokenizer as ids."""
    parting = compared(story("a", [[1, 2], [3, 4, 5, 7]]), story("b", [[1, 2], [3, 4, 6, 8]]))["parting"]
    assert (parting["turn"], parting["kind"], parting["place"], parting["before"]) == (
        2,
        "sampled",
        2,
        "[3][4]",
    )
    assert (parting["left"]["text"], parting["right"]["text"]) == ("[5][7]", "[6][8]")
    assert (parting["left"]["logprob"], parting["right"]["logprob"]) == (-0.25, -0.25)


@pytest.mark.parametrize(
    ("left", "right", "parting"),
    [
        ([[1, 2]], [[1, 2]], None),
        ([[1, 2]], [[1, 2, 3]], (1, "sampled", 2, "", "[3]")),
        ([[1, 2]], [[1, 2], [3]], (2, "turns", 0, "no such turn", "completed")),
    ],
)
def test_same_longer_and_missing(compared: Callable[..., Any], left: Any, right: Any, parting: Any) -> None:
    """One that goes on parts where the other ends."""
    page = compared(story("a", left), story("b", right))["parting"]
    seen = page and (page["turn"], page["kind"], page["place"], page["left"]["text"], page["right"]["text"])
    assert seen == parting


def test_other_prompts(compared: Callable[..., Any]) -> None:
    """They part before anything was sampled."""
    parting = compared(story("a", [[1]]), story("b", [[1]], prompt=9))["parting"]
    assert (parting["kind"], parting["place"], parting["right"]["text"]) == ("prompt", 0, "[9][6]")


def test_whom_to_compare_with(store: Store, view: Callable[..., Viewer]) -> None:
    """Repetitions first, then of its group, then of its task in other runs; not itself, nor others."""
    opened = [
        ("r", kinds.TrajectoryOpened("a", "A", group="g", task="t")),
        ("r", kinds.TrajectoryOpened("b", "B", group="g", task="t")),
        ("s", kinds.TrajectoryOpened("c", "C", group="g", task="t")),
        ("r", kinds.TrajectoryOpened("d", "D", split="replay", origin={"trajectory_id": "a"})),
        ("r", kinds.TrajectoryOpened("e", "E", group="h", task="u")),
    ]
    with store.writer("serve") as writer:
        writer.append([Event(record, run) for run, record in opened]).result(30)
    viewer = view(store)
    known = viewer.json("/compare/trajectories", left="a")["candidates"]
    assert [(c["trajectory_id"], c["why"]) for c in known] == [
        ("d", "repetition"),
        ("b", "group"),
        ("c", "task"),
    ]
    known = viewer.json("/compare/trajectories", left="d")["candidates"]
    assert [(c["trajectory_id"], c["why"]) for c in known] == [("a", "repeated")]
    assert viewer.get("/compare/trajectories").status_code == 400
    assert viewer.get("/compare/trajectories", left="a", right="x").status_code == 404
