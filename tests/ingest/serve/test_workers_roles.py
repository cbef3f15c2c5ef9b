"""What several workers do as one: record only, keys, and the bound of an online training."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
from tests.fakes.proxies.served import Served
from tests.fakes.stories.training import begins
from tests.fakes.upstreams.replies import ENDPOINTS
from tests.fakes.upstreams.server import HttpUpstream, chat_reply, whole

from rollbook import store
from rollbook.edge.keys import add_key
from rollbook.ingest.trajectories.place import owner_of
from rollbook.store import Event
from rollbook.store.events import TrajectoryOpened

NAMES = [f"task-{number}" for number in range(8)]
RESPONSE = ENDPOINTS["/v1/responses"]["whole"]
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_record_only(serve: Callable[..., Served], upstream: HttpUpstream) -> None:
    """Each turn is in its owner's lane, passed on once; a response is found by whoever it passed through."""
    served = serve(
        "--engine", "upstream", "--engine-url", upstream.url, "--engine-key", "k", "--workers", "2"
    )
    client = httpx.Client(base_url=served.url)
    upstream.answers += [whole(chat_reply(id=f"chatcmpl-{name}")) for name in NAMES]
    for name in NAMES:
        assert client.post(f"/t/{name}/v1/chat/completions", json=ASK).json()["id"] == f"chatcmpl-{name}"
    for number in range(4):
        upstream.answers.append(whole(RESPONSE | {"id": f"resp_{number}"}))
        client.post(
            "/v1/responses", json={"model": "m", "input": f"{number}"}, headers={"x-session-id": f"s{number}"}
        )
    for number in range(4):
        upstream.answers.append(whole(RESPONSE | {"id": f"resp_{number}"}))
        other = httpx.get(f"{served.url}/v1/responses/resp_{number}")
        assert (other.status_code, other.json().get("id")) == (200, f"resp_{number}")
        body = {"model": "m", "input": "more", "previous_response_id": f"resp_{number}"}
        upstream.answers.append(whole(RESPONSE | {"id": f"resp_{number}b"}))
        assert httpx.post(f"{served.url}/v1/responses", json=body).status_code == 200
    assert httpx.get(f"{served.url}/v1/responses/resp_unknown").status_code == 404
    assert len(upstream.asked) == len(NAMES) + 4 + 8
    expected = [(name, f"serve-{owner_of(name, 2)}", 1) for name in NAMES]
    expected += [(f"s{number}", f"serve-{owner_of(f's{number}', 2)}", 2) for number in range(4)]
    deadline = time.monotonic() + 20
    while sorted(_turns(served.path)) != sorted(expected):  # a reply passes before it is on disk
        assert time.monotonic() < deadline, _turns(served.path)
        time.sleep(0.05)
    details = httpx.get(f"{served.url}/healthz").json()
    assert [worker["unrecorded"] for worker in details["workers"]] == [0, 0]
    served.stop()


def _turns(path: Path) -> list[tuple[str, str, int]]:
    rows = store.connect(path).execute("select trajectory, lane, turns from trajectories")
    return [(str(name), str(lane), int(turns)) for name, lane, turns in rows.fetchall()]


def test_keys(
    serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path, tmp_path: Path
) -> None:
    """Each worker knows the keys, and keys that are added; a trajectory's own key goes to its owner."""
    file = tmp_path / "keys.toml"
    operator = add_key(file, "boss", "operator", None)
    served = serve(
        *("--model", str(text_model("chatml")), "--engine", "scripted", "--script", f"{script}:answer"),
        *("--workers", "2", "--keys", str(file)),
    )
    client = httpx.Client(base_url=served.url)
    mine = {"authorization": f"Bearer {operator}"}
    for name in NAMES:
        assert client.post("/v1/trajectories", json={"id": name}).status_code == 401
        key = client.post("/v1/trajectories", json={"id": name}, headers=mine).json()["api_key"]
        own = {"authorization": f"Bearer {key}"}
        assert client.post("/v1/chat/completions", json=ASK, headers=own).status_code == 200
        assert client.post(f"/t/other-{name}/v1/chat/completions", json=ASK, headers=own).status_code in (
            400,
            403,
        )
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/metrics").status_code == 401
    served.stop()


def test_the_bound_of_an_online_training(
    serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path, tmp_path: Path
) -> None:
    """However many workers take requests, no more trajectories begin than one proxy would let in."""
    words = ["--model", str(text_model("chatml")), "--engine", "scripted", "--script", f"{script}:answer"]
    with store.open(tmp_path / "store", create=True).writer("train") as writer:
        writer.append([Event(begins(1, 4, 2), "default")]).result()
    served = serve(*words, "--workers", "3", "--hold-s", "1.5", folder=tmp_path / "store")
    statuses: Counter[int] = Counter()

    def come(name: str) -> None:
        statuses[httpx.post(f"{served.url}/v1/trajectories", json={"id": name}, timeout=30).status_code] += 1

    names = [f"t{number}" for number in range(40)]
    first = [next(name for name in names if owner_of(name, 3) == worker) for worker in range(3)]
    for name in first:  # one of each worker begins, whichever is quicker then
        come(name)
    threads = [threading.Thread(target=come, args=[name]) for name in names if name not in first]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == {201: 12, 503: 28}
    opened = [e.lane for e in store.open(served.path).events() if isinstance(e.record, TrajectoryOpened)]
    assert len(opened) == 12
    assert len({*opened}) == 3
    served.stop()
