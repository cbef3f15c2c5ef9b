"""API keys: who may come in, and what a key of one trajectory opens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes.clients.streamed import KINDS, PATHS, asked
from tests.fakes.proxies.in_process import InProcess
from tests.fakes.proxies.served import Served

from rollbook.edge.keys import Keys, given_keys, trajectory_key
from rollbook.store.secret import store_secret

CHAT = PATHS["chat"]
KEYS = ("first-key", "second:key")


@pytest.fixture(scope="module")
def proxy(played: Callable[..., InProcess]) -> InProcess:
    """A proxy with two keys."""
    return played(keys=Keys(given_keys(KEYS, {})))


def _key(proxy: Any, name: str, run: str = "default") -> str:
    """The key of a trajectory, as the proxy makes it."""
    return trajectory_key(name, run, store_secret(proxy.store.path, "trajectory keys"))


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


GUARDED = [
    *(("POST", path) for path in PATHS.values()),
    *(("POST", f"/t/x{path}") for path in PATHS.values()),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/org/m"),
    ("GET", "/v1/responses/resp_x"),
    ("POST", "/v1/trajectories"),
    ("POST", "/v1/trajectories/x/finish"),
    ("POST", "/v1/trajectories/x/rewards"),
    ("POST", "/v1/trajectories/x/labels"),
    ("POST", "/v1/trajectories/x/launches"),
    ("POST", "/v1/trajectories/x/launches/l/end"),
    ("POST", "/v1/trajectories/x/launches/l/leaks"),
    ("GET", "/v1/rollouts/x"),
    ("POST", "/v1/evaluations"),
    ("POST", "/v1/preferences"),
    ("GET", "/v1/events"),
    ("GET", "/v1/cursors/me"),
    ("PUT", "/v1/cursors/me"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/redoc"),
    ("GET", "/openapi.json"),
    ("POST", "/engine/pause_generation"),
    ("GET", "/engine/model_info"),
    ("GET", "/nowhere"),
]


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_nothing_is_open_without_a_key(proxy: InProcess, method: str, path: str) -> None:
    """401 in the API's own form, final; no key, a wrong one, half of one, one with more."""
    wrong = [{}, _bearer("no"), _bearer("first-ke"), _bearer("first-key2"), _bearer(""), {"x-api-key": "no"}]
    wrong += [
        _bearer("trajectory:x"),
        _bearer("trajectory:x:" + "0" * 32),
        {"authorization": "Basic first-key"},
    ]
    for headers in wrong:
        reply = proxy.ask(path, {}, headers=headers, method=method)
        assert (reply.status, reply.json["error"]["code"]) == (401, "invalid_api_key"), headers
        assert reply.json["error"]["type"] == "authentication_error"
        assert reply.headers["x-should-retry"] == "false"
    assert proxy.trajectories() == {} or "x" not in proxy.trajectories()


def test_health_is_open_to_all(proxy: InProcess) -> None:
    """For load balancers, whatever key they send; what is run and where it says to who may know."""
    for headers in ({}, _bearer("no"), _bearer(_key(proxy, "x"))):
        reply = proxy.ask("/healthz", method="GET", headers=headers)
        assert (reply.status, reply.json) == (200, {"status": "ok"})
    known = proxy.ask("/healthz", method="GET", headers=_bearer(KEYS[0])).json
    assert set(known) == {"status", "store", "run", "lane", "engine", "policy_version", "engines"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens_by_either_header(proxy: InProcess, kind: str, key: str) -> None:
    """As OpenAI's clients send it and as Anthropic's do; `bearer` in any case."""
    for headers in (_bearer(key), {"x-api-key": key}, {"authorization": f"bearer  {key} "}):
        assert proxy.ask(f"/t/ok-{kind}{PATHS[kind]}", asked(kind), headers=headers).status == 200


def test_a_trajectorys_key(proxy: InProcess) -> None:
    """Who opens a trajectory gets its key: it names it, and opens nothing else."""
    opened = proxy.ask("/v1/trajectories", {"id": "a:b/c"}, headers=_bearer(KEYS[0])).json
    key = opened["api_key"]
    assert key == _key(proxy, "a:b/c")
    assert KEYS[0] not in key
    mine = _bearer(key)
    reply = proxy.ask(PATHS["responses"], asked("responses"), headers=mine)
    assert reply.headers["x-rollbook-trajectory-id"] == opened["trajectory_id"]
    assert proxy.ask(f"/t/a%3Ab/c{CHAT}", asked("chat"), headers=mine).status == 200
    other = proxy.ask(f"/t/other{CHAT}", asked("chat"), headers=mine)
    assert (other.status, other.json["error"]["code"]) == (400, "trajectory_conflict")
    for path in ("finish", "rewards", "labels"):
        refused = proxy.ask(f"/v1/trajectories/ok-chat/{path}", {}, headers=mine)
        assert (refused.status, refused.json["error"]["code"]) == (403, "other_trajectory")
        assert refused.json["error"]["type"] == "permission_error"
    assert proxy.ask("/v1/trajectories", {"id": "new"}, headers=mine).status == 403
    assert proxy.ask("/v1/trajectories", {}, headers=mine).status == 403
    for method, path in (("GET", "/v1/events"), ("GET", "/metrics"), ("PUT", "/v1/cursors/me")):
        refused = proxy.ask(path, {}, headers=mine, method=method)
        assert (refused.status, refused.json["error"]["code"]) == (403, "other_trajectory")
    rewarded = proxy.ask("/v1/trajectories/a%3Ab%2Fc/rewards", {"reward": 1}, headers=mine)
    assert rewarded.status == 201
    assert proxy.ask("/v1/trajectories/a%3Ab%2Fc/finish", {}, headers=mine).status == 200


def test_a_trajectorys_key_reads_no_other_response(proxy: InProcess) -> None:
    """What one agent was answered is not shown to another, by its id or as what it goes on from."""
    keys = {n: _bearer(_key(proxy, n)) for n in ("alice", "bob")}
    replies = {n: proxy.ask(PATHS["responses"], asked("responses"), headers=keys[n]).json for n in keys}
    theirs = replies["alice"]["id"]
    own = proxy.ask(f"/v1/responses/{theirs}", headers=keys["alice"], method="GET")
    assert (own.status, own.json["output"]) == (200, replies["alice"]["output"])
    for path in (f"/v1/responses/{theirs}", f"/t/bob/v1/responses/{theirs}"):
        assert proxy.ask(path, headers=keys["bob"], method="GET").status == 404
    assert proxy.ask(f"/v1/responses/{theirs}", headers=_bearer(KEYS[0]), method="GET").status == 200
    for fields in (
        {"previous_response_id": theirs},
        {"input": [{"type": "item_reference", "id": theirs.replace("resp_", "msg_")}, *_user()]},
    ):
        body = asked("responses") | fields
        assert proxy.ask(PATHS["responses"], body, headers=keys["bob"]).status == 404
        assert proxy.ask(PATHS["responses"], body, headers=keys["alice"]).status == 200


def _user() -> list[Any]:
    return [{"role": "user", "content": "go on"}]


def test_a_key_of_another_run_or_secret_opens_nothing(proxy: InProcess) -> None:
    """The name alone does not make a key."""
    for key in (
        _key(proxy, "z", "other-run"),
        trajectory_key("z", "default", b"other-secret"),
        trajectory_key("z", "default", store_secret(proxy.store.path, "another purpose")),
        trajectory_key("z", "default", KEYS[0].encode()),
        trajectory_key("z", "default", None),
        _key(proxy, "y").replace("y", "z", 1),
    ):
        assert proxy.ask(CHAT, asked("chat"), headers=_bearer(key)).status == 401
    assert proxy.ask(CHAT, asked("chat"), headers=_bearer(_key(proxy, "z"))).status == 200


def test_without_keys_any_key_is_good(played: Callable[..., InProcess]) -> None:
    """Clients insist on sending one; a plain one means nothing, one of a trajectory names it."""
    proxy = played()
    for headers in ({}, _bearer("none"), {"x-api-key": "sk-1"}):
        assert proxy.ask(f"/t/a{CHAT}", asked("chat"), headers=headers).status == 200
    reply = proxy.ask("/v1/trajectories", {"id": "mine"}).json
    assert reply["api_key"] == "trajectory:mine"
    assert proxy.ask("/metrics", headers=_bearer("trajectory:mine"), method="GET").status == 200


def test_the_served_command_checks_keys_and_warns(
    serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path
) -> None:
    """--api-key closes the door; listening beyond the host without one is told; keys are never shown."""
    words = ("--model", str(text_model("chatml")), "--engine", "scripted", "--script", f"{script}:answer")
    key = "sk-very-secret-key"
    keyed = serve(*words, "--host", "0.0.0.0", "--api-key", key)
    with httpx.Client(base_url=keyed.url) as http:
        assert http.post(f"/t/a{CHAT}", json=asked("chat")).status_code == 401
        assert http.post(f"/t/a{CHAT}", json=asked("chat"), headers=_bearer(key)).status_code == 200
    keyed.stop()
    text = keyed.log.read_text()
    assert "everybody may come in" not in text
    assert key not in text
    assert not any(key.encode() in p.read_bytes() for p in keyed.path.rglob("*") if p.is_file())
    opened = serve(*words, "--host", "0.0.0.0")
    opened.stop()
    assert "everybody may come in: set --keys or --api-key" in " ".join(opened.log.read_text().split())
