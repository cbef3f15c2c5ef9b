"""The proxy over HTTP: a real server with the real openai SDK, and in process where faults are needed."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

import httpx
import openai
import pytest
from tests.fakes.proxies.in_process import InProcess
from tests.fakes.proxies.served import Served

from rollbook import store
from rollbook.engines.scripted import ScriptedEngine
from rollbook.ingest.fields import OpenTrajectory
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.replies.json_calls import HERMES
from rollbook.ingest.replies.written import ReplyWriter
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.store.errors import WriteFailedError
from rollbook.store.events import TrajectoryOpened, TurnDelivered
from rollbook.store.fold.trajectory import Trajectory, fold

USER = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def server(serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path) -> Served:
    """A served script."""
    model = str(text_model("chatml"))
    return serve("--model", model, "--engine", "scripted", "--script", f"{script}:answer")


@pytest.fixture
def name() -> str:
    """A trajectory's name that no other test uses."""
    return f"t-{uuid4().hex[:12]}"


@pytest.fixture
def client(server: Served, name: str) -> Iterator[openai.OpenAI]:
    """The openai SDK, where only base_url was changed."""
    with openai.OpenAI(base_url=f"{server.url}/t/{name}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    """Plain HTTP to the server."""
    with httpx.Client(base_url=server.url, timeout=30) as raw:
        yield raw


def _trajectory(server: Any, name: str) -> Trajectory:
    return next(t for t in fold(store.open(server.path).events()).values() if t.opened.name == name)


def _sql(server: Any, query: str, *values: Any) -> list[Any]:
    return store.connect(server.path).execute(query, values).fetchall()


def _chat(http: httpx.Client, name: str, *messages: Any, **body: Any) -> httpx.Response:
    return http.post(f"/t/{name}/v1/chat/completions", json={"messages": list(messages)} | body)


def _finish(http: httpx.Client, name: str, **body: Any) -> httpx.Response:
    return http.post(f"/v1/trajectories/{name}/finish", json=body)


# What a client gets ---------------------------------------------------------------------------------


def test_a_reply_has_openais_shape(client: openai.OpenAI, server: Served, name: str) -> None:
    """Every field of a chat completion is there, as the SDK's own types read it."""
    before = int(time.time())
    raw = client.chat.completions.with_raw_response.create(model="gpt-x", messages=[USER])
    body = json.loads(raw.content)
    assert set(body) == {"id", "object", "created", "model", "choices", "usage"}
    reply = raw.parse()
    assert (reply.object, reply.model) == ("chat.completion", "gpt-x")
    assert before <= reply.created <= time.time()
    (choice,) = reply.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content, choice.message.refusal) == (
        "assistant",
        "1: Hello",
        None,
    )
    (turn,) = _trajectory(server, name).turns.values()
    assert reply.id == f"chatcmpl-{turn.turn_id}"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == turn.completed.prompt_length == len(turn.completed.prompt_ids)
    assert reply.usage.completion_tokens == len(turn.completed.completion_ids)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert raw.headers["x-rollbook-trajectory-id"] == turn.requested.trajectory_id
    assert "x-rollbook-policy-version" not in raw.headers


def test_an_agents_loop_is_one_path(client: openai.OpenAI, server: Served, name: str, tools: Any) -> None:
    """The SDK's own messages, appended as agents do, extend turn by turn; calls say tool_calls."""
    messages: list[Any] = [{"role": "user", "content": "call two"}]
    first = client.chat.completions.create(model="m", messages=messages, tools=tools)
    assert first.choices[0].finish_reason == "tool_calls"
    message = first.choices[0].message
    assert message.content is None
    assert [json.loads(c.function.arguments) for c in message.tool_calls] == [{"a": 1, "b": "é"}] * 2
    assert len({c.id for c in message.tool_calls}) == 2
    messages.append(message)
    for call in message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "95"})
    second = client.chat.completions.create(model="m", messages=messages, tools=tools)
    assert second.choices[0].message.content == "4: 95"
    trajectory = _trajectory(server, name)
    parent, child = trajectory.turns.values()
    assert child.requested.parent_turn_id == parent.turn_id
    assert parent.delivered == "sent"
    assert trajectory.messages(child)[1]["tool_calls"][0]["id"] == message.tool_calls[0].id


def test_the_header_names_a_trajectory_too(http: httpx.Client, server: Served, name: str) -> None:
    """Path and header are two ways to name it; both reach one trajectory."""
    headers = {"X-Rollbook-Trajectory": name}
    by_header = http.post("/v1/chat/completions", json={"messages": [USER]}, headers=headers)
    reply = by_header.json()["choices"][0]["message"]
    by_path = _chat(http, name, USER, reply, USER)
    assert by_header.headers["x-rollbook-trajectory-id"] == by_path.headers["x-rollbook-trajectory-id"]
    both = http.post(f"/t/{name}/v1/chat/completions", json={"messages": [USER]}, headers=headers)
    assert both.status_code == 200
    assert [t.requested.parent_turn_id is None for t in _trajectory(server, name).turns.values()] == [
        True,
        False,
        True,
    ]


def test_two_names_in_one_request_conflict(http: httpx.Client, name: str) -> None:
    """A path and a header that differ are refused, and neither trajectory is opened."""
    headers = {"X-Rollbook-Trajectory": "other-" + name}
    answer = http.post(f"/t/{name}/v1/chat/completions", json={"messages": [USER]}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "trajectory_conflict")
    assert _finish(http, name).status_code == 404
    assert _finish(http, "other-" + name).status_code == 404


def test_a_request_that_names_none_is_quarantined(http: httpx.Client, server: Served) -> None:
    """It is answered and kept, each conversation apart, in a split that is never trained."""
    message = {"role": "user", "content": "who am I?"}
    first = http.post("/v1/chat/completions", json={"messages": [message]})
    reply = first.json()["choices"][0]["message"]
    more = http.post("/v1/chat/completions", json={"messages": [message, reply, USER]})
    other = http.post("/v1/chat/completions", json={"messages": [message]})
    names = [unquote(answer.headers["x-rollbook-quarantined"]) for answer in (first, more, other)]
    assert names[0] == names[1] != names[2]
    rows = _sql(server, "select split, turns from trajectories where trajectory = ?", names[0])
    assert rows == [("quarantine", 2)]


@pytest.mark.parametrize("model", ["gpt-4o-mini", "org/Модель:7b", "", None])
def test_any_model_name_is_kept(http: httpx.Client, server: Served, name: str, model: str | None) -> None:
    """Agents name their models; the name is recorded and not judged."""
    answer = _chat(http, name, USER, model=model)
    assert answer.json()["model"] == (model or "rollbook")
    assert _sql(server, "select requested_model from turns where trajectory = ?", name) == [(model,)]


def test_headers_of_the_first_request_describe_the_trajectory(
    http: httpx.Client, server: Served, name: str
) -> None:
    """Group, task and split are taken from the request that opens it."""
    headers = {"X-Rollbook-Group": "g1", "X-Rollbook-Task": "sum", "X-Rollbook-Split": "eval"}
    http.post(f"/t/{name}/v1/chat/completions", json={"messages": [USER]}, headers=headers)
    rows = _sql(server, 'select "group", task, split, status from trajectories where trajectory = ?', name)
    assert rows == [("g1", "sum", "eval", "open")]


def test_an_unknown_split_is_refused(http: httpx.Client, name: str) -> None:
    """A misspelt split would train what must not be trained."""
    headers = {"X-Rollbook-Split": "evla"}
    answer = http.post(f"/t/{name}/v1/chat/completions", json={"messages": [USER]}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_split")
    assert _finish(http, name).status_code == 404


def test_fields_the_engine_cannot_honour_are_told(http: httpx.Client, server: Served, name: str) -> None:
    """They are accepted, recorded as not honoured and named in a header that holds whatever they hold."""
    shape = {"type": "json_object"}
    odd = {"top_p": 0.5, "temperature": 0.1, "response_format": shape, "поле\r\nX: 1": 2, "a,b": 1}
    plain = {"response_format": None, "tool_choice": "auto", "logprobs": False, "presence_penalty": 0}
    answer = _chat(http, name, USER, user="u", metadata={}, **(plain | odd))
    assert answer.status_code == 200
    ignored = answer.headers["x-rollbook-not-honoured"].split(",")
    assert ignored[:4] == ["a%2Cb", "response_format", "temperature", "top_p"]
    assert len(ignored) == 5
    (turn,) = _trajectory(server, name).turns.values()
    assert turn.requested.honoured == dict.fromkeys(odd, False)
    assert {k: turn.requested.request[k] for k in odd} == odd
    assert _finish(http, name).status_code == 200  # the reply was delivered, so nothing is waited for
    assert "x-rollbook-not-honoured" not in _chat(http, name + "2", USER).headers


# What a client may not send -------------------------------------------------------------------------

DEEP: Any = 1
for _ in range(300):
    DEEP = [DEEP]

BAD: dict[str, tuple[Any, str]] = {
    "empty messages": ({"messages": []}, "empty_messages"),
    "no messages": ({}, "bad_request"),
    "messages no list": ({"messages": "hi"}, "bad_request"),
    "message no object": ({"messages": ["hi"]}, "bad_request"),
    "unknown role": ({"messages": [{"role": "robot", "content": "x"}]}, "unknown_role"),
    "no role": ({"messages": [{"content": "x"}]}, "unknown_role"),
    "role no text": ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown_role"),
    "assistant last": ({"messages": [USER, {"role": "assistant", "content": "x"}]}, "nothing_to_answer"),
    "bad calls": ({"messages": [{"role": "assistant", "tool_calls": [1]}, USER]}, "bad_tool_calls"),
    "calls no list": ({"messages": [{"role": "assistant", "tool_calls": {}}, USER]}, "bad_tool_calls"),
    "content number": ({"messages": [{"role": "user", "content": 5}]}, "bad_request"),
    "content object": ({"messages": [{"role": "user", "content": {"a": 1}}]}, "bad_request"),
    "content numbers": ({"messages": [{"role": "user", "content": [5]}]}, "bad_request"),
    "negative temperature": ({"messages": [USER], "temperature": -0.1}, "bad_request"),
    "no tokens": ({"messages": [USER], "max_tokens": 0}, "bad_request"),
    "seed too large": ({"messages": [USER], "seed": "9" * 25}, "bad_request"),
    "too deep": ({"messages": [USER], "metadata": DEEP}, "json_too_deep"),
    "too long": ({"messages": [{"role": "user", "content": "天" * 40000}]}, "context_length_exceeded"),
    "too many tokens": ({"messages": [USER], "max_completion_tokens": 32768}, "context_length_exceeded"),
    "no JSON": (b"{", "bad_json"),
    "a list": (b"[]", "bad_json"),
    "a string": (b'"hi"', "bad_json"),
    "not UTF-8": (b'{"messages": "\xff"}', "bad_json"),
    "half a surrogate": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "bad_json"),
    "nothing": (b"", "bad_request"),
    "NaN": (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "bad_json"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_400_and_records_no_turn(
    http: httpx.Client, server: Served, name: str, case: str
) -> None:
    """Each is told apart by its code, must not be retried, and leaves no half-recorded turn."""
    body, code = BAD[case]
    raw = body if isinstance(body, bytes) else json.dumps(body)
    answer = http.post(f"/t/{name}/v1/chat/completions", content=raw)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code), answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.headers["x-should-retry"] == "false"
    assert _chat(http, "next-" + name, USER).status_code == 200  # and the log still takes events
    counts = (f"(select count(*) from {view} where trajectory = ?)" for view in ("turns", "trajectories"))
    assert _sql(server, f"select {', '.join(counts)}", name, name) == [(0, 0)]


def test_a_name_may_hold_slashes(http: httpx.Client, server: Served, name: str) -> None:
    """Task names such as `org/repo/7` work in every route."""
    path = f"{name}/repo/7"
    assert http.post(f"/t/{path}/v1/chat/completions", json={"messages": [USER]}).status_code == 200
    assert http.post(f"/v1/trajectories/{path}/finish", json={"reward": 0.5}).json()["turns"] == 1
    assert _sql(server, "select reward from trajectories where trajectory = ?", path) == [(0.5,)]


def test_arguments_that_spell_half_a_surrogate_are_a_400(http: httpx.Client, name: str) -> None:
    """JSON inside JSON can hold what UTF-8 cannot: the client's error, not the server's."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    answer = _chat(http, name, USER, {"role": "assistant", "tool_calls": [call]}, USER)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_unicode")


# Opening and finishing ------------------------------------------------------------------------------


def test_a_trajectory_is_opened_by_itself(http: httpx.Client, server: Served, name: str) -> None:
    """POST /v1/trajectories is 201 and durable; the name is then taken."""
    body = {"id": name, "group": "g", "task": "t", "split": "teacher", "labels": {"k": [1, "é"]}}
    answer = http.post("/v1/trajectories", json=body)
    assert answer.status_code == 201
    assert answer.json()["id"] == name
    opened = _trajectory(server, name).opened
    assert opened == TrajectoryOpened(
        answer.json()["trajectory_id"], name, "g", "t", "teacher", {"k": [1, "é"]}
    )
    again = http.post("/v1/trajectories", json=body)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "trajectory_exists")
    assert _chat(http, name, USER).headers["x-rollbook-trajectory-id"] == opened.trajectory_id


def test_a_trajectory_without_a_name_is_named_by_its_id(http: httpx.Client) -> None:
    """An empty body opens one, too."""
    answer = http.post("/v1/trajectories").json()
    assert answer["id"] == answer["trajectory_id"]
    assert _finish(http, answer["id"]).json() == {"id": answer["id"], "status": "finished", "turns": 0}


@pytest.mark.parametrize(
    "body", [{"id": ""}, {"id": "x" * 257}, {"split": "evla"}, {"labels": 5}, {"grup": "g"}, {"id": 5}]
)
def test_a_bad_opening_is_a_400(http: httpx.Client, body: Any) -> None:
    """Misspelt keys and values are refused before anything is recorded."""
    answer = http.post("/v1/trajectories", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_request")


def test_finishing_records_outcome_and_rewards(http: httpx.Client, server: Served, name: str) -> None:
    """Reward, success, status and a reward per turn, in turn order."""
    first = _chat(http, name, USER).json()["choices"][0]["message"]
    _chat(http, name, USER, first, USER)
    answer = _finish(http, name, reward=0.5, success=False, status="truncated", turn_rewards=[1, -2.5])
    assert answer.json() == {"id": name, "status": "finished", "turns": 2}
    trajectory = _trajectory(server, name)
    assert trajectory.reward() == 0.5
    assert [trajectory.reward(turn_id=t) for t in trajectory.turns] == [1.0, -2.5]
    rows = _sql(server, "select status, success, reward, turns from trajectories where trajectory = ?", name)
    assert rows == [("truncated", False, 0.5, 2)]


def test_turn_rewards_by_response_id(http: httpx.Client, server: Served, name: str) -> None:
    """An object names turns by the ids of their responses; the others have no reward."""
    ids = [_chat(http, name, {"role": "user", "content": str(i)}).json()["id"] for i in range(3)]
    assert _finish(http, name, turn_rewards={ids[2]: 3.0, ids[0]: 1.0}).status_code == 200
    rows = _sql(server, "select turn_id, reward from turns where trajectory = ? order by seq", name)
    assert rows == [(i.removeprefix("chatcmpl-"), r) for i, r in zip(ids, (1.0, None, 3.0), strict=True)]


def _reward(http: httpx.Client, name: str, **body: Any) -> httpx.Response:
    return http.post(f"/v1/trajectories/{name}/rewards", json=body)


def test_rewards_come_at_any_time(http: httpx.Client, server: Served, name: str) -> None:
    """Before the end and after it, for the trajectory and for a turn, from the agent and from a judge."""
    reply = _chat(http, name, USER).json()["id"]
    early = _reward(http, name, reward=0.25, turn=reply)
    assert early.status_code == 201
    assert _finish(http, name, reward=1.0).status_code == 200
    judged = _reward(http, name, reward=-1, source="judge").json()
    trajectory = _trajectory(server, name)
    assert judged == {
        "id": name,
        "trajectory_id": trajectory.opened.trajectory_id,
        "event_id": trajectory.rewards[-1][0],
    }
    turn_id = reply.removeprefix("chatcmpl-")
    assert (trajectory.reward(), trajectory.reward("judge")) == (1.0, -1.0)
    assert trajectory.reward(turn_id=turn_id) == 0.25
    # The turn's own id names it as well as its reply's does.
    assert _reward(http, name, reward=0.5, turn=turn_id).status_code == 201
    rows = _sql(server, "select turn_id, reward, source from rewards where trajectory = ? order by seq", name)
    assert rows == [
        *((turn_id, 0.25, "agent"), (None, 1.0, "agent")),
        *((None, -1.0, "judge"), (turn_id, 0.5, "agent")),
    ]


def test_a_reward_takes_the_place_of_an_earlier_one(http: httpx.Client, server: Served, name: str) -> None:
    """The earlier one stays in the log, superseded; as of an earlier cut it still counts."""
    _chat(http, name, USER)
    first = _reward(http, name, reward=1.0).json()["event_id"]
    assert _finish(http, name).status_code == 200
    cut = store.format_cut(store.open(server.path).head())
    assert _reward(http, name, reward=0.0, supersedes=first).status_code == 201
    assert _trajectory(server, name).reward() == 0.0
    query = "select reward, superseded from rewards where trajectory = ? order by seq"
    assert _sql(server, query, name) == [(1.0, True), (0.0, False)]
    then = store.connect(server.path, as_of=cut).execute(query, [name]).fetchall()
    assert then == [(1.0, False)]


def test_a_reward_that_does_not_fit_is_refused(http: httpx.Client, server: Served, name: str) -> None:
    """Whom, what and which: each with a code that says what is wrong, and nothing is recorded."""
    _chat(http, name, USER)
    mine = _reward(http, name, reward=1.0).json()["event_id"]
    other = f"{name}-other"
    elsewhere = _chat(http, other, USER).json()["id"]
    theirs = _reward(http, other, reward=1.0).json()["event_id"]
    for status, code, body in (
        (422, "unknown_turn", {"reward": 1, "turn": elsewhere}),
        (422, "unknown_reward", {"reward": 1, "supersedes": theirs}),
        (422, "other_reward", {"reward": 1, "supersedes": mine, "source": "judge"}),
        (400, "bad_request", {"reward": "much"}),
        (400, "bad_request", {"reward": 1, "source": ""}),
        (400, "bad_request", {"reward": 1, "turns": "x"}),
        (400, "bad_request", {}),
    ):
        answer = _reward(http, name, **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), body
    raw = http.post(f"/v1/trajectories/{name}/rewards", content=b'{"reward": NaN}')
    assert raw.status_code == 400
    nobody = _reward(http, f"{name}-nobody", reward=1)
    assert (nobody.status_code, nobody.json()["error"]["code"]) == (404, "unknown_trajectory")
    assert [r.reward for _, r in _trajectory(server, name).rewards] == [1.0]


def test_preferences_between_trajectories(http: httpx.Client, server: Served, name: str) -> None:
    """By name, at any time; what does not fit is refused with a code, and nothing is recorded."""
    other = f"{name}-other"
    for trajectory in (name, other):
        _chat(http, trajectory, USER)
    assert _finish(http, name).status_code == 200
    detailed = http.post(
        "/v1/preferences", json={"chosen": name, "rejected": other, "margin": 2, "source": "me"}
    )
    plain = http.post("/v1/preferences", json={"chosen": other, "rejected": name})
    assert (detailed.status_code, plain.status_code) == (201, 201)
    for status, code, body in (
        (404, "unknown_trajectory", {"chosen": name, "rejected": f"{name}-nobody"}),
        (404, "unknown_trajectory", {"chosen": f"{name}-nobody", "rejected": name}),
        (422, "same_trajectory", {"chosen": name, "rejected": name}),
        (400, "bad_request", {"chosen": name}),
        (400, "bad_request", {"chosen": name, "rejected": other, "margin": "much"}),
        (400, "bad_request", {"chosen": name, "rejected": other, "source": ""}),
        (400, "bad_request", {"chosen": name, "rejected": other, "margins": 1}),
    ):
        answer = http.post("/v1/preferences", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), body
    columns = "trajectory, rejected, margin, source, event_id"
    query = f"select {columns} from preferences where ? in (trajectory, rejected) order by event_id"
    rows = _sql(server, query, name)
    assert rows == [
        (name, other, 2.0, "me", detailed.json()["event_id"]),
        (other, name, None, "label", plain.json()["event_id"]),
    ]


@pytest.mark.parametrize("rewards", [[], [1.0], [1.0, 2.0, 3.0], {"chatcmpl-no": 1.0}, {"": 1.0}])
def test_rewards_that_do_not_fit_are_422_and_finish_nothing(
    http: httpx.Client, server: Served, name: str, rewards: Any
) -> None:
    """A wrong number of rewards, or one for a reply that is not of this trajectory."""
    reply = _chat(http, name, USER).json()["choices"][0]["message"]
    _chat(http, name, USER, reply, USER)
    answer = _finish(http, name, reward=1.0, turn_rewards=rewards)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "wrong_turn_rewards")
    trajectory = _trajectory(server, name)
    assert trajectory.finished is None
    assert trajectory.rewards == ()
    assert _finish(http, name, turn_rewards=[1.0, 2.0]).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        '{"reward": NaN}',
        '{"reward": Infinity}',
        '{"reward": 1e999}',
        '{"reward": "NaN"}',
        '{"reward": "inf"}',
        '{"turn_rewards": ["nan"]}',
        '{"status": "great"}',
        '{"rewrad": 1}',
    ],
)
def test_a_finish_that_means_nothing_is_a_400(http: httpx.Client, name: str, raw: str) -> None:
    """No reward that is not a finite number, no unknown status or key."""
    _chat(http, name, USER)
    assert http.post(f"/v1/trajectories/{name}/finish", content=raw).status_code == 400
    assert _finish(http, name, reward=1).status_code == 200


def test_what_is_finished_stays_finished(http: httpx.Client, server: Served, name: str) -> None:
    """Unknown is 404; a second finish and further turns are 409, not to be retried."""
    unknown = _finish(http, name)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_trajectory")
    _chat(http, name, USER)
    assert _finish(http, name, reward=1).status_code == 200
    for late in (_finish(http, name, reward=2), _chat(http, name, USER)):
        assert (late.status_code, late.json()["error"]["code"]) == (409, "trajectory_finished")
        assert late.headers["x-should-retry"] == "false"
    assert _trajectory(server, name).reward() == 1.0
    assert len(_trajectory(server, name).turns) == 1


def test_the_sdks_own_errors_come_out(client: openai.OpenAI, server: Served, name: str) -> None:
    """Status and code reach agents as the SDK's error classes, without a retry."""
    patient = client.with_options(max_retries=5)
    with pytest.raises(openai.BadRequestError, match="nothing is left to answer") as bad:
        patient.chat.completions.create(model="m", messages=[{"role": "assistant", "content": "x"}])
    assert bad.value.code == "nothing_to_answer"
    with pytest.raises(openai.NotFoundError):
        patient.post(f"{server.url}/v1/trajectories/{name}-no/finish", body={}, cast_to=object)
    patient.chat.completions.create(model="m", messages=[USER])
    finish = f"{server.url}/v1/trajectories/{name}/finish"
    with pytest.raises(openai.UnprocessableEntityError):
        patient.post(finish, body={"turn_rewards": []}, cast_to=object)
    patient.post(finish, body={"reward": 1.0}, cast_to=object)
    with pytest.raises(openai.ConflictError) as late:
        patient.chat.completions.create(model="m", messages=[USER])
    assert late.value.code == "trajectory_finished"
    # The SDK retries a 409 unless told not to.
    assert late.value.request.headers["x-stainless-retry-count"] == "0"
    with pytest.raises(openai.InternalServerError):
        client.with_options(base_url=f"{server.url}/t/{name}-boom/v1").chat.completions.create(
            model="m", messages=[{"role": "user", "content": "boom"}]
        )


def test_concurrent_requests_become_siblings_in_the_order_asked(
    http: httpx.Client, server: Served, name: str
) -> None:
    """Two requests at once share a parent; rewards by list go by when turns were asked for."""
    reply = _chat(http, name, USER).json()["choices"][0]["message"]
    texts = ["sleep 0.5", "sleep 0.1"]
    with ThreadPoolExecutor(2) as pool:
        waiting = []
        for text in texts:
            waiting.append(pool.submit(_chat, http, name, USER, reply, {"role": "user", "content": text}))
            time.sleep(0.1)
        answers = [w.result().json() for w in waiting]
    assert [a["choices"][0]["message"]["content"] for a in answers] == [f"3: {t}" for t in texts]
    first, slow, fast = _trajectory(server, name).turns.values()
    assert [f"chatcmpl-{t.turn_id}" for t in (slow, fast)] == [a["id"] for a in answers]
    assert slow.requested.parent_turn_id == fast.requested.parent_turn_id == first.turn_id
    assert _finish(http, name, turn_rewards=[0.0, 1.0, 2.0]).status_code == 200
    trajectory = _trajectory(server, name)
    assert [trajectory.reward(turn_id=t.turn_id) for t in (first, slow, fast)] == [0.0, 1.0, 2.0]


def test_finishing_while_a_request_runs_is_a_409(http: httpx.Client, server: Served, name: str) -> None:
    """A trajectory that still answers cannot end; once it has answered, it can."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_chat, http, name, {"role": "user", "content": "sleep 0.6"})
        time.sleep(0.25)
        busy = _finish(http, name)
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "trajectory_busy")
        assert waiting.result().status_code == 200
    assert _finish(http, name).status_code == 200
    (turn,) = _trajectory(server, name).turns.values()
    assert turn.delivered == "sent"


def test_a_client_that_left_is_not_marked_delivered(http: httpx.Client, server: Served, name: str) -> None:
    """A reply nobody took is kept, but its delivery stays uncertain; the trajectory can still finish."""
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=server.url, timeout=0.2) as hasty:
        _chat(hasty, name, {"role": "user", "content": "sleep 0.5"})
    time.sleep(0.6)
    assert _finish(http, name).status_code == 200
    (turn,) = _trajectory(server, name).turns.values()
    assert turn.completed is not None
    assert turn.delivered is None


def test_health_names_run_lane_and_engine(http: httpx.Client, server: Served) -> None:
    """/healthz says what is being recorded, and /engine is not there for a script."""
    assert http.get("/healthz").json() == {
        "status": "ok",
        "store": store.open(server.path).store_id,
        "run": "default",
        "lane": "serve",
        "engine": "scripted",
        "policy_version": None,
        "engines": [],
    }
    assert http.get("/engine/health").status_code == 404


def test_interrupting_ends_in_order(
    serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path
) -> None:
    """Ctrl-C stops the server, and all it acknowledged is in the store."""
    arguments = ["--engine", "scripted", "--script", f"{script}:answer"]
    served = serve("--model", str(text_model("chatml")), *arguments)
    httpx.post(f"{served.url}/t/a/v1/chat/completions", json={"messages": [USER]})
    assert served.stop() in (0, 130, -2)
    assert "Traceback" not in served.log.read_text()
    (turn,) = _trajectory(served, "a").turns.values()
    assert turn.completed.reply["content"] == "1: Hello"


# In process: faults --------------------------------------------------------------------------------


@pytest.fixture
def proxy(in_process: Callable[..., InProcess], chat: Any) -> InProcess:
    """An in-process proxy over a script that echoes."""
    return in_process(
        ScriptedEngine(ReplyWriter(chat(), HERMES), lambda m, t: f"{len(m)}: {m[-1]['content']}"), chat()
    )


def test_a_reward_for_what_retention_dropped_is_a_404(
    proxy: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is known still, its events are not there: nothing is recorded of it."""
    assert proxy.chat("dropped", USER).status_code == 200
    assert proxy.post("/v1/trajectories/dropped/finish", json={}).status_code == 200
    proxy.settled()
    head = proxy.store.head()
    with monkeypatch.context() as patch:
        patch.setattr(store.Store, "trajectory", lambda *_: None)
        answer = proxy.post("/v1/trajectories/dropped/rewards", json={"reward": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "trajectory_dropped")
    assert proxy.store.head() == head


def test_a_store_that_fails_is_a_503(proxy: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be made durable is never answered with 200; the client is told when to come back."""
    first = proxy.chat("t", USER)
    assert first.status_code == 200

    def append_each(appends: Any) -> None:
        for _, future in appends:
            future.set_exception(WriteFailedError("lane 'serve': no space left on device"))

    with monkeypatch.context() as patch:
        patch.setattr(proxy.recorder.writer, "append_each", append_each)
        reply = first.json()["choices"][0]["message"]
        calls: list[tuple[str, Callable[[], httpx.Response]]] = [
            ("chat", lambda: proxy.chat("t", USER, reply, USER)),
            ("finish", lambda: proxy.post("/v1/trajectories/t/finish", json={"reward": 1})),
            ("open", lambda: proxy.post("/v1/trajectories", json={"id": "new"})),
        ]
        for what, call in calls:
            answer = call()
            assert (what, answer.status_code) == (what, 503)
            assert answer.headers["retry-after"] == "10"
            assert answer.json()["error"]["code"] == "store_failed"
            assert answer.json()["error"]["type"] == "server_error"
            assert answer.headers["x-should-retry"] == "true"
    assert proxy.post("/v1/trajectories/t/finish", json={"reward": 1}).status_code == 200
    (trajectory,) = fold(proxy.store.events()).values()
    assert len(trajectory.turns) == 1


def test_a_write_that_fails_on_disk_is_a_503_from_then_on(
    proxy: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a real failed write the lane takes nothing more, and every request says so."""
    import os

    assert proxy.chat("t", USER).status_code == 200
    with monkeypatch.context() as patch:

        def fdatasync(fd: int) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "fdatasync", fdatasync)
        assert proxy.chat("u", USER).status_code == 503
    assert proxy.chat("v", USER).status_code == 503
    health = proxy.run(proxy.client.get("/healthz"))
    assert health.status_code == 503
    assert "No space left on device" in health.json()["status"]
    trajectories = fold(proxy.store.events()).values()
    assert [t.opened.name for t in trajectories] == ["t"]


def test_a_reply_waits_for_the_disk(
    in_process: Any,
    chat: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reply is held back until its turn is durable."""
    import os

    proxy = in_process(ScriptedEngine(ReplyWriter(chat(), HERMES), lambda m, t: "Hi"), chat())
    gate, real = threading.Event(), os.fdatasync

    def fdatasync(fd: int) -> None:
        gate.wait(60)
        real(fd)

    async def scenario() -> None:
        monkeypatch.setattr(os, "fdatasync", fdatasync)
        body = {"messages": [USER]}
        request = asyncio.create_task(proxy.client.post("/t/t/v1/chat/completions", json=body))
        await asyncio.sleep(0.3)
        assert not request.done()
        assert fold(proxy.store.events()) == {}
        gate.set()
        answer = await request
        assert answer.status_code == 200
        (trajectory,) = fold(proxy.store.events()).values()
        (turn,) = trajectory.turns.values()
        assert answer.json()["id"] == f"chatcmpl-{turn.turn_id}"

    proxy.run(scenario())


def test_delivery_is_noted_after_the_turn(proxy: InProcess) -> None:
    """turn.delivered follows turn.completed in the lane."""
    proxy.chat("t", USER)
    proxy.settled()
    kinds = [event.kind for event in proxy.store.events()]
    assert kinds == ["trajectory.opened", "turn.requested", "turn.completed", "turn.delivered"]
    assert isinstance(list(proxy.store.events())[-1].record, TurnDelivered)


def test_another_lanes_open_trajectory_is_refused(
    proxy: InProcess, chat: Callable[[str], ChatTokenizer]
) -> None:
    """A trajectory is written by one proxy at a time: another says whose it is."""
    proxy.chat("mine", USER)
    proxy.chat("done", USER)
    proxy.post("/v1/trajectories/done/finish", json={})
    other = Recorder(proxy.store, "second", "default")
    try:
        from rollbook.store.errors import RequestError

        with pytest.raises(RequestError, match="lane 'serve': send it there") as refused:
            other.find("mine")
        assert (refused.value.status, refused.value.code) == (409, "other_lane")
        done = other.find("done")
        assert done is not None
        assert done.finished
        with pytest.raises(RequestError, match="choose another id"):
            other.draft(OpenTrajectory(id="mine"))
    finally:
        other.close()


def test_a_header_may_not_contradict_the_opening(http: httpx.Client, name: str) -> None:
    """A trajectory's split, group and task are decided once; saying otherwise later is a 409."""
    path, body = f"/t/{name}/v1/chat/completions", {"messages": [USER]}
    assert http.post(path, json=body, headers={"X-Rollbook-Split": "eval"}).status_code == 200
    answer = http.post(path, json=body, headers={"X-Rollbook-Split": "train"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "trajectory_conflict")
    assert http.post(path, json=body).status_code == 200


def test_header_values_are_utf8(http: httpx.Client, server: Served, name: str) -> None:
    """A name in a header is the same as in a path, beyond ASCII too."""
    wanted = f"{name}-дом"
    headers = {"X-Rollbook-Trajectory": wanted.encode()}
    assert http.post("/v1/chat/completions", json={"messages": [USER]}, headers=headers).status_code == 200
    assert http.post(f"/v1/trajectories/{wanted}/finish", json={"reward": 1}).status_code == 200
    assert _sql(server, "select reward from trajectories where trajectory = ?", wanted) == [(1.0,)]
