"""Several proxies of one run, as on several hosts that share the store's folder: one log, whoever is asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rollbook import store
from rollbook.ingest.workers.place import owner_of
from rollbook.store.events import QUARANTINE, TrajectoryAdopted, TrajectoryOpened
from rollbook.store.fold.trajectory import fold
from rollbook.testing.ports import free_port

NAMES = [f"task-{number}" for number in range(9)]
PATIENCE_S = 30.0


class Cluster:
    """Proxies of one run."""

    def __init__(self, serve: Any, folder: Path, words: list[str], count: int = 3) -> None:
        self.path, self._serve, self._words = folder / "store", serve, words
        self.ports = [free_port() for _ in range(count)]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.served: list[Any] = [None] * count

    def start(self, number: int) -> Any:
        """Start one of them, or start it again."""
        if self.served[number] is None:
            words = [word for url in self.urls for word in ("--proxies", url)]
            words += ["--proxy", str(number)]
            port = self.ports[number]
            self.served[number] = self._serve(*self._words, *words, folder=self.path, port=port)
        else:
            self.served[number].start()
        return self.served[number]

    def agent(self, number: int, name: str) -> openai.OpenAI:
        """An agent in a trajectory, which asks that proxy."""
        return openai.OpenAI(base_url=f"{self.urls[number]}/t/{name}/v1", api_key="none", max_retries=0)

    def holds(self, number: int) -> list[list[int]]:
        """Which seats each proxy holds, as that one sees it."""
        said = httpx.get(f"{self.urls[number]}/healthz").json()["proxies"]
        return [one["holds"] for one in said]

    def until_holds(self, number: int, *wanted: list[int]) -> None:
        """Wait until one sees it so."""
        until = time.monotonic() + PATIENCE_S
        while (found := self.holds(number)) != list(wanted):
            assert time.monotonic() < until, found
            time.sleep(0.1)

    def lanes(self) -> dict[str, set[str]]:
        """Trajectory -> the lanes that hold events of it."""
        log, found = store.open(self.path), dict[str, set[str]]()
        name = {t.opened.trajectory_id: t.opened.name for t in fold(log.events()).values()}
        for event in log.events():
            if (trajectory_id := getattr(event.record, "trajectory_id", None)) in name:
                found.setdefault(name[trajectory_id], set()).add(event.lane)
        return found


@pytest.fixture(scope="module")
def words(text_model: Any, script: Any) -> list[str]:
    """What a scripted server takes."""
    return ["--model", str(text_model("chatml")), "--engine", "scripted", "--script", f"{script}:answer"]


@pytest.fixture
def cluster(serve: Any, words: list[str], tmp_path: Path) -> Callable[..., Cluster]:
    """Starts proxies."""

    def make(count: int = 3, *more: str) -> Cluster:
        made = Cluster(serve, tmp_path, [*words, *more], count)
        for number in range(count):
            made.start(number)
        for number in range(count):
            made.until_holds(number, *([seat] for seat in range(count)))
        return made

    return make


def say(client: openai.OpenAI, *texts: str, **more: Any) -> str:
    """The reply to messages of a user and an assistant in turn."""
    roles = ("user", "assistant")
    messages: list[Any] = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return str(
        client.chat.completions.create(model="m", messages=messages, **more).choices[0].message.content
    )


def test_whoever_is_asked(cluster: Callable[..., Cluster]) -> None:
    """Each turn at another proxy: one conversation, in its owner's lane; streams, ends, rewards likewise."""
    three = cluster()
    for name in NAMES:
        texts = ["a"]
        for turn in range(3):
            texts += [say(three.agent(turn, name), *texts), "b"]
        stream = three.agent(0, name).chat.completions.create(
            model="m", messages=[{"role": "user", "content": "streamed"}], stream=True
        )
        assert (
            "".join(part.choices[0].delta.content or "" for part in stream if part.choices) == "1: streamed"
        )
        ended = httpx.post(f"{three.urls[1]}/v1/trajectories/{name}/finish", json={"reward": 1.0})
        assert ended.json() == {"id": name, "status": "finished", "turns": 4}
        for url in three.urls:
            assert httpx.post(f"{url}/v1/trajectories/{name}/finish", json={}).status_code == 409
            said = httpx.post(f"{url}/v1/trajectories/{name}/rewards", json={"reward": 0.5, "source": "j"})
            assert said.status_code in (200, 201)
            assert httpx.post(f"{url}/v1/trajectories", json={"id": name}).status_code == 409
            fresh = httpx.post(f"{url}/v1/trajectories", json={}).json()["id"]
            assert httpx.post(f"{three.urls[2]}/v1/trajectories/{fresh}/finish", json={}).status_code == 200
    lanes = three.lanes()
    for name in NAMES:
        assert lanes[name] == {f"serve-{owner_of(name, 3)}"}
    rows = store.connect(three.path).execute(
        "select trajectory, count(*), count(parent_turn_id), count(delivered) from turns "
        "where trajectory like 'task-%' group by 1 order by 1"
    )
    assert rows.fetchall() == [(name, 4, 2, 4) for name in NAMES]
    rewards = store.connect(three.path).execute("select trajectory, sum(reward) from rewards group by 1")
    assert dict(rewards.fetchall()) == dict.fromkeys(NAMES, 1.5)


def test_what_names_nothing(cluster: Callable[..., Cluster]) -> None:
    """A conversation without a name stays one, whichever proxy is asked; an earlier response is found."""
    three, texts = cluster(), list[str]()
    for turn in range(6):
        client = openai.OpenAI(base_url=f"{three.urls[turn % 3]}/v1", api_key="none", max_retries=0)
        texts += [f"nameless {turn}"]
        texts += [say(client, *texts)]
    [(name, turns, linked)] = (
        store.connect(three.path)
        .execute("select trajectory, count(*), count(parent_turn_id) from turns group by 1")
        .fetchall()
    )
    assert (name.startswith(QUARANTINE), turns, linked) == (True, 6, 5)
    assert three.lanes()[name] == {"serve-0"}
    earlier = None
    for turn in range(3):
        client = openai.OpenAI(base_url=f"{three.urls[turn]}/v1", api_key="trajectory:resp", max_retries=0)
        if turn:
            client = openai.OpenAI(base_url=f"{three.urls[turn]}/v1", api_key="none", max_retries=0)
        made = client.responses.create(model="m", input=f"{turn}", previous_response_id=earlier)
        assert made.output_text == f"{2 * turn + 1}: {turn}"
        earlier = made.id


def test_one_is_killed(cluster: Callable[..., Cluster]) -> None:
    """Others go on with what it had open; it comes back, and has its names again. Nothing is lost or double."""
    three = cluster()
    before = {name: ["hi", say(three.agent(0, name), "hi")] for name in NAMES}
    gone = owner_of(NAMES[0], 3)
    others = [number for number in range(3) if number != gone]
    three.served[gone].kill()
    texts = {}
    for name in NAMES:
        texts[name] = [*before[name], "more"]
        texts[name].append(say(three.agent(others[0], name), *texts[name]))
        assert texts[name][-1] == "3: more"
    assert gone in {seat for held in three.holds(others[0]) for seat in held}
    fresh = [f"fresh-{number}" for number in range(9)]
    for name in fresh:
        assert say(three.agent(others[1], name), "hi") == "1: hi"
    three.start(gone)
    three.until_holds(others[0], *([seat] for seat in range(3)))
    late = [f"late-{number}" for number in range(9)]
    for name in [*NAMES, *fresh, *late]:
        for number in range(3):
            said = say(three.agent(number, name), f"again {number}")
            assert said == f"1: again {number}"
        ended = httpx.post(f"{three.urls[gone]}/v1/trajectories/{name}/finish", json={"reward": 1.0})
        assert ended.status_code == 200, ended.text
        assert httpx.post(f"{three.urls[others[0]]}/v1/trajectories/{name}/finish").status_code == 409
    log = store.open(three.path)
    opened = [e.record.name for e in log.events_of({TrajectoryOpened.KIND})]
    assert sorted(opened) == sorted([*NAMES, *fresh, *late])
    adopted = [e.record for e in log.events_of({TrajectoryAdopted.KIND})]
    mine = [name for name in NAMES if owner_of(name, 3) == gone]
    assert (len(adopted), {one.from_lane for one in adopted}) == (len(mine), {f"serve-{gone}"})
    rows = store.connect(three.path).execute(
        "select trajectory, count(*), count(parent_turn_id) from turns group by 1"
    )
    wanted = {name: (5, 1) for name in NAMES} | {name: (4, 0) for name in fresh}
    wanted |= {name: (3, 0) for name in late}
    assert {row[0]: row[1:] for row in rows.fetchall()} == wanted
