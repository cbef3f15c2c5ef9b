"""`rollbook replay rollout`: a recorded trajectory is sampled again, and said to be the same or not."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from tests.fakes.proxies.settings import proxy_parts
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.demo.model import make_model
from rollbook.demo.task import TOOLS
from rollbook.engines.engine import Engine
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.replies.choose import choose_family
from rollbook.ingest.serve.engines import make_engine
from rollbook.ingest.serve.proxy import build_app, identity_of
from rollbook.ingest.tokens.bridge import Bridges
from rollbook.ingest.tokens.chat_template import load_chat_tokenizer
from rollbook.store import Store
from rollbook.store.events import LabelAdded, TurnFailed
from rollbook.store.events.event_json import as_json
from rollbook.store.fold.trajectory import Trajectory
from rollbook.store.upkeep.erase import erase_trajectory

Cli = Callable[..., tuple[int, str, str]]
RUN, VERSION = "demo", 40
SCRIPT = """\
def answer(messages, tools):
    last = messages[-1]
    if last["role"] == "tool":
        return f"It is {last['content']}."
    if "plus" not in last["content"]:
        return "You are welcome."
    arguments = {"a": %d, "op": "+", "b": 58}
    call = {"id": "c", "type": "function", "function": {"name": "calc", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
"""
SFT = {
    "run": RUN,
    "steps": VERSION,
    "seed": 3,
    "threads": 1,
    "checkpoint_every": VERSION,
    "algorithm": {"name": "sft", "batch_size": 4},
    "recipe": {"splits": ["teacher"]},
    "optimizer": {"lr": 3e-3, "warmup_steps": 5},
}


@contextlib.asynccontextmanager
async def _serving(log: Store, model: Path, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The proxy of a model in this process, with its lifespan."""
    tokenizer = load_chat_tokenizer(model)
    recorder = Recorder(log, "serve", RUN)
    identity = identity_of(recorder, "actor", model)
    parts = proxy_parts(store=log.path, model=model, threads=1, **options)
    factory = make_engine(*parts, tokenizer)
    engine: Engine = factory(identity)
    family = choose_family("auto", model, tokenizer.template_source)
    app = build_app(
        TurnRunner(recorder, engine, Bridges.tested(tokenizer), family), *parts, identity=identity
    )
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
            yield client


async def _converse(client: httpx.AsyncClient, name: str, split: str, **sampling: Any) -> None:
    """A question that takes a call, the call's result, and a word of thanks: three turns."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 37 plus 58?"}]
    for then in ({"role": "tool", "content": "95"}, {"role": "user", "content": "Thank you."}, None):
        body = {"messages": messages, "tools": TOOLS, "max_tokens": 32} | sampling
        path = f"/t/{name}/split/{split}/v1/chat/completions"
        reply = (await client.post(path, json=body)).raise_for_status().json()["choices"][0]["message"]
        if then is not None and then["role"] == "tool":
            then = then | {"tool_call_id": reply["tool_calls"][0]["id"]}
        messages += [reply] if then is None else [reply, then]
    (await client.post(f"/v1/trajectories/{name}/finish", json={"reward": 1.0})).raise_for_status()


async def _other_apis(client: httpx.AsyncClient) -> None:
    """Two turns by Anthropic's messages, two by Responses of which one names the other, one raw prompt."""
    hello, more = [{"role": "user", "content": "Hello."}], [{"role": "user", "content": "Thank you."}]
    body: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "system": "Be kind."}
    first = await client.post("/t/apis/v1/messages", json=body | {"messages": hello})
    messages = [*hello, {"role": "assistant", "content": first.raise_for_status().json()["content"]}, *more]
    (await client.post("/t/apis/v1/messages", json=body | {"messages": messages})).raise_for_status()
    body = {"max_output_tokens": 6, "temperature": 1, "seed": 7}
    first = await client.post("/t/apis/v1/responses", json=body | {"input": "Hello."})
    named = {"previous_response_id": first.raise_for_status().json()["id"], "input": more}
    (await client.post("/t/apis/v1/responses", json=body | named)).raise_for_status()
    raw = {"prompt": [5, 6, 7, 8], "max_tokens": 5, "n": 2, "seed": 7}
    (await client.post("/t/apis/v1/completions", json=raw)).raise_for_status()


@pytest.fixture(scope="module")
def recorded_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a scripted teacher's conversations, a model trained on them (versions 0 and 40), and
    conversations with that, drawn and greedy. Copy it; never write."""
    folder = tmp_path_factory.mktemp("rollouts")
    model, log = folder / "model", rb.open(folder / "store", create=True)
    make_model(model, seed=0)
    (folder / "teacher.py").write_text(SCRIPT % 37)

    async def teach() -> None:
        script = f"{folder / 'teacher.py'}:answer"
        async with _serving(log, model, engine="scripted", script=script) as client:
            for number in range(4):
                await _converse(client, f"teach{number}", "teacher")

    async def act() -> None:
        async with _serving(log, log.path / f"checkpoints/{RUN}/actor/v{VERSION:08d}") as client:
            await _converse(client, "task-7", "train", temperature=1.0, seed=7)
            await _converse(client, "greedy", "train", temperature=0.0)
            await _other_apis(client)

    asyncio.run(teach())
    fabric.train(log, fabric.config(SFT, model=str(model)))
    asyncio.run(act())
    return log.path


@pytest.fixture
def log(recorded_path: Path, tmp_path: Path) -> Store:
    """A copy of the store."""
    return rb.open(shutil.copytree(recorded_path, tmp_path / "store"))


def _named(log: Store, name: str) -> Trajectory:
    return next(t for t in log.trajectories().values() if t.opened.name == name)


def _replays(log: Store) -> list[Trajectory]:
    return [t for t in log.trajectories().values() if t.opened.split == "replay"]


def _events(log: Store, trajectory: Trajectory) -> list[Any]:
    return [as_json(event) for event in log.events_about([trajectory.opened.trajectory_id])]


def _completed(trajectory: Trajectory) -> list[Any]:
    return [turn.completed for turn in trajectory.turns.values()]


# The same weights ---------------------------------------------------------------------------------


@pytest.mark.more_but("task-7")
@pytest.mark.parametrize("name", ["task-7", "greedy"])
def test_the_same_weights_give_the_same_tokens(log: Store, cli: Cli, name: str) -> None:
    """By the recorded seeds, or greedily: every turn, recorded as new events that name their origin."""
    source = _named(log, name)
    before = _events(log, source)
    code, out, err = cli("replay", "rollout", name, "--policy", VERSION, "--store", log.path, "--json")
    assert code == 0, err
    report = orjson.loads(out)
    turns = list(source.turns.values())
    assert [turn["turn_id"] for turn in report["turns"]] == [turn.turn_id for turn in turns]
    assert [(t["number"], t["same"], t["repeatable"]) for t in report["turns"]] == [
        (number, True, True) for number in (1, 2, 3)
    ]
    assert max(turn["largest_gap"] for turn in report["turns"]) < 1e-4
    [replay] = _replays(log)
    assert replay.opened.trajectory_id == report["new_trajectory_id"]
    assert replay.opened.origin == {
        "trajectory_id": source.opened.trajectory_id,
        "turn_id": turns[0].turn_id,
        "how": "repeated",
        "policy": "actor",
        "policy_version": VERSION,
    }
    assert (replay.run, replay.finished.status if replay.finished else None) == (RUN, "completed")
    assert [t.requested.wire["repeats"] for t in replay.turns.values()] == list(source.turns)
    assert [t.requested.parent_turn_id for t in replay.turns.values()] == [None, *list(replay.turns)[:2]]
    for was, now in zip(_completed(source), _completed(replay), strict=True):
        assert (was.prompt_sha256, was.version_spans) == (now.prompt_sha256, now.version_spans)
        assert np.array_equal(was.completion_ids, now.completion_ids)
    assert _events(log, _named(log, name)) == before


def test_every_api_is_asked_again(log: Store, cli: Cli) -> None:
    """Anthropic's messages, Responses that name each other, raw prompts and their siblings."""
    code, out, err = cli("replay", "rollout", "apis", "--policy", VERSION, "--store", log.path, "--json")
    assert code == 0, err
    assert [turn["same"] and turn["repeatable"] for turn in orjson.loads(out)["turns"]] == [True] * 6
    source, [replay] = _named(log, "apis"), _replays(log)
    for was, now in zip(source.turns.values(), replay.turns.values(), strict=True):
        assert now.requested.wire["endpoint"] == was.requested.wire["endpoint"]
        assert replay.messages(now) == source.messages(was)
        assert replay.items(now) == source.items(was)
        assert np.array_equal(replay.prompt_ids(now), source.prompt_ids(was))


def test_an_engine_that_does_not_repeat_itself(log: Store, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1, and the first token that differs, with both logprobs."""
    monkeypatch.setattr("rollbook.engines.embedded.batching.uniform_draw", lambda seed, place: 0.9999)
    code, out, _ = cli("replay", "rollout", "task-7", "--policy", VERSION, "--store", log.path, "--json")
    assert code == 1
    source, differing = _named(log, "task-7"), [t for t in orjson.loads(out)["turns"] if not t["same"]]
    assert differing
    first = differing[0]
    was, at = source.turns[first["turn_id"]].completed, first["differs_at"]
    assert was is not None
    assert was.logprobs is not None
    assert first["recorded"]["token_id"] == was.completion_ids[at] != first["new"]["token_id"]
    assert first["recorded"]["logprob"] == float(was.logprobs[at])
    code, out, _ = cli("replay", "rollout", "task-7", "--policy", VERSION, "--store", log.path)
    assert code == 1
    assert f"differs in turn {first['number']}" in out
    assert f"differ at {at}: recorded {first['recorded']['text']!r}" in " ".join(out.split())


def test_other_draws_are_no_claim(log: Store, cli: Cli) -> None:
    """With another seed nothing is to be the same, so nothing is missed."""
    command = ("replay", "rollout", "task-7", "--policy", VERSION, "--seed", 9, "--store", log.path, "--json")
    code, out, _ = cli(*command)
    assert code == 0
    assert not any(turn["repeatable"] for turn in orjson.loads(out)["turns"])
    assert [t.requested.sampling["seed"] for t in _replays(log)[0].turns.values()] == [10, 11, 12]


# Other weights ------------------------------------------------------------------------------------


def test_other_weights_are_shown_beside(log: Store, cli: Cli) -> None:
    """Each recorded prompt again, id for id, whatever the replies before it are now; exit code 0."""
    code, out, err = cli("replay", "rollout", "task-7", "--policy", "actor:0", "--store", log.path)
    assert code == 0, err
    assert "repeated with version 0 of policy actor" in out
    assert "0 of 3 turns have the same tokens, with other weights" in out
    source, [replay] = _named(log, "task-7"), _replays(log)
    for was, now in zip(source.turns.values(), replay.turns.values(), strict=True):
        assert np.array_equal(replay.prompt_ids(now), source.prompt_ids(was))
        assert now.completed is not None
        assert {span.version for span in now.completed.version_spans} == {0}
    reasons = [turn.requested.root_reason for turn in replay.turns.values()]
    assert reasons == ["first_turn", "replayed_otherwise", "replayed_otherwise"]


def test_some_turns_alone(log: Store, cli: Cli) -> None:
    """From one turn to another."""
    options = ("--from-turn", 2, "--until-turn", 2, "--policy", VERSION)
    assert cli("replay", "rollout", "task-7", *options, "--store", log.path)[0] == 0
    [replay] = _replays(log)
    assert replay.opened.origin is not None
    assert replay.opened.origin["turn_id"] == list(_named(log, "task-7").turns)[1]
    assert [t.requested.wire["repeats"] for t in replay.turns.values()] == [replay.opened.origin["turn_id"]]


# Continued ----------------------------------------------------------------------------------------


def test_the_same_reply_goes_on_as_recorded(log: Store, cli: Cli) -> None:
    """With the same weights the whole conversation comes again, the tool's result for the same call."""
    options = ("--continue", "--policy", VERSION, "--json")
    code, out, err = cli("replay", "rollout", "task-7", *options, "--store", log.path)
    assert code == 0, err
    report = orjson.loads(out)
    assert [turn["same"] and turn["repeatable"] for turn in report["turns"]] == [True] * 3
    [replay] = _replays(log)
    result = replay.messages(list(replay.turns.values())[1])[2]
    reply = _completed(replay)[0].reply
    assert result == {"role": "tool", "content": "95", "tool_call_id": reply["tool_calls"][0]["id"]}


def test_a_fork_goes_on_from_the_new_reply(log: Store, cli: Cli) -> None:
    """Behind what other weights say at turn 2 comes what the user said then; that is one conversation."""
    options = ("--continue", "--from-turn", 2, "--policy", 0, "--json")
    code, out, err = cli("replay", "rollout", "task-7", *options, "--store", log.path)
    assert code == 0, err
    turns = orjson.loads(out)["turns"]
    assert [(turn["number"], turn["same_prompt"]) for turn in turns] == [(2, True), (3, False)]
    [replay] = _replays(log)
    assert replay.opened.origin is not None
    assert (replay.opened.origin["how"], replay.finished and replay.finished.status) == (
        "continued",
        "completed",
    )
    forked, last = replay.turns.values()
    assert forked.completed is not None
    [*before, reply, thanks] = replay.messages(last)
    assert before == replay.messages(forked)
    assert (reply, thanks) == (forked.completed.reply, {"role": "user", "content": "Thank you."})


def test_a_result_without_its_call(log: Store, cli: Cli) -> None:
    """Other weights make no call: what the tool said then is not used, and the reason is in the log."""
    code, out, err = cli("replay", "rollout", "task-7", "--continue", "--policy", 0, "--store", log.path)
    assert code == 0, err
    why = "behind turn 1: the new reply makes no call, where the recorded one made calc("
    assert f"stopped {why}" in out
    [replay] = _replays(log)
    assert replay.finished is not None
    assert (replay.finished.status, len(replay.turns)) == ("truncated", 1)
    labels = [e.record for e in log.events() if isinstance(e.record, LabelAdded)]
    assert [(label.name, label.value[: len(why)]) for label in labels] == [("replay_stopped", why)]


def test_a_call_of_other_arguments(log: Store, cli: Cli, tmp_path: Path) -> None:
    """A teacher that calls with another number: its result was never seen."""
    (tmp_path / "other.py").write_text(SCRIPT % 36)
    script = ("--engine", "scripted", "--script", f"{tmp_path / 'other.py'}:answer", "--policy", VERSION)
    code, out, err = cli("replay", "rollout", "teach0", "--continue", *script, "--store", log.path, "--json")
    assert code == 2
    assert "serves version None" in err
    model = log.path / f"checkpoints/{RUN}/actor/v{VERSION:08d}"
    script = (*script[:-2], "--model", str(model))
    code, out, err = cli("replay", "rollout", "teach0", "--continue", *script, "--store", log.path, "--json")
    assert code == 0, err
    stopped = orjson.loads(out)["stopped"]
    assert stopped.startswith('behind turn 1: the recorded agent never called calc({"a":36,"b":58,"op":"+"})')


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        (("task-8", "--policy", VERSION), "near names: task-7"),
        (("task-7", "--policy", 7), "--policy 7: run 'demo' has no checkpoint of it; there are of: 0, 40"),
        (("task-7", "--policy", "critic:7"), "no checkpoint of policy 'critic'"),
        (("task-7",), "either --policy VERSION, or --model DIR"),
        (("task-7", "--policy", "newest"), "give a version, such as 12, or NAME:12"),
        (("task-7", "--policy", VERSION, "--from-turn", 4), "no such answered turn; there are 1, 2, 3"),
        (("task-7", "--policy", VERSION, "--from-turn", 3, "--until-turn", 2), "--until-turn lies before"),
        (("apis", "--policy", VERSION, "--from-turn", 5, "--continue"), "raw prompt"),
        (("task-7", "--policy", VERSION, "--engine", "sglang"), "needs --engine-url"),
    ],
)
def test_what_is_not_there(log: Store, cli: Cli, asked: tuple[Any, ...], remedy: str) -> None:
    """Exit code 2, with the remedy, and nothing is recorded."""
    head = log.head()
    code, _, err = cli("replay", "rollout", *asked, "--store", log.path)
    assert (code, remedy in " ".join(err.split())) == (2, True), err
    assert log.head() == head


def test_another_tokenizer(log: Store, cli: Cli, tmp_path: Path) -> None:
    """Ids of one tokenizer say something else to the model of another."""
    make_model(tmp_path / "other", seed=5)
    code, _, err = cli("replay", "rollout", "task-7", "--model", tmp_path / "other", "--store", log.path)
    assert (code, "recorded with another tokenizer or chat template" in err) == (2, True)


@pytest.mark.parametrize("keep_tokens", [False, True])
def test_what_was_erased(log: Store, cli: Cli, *, keep_tokens: bool) -> None:
    """It is refused with the reason, also where its tokens were kept: what was asked is gone."""
    erase_trajectory(log, "task-7", "a customer asked", keep_tokens=keep_tokens)
    code, _, err = cli("replay", "rollout", "task-7", "--policy", VERSION, "--store", log.path)
    assert (code, "was erased (a customer asked)" in err) == (2, True)
    assert _replays(log) == []


# What is left -------------------------------------------------------------------------------------


def test_an_engine_that_fails(log: Store, cli: Cli, tmp_path: Path) -> None:
    """What came is kept, the turn that failed too, and the replay is finished as failed."""
    (tmp_path / "broken.py").write_text(SCRIPT % 37 + '    assert last["role"] != "tool"\n')
    text = (tmp_path / "broken.py").read_text().replace("return f\"It is {last['content']}.\"", "1 / 0")
    (tmp_path / "broken.py").write_text(text)
    model = log.path / f"checkpoints/{RUN}/actor/v{VERSION:08d}"
    script = ("--engine", "scripted", "--script", f"{tmp_path / 'broken.py'}:answer", "--model", model)
    code, _, err = cli("replay", "rollout", "task-7", *script, "--store", log.path)
    assert (code, "the script failed: ZeroDivisionError" in err) == (2, True)
    [replay] = _replays(log)
    assert replay.finished is not None
    assert replay.finished.status == "failed"
    assert [turn.completed is not None for turn in replay.turns.values()] == [True, False]
    assert any(isinstance(event.record, TurnFailed) for event in log.events())


def _model(log: Store) -> tuple[Any, ...]:
    return "--model", log.path / f"checkpoints/{RUN}/actor/v{VERSION:08d}"


def _script_that(folder: Path, does: str) -> tuple[Any, ...]:
    """Options of an engine whose script does this when it is told a tool's result."""
    text = ("import os\nimport shutil\n" + SCRIPT % 37).replace(' return f"It is', f' {does}; return f"It is')
    (folder / "killed.py").write_text(text)
    return "--engine", "scripted", "--script", f"{folder / 'killed.py'}:answer"


def _ends_what_was_left(log: Store, cli: Cli) -> None:
    assert cli("store", "verify", "--store", log.path)[0] == 0
    [left] = _replays(log)
    assert left.finished is None
    assert [turn.completed is not None for turn in left.turns.values()][:1] == [True]
    assert cli("replay", "rollout", "task-7", "--policy", VERSION, "--store", log.path)[0] == 0
    ended, done = _replays(log)
    assert [t.finished.status if t.finished else None for t in (ended, done)] == ["aborted", "completed"]


@pytest.mark.more
def test_a_process_that_is_killed(log: Store, cli: Cli, tmp_path: Path) -> None:
    """What it had recorded is whole; the next replay of the lane ends it as aborted."""
    script = _script_that(tmp_path, "os.kill(os.getpid(), 9)")
    process = fabric.start_cli("replay", "rollout", "task-7", *script, *_model(log), "--store", log.path)
    process.communicate(timeout=150)
    assert process.returncode == -9
    _ends_what_was_left(log, cli)


def test_what_a_killed_process_leaves(log: Store, cli: Cli, tmp_path: Path) -> None:
    """A store as it stands amid a turn is what a killed process leaves: the same holds of it."""
    left = tmp_path / "left"
    script = _script_that(tmp_path, f"shutil.copytree({str(log.path)!r}, {str(left)!r})")
    assert cli("replay", "rollout", "task-7", *script, *_model(log), "--store", log.path)[0] == 0
    _ends_what_was_left(rb.open(left), cli)


def test_replays_are_never_trained(log: Store, cli: Cli) -> None:
    """The ledger keeps them out by their split, no recipe can name it, and a training takes none."""
    assert cli("replay", "rollout", "task-7", "--policy", VERSION, "--store", log.path)[0] == 0
    [replay] = _replays(log)
    sampled = sum(len(done.completion_ids) for done in _completed(replay))
    with rb.connect(log.path) as connection:
        kept_out = connection.execute("select term, tokens from ledger where rule = 'replay'").fetchall()
        [(origin, split)] = connection.execute(
            "select origin->>'$.trajectory_id', split from trajectories where origin is not null"
        ).fetchall()
        pairs = connection.execute(
            """select was.turn_id, now.completion_ids = was.completion_ids from turns now
               join turns was on was.turn_id = now.repeats order by now.turn_id"""
        ).fetchall()
    assert kept_out == [("kept out", sampled)]
    assert (origin, split) == (_named(log, "task-7").opened.trajectory_id, "replay")
    assert pairs == [(turn_id, True) for turn_id in _named(log, "task-7").turns]
    code, _, err = cli("samples", "--store", log.path, "--trajectory", replay.opened.name, "--json")
    assert code == 0, err
    with pytest.raises(ValueError, match="splits"):
        fabric.config(SFT, recipe={"splits": ["replay"]})


# The page -----------------------------------------------------------------------------------------


@pytest.mark.more
def test_the_page(log: Store, cli: Cli, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of docs/replaying-rollouts.md run, its table is what they print, its query finds them."""
    page = (root / "docs" / "replaying-rollouts.md").read_text()
    [commands], [shown] = (
        re.findall(rf"^```{kind}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE) for kind in ("bash", "text")
    )
    log.path.rename(log.path.parent / "runs")
    monkeypatch.chdir(log.path.parent)
    monkeypatch.setenv("COLUMNS", "160")
    printed = []
    for line in commands.splitlines():
        code, out, err = cli(*shlex.split(line)[1:])
        assert code == 0, err
        printed.append(out)
    first, head, turn = shown.splitlines()
    assert first.replace("run first", f"run {RUN}") in printed[1]
    assert head in [line.rstrip() for line in printed[1].splitlines()]
    assert re.search(r"^ +1 +15 +12 +\d+ +differ at 0: recorded '<tool_call>' \(", printed[1], re.MULTILINE)
    assert re.match(r" +1 +15 +12 +48 +differ at 0: recorded ", turn)
    [query] = re.findall(r"^```sql\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    with rb.connect("runs") as connection:
        rows = connection.execute(query).fetchall()
    assert [row[1:] for row in rows] == [
        ("repeated", str(VERSION), 3, 3),
        ("repeated", "0", 3, 0),
        ("continued", "0", 2, 0),
        ("continued", str(VERSION), 3, 3),
    ]
