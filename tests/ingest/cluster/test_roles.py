"""What several proxies of a run do as one: record only, keys, and the bound of an online training."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.fakes.proxies.several import Cluster
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


def test_record_only(cluster: Callable[..., Cluster], upstream: HttpUpstream) -> None:
    """Each turn is in its owner's lane, passed on once, whoever is asked; a response is found by any."""
    words = ["--engine", "upstream", "--engine-url", upstream.url, "--engine-key", "k"]
    two = cluster(2, given=words)
    for number, name in enumerate(NAMES):
        upstream.answers.append(whole(chat_reply(id=f"chatcmpl-{name}")))
        reply = httpx.post(f"{two.urls[number // 4]}/t/{name}/v1/chat/completions", json=ASK)
        assert reply.json()["id"] == f"chatcmpl-{name}"
    answers = upstream.answers
    answers.append(whole(RESPONSE | {"id": "resp_a"}))
    name = next(name for name in ("a", "b", "c") if owner_of(name, 2) == 1)
    headers = {"x-session-id": name}
    httpx.post(f"{two.urls[0]}/v1/responses", json={"model": "m", "input": "1"}, headers=headers)
    for url in two.urls:
        answers.append(whole(RESPONSE | {"id": "resp_a"}))
        assert httpx.get(f"{url}/v1/responses/resp_a").json()["id"] == "resp_a"
        answers.append(whole(RESPONSE | {"id": f"resp_{url}"}))
        body = {"model": "m", "input": "more", "previous_response_id": "resp_a"}
        assert httpx.post(f"{url}/v1/responses", json=body).status_code == 200
        assert httpx.get(f"{url}/v1/responses/resp_unknown").status_code == 404
    assert len(upstream.asked) == len(NAMES) + 1 + 4
    expected = [(trajectory, f"serve-{owner_of(trajectory, 2)}", 1) for trajectory in NAMES] + [
        (name, "serve-1", 3)
    ]
    deadline = time.monotonic() + 20
    while sorted(_turns(two)) != sorted(expected):  # a reply passes before it is on disk
        assert time.monotonic() < deadline, _turns(two)
        time.sleep(0.05)


def _turns(two: Cluster) -> list[tuple[str, str, int]]:
    rows = two.connect().execute("select trajectory, split_part(lane, '.', 1), turns from trajectories")
    return rows.fetchall()


def test_keys(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """Both know the keys; a trajectory's own key opens it at either, and no other."""
    file = tmp_path / "keys.toml"
    operator = add_key(file, "boss", "operator", None)
    two = cluster(2, "--keys", str(file), seen_by={"authorization": f"Bearer {operator}"}).urls
    mine = {"authorization": f"Bearer {operator}"}
    for name in NAMES:
        for url in two:
            assert httpx.post(f"{url}/v1/trajectories", json={"id": name}).status_code == 401
        opened = httpx.post(f"{two[0]}/v1/trajectories", json={"id": name}, headers=mine)
        own = {"authorization": f"Bearer {opened.json()['api_key']}"}
        for url in two:
            assert httpx.post(f"{url}/v1/chat/completions", json=ASK, headers=own).status_code == 200
            other = httpx.post(f"{url}/t/other-{name}/v1/chat/completions", json=ASK, headers=own)
            assert other.status_code in (400, 403)
            assert httpx.get(f"{url}/v1/trajectories/{name}", headers=own).status_code == 403
            assert httpx.get(f"{url}/healthz").json() == {"status": "ok"}


@pytest.mark.more
def test_the_bound_of_an_online_training(either_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """No more trajectories begin than one proxy would let in, whoever is asked; also once the one that
    admits for all was killed, and once it is back."""
    with store.open(tmp_path / "store", create=True).writer("train") as writer:
        writer.append([Event(begins(1, 4, 2), "default")]).result()
    three = either_cluster(3, "--hold-s", "1.5")
    assert _come(three, [0, 1, 2], 18, "a") == {201: 12, 503: 6}
    assert len(_opened(three)) == 12
    three.served[0].kill()
    assert _come(three, [1, 2], 6, "b") == {503: 6}
    for name in _opened(three)[:4]:
        assert httpx.post(
            f"{three.urls[1]}/v1/trajectories/{name}/finish", json={"status": "aborted"}
        ).is_success
    assert _come(three, [1, 2], 12, "c") == {201: 4, 503: 8}
    three.start(0)
    three.until_holds(1, [0], [1], [2])
    assert _come(three, [0, 1, 2], 6, "d") == {503: 6}
    assert len(_opened(three)) == 16


def _come(three: Cluster, proxies: list[int], count: int, word: str) -> Counter[int]:
    """The answers to so many that come at once."""
    statuses: Counter[int] = Counter()

    def come(number: int) -> None:
        url = three.urls[proxies[number % len(proxies)]]
        reply = httpx.post(f"{url}/v1/trajectories", json={"id": f"{word}{number}"}, timeout=40)
        statuses[reply.status_code] += 1

    threads = [threading.Thread(target=come, args=[number]) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


def _opened(three: Cluster) -> list[str]:
    events = three.log().events_of({TrajectoryOpened.KIND})
    return [e.record.name for e in events if isinstance(e.record, TrajectoryOpened)]
