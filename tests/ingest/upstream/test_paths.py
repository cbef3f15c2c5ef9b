"""With the engine's own key only agents' endpoints pass, as they are written, and one's own responses."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.proxies.settings import proxy_parts
from tests.fakes.upstreams.replies import ENDPOINTS
from tests.fakes.upstreams.server import HttpUpstream, sse, streamed, whole
from tests.ingest.upstream.conftest import Passed

from rollbook.edge.keys import Key, Keys, Role, digest_of, trajectory_key
from rollbook.engines.address import EngineAddress
from rollbook.ingest.serve.engines import upstream_of
from rollbook.ingest.serve.serve import recorded_settings
from rollbook.ingest.upstream.paths import allowed, canonical_path, paths_of, response_named
from rollbook.store.errors import ConfigError, RequestError
from rollbook.store.secret import store_secret

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
USER = {"role": "user", "content": "Hello"}


def _raw(passed: Any, method: str, path: str, body: bytes = b"{}") -> int:
    """The status of a request whose path is sent as it is: a library would resolve it.

    The reply is read to its end: who leaves before it has a turn that may end after the test looks at it.
    """
    with socket.create_connection(("127.0.0.1", passed.port), timeout=20) as client:
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        client.sendall(f"{head}connection: close\r\n\r\n".encode() + body)
        with client.makefile("rb") as reply:
            return int(reply.read().split()[1])


# Paths ----------------------------------------------------------------------------------------------

SPELLINGS = [
    "/v1//chat/completions",
    "/v1/./chat/completions",
    "/v1/x/../chat/completions",
    "/v1/x/%2e%2e/chat/completions",
    "/v1/x/%2E./chat/completions",
    "/v1/chat%252Fcompletions",
    "/v1/chat/completions/",
    "/v1/chat/completions;a=b",
    "/v1;x/chat/completions",
    "/v1\\chat\\completions",
    "/v1/chat%5Ccompletions",
    "/v1/chat/completions%20",
    "/v1/chat/completions%0A",
]


@pytest.mark.parametrize("path", SPELLINGS)
def test_odd_spellings_mean_what_they_mean(path: str) -> None:
    """What some server may take for an endpoint is that for the log, and nothing for the engine's key."""
    assert canonical_path(path) == CHAT
    with pytest.raises(RequestError, match="written plainly") as error:
        paths_of().check("POST", path)
    assert error.value.status == 404


@given(st.text(alphabet="/.%2eE5cC;v1\\ ax", max_size=30))
def test_what_is_meant_is_plain(path: str) -> None:
    """Resolved once it stays as it is, and never leaves the root."""
    resolved = canonical_path("/" + path)
    assert canonical_path(resolved) == resolved
    parts = resolved.split("/")[1:]
    assert resolved == "/" or not set(parts) & {"", ".", ".."}


PASSING = [rule.split() for rule in allowed()]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/files"),
        ("GET", "/v1/files/file-1/content"),
        ("POST", "/v1/files"),
        ("POST", "/v1/batches"),
        ("POST", "/v1/messages/batches"),
        ("GET", "/v1/responses"),
        ("GET", "/v1/chat/completions"),
        ("GET", "/v1/chat/completions/chatcmpl-1"),
        ("GET", "/v1/organization/users"),
        ("POST", "/v1/fine_tuning/jobs"),
        ("DELETE", "/v1/models/m"),
        ("PUT", CHAT),
        ("OPTIONS", CHAT),
        ("POST", "/v1/../admin"),
        ("POST", "/v1/chat/completions/x"),
        ("POST", "/v1/responses/r/cancel/x"),
    ],
)
def test_other_paths_are_refused_before_the_upstream_is_asked(
    passing: Callable[..., Passed], upstream: HttpUpstream, method: str, path: str
) -> None:
    """Nor is the upstream asked; the refusal says what to do."""
    passed = passing(key="engine")
    for prefix in ("", "/t/a"):
        assert _raw(passed, method, prefix + path) in (403, 404)
    assert upstream.asked == []
    reply = passed.http.get("/t/a/v1/files")
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "path_not_allowed")
    assert "--pass-path" in reply.json()["error"]["message"]


def test_agents_paths_pass(passing: Callable[..., Passed], upstream: HttpUpstream) -> None:
    """Each that agents' libraries ask, and models whose names hold a slash."""
    passed = passing(key="engine")
    paths = [("POST", path) for path in ENDPOINTS] + [
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/responses/input_tokens"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/org/m"),
        ("GET", "/v1/models/org%2Fm"),
    ]
    for method, path in paths:
        assert _raw(passed, method, path) == 200, path
    assert [request.target for request in upstream.asked] == [path for _, path in paths]
    assert all(
        request.header("x-api-key" if "messages" in request.target else "authorization")
        for request in upstream.asked
    )


def test_without_a_key_everything_passes(passed: Passed, upstream: HttpUpstream) -> None:
    """The agent's own key is its own business; and a completion is recorded however its path is spelled."""
    assert _raw(passed, "GET", "/v1/files") == 200
    assert _raw(passed, "POST", "/v1/batches") == 200
    odd = [path for path in SPELLINGS if path.startswith("/v1/") and "%0A" not in path]  # others are a 404
    for i, path in enumerate(odd):
        assert (
            _raw(passed, "POST", f"/t/odd{i}{path}", b'{"messages": [{"role": "user", "content": "x"}]}')
            == 200
        )
    assert [request.target for request in upstream.asked[2:]] == odd
    assert all(passed.turn(f"odd{i}").completed for i in range(len(odd)))
    assert passed.metric("rollbook_unrecorded_total") == 0
    assert passed.metric("rollbook_passed_total") == 2


def test_more_paths_may_be_allowed_one_by_one() -> None:
    """By setting: a method and a path; nothing that would open everything."""
    paths = paths_of(["POST /v1/rerank", "GET /v1/files/*", "GET /v1/tree/**"])
    for method, path in (("POST", "/v1/rerank"), ("GET", "/v1/files/f"), ("GET", "/v1/tree/a/b")):
        paths.check(method, path)
    for method, path in (("GET", "/v1/rerank"), ("GET", "/v1/files/f/content"), ("GET", "/v1/files")):
        with pytest.raises(RequestError, match="--pass-path"):
            paths.check(method, path)
    for wrong in ("/v1/rerank", "POST rerank", "POST /v2/x", "* /v1/x", "POST /v1/../x", "POST /v1//x", ""):
        with pytest.raises(ConfigError, match="such as 'POST /v1/rerank'"):
            paths_of([wrong])


def test_options_of_an_upstream() -> None:
    """Paths go with a key; what they are is recorded."""
    words: Any = {"engine_url": (EngineAddress("http://x"),), "pass_path": ("POST /v1/rerank",)}
    parts = proxy_parts(engine_key="k", **words)
    assert upstream_of(*parts).passes == ("POST /v1/rerank",)
    assert recorded_settings(*parts)["pass_paths"] == ("POST /v1/rerank",)
    with pytest.raises(ConfigError, match="without a key everything passes"):
        upstream_of(*proxy_parts(**words))


# Responses ------------------------------------------------------------------------------------------


def test_which_response_a_path_names() -> None:
    """By its id, whatever follows; counting tokens names none."""
    assert response_named("GET", "/v1/responses/resp_1") == "resp_1"
    assert response_named("POST", "/v1/responses/resp_1/cancel") == "resp_1"
    assert response_named("POST", "/v1/responses/input_tokens") is None
    assert response_named("POST", "/v1/responses") is None
    assert response_named("GET", "/v1/responses/input_tokens") == "input_tokens"


def _response(response_id: str) -> Any:
    return ENDPOINTS[RESPONSES]["whole"] | {"id": response_id}


def _sent(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def keyed(passing: Callable[..., Passed]) -> Passed:
    """A proxy with the engine's key, two writers' and an operator's."""
    roles = {"w1": Role.writer, "w2": Role.writer, "ops": Role.operator}
    return passing(key="engine", keys=Keys([Key(n, r, digest_of(f"key-{n}")) for n, r in roles.items()]))


def _own(keyed: Any, name: str) -> dict[str, str]:
    return _sent(trajectory_key(name, "default", store_secret(keyed.path, "trajectory keys")))


def test_ones_own_responses(keyed: Passed, upstream: HttpUpstream) -> None:
    """Of one's trajectory, or asked with one's key; another's are as if they were not there."""
    w1, w2, ops = (_sent(f"key-{name}") for name in ("w1", "w2", "ops"))
    asks = ENDPOINTS[RESPONSES]["asks"]
    upstream.answers += [whole(_response("resp_w1")), whole(_response("resp_t"))]
    assert keyed.post(RESPONSES, asks, "t1", headers=w1).status_code == 200
    assert keyed.post(RESPONSES, asks, None, headers=_own(keyed, "t2")).status_code == 200
    before = len(upstream.asked)
    cases = [
        ("resp_w1", w1, "", True),
        ("resp_w1", w2, "", False),
        ("resp_w1", ops, "", True),
        ("resp_w1", w2, "/t/t1", True),
        ("resp_w1", _own(keyed, "t1"), "", True),
        ("resp_w1", _own(keyed, "t2"), "", False),
        ("resp_t", _own(keyed, "t2"), "", True),
        ("resp_t", w1, "", False),
        ("resp_t", w1, "/t/t2", True),
        ("resp_t", _own(keyed, "t3"), "", False),
        ("resp_elsewhere", ops, "", False),
    ]
    for response_id, key, prefix, mine in cases:
        path = f"{prefix}{RESPONSES}/{response_id}"
        statuses = [
            keyed.http.get(path, headers=key).status_code,
            keyed.http.delete(path, headers=key).status_code,
            keyed.http.post(f"{path}/cancel", headers=key).status_code,
            keyed.http.get(f"{path}/input_items", headers=key).status_code,
            keyed.http.post(
                prefix + RESPONSES, json=asks | {"previous_response_id": response_id}, headers=key
            ).status_code,
        ]
        assert statuses == [200 if mine else 404] * 5, (response_id, key, prefix)
    assert len(upstream.asked) - before == 5 * sum(mine for *_, mine in cases)
    refused = keyed.http.get(f"{RESPONSES}/resp_t", headers=w1).json()["error"]
    assert refused["code"] == "unknown_response"


def test_a_stream_and_one_in_the_background(keyed: Passed, upstream: HttpUpstream) -> None:
    """A response is its asker's from its first event on, also where it holds nothing yet; that is counted."""
    own = _own(keyed, "t")
    events = [
        {"type": "response.created", "response": {"id": "resp_s", "status": "in_progress", "output": []}}
    ]
    upstream.answers += [
        streamed(sse(*events, named=True), broken=True),
        whole({"id": "resp_b", "object": "response", "status": "queued", "output": []}),
    ]
    with pytest.raises(httpx.RemoteProtocolError):
        keyed.post(RESPONSES, ENDPOINTS[RESPONSES]["asks"] | {"stream": True}, None, headers=own)
    background = ENDPOINTS[RESPONSES]["asks"] | {"background": True}
    assert keyed.post(RESPONSES, background, None, headers=own).json()["status"] == "queued"
    for response_id in ("resp_s", "resp_b"):
        assert keyed.http.get(f"{RESPONSES}/{response_id}", headers=own).status_code == 200
        assert keyed.http.get(f"{RESPONSES}/{response_id}", headers=_own(keyed, "o")).status_code == 404
    keyed.http.headers.update(_sent("key-ops"))
    assert keyed.metric("rollbook_unrecorded_total") == 1


def test_responses_keep_their_owner_over_a_restart(
    passing: Callable[..., Passed], upstream: HttpUpstream
) -> None:
    """A response of an open trajectory is still its own."""
    passed = passing(key="engine")
    upstream.answers.append(whole(_response("resp_1")))
    passed.post(RESPONSES, ENDPOINTS[RESPONSES]["asks"], "t")
    passed.turn()
    again = passing(key="engine")
    assert again.http.get(f"/t/t{RESPONSES}/resp_1").status_code == 200
    assert again.http.get(f"{RESPONSES}/resp_1").status_code == 200
    assert again.http.get(f"/t/other{RESPONSES}/resp_1").status_code == 404
    assert again.http.get(f"{RESPONSES}/resp_2").status_code == 404
