"""Several proxies of one run, as on several hosts that share its folder: one log, whoever is asked."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import signal
import socket
import threading
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from tests.fakes.proxies.served import Served
from tests.fakes.proxies.several import Cluster, say

from rollbook.ingest.trajectories.place import owner_of
from rollbook.store.events import QUARANTINE, TrajectoryAdopted, TrajectoryOpened
from rollbook.testing.asgi import free_port

NAMES = [f"task-{number}" for number in range(9)]


def _base(lane: str) -> str:
    """A lane's name without its host's."""
    return lane.partition(".")[0]


def test_whoever_is_asked(either_cluster: Callable[..., Cluster]) -> None:
    """Each turn at another proxy: one conversation, in its owner's lane; streams, ends, rewards likewise."""
    three = either_cluster()
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
            reply = httpx.post(f"{url}/v1/trajectories/{name}/rewards", json={"reward": 0.5, "source": "j"})
            assert reply.status_code in (200, 201)
            assert httpx.post(f"{url}/v1/trajectories", json={"id": name}).status_code == 409
            fresh = httpx.post(f"{url}/v1/trajectories", json={}).json()["id"]
            assert httpx.post(f"{three.urls[2]}/v1/trajectories/{fresh}/finish", json={}).status_code == 200
    lanes = three.lanes()
    for name in NAMES:
        assert lanes[name] == {f"serve-{owner_of(name, 3)}"}
    rows = three.connect().execute(
        "select trajectory, count(*), count(parent_turn_id), count(delivered) from turns "
        "where trajectory like 'task-%' group by 1 order by 1"
    )
    assert rows.fetchall() == [(name, 4, 2, 4) for name in NAMES]
    rewards = three.connect().execute("select trajectory, sum(reward) from rewards group by 1")
    assert dict(rewards.fetchall()) == dict.fromkeys(NAMES, 1.5)


def test_what_names_nothing(cluster: Callable[..., Cluster]) -> None:
    """A conversation without a name stays one, whichever proxy is asked; an earlier response is found."""
    three, texts = cluster(), list[str]()
    for turn in range(6):
        client = openai.OpenAI(base_url=f"{three.urls[turn % 3]}/v1", api_key="none", max_retries=0)
        texts += [f"nameless {turn}"]
        texts += [say(client, *texts)]
    [(name, turns, linked)] = (
        three.connect()
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
        response = client.responses.create(model="m", input=f"{turn}", previous_response_id=earlier)
        assert response.output_text == f"{2 * turn + 1}: {turn}"
        earlier = response.id


@pytest.mark.more_but("one folder")
def test_one_is_killed(either_cluster: Callable[..., Cluster]) -> None:
    """Others go on with what it had open; it comes back, and has its names again. Nothing is lost."""
    three = either_cluster()
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
            reply = say(three.agent(number, name), f"again {number}")
            assert reply == f"1: again {number}"
        ended = httpx.post(f"{three.urls[gone]}/v1/trajectories/{name}/finish", json={"reward": 1.0})
        assert ended.status_code == 200, ended.text
        assert httpx.post(f"{three.urls[others[0]]}/v1/trajectories/{name}/finish").status_code == 409
    log = three.log()
    opened = [e.record.name for e in log.events_of({TrajectoryOpened.KIND})]
    assert sorted(opened) == sorted([*NAMES, *fresh, *late])
    adopted = [e.record for e in log.events_of({TrajectoryAdopted.KIND})]
    mine = [name for name in NAMES if owner_of(name, 3) == gone]
    assert (len(adopted), {_base(record.from_lane) for record in adopted}) == (len(mine), {f"serve-{gone}"})
    rows = three.connect().execute("select trajectory, count(*), count(parent_turn_id) from turns group by 1")
    wanted = dict.fromkeys(NAMES, (5, 1)) | dict.fromkeys(fresh, (4, 0)) | dict.fromkeys(late, (3, 0))
    assert {row[0]: row[1:] for row in rows.fetchall()} == wanted


@pytest.mark.more
def test_it_stands_in_for_two_and_dies(either_cluster: Callable[..., Cluster]) -> None:
    """What it had open for others goes to whoever holds the names by then, as does its own."""
    three = either_cluster()
    three.served[0].kill()
    three.served[1].kill()
    for name in NAMES:
        assert say(three.agent(2, name), "hi") == "1: hi"
    assert three.holds(2) == [[], [], [0, 1, 2]]
    three.start(0)
    three.until_holds(0, [0], [], [1, 2])
    for name in NAMES:  # what the other has open stays with it
        assert say(three.agent(0, name), "hi", "1: hi", "two") == "3: two"
    assert {lane for lanes in three.lanes().values() for lane in lanes} == {"serve-2"}
    three.served[2].kill()
    for name in NAMES:
        assert say(three.agent(0, name), "hi", "1: hi", "two", "3: two", "three") == "5: three"
        assert httpx.post(f"{three.urls[0]}/v1/trajectories/{name}/finish").status_code == 200
    assert three.holds(0) == [[0, 1, 2], [], []]
    adopted = [e.record for e in three.log().events_of({TrajectoryAdopted.KIND})]
    assert sorted(_base(record.from_lane) for record in adopted) == ["serve-2"] * len(NAMES)
    rows = three.connect().execute("select trajectory, count(*), count(parent_turn_id) from turns group by 1")
    assert {row[0]: row[1:] for row in rows.fetchall()} == dict.fromkeys(NAMES, (3, 2))


def test_the_one_that_answers_is_killed(cluster: Callable[..., Cluster]) -> None:
    """Who waits for a reply that another proxy makes is told to try again, and then has it."""
    two = cluster(2)
    name = next(name for name in NAMES if owner_of(name, 2) == 1)
    killing = threading.Timer(0.7, two.served[1].kill)
    killing.start()
    with pytest.raises(openai.InternalServerError, match="proxy 1 of this run does not answer now"):
        say(two.agent(0, name), "sleep 3")
    killing.join()
    assert say(two.agent(0, name), "sleep 0") == "1: sleep 0"
    lost = two.connect().execute("select completed is null, count(*) from turns group by 1")
    assert sorted(lost.fetchall()) == [(False, 1), (True, 1)]


@pytest.mark.more_but("one folder")
def test_it_stops_in_order(either_cluster: Callable[..., Cluster]) -> None:
    """A proxy that was asked to end: its names are another's at once, and what it has begun it answers."""
    three = either_cluster()
    mine = [name for name in NAMES if owner_of(name, 3) == 0]
    thread = threading.Thread(target=lambda: answers.append(say(three.agent(1, mine[0]), "sleep 6")))
    answers: list[str] = []
    thread.start()
    time.sleep(0.5)
    three.served[0].process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    for name in mine[1:]:
        assert say(three.agent(2, name), "hi") == "1: hi"
    assert say(openai.OpenAI(base_url=f"{three.urls[1]}/v1", api_key="none", max_retries=2), "hi") == "1: hi"
    assert answers == [] or time.monotonic() - began > 5, "they waited for its end"
    thread.join()
    assert answers == ["1: sleep 6"]
    assert three.served[0].process.wait(60) == 128 + signal.SIGTERM
    assert say(three.agent(1, mine[0]), "sleep 6", "1: sleep 6", "more") == "3: more"
    rows = three.connect().execute("select trajectory, count(*) from turns group by 1")
    counts = {name: turns for name, turns in rows.fetchall() if not name.startswith(QUARANTINE)}
    assert counts == {mine[0]: 2} | dict.fromkeys(mine[1:], 1)
    three.served[1].process.send_signal(signal.SIGTERM)
    while _takes_connections(three.urls[1]):
        time.sleep(0.001)
    assert three.holds(2)[1] == [], "it closed its port before the others knew"


@pytest.mark.more_but("one folder")
def test_nobody_hears_that_another_one_ends(either_cluster: Callable[..., Cluster]) -> None:
    """What is sent on to a proxy that ends meanwhile goes to whoever holds its names next."""
    three = either_cluster()
    fresh = [name for i in range(1200) if owner_of(name := f"fresh {i}", 3) == 0]
    ending = threading.Timer(0.5, three.served[0].process.send_signal, [signal.SIGTERM])
    ending.start()
    with ThreadPoolExecutor(4) as clients:
        said = list(clients.map(lambda name: say(three.agent(2, name), "hi"), fresh))
    assert set(said) == {"1: hi"}
    assert three.served[0].process.wait(60) == 128 + signal.SIGTERM
    assert 0 < sum("serve-0" in lanes for lanes in three.lanes().values()) < len(fresh)


def _takes_connections(url: str) -> bool:
    at = httpx.URL(url)
    try:
        socket.create_connection((at.host, at.port), 5).close()
    except (ConnectionRefusedError, ConnectionResetError):  # reset: it closed as the connection came
        return False
    return True


@pytest.mark.more_but("one folder")
def test_who_writes_it_is_for_its_seat_to_say(either_cluster: Callable[..., Cluster]) -> None:
    """Who stood in for a proxy once knows no more than others of what it has; what ended elsewhere ended."""
    three = either_cluster()
    mine = [name for name in NAMES if owner_of(name, 3) == 1]
    for stand_in, gone in ((2, 0), (0, 2)):
        three.served[gone].kill()  # so that it is the other one that stands in
        three.served[1].kill()
        for name in mine:
            assert say(three.agent(stand_in, name), f"by {stand_in}") == f"1: by {stand_in}"
        for number in (gone, 1):
            three.start(number)
        three.until_holds(stand_in, [0], [1], [2])
    for name in mine[:-1]:
        ended = httpx.post(f"{three.urls[2]}/v1/trajectories/{name}/finish", json={"reward": 1.0})
        assert ended.status_code == 200, ended.text
    three.served[2].kill()
    for number in (1, 0):
        assert say(three.agent(number, mine[-1]), "still open") == "1: still open"
        for name in mine[:-1]:
            body = {"reward": float(number), "source": "late"}
            reply = httpx.post(f"{three.urls[number]}/v1/trajectories/{name}/rewards", json=body, timeout=40)
            assert reply.status_code == 201, reply.text
    three.start(2)
    three.until_holds(0, [0], [1], [2])
    assert say(three.agent(0, mine[-1]), "open") == "1: open"


def test_what_one_proxy_left_open(
    cluster: Callable[..., Cluster], serve: Callable[..., Served], words: list[str]
) -> None:
    """Of a run that one proxy recorded by itself: several go on, also if its lane is being looked at."""
    alone = serve(*words, folder=(two := cluster(0)).path)
    for name in NAMES:
        client = openai.OpenAI(base_url=f"{alone.url}/t/{name}/v1", api_key="none", max_retries=0)
        assert say(client, "hi") == "1: hi"
    alone.kill()
    two.ports = [free_port(), free_port()]
    two.urls, two.served = [f"http://127.0.0.1:{port}" for port in two.ports], [None, None]
    with two.log().writer("serve"):
        for number in range(2):
            two.start(number)
    until = time.monotonic() + 20
    for name in NAMES:
        while True:
            try:
                assert say(two.agent(0, name), "hi", "1: hi", "two") == "3: two"
                break
            except openai.ConflictError:
                assert time.monotonic() < until
                time.sleep(0.2)
    adopted = [e.record for e in two.log().events_of({TrajectoryAdopted.KIND})]
    assert [record.from_lane for record in adopted] == ["serve"] * len(NAMES)


def test_it_comes_as_it_was_sent(cluster: Callable[..., Cluster]) -> None:
    """Names in any letters, bodies in gzip and in chunks; nothing counts as a failure; other paths stay."""
    two = cluster(2)
    ask = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    for number, name in enumerate(f"caf\xe9-{n}" for n in range(4)):
        for url in two.urls:
            headers = [(b"x-rollbook-trajectory", name.encode("latin-1")), (b"content-encoding", b"gzip")]
            body = gzip.compress(json.dumps(ask | {"n": number % 2 + 1}).encode())
            reply = httpx.post(f"{url}/v1/chat/completions", content=body, headers=headers)
            assert reply.status_code == 200, reply.text
            session = {"metadata": {"session_id": f"session-{number}"}}
            chunks = iter([json.dumps(ask | session).encode()])
            reply = httpx.post(f"{url}/v1/chat/completions", content=chunks, headers={"x-n": "1"})
            assert reply.status_code == 200, reply.text
    lanes = two.lanes()
    names = [f"caf\xe9-{n}" for n in range(4)] + [f"session-{n}" for n in range(4)]
    assert {name: lanes[name] for name in names} == {n: {f"serve-{owner_of(n, 2)}"} for n in names}
    for url in two.urls:
        assert "rollbook_failures_total{" not in httpx.get(f"{url}/metrics").text
    other = next(name for name in NAMES if owner_of(name, 2) == 1)
    reply = httpx.get(f"{two.urls[0]}/healthz", headers={"authorization": f"Bearer trajectory:{other}"})
    assert reply.json()["lane"].partition(".")[0] == "serve-0"


def test_lanes_are_sealed_where_they_are(cluster: Callable[..., Cluster]) -> None:
    """Of one folder one proxy does it for all; on hosts of their own each does."""
    two = cluster(2, "--seal")
    sealers = [len(_children(served.process.pid, "seal")) for served in two.served]
    assert sealers == ([1, 1] if two.folders else [1, 0])


def _children(pid: int, word: str) -> list[str]:
    """The command lines of a process's children that have a word."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    lines = [Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0") for child in pids]
    return [" ".join(words) for words in lines if word in words]


@pytest.mark.more
def test_the_first_is_killed(cluster: Callable[..., Cluster]) -> None:
    """What names nothing waits for whoever stands in for it, also there."""
    three = cluster(3, "--seal")
    three.served[0].kill()
    clients = [openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) for url in three.urls[1:]]
    answers: list[str] = []
    threads = [threading.Thread(target=lambda c=c: answers.append(say(c, "hi"))) for c in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["1: hi", "1: hi"]


def test_what_does_not_fit(
    cluster: Callable[..., Cluster], serve: Callable[..., Served], words: list[str]
) -> None:
    """Another list of proxies, a number that is taken, a proxy that would be alone: each says what to do."""
    two = cluster(2)
    both = [word for url in two.urls for word in ("--proxies", url)]
    third = ["--proxies", f"http://127.0.0.1:{free_port()}"]
    alone = "recording run default in .* is being done by process .* name another run with --run"
    for more, why in (
        ([*both, *third, "--proxy", "2"], "all proxies of a run need the same list"),
        ([], alone),
        ([*both, "--proxy", "2"], "--proxy 2: there are 2 proxies, 0 to 1"),
        ([*both[:2]], "name two or more, each once"),
        ([*both, "--workers", "2"], "one of several proxies is one process"),
        ([*both, "--engine", "embedded"], "the embedded engine holds its weights in one process"),
        (["--proxies", "node-1:8000", *both], "proxies.0: String should match pattern"),
        ([*both, "--proxy", "1", "--lane", "other"], "all proxies of a run need the same list"),
        (["--proxies", two.urls[1], "--proxies", two.urls[0]], "all proxies of a run need the same list"),
    ):
        with pytest.raises(RuntimeError, match=why):
            serve(*words, *more, folder=two.path)


def test_strangers(cluster: Callable[..., Cluster]) -> None:
    """Without the token nobody speaks as a proxy of the run, nor is a request taken for one sent on."""
    two = cluster(2)
    for token in ("", "wrong"):
        question = {"from": 1, "process": "x", "proxies": two.urls, "seat": 1, "holds": [0, 1]}
        for kind in ("holds", "give-back", "enter"):
            reply = httpx.post(
                f"{two.urls[0]}/peers/{kind}", json=question, headers={"x-rollbook-peer": token}
            )
            assert reply.status_code in (404, 405)
        name = next(name for name in NAMES if owner_of(name, 2) == 1)
        headers = {"x-rollbook-peer": token, "x-rollbook-sent-as": "writer"}
        opened = httpx.post(f"{two.urls[0]}/v1/trajectories", json={"id": name + token}, headers=headers)
        assert opened.status_code == 201
    assert two.holds(0) == [[0], [1]]
    by_name = two.lanes()
    assert {f"serve-{owner_of(name, 2)}" for name in by_name} == {
        lane for lanes in by_name.values() for lane in lanes
    }


def test_the_page(root: Path, cluster: Callable[..., Cluster], words: list[str], tmp_path: Path) -> None:
    """docs/recording.md: its file and its commands, at this host's ports."""
    page = (root / "docs" / "recording.md").read_text().partition("## Several proxies")[2]
    two = cluster(0)
    two.ports = [free_port(), free_port()]
    two.urls = [f"http://127.0.0.1:{port}" for port in two.ports]
    file = tmp_path / "serve.toml"
    text = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[0]
    for url, named in zip(two.urls, tomllib.loads(text)["proxies"], strict=True):
        text = text.replace(named, url)
    file.write_text(text.replace("0.0.0.0", "127.0.0.1"))
    lines = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)[0].splitlines()
    for line, port in zip(lines, two.ports, strict=True):
        command = shlex.split(line, comments=True)
        assert command[:3] == ["rollbook", "serve", "serve.toml"]
        two.served.append(two.serve(str(file), *command[3:], *words, folder=two.path, port=port))
    two.until_holds(0, [0], [1])
    for name in NAMES:
        assert [say(two.agent(number, name), "hi") for number in (0, 1)] == ["1: hi", "1: hi"]
    lanes = {lane for held in two.lanes().values() for lane in held}
    assert lanes == {"serve-0", "serve-1"}
