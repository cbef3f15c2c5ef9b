"""Which role may use which route, what each may say of a trajectory, and whose key the log says it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from starlette.routing import Route
from tests.fakes.clients.streamed import PATHS, asked
from tests.fakes.proxies.in_process import InProcess

from rollbook.edge.keys import Key, Keys, Role, digest_of, trajectory_key
from rollbook.ingest.access import OTHERWISE, ROUTES, RULES
from rollbook.store.events import (
    CursorMoved,
    LabelAdded,
    RewardAssigned,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnRequested,
)
from rollbook.store.secret import store_secret

CHAT = PATHS["chat"]
ROLES = ("operator", "writer", "judge", "reader")
SECRETS = {role: f"the-{role}s-key" for role in ROLES}


def made_keys() -> Keys:
    """A key of each role, named after it."""
    return Keys([Key(f"{role}-1", Role(role), digest_of(SECRETS[role])) for role in ROLES])


@pytest.fixture(scope="module")
def proxy(played: Callable[..., InProcess]) -> InProcess:
    """A proxy with a key of each role."""
    return played(keys=made_keys())


def _sent(proxy: Any, who: str, name: str = "x") -> dict[str, str]:
    if who == "trajectory":
        secret = store_secret(proxy.store.path, "trajectory keys")
        return {"authorization": f"Bearer {trajectory_key(name, 'default', secret)}"}
    return {"authorization": f"Bearer {SECRETS[who]}"}


# Written out once more, so that no slip in the table goes unseen: o(perator), w(riter), j(udge), r(eader) and
# t(rajectory).
MATRIX = {
    ("GET", "/metrics"): "or",
    ("GET", "/docs"): "owjrt",
    ("GET", "/docs/oauth2-redirect"): "owjrt",
    ("GET", "/redoc"): "owjrt",
    ("GET", "/openapi.json"): "owjrt",
    ("GET", "/engine/model_info"): "o",
    ("POST", "/engine/pause_generation"): "o",
    ("POST", "/engine/update_weight_version"): "o",
    ("GET", "/v1/events?follow=false&limit=1"): "or",
    ("GET", "/v1/events?follow=false&limit=1&kinds=trajectory.opened,reward.assigned"): "ojr",
    ("GET", "/v1/events?follow=false&limit=1&kinds=trajectory.opened,turn.completed"): "or",
    ("GET", "/v1/events?format=arrow&kinds=*"): "or",
    ("GET", "/v1/cursors/me"): "or",
    ("PUT", "/v1/cursors/me"): "o",
    ("POST", "/v1/trajectories"): "owt",
    ("POST", "/v1/trajectories/x/finish"): "owt",
    ("POST", "/v1/trajectories/x/rewards"): "owjt",
    ("POST", "/v1/trajectories/x/labels"): "owjt",
    ("POST", "/v1/trajectories/x/launches"): "ow",
    ("POST", "/v1/trajectories/x/launches/l/end"): "ow",
    ("POST", "/v1/trajectories/x/launches/l/leaks"): "ow",
    ("GET", "/v1/trajectories/x"): "or",
    ("GET", "/v1/trajectories/x/launches"): "or",
    ("GET", "/v1/rollouts/x"): "ow",
    ("POST", "/v1/evaluations"): "ow",
    ("POST", "/v1/preferences"): "oj",
    ("GET", "/v1/models"): "owt",
    ("GET", "/v1/models/org/m"): "owt",
    ("GET", "/v1/responses/resp_1"): "owt",
    ("POST", "/v1/messages/count_tokens"): "owt",
    ("GET", "/t/x/v1/models"): "owt",
    ("GET", "/view/runs"): "or",
    ("GET", "/view/sql?q=x"): "or",
    ("GET", "/view/trajectories"): "ojr",
    ("GET", "/view/trajectories/x/samples/y.json"): "ojr",
    ("GET", "/view/compare/trajectories?left=x"): "ojr",
    ("GET", "/view/static/viewer.js"): "ojr",
    ("POST", "/view/trajectories/x/rewards"): "oj",
    ("POST", "/view/preferences"): "oj",
    ("POST", "/v1/nowhere"): "owt",
    ("DELETE", "/metrics"): "o",
    ("GET", "/nowhere"): "o",
    **{("POST", prefix + path): "owt" for prefix in ("", "/t/x") for path in PATHS.values()},
}
LETTERS = {"o": "operator", "w": "writer", "j": "judge", "r": "reader", "t": "trajectory"}
REFUSALS = ("not_permitted", "other_trajectory", "invalid_api_key")


@pytest.mark.parametrize("who", [*ROLES, "trajectory"])
@pytest.mark.parametrize(("method", "path"), MATRIX)
def test_each_role_at_each_route(proxy: InProcess, method: str, path: str, who: str) -> None:
    """403 with the roles that may, or whatever the route says; the body is no matter, and may be wrong."""
    reply = proxy.ask(path, {"id": "x"}, headers=_sent(proxy, who), method=method)
    code = _code(reply)
    if who in [LETTERS[letter] for letter in MATRIX[method, path]]:
        assert code not in REFUSALS
        assert reply.status not in (401, 403), reply.data
    else:
        assert (reply.status, code in ("not_permitted", "other_trajectory")) == (403, True), reply.data
        assert reply.headers["x-should-retry"] == "false"


def _code(reply: Any) -> str | None:
    try:
        return str(orjson.loads(reply.data)["error"]["code"])
    except (KeyError, TypeError, orjson.JSONDecodeError):
        return None


def test_every_route_has_a_ROUTES_its_own(proxy: InProcess) -> None:
    """A route that is added without one is an operator's alone; here none is."""
    routes = {
        (m, r.path) for r in proxy.app.routes if isinstance(r, Route) for m in (r.methods or ()) - {"HEAD"}
    }
    assert ("GET", "/openapi.json") in routes
    assert ("POST", "/t/{said:path}/v1/messages") in routes
    assert [route for route in sorted(routes) if ROUTES.of(*route) is OTHERWISE] == []
    assert ROUTES.of("GET", "/viewer") is OTHERWISE
    assert {rule.roles for rule in (OTHERWISE, ROUTES.of("POST", "/engine/x"))} == {
        frozenset({Role.operator})
    }
    assert len({(rule.method, rule.path) for rule in RULES}) == len(RULES)


# What may be said of a trajectory -------------------------------------------------------------------


def _remark(proxy: Any, who: str, name: str, what: str, **body: Any) -> tuple[int, str | None]:
    default = {"reward": 1.0} if what == "rewards" else {"name": "note"}
    reply = proxy.ask(f"/v1/trajectories/{name}/{what}", default | body, headers=_sent(proxy, who, name))
    return reply.status, _code(reply)


@pytest.mark.parametrize("what", ["rewards", "labels"])
@pytest.mark.parametrize("who", [*ROLES, "trajectory"])
def test_who_may_reward_and_label(proxy: InProcess, who: str, what: str) -> None:
    """An agent speaks for itself, until the end; a judge never as the agent; a reader not at all."""
    name = f"remarks-{who}-{what}"
    proxy.ask("/v1/trajectories", {"id": name}, headers=_sent(proxy, "writer"))
    agents, judges = who in ("writer", "trajectory", "operator"), who in ("judge", "operator")
    refused = (403, "not_permitted" if who == "reader" else "other_source")
    assert _remark(proxy, who, name, what) == ((201, None) if agents else refused)
    assert _remark(proxy, who, name, what, source="judge") == ((201, None) if judges else refused)
    assert _remark(proxy, who, name, what, source="rollbook") == ((201, None) if judges else refused)
    proxy.ask(f"/v1/trajectories/{name}/finish", {"reward": 0.5}, headers=_sent(proxy, "writer"))
    late = {"operator": (201, None), "writer": (403, "after_finish"), "trajectory": (403, "after_finish")}
    assert _remark(proxy, who, name, what) == late.get(who, refused)
    other = {"reward": 2.0} if what == "rewards" else {}  # the same once more would be a repetition
    outcome = _remark(proxy, who, name, what, source="judge", **other)
    assert outcome == ((201, None) if judges else refused)
    kinds: Any = {"rewards": RewardAssigned, "labels": LabelAdded}
    records = [e.record for e in proxy.store.events() if isinstance(e.record, kinds[what])]
    opened = proxy.trajectories()[name].opened
    expected = {"operator": 5, "writer": 1, "trajectory": 1, "judge": 3, "reader": 0}
    ended = 1 if what == "rewards" else 0
    assert len([r for r in records if r.trajectory_id == opened.trajectory_id]) == expected[who] + ended


def test_a_refusal_names_the_key_that_would_do(proxy: InProcess) -> None:
    """A refusal says which key would do."""
    proxy.ask("/v1/trajectories", {"id": "remedy"}, headers=_sent(proxy, "writer"))
    own = _sent(proxy, "trajectory", "remedy")
    path = "/v1/trajectories/remedy"
    refused = proxy.ask(f"{path}/rewards", {"reward": 9, "source": "judge"}, headers=own).json["error"]
    assert "send a judge's or an operator's key" in refused["message"]
    proxy.ask(f"{path}/finish", {}, headers=own)
    refused = proxy.ask(f"{path}/rewards", {"reward": 9}, headers=own).json["error"]
    assert refused["message"] == (
        "trajectory 'remedy' is finished, and its agent has had its say: later rewards and labels need "
        "a judge's or an operator's key"
    )
    refused = proxy.ask("/metrics", headers=_sent(proxy, "judge"), method="GET").json["error"]
    assert refused["message"] == "the key 'judge-1' is a judge's, and GET /metrics is for: operator, reader"


def test_another_proxys_finish_counts(proxy: InProcess) -> None:
    """The log says that it ended, whatever this proxy has in memory."""
    name = "elsewhere"
    proxy.ask("/v1/trajectories", {"id": name}, headers=_sent(proxy, "writer"))
    trajectory_id = proxy.trajectories()[name].opened.trajectory_id
    proxy.run(proxy.recorder.write(TrajectoryFinished(trajectory_id)))
    assert _remark(proxy, "trajectory", name, "rewards") == (403, "after_finish")


def test_a_judge_sees_the_details_of_nothing(proxy: InProcess) -> None:
    """/healthz has details for operators and readers."""
    detailed = {
        who: len(proxy.ask("/healthz", headers=_sent(proxy, who), method="GET").json) > 1 for who in ROLES
    }
    assert detailed == {"operator": True, "writer": False, "judge": False, "reader": True}


# Whose key it was -----------------------------------------------------------------------------------


def test_the_log_says_whose_key_it_was(proxy: InProcess) -> None:
    """Of openings, requests, rewards, labels, ends and cursors; the key itself is nowhere in the store."""
    writer, own = _sent(proxy, "writer"), _sent(proxy, "trajectory", "logged")
    opened = proxy.ask("/v1/trajectories", {"id": "logged"}, headers=writer).json
    proxy.ask(CHAT, asked("chat"), headers=own)
    proxy.ask(f"/t/logged{CHAT}", asked("chat", n=2), headers=writer | {"x-rollbook-labels": '{"a": 1}'})
    proxy.ask("/v1/trajectories/logged/labels", {"name": "b"}, headers=own)
    proxy.ask("/v1/trajectories/logged/finish", {"reward": 1, "turn_rewards": [1, 2, 3]}, headers=own)
    proxy.ask(
        "/v1/trajectories/logged/rewards", {"reward": 2, "source": "judge"}, headers=_sent(proxy, "judge")
    )
    proxy.ask("/v1/cursors/board", {"cut": "empty"}, headers=_sent(proxy, "operator"), method="PUT")
    proxy.ask("/v1/cursors/board", {"cut": "serve=1"}, headers=_sent(proxy, "operator"), method="PUT")
    proxy.settled()
    records = [e.record for e in proxy.store.events()]
    mine = [r for r in records if getattr(r, "trajectory_id", "") == opened["trajectory_id"]]
    by = {
        kind: [r.by for r in mine if isinstance(r, kind)] for kind in (TrajectoryOpened, TrajectoryFinished)
    }
    assert by == {TrajectoryOpened: ["writer-1"], TrajectoryFinished: ["trajectory"]}
    assert [r.by for r in mine if isinstance(r, LabelAdded)] == ["writer-1", "trajectory"]
    assert [r.by for r in mine if isinstance(r, RewardAssigned)] == ["trajectory"] * 4 + ["judge-1"]
    assert [r.by for r in records if isinstance(r, CursorMoved)] == ["operator-1"]
    turns = proxy.trajectories()["logged"].turns.values()
    assert [t.requested.wire["key"] for t in turns] == ["trajectory", "writer-1", "writer-1"]
    data = b"".join(p.read_bytes() for p in proxy.store.path.rglob("*") if p.is_file())
    assert not any(secret.encode() in data for secret in SECRETS.values())


def test_an_unnamed_request_says_whose_key_it_was(proxy: InProcess) -> None:
    """A quarantined trajectory was opened by somebody too."""
    reply = proxy.ask(CHAT, asked("chat"), headers=_sent(proxy, "writer"))
    name = reply.headers["x-rollbook-quarantined"]
    assert proxy.trajectories()[name].opened.by == "writer-1"


def test_without_keys_nobody_is_named(played: Callable[..., InProcess]) -> None:
    """And a plain trajectory key names its trajectory and no more: everybody may do everything."""
    proxy = played()
    own = {"authorization": "Bearer trajectory:a"}
    assert proxy.ask(CHAT, asked("chat"), headers=own).status == 200
    assert proxy.ask("/v1/trajectories/a/finish", {}, headers=own).status == 200
    assert proxy.ask("/v1/trajectories/a/rewards", {"reward": 1, "source": "me"}, headers=own).status == 201
    proxy.settled()
    records = [e.record for e in proxy.store.events()]
    assert {r.by for r in records if hasattr(r, "by")} == {None}
    assert ["key" in r.wire for r in records if isinstance(r, TurnRequested)] == [False]
