"""Judges of other processes and models, and scores that are given again: later, changed, or twice."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from tests.fakes.processes.rollout_runs import launches, run
from tests.fakes.proxies.served import Served

from rollbook import store as rb
from rollbook.cli.online.rollout import run_scoring
from rollbook.rollouts.config import RolloutConfig, load_rollouts, parse_rollouts
from rollbook.rollouts.launchers.agents import launcher_of
from rollbook.rollouts.proxy import Proxy
from rollbook.rollouts.scoring import Rescored, Scorers, filled, score_again
from rollbook.rollouts.tasks import Task
from rollbook.store.errors import ConfigError
from rollbook.store.events import TrajectoryFinished, TrajectoryOpened
from rollbook.store.upkeep.erase import erase_trajectory
from rollbook.testing.ledger import fold_ledger

OWN = """
from rollbook.rollouts.agents.agentic import AgenticRollout


class Says(AgenticRollout):
    async def run(self, task, llm):
        await llm.chat([{"role": "user", "content": task.values["say"]}])


def length(task, attempt):
    return float(len(attempt.answer))


def by_file(task, attempt):
    return float((attempt.folder / "worth.txt").read_text())
"""


@pytest.fixture(scope="module")
def server(serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path) -> Served:
    """A served script, which repeats what it is told behind the number of messages."""
    model = str(text_model("chatml"))
    return serve("--model", model, "--engine", "scripted", "--script", f"{script}:answer", "--no-seal")


@pytest.fixture
def config(server: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """Makes a CONFIG under this test's name, of a class that says what its task has."""
    (tmp_path / "own.py").write_text(OWN)

    def make(*score: dict[str, Any], **changes: Any) -> RolloutConfig:
        name = "".join(c for c in request.node.name if c.isalnum() or c == "_")[:60]
        values = {"name": name, "proxy": server.url, "tasks": "none", "folder": str(tmp_path / "launches")}
        values |= {"agent": {"launcher": "python", "rollout": f"{tmp_path}/own.py:Says"}, "score": score}
        return parse_rollouts(values | changes, "test")

    return make


class Judge(ThreadingHTTPServer):
    """A judge that answers one thing after the other, and keeps what it was sent."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.answers, self.got = list(answers), list[tuple[Any, Any]]()
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_port}/judge"


class Handler(BaseHTTPRequestHandler):
    """Of a judge's requests."""

    server: Judge

    def do_POST(self) -> None:
        """Answer the next thing."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.got.append((body, {name.lower(): value for name, value in self.headers.items()}))
        status, text = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        if status == 0:
            time.sleep(1.5)
        self.send_response(status or 200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> Iterator[Judge]:
    """A judge with the parameter's answers."""
    running = Judge(*request.param)
    yield running
    running.shutdown()
    running.server_close()


def rewards(server: Any, trajectory: str) -> list[Any]:
    """Every reward of a trajectory: source, number, and whether another took its place."""
    with rb.connect(server.path) as connection:
        query = "SELECT source, reward, superseded FROM rewards WHERE trajectory = $1 ORDER BY event_id"
        return connection.execute(query, [trajectory]).fetchall()


# A service that judges ------------------------------------------------------------------------------------


@pytest.mark.parametrize("judge", [[(503, "away"), (200, '{"reward": 0.5, "why": "fair"}')]], indirect=True)
def test_a_service_judges(
    server: Served, config: Callable[..., RolloutConfig], judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent the task and what was said; while it is away it is asked again."""
    monkeypatch.setenv("JUDGES_TOKEN", "sesame")
    monkeypatch.setattr("rollbook.rollouts.scoring.PAUSE_S", 0.05)
    settings = config({"name": "fair", "url": judge.url, "token_variable": "JUDGES_TOKEN", "weight": 2.0})
    run(settings, [Task("a", {"say": "hello", "answer": 7})])
    (row,) = launches(server, settings.name)
    assert (row["reward"], orjson.loads(row["scoring"])) == (1.0, {"fair": 0.5})
    assert len(judge.got) == 2
    body, headers = judge.got[1]
    assert body["task"] == {"say": "hello", "answer": 7}
    assert body["names"] == {"task": "a", "trajectory": row["trajectory"], "scorer": "fair"}
    assert [[m["content"] for m in c["messages"]] for c in body["conversations"]] == [["hello", "1: hello"]]
    assert headers["authorization"] == "Bearer sesame"
    assert judge.got[0][1]["idempotency-key"] == headers["idempotency-key"]


@pytest.mark.more_but("judge0-*", "judge1-*", "judge2-*", "judge3-*")  # that it is asked again is held above
@pytest.mark.parametrize(
    ("judge", "why"),
    [
        ([(422, "no such task")], "answered 422: no such task"),
        ([(200, '"good"')], "gave 'good': a finite number is wanted"),
        ([(200, "NaN")], "answered 'NaN': a number, or an object with `reward`, is wanted"),
        ([(0, "1")], "it took longer than 0.5 s"),
        ([(500, "down")], "it took longer than 0.5 s"),
    ],
    indirect=["judge"],
)
def test_a_service_that_does_not_judge(
    server: Served, config: Callable[..., RolloutConfig], judge: Judge, why: str
) -> None:
    """It leaves no reward, and its reason."""
    settings = config({"name": "fair", "url": judge.url}, clocks={"scoring_s": 0.5})
    run(settings, [Task("a", {"say": "hello"})])
    (row,) = launches(server, settings.name)
    assert (row["status"], row["reward"]) == ("done", None)
    assert why in orjson.loads(row["scoring"])["fair"]["error"]


# A model that judges --------------------------------------------------------------------------------------

PROMPT = "Was {answer} right? It was said:\n{conversation}\n{unknown}\n{worth}"


def judgements(server: Any, trajectory_id: str) -> list[Any]:
    """The judges' trajectories about one: status, split, group, reward, labels, and the last messages."""
    with rb.connect(server.path) as connection:
        query = """
            SELECT t.status, t.split, t."group", t.reward, t.labels->>'$.scorer', u.new_messages,
                   u.requested_model
            FROM trajectories t LEFT JOIN turns u USING (trajectory_id)
            WHERE t.origin->>'$.trajectory_id' = $1 AND t.origin->>'$.how' = 'judged'
            ORDER BY t.trajectory_id"""
        return connection.execute(query, [trajectory_id]).fetchall()


def _ids(server: Any, name: str) -> list[str]:
    with rb.connect(server.path) as connection:
        query = "SELECT trajectory_id FROM launches WHERE rollout = $1 ORDER BY task"
        return [row[0] for row in connection.execute(query, [name]).fetchall()]


def test_a_model_judges(server: Served, config: Callable[..., RolloutConfig]) -> None:
    """What it is asked and says is a trajectory of its own, of no group, which names the one it is about."""
    options = {"prompt": PROMPT, "system": "Be strict.", "model": "gpt-judge", "options": {"max_tokens": 500}}
    settings = config({"name": "strict", "judge": options}, samples=2)
    # What an agent says is no template, and no number of the judge's.
    run(settings, [Task("a", {"say": "{worth} of 9", "worth": 0.75})])
    rows = launches(server, settings.name)
    assert [(row["reward"], row["split"], orjson.loads(row["scoring"])) for row in rows] == [
        (0.75, "train", {"strict": 0.75})
    ] * 2
    judged = judgements(server, _ids(server, settings.name)[0])
    assert [row[:5] + row[6:] for row in judged] == [
        ("completed", "judge", None, None, "strict", "gpt-judge")
    ]
    contents = [message["content"] for message in orjson.loads(judged[0][5])]
    conversation = "user:\n{worth} of 9\n\nassistant:\n1: {worth} of 9"
    assert contents == [
        "Be strict.",
        f"Was 1: {{worth}} of 9 right? It was said:\n{conversation}\n{{unknown}}\n0.75",
    ]


def test_what_judges_say_is_kept_out(server: Served, config: Callable[..., RolloutConfig]) -> None:
    """Of training, by both ledgers."""
    settings = config({"name": "strict", "judge": {"prompt": "Say\n{worth}"}})
    run(settings, [Task("a", {"say": "hello", "worth": 1})])
    with rb.connect(server.path) as connection:
        query = "SELECT term, CAST(sum(turns) AS BIGINT) FROM ledger WHERE rule = 'judge' GROUP BY ALL"
        [(term, turns)] = connection.execute(query).fetchall()
        query = "SELECT count(*) FROM turns JOIN trajectories t USING (trajectory_id) WHERE t.split = 'judge'"
        assert turns == connection.execute(query).fetchall()[0][0] > 0
    places = [where for _, where in fold_ledger(rb.open(server.path).events()).entries if where[1] == "judge"]
    assert {place[0] for place in places} == {term} == {"kept out"}


@pytest.mark.parametrize(
    ("judge", "status", "why"),
    [
        ({"prompt": "{worth} or so"}, "failed", "said, as its last line, '1: good or so'"),
        ({"prompt": "{worth}", "parse": r"Score: (\d+)"}, "failed", "finds nothing"),
        ({"prompt": "boom"}, "void", "RolloutError: the proxy answered 502"),
        ({"prompt": "sleep 1.5"}, "void", "it took longer than 1 s"),
    ],
)
def test_a_model_that_does_not_judge(
    server: Served, config: Callable[..., RolloutConfig], judge: dict[str, Any], status: str, why: str
) -> None:
    """It leaves no reward, its reason, and its trajectory ended."""
    settings = config({"name": "strict", "judge": judge}, clocks={"scoring_s": 1.0})
    run(settings, [Task("a", {"say": "hello", "worth": "good"})])
    (row,) = launches(server, settings.name)
    assert (row["status"], row["reward"], row["finished"]) == ("done", None, "completed")
    assert why in orjson.loads(row["scoring"])["strict"]["error"]
    (judgement,) = judgements(server, _ids(server, settings.name)[0])
    assert judgement[:2] == (status, "judge" if status != "void" else "void")


def test_a_number_is_found_where_it_last_matches(
    server: Served, config: Callable[..., RolloutConfig]
) -> None:
    """By the group of a regular expression."""
    settings = config(
        {"name": "s", "judge": {"prompt": "Score: 1, no: Score: 4 of 10", "parse": r"Score: (\d+)"}}
    )
    run(settings, [Task("a", {"say": "hello"})])
    assert [row["reward"] for row in launches(server, settings.name)] == [4.0]


def test_erasure_tells_of_what_judges_were_asked(store: rb.Store) -> None:
    """It holds the text that is erased."""
    judged = {"trajectory_id": "a", "how": "judged"}
    records = [
        *(TrajectoryOpened("a", "name-a"), TrajectoryFinished("a")),
        *(TrajectoryOpened("j", "name-j", split="judge", origin=judged), TrajectoryFinished("j")),
    ]
    with store.writer("serve") as lane:
        lane.append([rb.Event(record, "r") for record in records]).result()
    assert erase_trajectory(store, "name-a", "a leak").replays == ("j",)


def test_what_is_filled_in_is_no_template() -> None:
    """In one pass."""
    assert filled("{a} {b} {c}", {"a": "{b}", "b": "{a}"}) == "{b} {a} {c}"


# Scores again ---------------------------------------------------------------------------------------------


def again(config: RolloutConfig, tasks: list[Task]) -> tuple[Rescored, list[str]]:
    """Score what ended again; what was done, and what was said."""
    messages: list[str] = []

    async def score() -> Rescored:
        async with Proxy(config.proxy) as proxy:
            scorers = Scorers(config, proxy, launcher_of(config))
            return await score_again(config, tasks, proxy, scorers, messages.append)

    return asyncio.run(score()), messages


def test_scores_given_again(server: Served, config: Callable[..., RolloutConfig], tmp_path: Path) -> None:
    """What is new or another number supersedes what was in force; what is the same is not said twice."""
    tasks = [Task("a", {"say": "hello"}), Task("b", {"say": "at length"})]
    settings = config({"name": "length", "function": f"{tmp_path}/own.py:length"})
    run(settings, tasks)
    first, second = launches(server, settings.name)
    assert rewards(server, first["trajectory"]) == [("length", 8.0, False), ("agent", 8.0, False)]
    assert again(settings, tasks)[0] == Rescored(2, 0, 0, {})
    heavier = config(
        {"name": "length", "function": f"{tmp_path}/own.py:length", "weight": 0.5},
        {"name": "worth", "function": f"{tmp_path}/own.py:by_file", "weight": 1.0},
    )
    (folder,) = (tmp_path / "launches").glob(f"{first['trajectory']}-*")
    (folder / "worth.txt").write_text("2")
    result, messages = again(heavier, tasks)
    assert (result.scored, result.failed, result.rewards, result.left_out) == (1, 1, 2, {})
    assert rewards(server, first["trajectory"]) == [
        *[("length", 8.0, False), ("agent", 8.0, True)],
        *[("worth", 2.0, False), ("agent", 6.0, False)],
    ]
    # A scorer that failed leaves what was in force.
    assert rewards(server, second["trajectory"]) == [("length", 12.0, False), ("agent", 12.0, False)]
    assert len(messages) == 1
    assert "scorer worth failed" in messages[0]
    assert [row["reward"] for row in launches(server, settings.name)] == [6.0, 12.0]
    # And back.
    assert again(settings, tasks)[0].rewards == 1
    assert Counter(superseded for _, _, superseded in rewards(server, first["trajectory"])) == {
        True: 2,
        False: 3,
    }


def test_the_command_scores_again(
    server: Served, config: Callable[..., RolloutConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what it did, and by its exit code whether a scorer failed."""
    settings = config()
    run(settings, [Task("a", {"say": "hello"}), Task("b", {"say": "ho"})])
    (tmp_path / "tasks.jsonl").write_text('{"id": "a"}\n{"id": "b"}\n')
    file = tmp_path / "r.toml"
    file.write_text(
        f'name = "{settings.name}"\nproxy = "{server.url}"\ntasks = "{tmp_path}/tasks.jsonl"\n'
        f'folder = "{tmp_path}/launches"\n[agent]\nlauncher = "python"\nrollout = "{tmp_path}/own.py:Says"\n'
        f'[[score]]\nname = "length"\nfunction = "{tmp_path}/own.py:length"\n'
    )
    assert run_scoring(load_rollouts(file, []), None, json=False) == 0
    assert capsys.readouterr().out == "scored 2 launches; 4 rewards are new\n"
    assert [row["reward"] for row in launches(server, settings.name)] == [8.0, 5.0]
    failing = f'score=[{{name="worth", function="{tmp_path}/own.py:by_file"}}]'
    assert run_scoring(load_rollouts(file, [failing]), None, json=True) == 1
    assert json.loads(capsys.readouterr().out) == {"scored": 0, "failed": 2, "rewards": 0, "left_out": {}}


def test_what_cannot_be_scored_again(
    server: Served, config: Callable[..., RolloutConfig], tmp_path: Path
) -> None:
    """Its folder is gone, or its task; what never had a reward is not asked about."""
    tasks = [Task("a", {"say": "hello"}), Task("b", {"say": "hello"}), Task("c", {"say": "boom"})]
    settings = config({"name": "length", "function": f"{tmp_path}/own.py:length"}, retries={"attempts": 1})
    run(settings, tasks)
    (folder,) = (tmp_path / "launches").glob("*.b.*")
    folder.rename(tmp_path / "gone")
    result, _ = again(settings, tasks[1:])
    assert result == Rescored(0, 0, 0, {"its folder is gone": 1, "its task is not among the CONFIG's": 1})
    with pytest.raises(ConfigError, match="there is nothing to score by"):
        again(config(), tasks)


# Rewards given twice --------------------------------------------------------------------------------------


def test_a_reward_that_is_sent_again_counts_once(server: Served) -> None:
    """Also of several at once, and of one that supersedes; another number, or an earlier one, is new."""
    path = "/v1/trajectories/twice"
    with httpx.Client(base_url=server.url) as http:
        assert http.post("/v1/trajectories", json={"id": "twice"}).status_code == 201

        def give(value: float, **more: Any) -> tuple[int, str]:
            answer = http.post(f"{path}/rewards", json={"reward": value, "source": "s", **more})
            return answer.status_code, answer.json()["event_id"]

        status, first = give(1.0)
        assert (status, give(1.0)) == (201, (200, first))
        status, second = give(2.0, supersedes=first)
        assert (status, give(2.0, supersedes=first)) == (201, (200, second))
        assert give(3.0, supersedes=second)[0] == 201
        # Even once it was superseded itself.
        assert give(2.0, supersedes=first) == (200, second)
        assert give(1.0)[0] == 201
        listed = [row[1:] for row in rewards(server, "twice")]
        assert listed == [(1.0, True), (2.0, True), (3.0, False), (1.0, False)]

    async def at_once() -> list[int]:
        async with Proxy(server.url) as proxy:
            url = f"{server.url}{path}/rewards"
            posts = [proxy.http.send("POST", url, {"reward": 5.0}) for _ in range(8)]
            return [answer.status for answer in await asyncio.gather(*posts)]

    assert Counter(asyncio.run(at_once())) == {201: 1, 200: 7}
