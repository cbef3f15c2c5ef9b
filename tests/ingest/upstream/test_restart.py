"""Trajectories live on over restarts and crashes, are finished once, and rewarded by the reply's own id."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.fakes.proxies.served import Served
from tests.fakes.upstreams.replies import ENDPOINTS
from tests.fakes.upstreams.server import HttpUpstream, chat_reply, streamed, whole
from tests.ingest.upstream.conftest import Passed

from rollbook import store
from rollbook.store.fold.trajectory import fold

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize("path", [p for p in ENDPOINTS if ENDPOINTS[p]["goes_on"]])
def test_a_conversation_goes_on_over_a_restart(
    passing: Callable[..., Passed], upstream: HttpUpstream, path: str
) -> None:
    """The next request hangs on the turn from before, and is stored as what is new in it."""
    endpoint = ENDPOINTS[path]
    upstream.answers += [streamed(endpoint["stream"]), whole(endpoint["whole"])]
    passed = passing()
    passed.post(path, endpoint["asks"] | {"stream": True})
    passed.turn()
    again = passing()
    again.post(path, endpoint["goes_on"])
    parent, child = again.turns(count=2)
    assert child.requested.parent_turn_id == parent.turn_id
    assert child.requested.base_turn_id == parent.turn_id
    if path != CHAT:
        assert child.requested.wire["shared_items"] == 1
        sent = endpoint["goes_on"]["input" if path == "/v1/responses" else "messages"]
        assert again.trajectories()["t"].items(child) == sent


def test_a_finished_trajectory_takes_no_more(passing: Callable[..., Passed], upstream: HttpUpstream) -> None:
    """409, also after a restart, and the upstream is not asked."""
    passed = passing()
    passed.chat(USER)
    assert passed.finish(reward=0.5, success=True).json()["turns"] == 1
    for again in (False, True):
        proxy = passing() if again else passed
        refused = proxy.chat(USER)
        assert (refused.status_code, refused.headers["x-should-retry"]) == (409, "false")
        assert refused.json()["error"]["code"] == "trajectory_finished"
    assert len(upstream.asked) == 1
    assert proxy.sql("select status, success, reward, turns from trajectories") == [
        ("completed", True, 0.5, 1)
    ]


def test_an_abandoned_trajectory_is_finished(passing: Any, upstream: Any) -> None:
    """--abandon-s counts from the last request, and not while one runs."""
    passed = passing(abandon_s=0.6)
    hold = threading.Event()
    data = ENDPOINTS[CHAT]["stream"]
    upstream.answers.append(streamed(data, [50], hold=hold, held=1))
    with passed.http.stream("POST", f"/t/t{CHAT}", json={"messages": [USER], "stream": True}) as reply:
        time.sleep(1.5)
        hold.set()
        reply.read()
    assert passed.trajectories()["t"].finished is None
    deadline = time.monotonic() + 30
    while passed.trajectories()["t"].finished is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert passed.trajectories()["t"].finished.status == "aborted"


def test_rewards_by_the_replys_own_id(passing: Callable[..., Passed], upstream: HttpUpstream) -> None:
    """A turn is named by the id that the upstream gave its reply, at any time; an unknown one is a 422."""
    passed = passing()
    upstream.answers += [whole(chat_reply(id=f"chatcmpl-{i}")) for i in "ab"]
    passed.chat(USER)
    passed.chat(USER)
    first, second = passed.turns(count=2)

    def reward(turn: str, value: float) -> httpx.Response:
        body = {"reward": value, "turn": turn, "source": "judge"}
        return passed.http.post("/v1/trajectories/t/rewards", json=body)

    assert reward("chatcmpl-b", 0.25).status_code == 201
    assert passed.finish(reward=1.0).status_code == 200
    assert reward("chatcmpl-a", 0.75).status_code == 201
    assert reward(f"chatcmpl-{second.turn_id}", 0.5).status_code == 201
    assert reward("chatcmpl-c", 0.5).status_code == 422
    label = {"name": "good", "value": True, "turn": "chatcmpl-a"}
    assert passed.http.post("/v1/trajectories/t/labels", json=label).status_code == 201
    trajectory = passed.trajectories()["t"]
    assert trajectory.reward("judge", first.turn_id) == 0.75
    assert trajectory.reward("judge", second.turn_id) == 0.5
    assert trajectory.reward() == 1.0


@pytest.mark.parametrize("restarted", [False, True])
def test_a_finish_rewards_turns_by_the_upstreams_ids(
    passing: Callable[..., Passed], upstream: HttpUpstream, restarted: bool
) -> None:
    """Also over a restart; an id that no reply had is a 422, and the trajectory stays open."""
    passed = passing()
    upstream.answers += [whole(chat_reply(id=f"chatcmpl-{i}")) for i in "ab"]
    passed.chat(USER)
    passed.chat(USER)
    first, second = passed.turns(count=2)
    if restarted:
        passed = passing()
    assert passed.finish(turn_rewards={"chatcmpl-c": 1.0}).status_code == 422
    rewards = {"chatcmpl-b": 0.25, f"chatcmpl-{first.turn_id}": 0.5}
    assert passed.finish(turn_rewards=rewards).status_code == 200
    trajectory = passed.trajectories()["t"]
    assert [trajectory.reward("agent", t.turn_id) for t in (first, second)] == [0.5, 0.25]


def test_of_several_choices_the_first_has_the_id(passed: Passed, upstream: HttpUpstream) -> None:
    """Siblings share the upstream's id."""
    choices = [{"index": i, "message": {"role": "assistant", "content": str(i)}} for i in range(2)]
    upstream.answers.append(whole(chat_reply(choices=choices)))
    passed.chat(USER, n=2)
    first, _ = passed.turns(count=2)
    body = {"reward": 1.0, "turn": "chatcmpl-up1"}
    assert passed.http.post("/v1/trajectories/t/rewards", json=body).status_code == 201
    assert passed.trajectories()["t"].reward("agent", first.turn_id) == 1.0


@pytest.mark.crashes
def test_kill_between_request_and_reply(serve: Callable[..., Served], upstream: HttpUpstream) -> None:
    """kill -9 while an upstream works: the request is in the log, its turn never ended, and all goes on."""
    served = serve("--engine", "upstream", "--engine-url", upstream.url)
    url = f"{served.url}/t/t{CHAT}"
    first = httpx.post(url, json={"messages": [USER]}).json()["choices"][0]["message"]
    hold = threading.Event()
    answer = whole(chat_reply("never"))
    answer.hold = hold
    upstream.answers.append(answer)
    following = {"messages": [USER, first, USER]}
    errors: list[Exception] = []

    def ask() -> None:
        try:
            httpx.post(url, json=following, timeout=30)
        except httpx.TransportError as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    deadline = time.monotonic() + 60
    while len(_turns(served)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    served.kill()
    asking.join(20)
    assert len(errors) == 1
    assert upstream.left.wait(60)
    served.start()
    assert httpx.post(url, json=following).json() == chat_reply()
    finish = httpx.post(f"{served.url}/v1/trajectories/t/finish", json={"reward": 1.0})
    assert finish.json()["turns"] == 2
    parent, lost, again = _turns(served)
    assert (lost.completed, lost.failed) == (None, None)
    assert again.requested.parent_turn_id == lost.requested.parent_turn_id == parent.turn_id
    rows = store.connect(served.path).execute("select status from turns order by seq").fetchall()
    assert rows == [("completed",), ("running",), ("completed",)]
    served.stop()


def _turns(served: Any) -> list[Any]:
    """Of its only trajectory, as far as they are durable: a reply that only passes does not wait for that."""
    trajectories = list(fold(store.open(served.path).events()).values())
    assert len(trajectories) <= 1
    return [turn for trajectory in trajectories for turn in trajectory.turns.values()]
