"""What the proxy keeps of trajectories: never more than the log, and never more than has a bound."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.proxies.in_process import InProcess

from rollbook.engines.scripted import ScriptedEngine
from rollbook.ingest.recording import recorder
from rollbook.ingest.recording.recorder import RunRecovery
from rollbook.ingest.recording.restore import restored
from rollbook.ingest.replies.json_calls import HERMES
from rollbook.ingest.replies.written import ReplyWriter
from rollbook.ingest.tokens.tree import TreeTurn
from rollbook.ingest.trajectories import registry
from rollbook.ingest.trajectories import registry as trajectories
from rollbook.ingest.trajectories.live import Contents, LiveTrajectory
from rollbook.ingest.trajectories.place import Place
from rollbook.ingest.trajectories.registry import EndedNames, NameFilter
from rollbook.store.errors import UnstorableError
from rollbook.store.events import TrajectoryOpened
from rollbook.store.fold.trajectory import Trajectory
from rollbook.store.log import writer as lane_writer

USER = {"role": "user", "content": "Hello"}
AGAIN = {"x-stainless-retry-count": "1"}


@pytest.fixture
def proxy(in_process: Callable[..., InProcess], chat: Any) -> InProcess:
    """A proxy whose engine says how many messages it was sent, and the last one."""
    return in_process(
        ScriptedEngine(ReplyWriter(chat(), HERMES), lambda m, t: f"{len(m)}: {str(m[-1]['content'])[:40]}"),
        chat(),
    )


def _until(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _tree_turn(turn: TreeTurn) -> Any:
    parent = None if turn.parent is None else turn.parent.turn_id
    fields = (turn.turn_id, turn.context_key, turn.messages, turn.reply, parent, turn.length, turn.cut)
    return *fields, turn.ids.tolist(), turn.hashes, turn.hasher.hexdigest()


def _plain(contents: Contents) -> Any:
    """What two contents must have alike."""
    turns = [_tree_turn(turn) for turn in contents.tree.turns]
    tips = {tip: [t.turn_id for t in entries] for tip, entries in contents.tree._by_tip.items()}
    rest = (contents.completed, contents.delivered, contents.items, contents.replies, contents.arrivals)
    return turns, tips, rest, contents.requests


def _check_memory(proxy: Any) -> None:
    """What is in memory of each open trajectory is what the log has of it."""
    proxy.settled()
    known = proxy.recorder.trajectories
    for live in known.open():
        proxy.run(proxy.recorder.recall(live.opened.name))
        folded = proxy.store.trajectory(live.opened.trajectory_id)
        assert _plain(live.known) == _plain(restored(folded))
        assert {known.of_turn(turn_id) for turn_id in live.known.completed} <= {live}
    held = [live for live in known.open() if live.contents is not None]
    assert known.bytes == sum(live.known.size for live in held)


# A script of requests, the same again and again ------------------------------------------------------


class Agent:
    """Sends requests of several trajectories, by a seed: goes on, goes back, repeats, changes history."""

    def __init__(self, proxy: Any, seed: int) -> None:
        self.proxy, self.rng = proxy, random.Random(seed)
        self.seen: dict[str, list[list[Any]]] = {}
        self.sent: list[tuple[str, str, Any]] = []
        self.responses: list[tuple[str, str]] = []

    def step(self) -> httpx.Response:
        """One request."""
        rng = self.rng
        name = rng.choice(["a", "b", "c"])
        kind = rng.choice(
            ["chat", "chat", "chat", "edit", "retry", "responses", "messages", "unnamed", "label"]
        )
        if kind == "retry" and self.sent:
            _, path, body = rng.choice(self.sent)
            return self.proxy.post(path, json=body, headers=AGAIN)
        if kind == "responses":
            return self._respond(name)
        if kind == "unnamed":
            name = f"unnamed-{rng.randint(0, 1)}"
        history = list(rng.choice(self.seen.get(name) or [[]]))
        if kind == "edit" and history:
            history[0] = {"role": "user", "content": f"changed {rng.randint(0, 2)}"}
        messages = [*history, {"role": "user", "content": f"say {rng.randint(0, 3)}"}]
        if kind == "messages":
            return self._message(name, messages)
        body = {"messages": messages, "n": rng.choice([1, 1, 2])}
        prefix = "" if name.startswith("unnamed") else f"/t/{name}"
        path = f"{prefix}/v1/chat/completions"
        headers = {"x-rollbook-labels": f'{{"k": {rng.randint(0, 3)}}}'} if kind == "label" else {}
        answer: httpx.Response = self.proxy.post(path, json=body, headers=headers)
        if answer.status_code == 200:
            message = rng.choice(answer.json()["choices"])["message"]
            self.seen.setdefault(name, []).append([*messages, message])
            self.sent.append((name, path, body))
        return answer

    def _respond(self, name: str) -> httpx.Response:
        body: dict[str, Any] = {"input": [{"role": "user", "content": f"say {self.rng.randint(0, 3)}"}]}
        earlier = [response for response in self.responses if response[0] == name]
        path = f"/t/{name}/v1/responses"
        if earlier and self.rng.random() < 0.7:
            body["previous_response_id"] = self.rng.choice(earlier)[1]
            path = self.rng.choice([path, "/v1/responses"])  # known by the response alone
        answer: httpx.Response = self.proxy.post(path, json=body)
        if answer.status_code == 200:
            self.responses.append((name, answer.json()["id"]))
            self.sent.append((name, path, body))
        return answer

    def _message(self, name: str, messages: list[Any]) -> httpx.Response:
        plain = [m for m in messages if isinstance(m["content"], str)]
        body = {"messages": plain, "max_tokens": 100, "model": "m"}
        answer: httpx.Response = self.proxy.post(f"/t/{name}/v1/messages", json=body)
        return answer


def _recorded(by_name: dict[str, Trajectory]) -> list[Any]:
    """What the log says of all turns, with their places for their ids."""
    rows = []
    for number, trajectory in enumerate(by_name.values()):
        place = {turn_id: i for i, turn_id in enumerate(trajectory.turns)}
        for turn in trajectory.turns.values():
            request, done = turn.requested, turn.completed
            links = [
                place.get(i or "") for i in (request.parent_turn_id, request.base_turn_id, request.sibling_of)
            ]
            what = (
                number,
                links,
                request.root_reason,
                request.shared_messages,
                request.messages,
                request.wire,
            )
            result = None
            if done is not None:
                ids = (done.prompt_ids.tolist(), done.completion_ids.tolist(), done.prompt_sha256)
                result = (*ids, done.flags, done.reply.get("content"))
            rows.append((*what, result, turn.delivered))
    return rows


@pytest.mark.more_but("0")
@pytest.mark.parametrize("seed", range(4))
def test_what_is_written_off_is_as_if_it_had_stayed(
    in_process: Callable[..., InProcess], chat: Any, seed: int
) -> None:
    """The same requests are recorded alike, whichever trajectories had to be read back in between."""
    outcomes = []
    for away in (False, True):
        proxy = in_process(
            ScriptedEngine(ReplyWriter(chat(), HERMES), lambda m, t: f"{len(m)}: {m[-1]['content']}"), chat()
        )
        agent, rng = Agent(proxy, seed), random.Random(seed)
        known = proxy.recorder.trajectories
        gone = 0
        answers = []
        for _ in range(60):
            for live in [live for live in known.open() if away and rng.random() < 0.5]:
                gone += live.idle and live.contents is not None
                if live.idle:
                    known.write_off(live)
            answers.append(agent.step().status_code)
        assert (gone > 20) == away
        assert set(answers) <= {200, 404}
        _check_memory(proxy)
        outcomes.append((answers, _without_ids(proxy)))
    assert outcomes[0] == outcomes[1]


def _without_ids(proxy: Any) -> list[Any]:
    turns = _recorded(proxy.trajectories())
    for turn in turns:
        turn[5].pop("digest")  # of a body that names an earlier response by its id
    return turns


def test_memory_of_open_trajectories_has_a_bound(in_process: Any, chat: Any) -> None:
    """Beyond the budget the least recently used goes; all can be gone on with."""
    proxy = in_process(ScriptedEngine(ReplyWriter(chat(), HERMES), lambda m, t: "Hi"), chat())
    known = proxy.recorder.trajectories
    known.budget = 40_000
    histories: dict[str, list[Any]] = {}
    for _ in range(3):
        for name in "abcdefgh":
            messages = [*histories.get(name, []), {"role": "user", "content": os.urandom(1000).hex()}]
            reply = proxy.chat(name, *messages)
            histories[name] = [*messages, reply.json()["choices"][0]["message"]]
    assert known.bytes < 40_000
    there = [live.opened.name for live in known.open() if live.contents is not None]
    assert 0 < len(there) < 8
    assert there == list("abcdefgh")[-len(there) :]
    for name in "abcdefgh":
        turns = list(proxy.trajectories()[name].turns.values())
        assert [t.requested.parent_turn_id for t in turns] == [None, *(t.turn_id for t in turns[:-1])]
    assert proxy.post("/v1/trajectories/a/finish", json={"turn_rewards": [1, 2, 3]}).json()["turns"] == 3
    _check_memory(proxy)


def test_what_was_asked_once_is_written_off_too(in_process: Any, chat: Any) -> None:
    """An agent that never comes back holds no memory either."""
    proxy = in_process(ScriptedEngine(ReplyWriter(chat(), HERMES), lambda m, t: "Hi"), chat())
    known = proxy.recorder.trajectories
    known.budget = 20_000
    for i in range(40):
        proxy.chat(f"t{i}", {"role": "user", "content": os.urandom(1000).hex()})
    assert known.bytes <= 20_000
    assert sum(live.contents is not None for live in known.open()) < 8


def test_a_trajectory_in_use_is_not_written_off(in_process: Any, chat: Any) -> None:
    """Whatever the budget, what a request or a reply still needs stays."""
    proxy = in_process(ScriptedEngine(ReplyWriter(chat(), HERMES), lambda m, t: "Hi"), chat())
    known = proxy.recorder.trajectories
    known.budget = 0
    for _ in range(2):
        assert proxy.chat("a", USER).status_code == 200
        assert proxy.chat("b", USER, n=2).status_code == 200
    [a, b] = known.open()
    proxy.run(proxy.recorder.recall("a"))
    a.sending = 1
    proxy.chat("b", USER)
    assert (a.contents is None, b.contents is None) == (False, False)
    a.sending = 0
    proxy.chat("b", USER)
    assert a.contents is None
    _check_memory(proxy)


# Memory is what the log has ----------------------------------------------------------------------------


@pytest.mark.more_but("0", "3")
@pytest.mark.parametrize("seed", range(4))
def test_after_spells_memory_is_what_the_log_has(
    in_process: Callable[..., InProcess],
    chat: Any,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """The disk fails again and again: what was answered is there once, and nobody goes on from a ghost."""
    monkeypatch.setattr(lane_writer, "MEND_S", 0.001)
    monkeypatch.setattr(lane_writer, "REST", 0)
    real, rng, failing = os.fdatasync, random.Random(seed), [False]

    def fdatasync(fd: int) -> None:
        if failing[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    proxy = in_process(
        ScriptedEngine(ReplyWriter(chat(), HERMES), lambda m, t: f"{len(m)}: {m[-1]['content']}"), chat()
    )
    agent, answers = Agent(proxy, seed), []
    for _ in range(60):
        failing[0] = rng.random() < 0.3
        answers.append(agent.step())
        if failing[0]:
            failing[0] = False
            _until(lambda: proxy.recorder.writer.failure is None)
    refused = [a for a in answers if a.status_code == 503]
    assert len(refused) > 5
    assert all(a.headers["retry-after"] == "10" for a in refused)
    assert {a.status_code for a in answers} <= {200, 404, 503}
    _check_memory(proxy)
    there = {
        t.turn_id
        for trajectory in proxy.trajectories().values()
        for t in trajectory.turns.values()
        if t.completed
    }
    answered = [a.headers["x-rollbook-turn-id"].split(",") for a in answers if a.status_code == 200]
    assert {turn_id for turns in answered for turn_id in turns} <= there
    for trajectory in proxy.trajectories().values():
        parents = {t.requested.parent_turn_id for t in trajectory.turns.values()} - {None}
        assert parents <= there


def test_a_label_that_was_not_written_is_written_later(
    proxy: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed with its request; sent again, it is new."""
    label = {"x-rollbook-labels": '{"colour": "blue"}'}
    path, body = "/t/t/v1/chat/completions", {"messages": [USER]}
    assert proxy.post(path, json=body).status_code == 200
    with monkeypatch.context() as patch:
        _refuse(patch, proxy, lambda event: event.kind == "label.added")
        assert proxy.post(path, json=body, headers=label).status_code != 200
    assert proxy.post(path, json=body, headers=label).status_code == 200
    proxy.settled()
    kinds = [event.kind for event in proxy.store.events()]
    assert kinds.count("label.added") == 1


def test_a_delivery_that_was_not_noted_is_noted_later(
    proxy: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request proves it by its echo."""
    with monkeypatch.context() as patch:
        _refuse(patch, proxy, lambda event: event.kind == "turn.delivered")
        reply = proxy.chat("t", USER).json()["choices"][0]["message"]
        proxy.settled()
    assert proxy.chat("t", USER, reply, USER).status_code == 200
    first, second = proxy.trajectories()["t"].turns.values()
    assert (first.delivered, second.delivered) == ("echoed", "sent")


def test_a_trajectory_that_did_not_begin_takes_no_place(
    proxy: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its name nor its place among those that wait to be trained on."""
    ids: list[str] = []
    outstanding = proxy.recorder.known_run.outstanding
    with monkeypatch.context() as patch:
        _refuse(patch, proxy, lambda event: event.kind == "trajectory.opened")
        unopened = proxy.recorder.on_unopened
        patch.setattr(proxy.recorder, "on_unopened", lambda id_: (ids.append(id_), unopened(id_)))
        assert proxy.post("/v1/trajectories", json={"id": "t"}).status_code == 400
        assert proxy.chat("u", USER).status_code == 400
        proxy.settled()
        proxy.recorder._notify()
    assert len(ids) == 2
    assert outstanding._trajectories == {}
    assert list(proxy.recorder.trajectories.open()) == []
    assert proxy.chat("t", USER).status_code == 200
    assert len(outstanding._trajectories) == 1


def _refuse(patch: pytest.MonkeyPatch, proxy: Any, what: Callable[[Any], bool]) -> None:
    """Let appends fail that hold such an event."""
    writer = proxy.recorder.writer
    real = writer.append_each

    def append_each(appends: Any) -> None:
        for events, future in appends:
            if any(map(what, events)):
                future.set_exception(UnstorableError("it has no stored form"))
            else:
                real([(events, future)])

    patch.setattr(writer, "append_each", append_each)


# What is finished --------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", ["recent", "filter", "restart"])
def test_a_finished_name_is_taken(
    in_process: Any,
    chat: Any,
    monkeypatch: pytest.MonkeyPatch,
    known: str,
) -> None:
    """However long ago it ended: it opens nothing, takes no turn, and can be rewarded and labelled."""
    engine = ScriptedEngine(ReplyWriter(chat(), HERMES), lambda m, t: "Hi")
    proxy = in_process(engine, chat())
    proxy.recorder.trajectories.ended = EndedNames(100 if known == "recent" else 2)
    names = [f"t{i}" for i in range(6)]
    for name in names:
        assert proxy.chat(name, USER).status_code == 200
        assert proxy.post(f"/v1/trajectories/{name}/finish", json={}).status_code == 200
    if known == "restart":
        monkeypatch.setattr(trajectories, "EndedNames", lambda: EndedNames(2))
        it = proxy.recorder
        it.known_run.refresh()
        begun = RunRecovery(it.store, it.writer, it.run, Place(), trajectories.BUDGET_BYTES)
        it.trajectories = begun.restored(it.known_run)
    for name in names:
        assert (
            proxy.post("/v1/trajectories", json={"id": name}).json()["error"]["code"] == "trajectory_exists"
        )
        for answer in (
            proxy.chat(name, USER),
            proxy.post(f"/v1/trajectories/{name}/finish", json={}),
            proxy.post(f"/t/{name}/v1/responses", json={"input": "x"}),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "trajectory_finished")
        reward = {"reward": 0.5, "source": "judge"}
        assert proxy.post(f"/v1/trajectories/{name}/rewards", json=reward).status_code == 201
        assert (
            proxy.post(f"/v1/trajectories/{name}/labels", json={"name": "k", "value": 1}).status_code == 201
        )
    assert proxy.post("/v1/trajectories/none/rewards", json={"reward": 1.0}).status_code == 404
    assert {name: t.reward("judge") for name, t in proxy.trajectories().items()} == dict.fromkeys(names, 0.5)


def test_a_new_name_is_asked_of_the_log_only_where_the_filter_cannot_say(
    proxy: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then it is new all the same."""
    lookups: list[str] = []
    real = type(proxy.store).opening

    def opening(store: Any, run: str, name: str) -> Any:
        lookups.append(name)
        return real(store, run, name)

    monkeypatch.setattr(type(proxy.store), "opening", opening)
    assert proxy.chat("one", USER).status_code == 200
    assert lookups == []
    ended = proxy.recorder.trajectories.ended
    ended._filter = NameFilter(1)
    for i in range(20):
        ended._filter.add(f"{i}")
    assert proxy.chat("two", USER).status_code == 200
    assert proxy.post("/v1/trajectories", json={"id": "three"}).status_code == 201
    assert set(lookups) == {"two", "three"}
    assert proxy.chat("two", USER).status_code == 200


@given(names=st.lists(st.text(max_size=20), max_size=50), others=st.lists(st.text(max_size=20), max_size=50))
@settings(max_examples=50)
def test_the_filter_forgets_no_name(names: list[str], others: list[str]) -> None:
    """Of what it was given it holds all; of a few others, in so much room, none."""
    held = NameFilter(1 << 16)
    for name in names:
        held.add(name)
    assert all(name in held for name in names)
    assert not any(name in held for name in set(others) - set(names))


@pytest.mark.parametrize(
    ("count", "bytes_each"), [(25_000, 400), pytest.param(100_000, 100, marks=pytest.mark.more)]
)
def test_finished_trajectories_leave_little_behind(count: int, bytes_each: int) -> None:
    """The latest take most of it; 100,000 of them less than 100 bytes each, and more of them no more."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    ended = EndedNames()
    for i in range(count):
        ended.add(
            TrajectoryOpened(f"{i:036d}", f"agent-{i:06d}", "g", "task", "train", {"a": "b" * 100}), "serve"
        )
    now, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(ended._latest) == registry.RECENT
    assert (now - before) / count < bytes_each
    assert sum(f"other-{i}" in ended._filter for i in range(10_000)) < 50
    assert all(ended.may_hold(f"agent-{i:06d}") for i in range(0, count - 20_000, 997))
    assert all(live.opened.labels == {} and live.contents is None for live in ended._latest.values())


def test_nothing_points_to_what_is_finished(proxy: InProcess) -> None:
    """Of its turns, ends and responses, none is left in any index."""
    known = proxy.recorder.trajectories
    for i in range(3):
        reply = proxy.post(
            "/v1/chat/completions", json={"messages": [USER, {"role": "user", "content": str(i)}]}
        )
        response = proxy.post(f"/t/t{i}/v1/responses", json={"input": "x"}).json()["id"]
        name = reply.headers["x-rollbook-quarantined"]
        assert known.of_turn(response.removeprefix("resp_")) is not None
        for finished in (f"t{i}", name):
            assert proxy.post(f"/v1/trajectories/{finished}/finish", json={}).status_code == 200
    for index in (known._open, known._by_id, known._turns, known._tips, known._responses, known._held):
        assert len(index) == 0
    assert known.bytes == 0
    assert all(live.contents is None for live in known.ended._latest.values())
    assert proxy.recorder.known_run._open == {}


def test_a_response_is_found_without_asking_every_trajectory(proxy: InProcess) -> None:
    """By an index that lives as long as its trajectory."""
    ids = [proxy.post(f"/t/t{i}/v1/responses", json={"input": "x"}).json()["id"] for i in range(5)]
    known = proxy.recorder.trajectories
    for live in known.open():
        known.write_off(live)
    again = proxy.post("/v1/responses", json={"input": "more", "previous_response_id": ids[3]})
    assert again.status_code == 200
    parent, child = proxy.trajectories()["t3"].turns.values()
    assert child.requested.parent_turn_id == parent.turn_id
    assert proxy.run(proxy.client.get(f"/v1/responses/{ids[1]}")).status_code == 200
    proxy.post("/v1/trajectories/t1/finish", json={})
    assert proxy.run(proxy.client.get(f"/v1/responses/{ids[1]}")).status_code == 404


def test_the_order_of_completion_makes_no_other_tree() -> None:
    """Siblings that end in another order than they were asked stand as after a restart."""
    turns = [
        TreeTurn(
            f"u{i}",
            "c",
            [USER],
            {"role": "assistant", "content": "x"},
            None,
            np.zeros(1, np.int32),
            1,
            [b"", b"h"],
            None,
        )
        for i in range(4)
    ]
    orders = []
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        contents = Contents()
        for i in order:
            contents.take(turns[i])
            contents.take(turns[i])  # once
        orders.append(([t.turn_id for t in contents.tree.turns], contents.completed, contents.size > 0))
        [tip] = contents.tree.tips()
        assert [t.turn_id for t in contents.tree._by_tip[tip]] == ["u0", "u1", "u2", "u3"]
    assert orders[0] == orders[1]


def test_what_is_used_without_being_recalled_is_a_fault() -> None:
    """It is never taken for an empty trajectory, which would make a root of every request."""
    live = LiveTrajectory(TrajectoryOpened("t", "t"), "serve", contents=None)
    with pytest.raises(AssertionError, match="without being recalled"):
        _ = live.tree


def test_what_runs_goes_on_while_its_trajectory_is_read_back(played: Callable[..., InProcess]) -> None:
    """An append about its trajectory has failed, and another request comes: it is not disturbed."""
    proxy = played()
    engine, path, body = proxy.engine, "/t/t/v1/chat/completions", {"messages": [USER]}
    first = proxy.ask(path, body).json["choices"][0]["message"]

    async def scenario() -> Any:
        engine.pace = asyncio.Semaphore(0)
        engine.prompts.clear()
        slow = proxy.exchange(path, {"messages": [USER, first, USER]})
        await slow.until(lambda: engine.prompts)
        live = proxy.recorder.known("t")
        before, live.doubtful = live.contents, True
        again = proxy.exchange(path, {"messages": [USER, first, USER]}, headers=AGAIN)
        (call,) = live.calls
        await again.until(lambda: len(call._listeners) == 2)  # it has joined the one that runs
        assert live.contents is not before
        for _ in range(50):
            engine.pace.release()
        return await slow.end(), await again.end()

    slow, again = proxy.run(scenario())
    assert slow.json == again.json
    assert len(engine.prompts) == 1
    parent, child = proxy.trajectories()["t"].turns.values()
    assert child.requested.parent_turn_id == parent.turn_id
    _check_memory(proxy)


def test_several_wait_for_one_reading(proxy: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come together to a trajectory that is away read it back once."""
    reads: list[str] = []
    real = recorder.restored
    monkeypatch.setattr(
        recorder, "restored", lambda trajectory: (reads.append(trajectory.opened.name), real(trajectory))[1]
    )
    reply = proxy.chat("t", USER).json()["choices"][0]["message"]
    known = proxy.recorder.trajectories
    [live] = known.open()
    known.write_off(live)

    async def several() -> Any:
        body = {"messages": [USER, reply, USER]}
        path = "/t/t/v1/chat/completions"
        return await asyncio.gather(*(proxy.client.post(path, json=body) for _ in range(5)))

    assert [answer.status_code for answer in proxy.run(several())] == [200] * 5
    assert reads == ["t"]
    first, *rest = proxy.trajectories()["t"].turns.values()
    assert {t.requested.parent_turn_id for t in rest} == {first.turn_id}
