"""What people say of trajectories in the viewer is in the log, in their key's name, and nobody else's."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest
from tests.viewer.conftest import Viewer

from rollbook import store as rb
from rollbook.edge.keys import Key, Keys, Role, digest_of
from rollbook.store import Event, Store
from rollbook.store import events as kinds

ROLES = ("operator", "writer", "judge", "reader")


def typed(role: str) -> str:
    """The header of a browser whose user typed a key."""
    return "Basic " + base64.b64encode(f"anybody:the-{role}s".encode()).decode()


@pytest.fixture
def judged(store: Store, view: Callable[..., Viewer]) -> Viewer:
    """A viewer with a key of each role, of two trajectories."""
    with store.writer("serve") as writer:
        opened = [Event(kinds.TrajectoryOpened(name, name.upper()), "r") for name in ("a", "b")]
        writer.append(opened).result(30)
    return view(store, Keys([Key(f"{role}-1", Role(role), digest_of(f"the-{role}s")) for role in ROLES]))


def rows(log: Store, query: str) -> list[Any]:
    """The rows of a query."""
    with rb.connect(log.path) as connection:
        return connection.execute(query).fetchall()


def test_a_number_takes_the_place_of_the_one_before(judged: Viewer) -> None:
    """Of the same source, by whomever; the page has both, and says which one is in force."""
    for reward in (1.0, 0.25):
        body = {"reward": reward, "source": "human"}
        assert judged.post("/trajectories/a/rewards", body, authorization=typed("judge")).status_code == 201
    judged.post("/trajectories/a/rewards", {"reward": 3, "source": "other"}, authorization=typed("operator"))
    query = "SELECT reward, source, superseded, key FROM rewards ORDER BY reward"
    assert rows(judged.log, query) == [
        (0.25, "human", False, "judge-1"),
        (1.0, "human", True, "judge-1"),
        (3.0, "other", False, "operator-1"),
    ]
    remarks = judged.get("/trajectories/a/remarks.json", authorization=typed("judge")).json()["remarks"]
    assert sorted((r["value"], r["superseded"]) for r in remarks) == [
        (0.25, False),
        (1.0, True),
        (3.0, False),
    ]


def test_labels_and_preferences(judged: Viewer) -> None:
    """A label keeps its type; a preference is seen from both sides, and is that of a proxy's route."""
    label = {"name": "garbled", "value": ["x", 2], "source": "human"}
    assert judged.post("/trajectories/b/labels", label, authorization=typed("judge")).status_code == 201
    body = {"chosen": "b", "rejected": "a", "margin": 0.5}
    assert judged.post("/preferences", body, authorization=typed("judge")).status_code == 201
    assert rows(judged.log, "SELECT trajectory, rejected, margin, source, key FROM preferences") == [
        ("B", "A", 0.5, "label", "judge-1")
    ]
    kept = {}
    for name in "ab":
        page = judged.get(f"/trajectories/{name}/remarks.json", authorization=typed("reader")).json()
        kept[name] = [(r["kind"], r["about"], r["name"], r["value"]) for r in page["remarks"]]
    assert kept["a"] == [("rejected", "b", "", 0.5)]
    assert sorted(kept["b"]) == [("label", None, "garbled", ["x", 2]), ("preferred", "a", "", 0.5)]


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/trajectories/x/rewards", {"reward": 1, "source": "human"}, 404, "not_in_log"),
        ("/trajectories/a/rewards", {"reward": "much", "source": "human"}, 400, "bad_request"),
        ("/trajectories/a/rewards", {"reward": 1}, 403, "other_source"),
        ("/trajectories/a/labels", {"name": "", "source": "human"}, 400, "bad_request"),
        ("/preferences", {"chosen": "a", "rejected": "a"}, 422, "same_trajectory"),
        ("/preferences", {"chosen": "a", "rejected": "x"}, 404, "not_in_log"),
        (
            "/trajectories/a/labels",
            {"name": "n", "value": "v" * 70_000, "source": "human"},
            413,
            "body_too_large",
        ),
    ],
)
def test_what_is_wrong_writes_nothing(judged: Viewer, path: str, body: Any, status: int, code: str) -> None:
    """And says which field, or what is not there."""
    reply = judged.post(path, body, authorization=typed("judge"))
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    query = "SELECT count(*) FROM events WHERE kind <> 'trajectory.opened'"
    assert rows(judged.log, query) == [(0,)]


def test_a_browser_asks_for_a_key(judged: Viewer) -> None:
    """Where it has none; a page of another site cannot write, nor can who may only read."""
    reply = judged.get("/trajectories")
    assert (reply.status_code, reply.headers["www-authenticate"].partition(" ")[0]) == (401, "Basic")
    body = {"reward": 1, "source": "human"}
    assert judged.post("/trajectories/a/rewards", body, authorization=typed("reader")).status_code == 403
    foreign = {"authorization": typed("judge"), "origin": "http://evil.example"}
    assert judged.post("/trajectories/a/rewards", body, **foreign).status_code == 403
    assert judged.get("/runs", authorization=typed("judge")).status_code == 403
    assert judged.get("/trajectories/a", authorization=typed("judge")).status_code == 200
    assert rows(judged.log, "SELECT count(*) FROM rewards") == [(0,)]
