"""`rollbook serve --workers N`: one proxy to its clients, several lanes in the log."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.fakes.proxies.served import Served

from rollbook import store
from rollbook.ingest.trajectories.place import owner_of
from rollbook.store.events import QUARANTINE, RunOpened, TrajectoryAdopted
from rollbook.store.fold.trajectory import fold

NAMES = [f"task-{number}" for number in range(8)]


@pytest.fixture(scope="module")
def words(text_model: Callable[[str], Path], script: Path) -> list[str]:
    """What a scripted server takes."""
    return ["--model", str(text_model("chatml")), "--engine", "scripted", "--script", f"{script}:answer"]


@pytest.fixture(scope="module")
def served(serve: Callable[..., Served], words: list[str]) -> Served:
    """A proxy of two workers."""
    return serve(*words, "--workers", "2", "--trajectory-header", "X-Relax-Trajectory-Id")


def agent(served: Any, name: str) -> openai.OpenAI:
    """An agent in a trajectory."""
    return openai.OpenAI(base_url=f"{served.url}/t/{name}/v1", api_key="none", max_retries=0)


def say(client: openai.OpenAI, *texts: str, **more: Any) -> str:
    """The reply to messages of a user and an assistant in turn."""
    roles = ("user", "assistant")
    messages: list[Any] = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return str(
        client.chat.completions.create(model="m", messages=messages, **more).choices[0].message.content
    )


def lanes(path: Path) -> dict[str, set[str]]:
    """Trajectory -> the lanes that hold events of it."""
    by_name: dict[str, set[str]] = {}
    log = store.open(path)
    name = {t.opened.trajectory_id: t.opened.name for t in fold(log.events()).values()}
    for event in log.events():
        trajectory_id = getattr(event.record, "trajectory_id", None)
        if trajectory_id in name:
            by_name.setdefault(name[trajectory_id], set()).add(event.lane)
    return by_name


def children(pid: int) -> list[int]:
    """The processes that a process started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_each_trajectory_is_in_its_owners_lane(served: Served) -> None:
    """Agents that share connections, and agents with ones of their own: each turn extends the last."""
    shared = httpx.Client(base_url=served.url)
    for turn in range(3):
        for name in NAMES:
            texts = [text for n in range(turn) for text in (f"{n}", f"{2 * n + 1}: {n}")] + [f"{turn}"]
            roles = [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]
            reply = shared.post(f"/t/{name}/v1/chat/completions", json={"messages": roles}).json()
            assert reply["choices"][0]["message"]["content"] == f"{2 * turn + 1}: {turn}"
            own = agent(served, f"own-{name}")
            assert say(own, *texts) == f"{2 * turn + 1}: {turn}"
    for name in NAMES:
        finished = shared.post(f"/v1/trajectories/{name}/finish", json={"reward": 1.0})
        assert finished.json() == {"id": name, "status": "finished", "turns": 3}
        assert shared.post(f"/v1/trajectories/{name}/finish", json={}).status_code == 409
        rewarded = shared.post(f"/v1/trajectories/{name}/rewards", json={"reward": 0.5, "source": "judge"})
        assert rewarded.status_code == 201
    by_name = lanes(served.path)
    for name in [*NAMES, *(f"own-{name}" for name in NAMES)]:
        assert by_name[name] == {f"serve-{owner_of(name, 2)}"}
    rows = store.connect(served.path).execute(
        "select trajectory, count(*), count(parent_turn_id), count(delivered) from turns "
        "where trajectory like '%task-%' group by 1 order by 1"
    )
    assert rows.fetchall() == sorted((n, 3, 2, 3) for own in ("", "own-") for n in (own + x for x in NAMES))


def test_whatever_names_a_trajectory(served: Served) -> None:
    """Header, key, hints, a header of another system, an id in a body: each ends up with its owner."""
    client = httpx.Client(base_url=served.url)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    for name in NAMES:
        for how, headers, more in (
            ("header", {"X-Rollbook-Trajectory": f"header-{name}"}, {}),
            ("relax", {"X-Relax-Trajectory-Id": f"relax-{name}"}, {}),
            ("key", {"Authorization": f"Bearer trajectory:key-{name}"}, {}),
            ("session", {"X-Session-ID": f"session-{name}"}, {}),
            ("meta", {}, {"metadata": {"session_id": f"meta-{name}"}}),
        ):
            reply = client.post("/v1/chat/completions", json=body | more, headers=headers)
            assert reply.status_code == 200, (how, reply.text)
        opened = client.post("/v1/trajectories", json={"id": f"opened-{name}", "group": "g"})
        assert opened.status_code == 201
        assert client.post("/v1/trajectories", json={"id": f"opened-{name}"}).status_code == 409
        fresh = client.post("/v1/trajectories", json={}).json()["id"]
        assert client.post(f"/v1/trajectories/{fresh}/finish", json={}).status_code == 200
        both = {"X-Relax-Trajectory-Id": "a", "X-Rollbook-Trajectory": "b"}
        assert client.post("/v1/chat/completions", json=body, headers=both).status_code == 400
    by_name = lanes(served.path)
    for how in ("header", "relax", "key", "session", "meta", "opened"):
        for name in NAMES:
            assert by_name[f"{how}-{name}"] == {f"serve-{owner_of(f'{how}-{name}', 2)}"}
    assert all(len(by_name[name]) == 1 for name in by_name)


def test_what_names_nothing_is_kept_by_one(served: Served) -> None:
    """A conversation without a name stays one, whichever worker takes its connection."""
    texts: list[str] = []
    for turn in range(4):
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        texts += [f"nameless {turn}"]
        texts += [say(client, *texts)]
    rows = store.connect(served.path).execute(
        "select trajectory, count(*), count(parent_turn_id) from turns where content like '%nameless%' "
        "or trajectory like 'quarantine/%' group by 1"
    )
    [(name, turns, linked)] = rows.fetchall()
    assert name.startswith(QUARANTINE)
    assert (turns, linked) == (4, 3)
    assert lanes(served.path)[name] == {"serve-0"}


def test_responses_go_on_by_their_id(served: Served) -> None:
    """A response that names no trajectory but an earlier one goes on there, and is looked up everywhere."""
    for name in NAMES:
        first = agent(served, f"resp-{name}").responses.create(model="m", input="one")
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        second = client.responses.create(model="m", input="two", previous_response_id=first.id)
        again = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        assert again.responses.retrieve(second.id).output_text == second.output_text == "3: two"
        rows = store.connect(served.path).execute(
            f"select turn_id, parent_turn_id from turns where trajectory = 'resp-{name}' order by 1"
        )
        (turn, _), (_, parent) = rows.fetchall()
        assert parent == turn
    with pytest.raises(openai.NotFoundError):
        again.responses.retrieve("resp_01a2191d-a008-7446-8e11-a26d1d55665c")


def test_streams_and_preferences(served: Served) -> None:
    """A stream comes from its owner; a preference between trajectories of two owners is recorded once."""
    for name in NAMES:
        stream = agent(served, f"stream-{name}").chat.completions.create(
            model="m", messages=[{"role": "user", "content": "abc " * 50}], stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == "1: " + "abc " * 50
    chosen, rejected = (next(n for n in NAMES if owner_of(f"stream-{n}", 2) == number) for number in range(2))
    body = {"chosen": f"stream-{chosen}", "rejected": f"stream-{rejected}"}
    for _ in range(2):
        httpx.post(f"{served.url}/v1/preferences", json=body).raise_for_status()
    assert httpx.post(f"{served.url}/v1/preferences", json=body | {"chosen": "none"}).status_code == 404


def test_one_page_for_all(served: Served) -> None:
    """/healthz names each worker, /metrics has each one's series, the events are those of all lanes."""
    say(agent(served, NAMES[0] + "-m"), "hi")
    details = httpx.get(f"{served.url}/healthz").json()
    assert details["status"] == "ok"
    assert [(w["worker"], w["lane"]) for w in details["workers"]] == [(0, "serve-0"), (1, "serve-1")]
    page = httpx.get(f"{served.url}/metrics").text
    counts: Counter[str] = Counter()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "rollbook_turns_total":
                counts[sample.labels["worker"]] += int(sample.value)
    [(turns,)] = store.connect(served.path).execute("select count(*) from turns").fetchall()
    assert set(counts) == {"0", "1"}
    assert counts.total() == turns
    cut = httpx.get(f"{served.url}/v1/events?follow=false&format=arrow").headers["x-rollbook-cut"]
    assert "serve-0=" in cut
    assert "serve-1=" in cut
    for _ in range(6):
        moved = httpx.put(f"{served.url}/v1/cursors/c", json={"cut": cut})
        assert moved.status_code == 200
        assert httpx.put(f"{served.url}/v1/cursors/c", json={"cut": "serve-0=1"}).status_code == 409


def test_the_run_is_opened_once(served: Served) -> None:
    """By the first worker's lane; and the parent's descriptors and threads are few."""
    opened = [e for e in store.open(served.path).events() if isinstance(e.record, RunOpened)]
    assert [event.lane for event in opened] == ["serve-0"]
    assert opened[0].record.config["workers"] == 2


@pytest.mark.more_but("3")
@pytest.mark.parametrize("before", [2, 3])
def test_another_number_of_workers(serve: Callable[..., Served], words: list[str], before: int) -> None:
    """What is open goes on with its new owner, who adopts it; names that were used stay used."""
    first = serve(*words, "--workers", str(before))
    for name in NAMES:
        assert say(agent(first, name), "one") == "1: one"
    httpx.post(f"{first.url}/v1/trajectories/{NAMES[0]}/finish", json={}).raise_for_status()
    assert first.stop() in (0, 130)
    for workers in (5 - before, 1, 2):
        served = type(first)(first.path, [*words, "--workers", str(workers)])
        try:
            for name in NAMES[1:]:
                owner = f"serve-{owner_of(name, workers)}" if workers > 1 else "serve"
                assert say(agent(served, name), "one", "1: one", f"{workers}") == f"3: {workers}"
                assert owner in lanes(first.path)[name]
            reply = httpx.post(f"{served.url}/t/{NAMES[0]}/v1/chat/completions", json={"messages": []})
            assert reply.status_code in (400, 409)
            assert httpx.post(f"{served.url}/v1/trajectories", json={"id": NAMES[0]}).status_code == 409
        finally:
            served.stop()
    rows = store.connect(first.path).execute(
        "select trajectory, count(*), count(parent_turn_id) from turns group by 1 order by 1"
    )
    assert rows.fetchall() == [(NAMES[0], 1, 0)] + [(name, 4, 3) for name in NAMES[1:]]
    adopted = [e for e in store.open(first.path).events() if isinstance(e.record, TrajectoryAdopted)]
    assert len({(e.record.trajectory_id, e.lane, e.record.from_lane) for e in adopted}) == len(adopted)
    moved = [owner_of(name, before) != owner_of(name, 5 - before) for name in NAMES[1:]]
    assert len(adopted) == sum(moved) + 2 * len(NAMES[1:])


def test_a_termination_ends_all(serve: Callable[..., Served], words: list[str]) -> None:
    """SIGTERM to the parent: workers, sealer and all end orderly."""
    served = serve(*words, "--workers", "2", "--seal")
    say(agent(served, "a"), "hi")
    workers = children(served.process.pid)
    everybody = [*workers, *(child for worker in workers for child in children(worker))]
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60) == 128 + signal.SIGTERM
    assert [pid for pid in everybody if Path(f"/proc/{pid}").exists()] == []
    assert len(everybody) == 3
    [turn] = store.open(served.path).trajectories().popitem()[1].turns.values()
    assert turn.delivered == "sent"


def test_what_cannot_be_shared(serve: Callable[..., Served], text_model: Callable[[str], Path]) -> None:
    """The embedded engine has its weights in one process."""
    with pytest.raises(RuntimeError, match=r"--workers 2: the embedded engine .* --engine sglang"):
        serve("--model", str(text_model("chatml")), "--engine", "embedded", "--workers", "2")


class Talk(threading.Thread):
    """Talks in one trajectory, whatever becomes of its server; keeps the ids of the replies it received."""

    def __init__(self, served: Any, name: str, over: threading.Event) -> None:
        super().__init__(name=name)
        self.served, self.over = served, over
        self.received: list[str] = []
        self.failures: set[str] = set()

    def run(self) -> None:
        """Ask on, and again what was not answered."""
        messages: list[Any] = []
        while not self.over.is_set():
            client = agent(self.served, self.name)
            try:
                while not self.over.is_set():
                    question = [*messages, {"role": "user", "content": f"{len(self.received)}"}]
                    reply = client.chat.completions.create(model="m", messages=question)
                    self.received.append(reply.id.removeprefix("chatcmpl-"))
                    messages = [*question, {"role": "assistant", "content": reply.choices[0].message.content}]
            except openai.OpenAIError as error:
                self.failures.add(type(error).__name__)


def _kill(served: Any, number: int, talks: list[Talk]) -> None:
    """Kill a worker, and wait until every conversation went on."""
    workers = children(served.process.pid)
    assert len(workers) == 2
    os.kill(workers[number], signal.SIGKILL)
    before = [len(talk.received) for talk in talks]
    deadline = time.monotonic() + 30
    while any(len(talk.received) <= count + 1 for talk, count in zip(talks, before, strict=True)):
        assert time.monotonic() < deadline, served.log.read_text()
        time.sleep(0.05)


@pytest.mark.crashes
def test_workers_die_in_mid_traffic(serve: Callable[..., Served], words: list[str]) -> None:
    """kill -9 of workers, time and again: each reply that was received is in the log as received, every
    conversation goes on as one, and no name is two trajectories."""
    served = serve(*words, "--workers", "2")
    over = threading.Event()
    talks = [Talk(served, name, over) for name in NAMES]
    for talk in talks:
        talk.start()
    for round_ in range(6):
        time.sleep(0.7)
        _kill(served, round_ % 2, talks)
    over.set()
    for talk in talks:
        talk.join(30)
        finished = httpx.post(f"{served.url}/v1/trajectories/{talk.name}/finish", json={"reward": 1.0})
        assert finished.status_code == 200, finished.text
        assert talk.failures <= {"APIConnectionError"}
    assert served.log.read_text().count("is started again") == 6
    _check_log(served.path, {talk.name: talk.received for talk in talks})
    served.stop()


def _check_log(path: Path, received: dict[str, list[str]]) -> None:
    """See that the log has every reply, each behind the one before, and nothing twice."""
    rows = store.connect(path).execute(
        "select turn_id, trajectory, status, parent_turn_id, root_reason from turns"
    )
    by_id = {row[0]: row[1:] for row in rows.fetchall()}
    for name, turns in received.items():
        assert len(turns) > 12
        for earlier, turn_id in zip([None, *turns], turns, strict=False):
            assert by_id[turn_id][:3] == (name, "completed", earlier)
    roots = {(row[0], row[3]) for row in by_id.values() if row[3] is not None}
    # Who got no reply to the first question asks it again: no earlier turn is the beginning of that.
    first = {(name, "first_turn") for name in received}
    lost = {row[0] for turn, row in by_id.items() if row[3] == "first_turn" and turn not in received[row[0]]}
    assert first <= roots
    assert roots - first <= {(name, "no_matching_turn") for name in lost}
    trajectories = store.connect(path).execute("select trajectory, status from trajectories").fetchall()
    assert sorted(trajectories) == [(name, "completed") for name in sorted(received)]
    assert lanes(path) == {name: {f"serve-{owner_of(name, 2)}"} for name in received}
    [(sampled, accounted)] = (
        store.connect(path)
        .execute("select (select sum(completion_length) from turns), (select sum(tokens) from ledger)")
        .fetchall()
    )
    assert sampled == accounted > 0


@pytest.mark.crashes
def test_workers_end_with_their_parent(serve: Callable[..., Served], words: list[str]) -> None:
    """kill -9 of the parent: nobody is left, and the next proxy goes on."""
    served = serve(*words, "--workers", "3")
    say(agent(served, "a"), "hi")
    workers = children(served.process.pid)
    assert len(workers) == 3
    served.kill()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() and _alive(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    served.start()
    assert say(agent(served, "a"), "hi", "1: hi", "again") == "3: again"
    served.stop()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
