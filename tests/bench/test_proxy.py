"""The proxy's benchmark, in small: what it talks about, that wrong replies are seen, and its figures."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from rollbook import store
from rollbook.bench import litellm_peer, proxy, tied
from rollbook.bench.http_client import Connection
from rollbook.bench.http_client import Reply as Response
from rollbook.bench.load_generator import Conversation, WrongReply, big, streamed, turns
from rollbook.bench.processes import BenchError, Process
from rollbook.bench.proxy_outcome import Big, Lap, Measured, Pair, Recorded
from rollbook.bench.proxy_workers import ONE, PROXIES, SHARED, TWO, WorkersLap
from rollbook.bench.recorded import check
from rollbook.bench.rounds import Limit
from rollbook.bench.scripted.asgi import Message, Receive, Send, drop, read_body, reply, send_part
from rollbook.bench.scripted.dialogues import (
    ANSWERS,
    CALLS,
    Material,
    by_mark,
    make_material,
    marked,
    write_model,
    write_replies,
)
from rollbook.bench.scripted.openai import ScriptedOpenAI, choice_of
from rollbook.bench.turns import make_turns
from rollbook.ingest.tokens.chat_template import load_chat_tokenizer
from rollbook.store import Event
from rollbook.store.errors import ConfigError
from rollbook.store.events import VersionSpan
from rollbook.testing.asgi import free_port, serving


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model directory, the conversations and the engine's replies."""
    folder = tmp_path_factory.mktemp("stage")
    material = make_material()
    write_replies(folder / "replies.json", material, write_model(folder / "model"))
    material.write(folder / "material.json")
    return folder


@pytest.fixture
def material(stage: Path) -> Material:
    """What is talked about, as the load generator reads it."""
    return Material.read(stage / "material.json")


@pytest.fixture
def upstream(material: Material) -> Iterator[str]:
    """The scripted OpenAI upstream, in a thread."""
    with serving(ScriptedOpenAI(material)) as url:
        yield url


def test_the_engine_finds_its_reply(stage: Path, material: Material) -> None:
    """By the mark of the last message, whatever came before; its ids are the reply's text and the end."""
    tokenizer, script = load_chat_tokenizer(stage / "model"), by_mark(stage / "replies.json")
    for number in range(CALLS + ANSWERS):
        messages = material.opening(number)
        messages[0]["content"] += " #03 "
        messages[1]["content"] = marked(material.result(number, 1), number)
        ids = tokenizer.encode(tokenizer.render(messages, material.tools, generate=True)).tolist()
        answer = script(ids, {})
        assert tokenizer.decode(answer.ids, special=True) == material.replies[number].text() + "<|im_end|>"
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.ids)
    with pytest.raises(LookupError, match="no mark"):
        script([1, 2, 3], {})


def test_images_have_a_place_in_the_prompt(stage: Path) -> None:
    """The template shows where an image stands, as ids of its own."""
    tokenizer = load_chat_tokenizer(stage / "model")
    url = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages = [{"role": "user", "content": [url, {"type": "text", "text": "what?"}]}]
    text = tokenizer.render(messages, None, generate=True)
    assert "<|vision_start|><|image_pad|><|vision_end|>what?<|im_end|>" in text
    assert len(tokenizer.encode("<|vision_start|><|image_pad|><|vision_end|>")) == 3


def test_every_side_gets_the_same_conversations(material: Material, tmp_path: Path) -> None:
    """The same seed makes the same; conversations differ, end with an answer, and call tools before."""
    make_material().write(tmp_path / "again.json")
    assert material == Material.read(tmp_path / "again.json")
    assert material.opening(1) != material.opening(2)
    assert all(material.replies[material.reply_number(5, t, last=False)].name for t in range(50))
    assert material.replies[material.reply_number(5, 7, last=True)].name is None
    assert 800 < sum(map(len, material.results)) / len(material.results) < 1500


def test_turns_are_sent_and_their_replies_checked(material: Material, upstream: str) -> None:
    """Whole conversations at once, against an upstream that answers as it should: all right, all counted."""
    options = {"url": upstream, "path": "/v1/chat/completions", "kind": "litellm", "name": "x", "seed": 3}
    result = asyncio.run(turns(material, options | {"turns": 4, "trajectories": 5, "concurrency": 2}))
    assert (result["turns"], result["wrong"], result["reasons"]) == (20, 0, [])
    assert result["wall_s"] > 0
    assert 0 < result["first_ms"]["p50"] <= result["whole_ms"]["p99"]


def _reply(material: Material, number: int) -> dict[str, Any]:
    return {"choices": [choice_of(material.replies[number])]}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda choice: choice["message"].update(content="no"), "'no', not"),
        (lambda choice: choice.update(finish_reason="stop"), "finish_reason 'stop'"),
        (lambda choice: choice["message"]["tool_calls"][0]["function"].update(name="rm"), "call .*rm"),
        (lambda choice: choice["message"]["tool_calls"][0]["function"].update(arguments="{}"), "call "),
    ],
)
def test_a_wrong_reply_is_seen(material: Material, spoil: Any, words: str) -> None:
    """Content, call and finish reason must be the wanted ones."""
    conversation = Conversation(material, 2, 3, "proxy")
    body = orjson.loads(conversation.ask(0))
    number = int(re.findall(r"#(\d\d)$", body["messages"][-1]["content"])[0])
    right = _reply(material, number)
    Conversation(material, 2, 3, "proxy").hear(0, Response(200, orjson.dumps(right), 0.0, 0.0))
    spoil(right["choices"][0])
    with pytest.raises(WrongReply, match=words):
        conversation.hear(0, Response(200, orjson.dumps(right), 0.0, 0.0))
    with pytest.raises(WrongReply, match="status 500"):
        conversation.hear(0, Response(500, b"oh", 0.0, 0.0))


def test_a_stream_is_put_together() -> None:
    """Content and call arguments in pieces; a stream without its end is wrong."""
    function = {"name": "f", "arguments": '{"a"'}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": "so "},
        {"content": "be it"},
        {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": function}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    ]
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": d}]} for d in deltas]
    chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}, {"choices": []}]
    data = b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks)
    choice = streamed(data + b"data: [DONE]\n\n")
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "so be it"
    [call] = choice["message"]["tool_calls"]
    assert call == {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    with pytest.raises(WrongReply, match="without its mark"):
        streamed(data)


def test_the_client_reads_parts_and_chunks_and_times_out() -> None:
    """Bodies in parts, chunked replies, a connection that is kept, one that is dropped, and one too slow."""
    clients: set[Any] = set()

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        clients.add(scope["client"][1])
        if scope["path"] == "/drop":
            return await drop(scope)
        if scope["path"] == "/slow":
            await asyncio.sleep(5)
        if scope["path"] == "/parts":
            await send_part(send, b"one ", first=True)
            await asyncio.sleep(0.02)
            await send_part(send, b"two", first=False)
            return await send({"type": "http.response.body", "body": b""})
        headers = {key.decode(): value.decode() for key, value in scope["headers"]}
        await reply(send, 201, {"size": len(body), "end": body[-2:].decode(), "x": headers.get("x")})

    async def talk(url: str) -> None:
        async with Connection(url, timeout_s=0.3) as connection:
            big_body = [b"a" * 100_000, b"b" * 3_000_000, b"yz"]
            answer = await connection.post("/", big_body, b"X: 1\r\n")
            assert (answer.status, orjson.loads(answer.body)) == (
                201,
                {"size": 3_100_002, "end": "yz", "x": "1"},
            )
            parts = await connection.get("/parts")
            assert (parts.status, parts.body) == (200, b"one two")
            assert parts.whole_s - parts.first_s > 0.01
            assert len(clients) == 1
            with pytest.raises(ConnectionResetError):
                await connection.get("/drop")
            with pytest.raises(TimeoutError):
                await connection.get("/slow")
            assert (await connection.get("/")).status == 201
            assert len(clients) == 3

    with serving(app) as url:
        asyncio.run(talk(url))


def test_big_bodies_that_fail_are_counted(material: Material) -> None:
    """A refusal is one failure, with its reason; what is answered is checked."""
    sizes: list[int] = []

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        body = orjson.loads(await read_body(receive))
        image, text = body["messages"][0]["content"]
        sizes.append(len(image["image_url"]["url"]))
        if scope["path"] == "/b-1":
            return await reply(send, 413, {"error": "too big"})
        await reply(send, 200, _reply(material, int(text["text"][-2:])))

    options = {"path": "/NAME", "name": "b", "timeout_s": 10, "count": 3, "size": 40_000}
    with serving(app) as url:
        result = asyncio.run(big(material, options | {"url": url}))
    assert (result["turns"], result["wrong"]) == (2, 1)
    assert min(sizes) > 40_000
    assert "KeyError" in result["reasons"][0] or "413" in result["reasons"][0]


def test_processes_answer_and_report_what_they_used(tmp_path: Path) -> None:
    """They answer commands, say what they use, and tell with their last lines why they ended."""
    echo = "import sys\nfor line in sys.stdin: print(line.strip() or '{}', flush=True)\n"
    with Process("cat", [sys.executable, "-c", echo], tmp_path, "all") as cat:
        assert cat.ask(a=1) == {"a": 1}
        assert cat.cpu_s() > 0
        assert cat.peak_rss() > 1 << 20
        with pytest.raises(BenchError, match="cat no"):
            cat.ask(error="no")
    dies = "import sys; print('a', file=sys.stderr); sys.exit(3)"
    with Process("dies", [sys.executable, "-c", dies], tmp_path, "all") as process:
        with pytest.raises(BenchError, match="dies ended with 3\na"):
            process.await_http(f"http://127.0.0.1:{free_port()}/")
        with pytest.raises(BenchError, match="dies ended"):
            process.line()


def test_no_child_is_left(tmp_path: Path) -> None:
    """Who ends at once takes its children along, before the folder they write to is removed."""
    inner = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n"
    outer = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {inner!r}])\n"
    with Process("parent", [sys.executable, "-c", outer], tmp_path, "all") as process:
        pid = int(process.line())
    assert process.child.returncode == -15
    assert not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text()


def test_a_process_that_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its children, before the folder they write to is removed."""
    monkeypatch.setattr("rollbook.bench.processes.STOP_S", 0.2)
    deaf = "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    inner = deaf + "print(os.getpid(), flush=True)\ntime.sleep(60)\n"
    starts = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {inner!r}])\n"
    outer = deaf + starts + "print('up', flush=True)\ntime.sleep(60)\n"
    with Process("deaf", [sys.executable, "-c", outer], tmp_path, "all") as process:
        pid = int(next(line for line in (process.line(), process.line()) if line != b"up"))
        assert Path(f"/proc/{pid}").exists()
    assert process.child.returncode == -9
    assert not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text()


def test_children_end_with_their_parent(tmp_path: Path) -> None:
    """Also when it is killed; the cores are those given."""
    core = min(os.sched_getaffinity(0))
    child = (
        "import os, time\n"
        f"print(os.getpid(), os.sched_getaffinity(0) == {{{core}}}, flush=True)\n"
        "time.sleep(60)\n"
    )
    words = [sys.executable, tied.__file__, str(core), sys.executable, "-c", child]
    parent = f"import subprocess; subprocess.run({words!r})"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid, pinned = process.stdout.readline().split()
    assert pinned == "True"
    process.kill()
    process.wait()
    for _ in range(500):
        if not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} outlived its parent")


def test_litellm_is_found_by_its_environment_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LiteLLM is found where the variable says, at the extra's version, configured for the upstream."""
    monkeypatch.setenv("ROLLBOOK_LITELLM", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "litellm").touch()
    assert litellm_peer.find() == tmp_path / "bin" / "litellm"
    words = litellm_peer.command(tmp_path / "bin" / "litellm", tmp_path, "http://up", 8)
    assert words[0] == str(tmp_path / "bin" / "python")
    config = orjson.loads((tmp_path / "litellm.yaml").read_bytes())
    assert config["model_list"][0]["litellm_params"]["api_base"] == "http://up/v1"
    root = Path(__file__).resolve().parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["bench"] == [f"litellm[proxy]=={litellm_peer.VERSION}"]


def test_the_peer_is_installed_by_the_uv_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words are the variable's, else uv on the path; where there is neither, the remedy is said."""
    monkeypatch.setenv("ROLLBOOK_UV", f"'{sys.executable}' .ci/uv.py")
    assert litellm_peer.uv() == [sys.executable, ".ci/uv.py"]
    monkeypatch.delenv("ROLLBOOK_UV")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="install it, or name it in ROLLBOOK_UV"):
        litellm_peer.uv()


def test_the_values_of_the_figures() -> None:
    """Ratios are medians of each round's; percentiles are over all pairs; long turns have neighbours."""

    def laps(*rates: float, **cpu: float) -> list[Lap]:
        return [Lap(rate, cpu, {"p50": 1.0, "p99": 2.0}, {"p50": 0.5, "p99": 1.0}) for rate in rates]

    long = [
        {5: [Pair(3.0, 1.0)] * 3, 128: [Pair(9.0, 1.0), Pair(50.0, 1.0), Pair(8.0, 1.0)]},
        {5: [Pair(2.0, 1.0)] * 3, 128: [Pair(7.0, 1.0)] * 3},
        {5: [Pair(5.0, 1.0)] * 3, 128: [Pair(9.0, 1.0)] * 3},
    ]
    measured = Measured(
        laps={
            "proxy": laps(100.0, 300.0, 200.0, proxy=2.0, engine=0.5, load=0.1),
            "stream": laps(50.0, 100.0, 100.0, proxy=4.0, engine=0.5, load=0.1),
            "echo": laps(400.0, 400.0, 1000.0, echo=0.25, load=0.1),
            "litellm": laps(50.0, 50.0, 50.0, litellm=9.0, load=0.1),
        },
        pairs=[Pair(1.0 + i, 1.0) for i in range(1, 101)],
        long=long,
        commit_ms=[1.0, 2.0, 9.0],
        recorded=Recorded(77, 1),
        peak_rss={"proxy": 100 << 20},
        big=Big(512, 3_000_000, 2, ["why"], 10.0, 1 << 30, 1 << 31, 1 << 20),
        workers={
            ONE: [WorkersLap(100.0, 4.0, 4.0, 0.5), WorkersLap(200.0, 5.0, 5.0, 0.5)],
            TWO: [WorkersLap(170.0, 4.4, 2.5, 0.5), WorkersLap(320.0, 5.0, 2.5, 0.5)],
            ONE + SHARED: [WorkersLap(100.0, 4.0, 4.0, 0.5)],
            TWO + SHARED: [WorkersLap(150.0, 4.6, 2.5, 0.5)],
            PROXIES: [WorkersLap(90.0, 6.0, 3.5, 0.5), WorkersLap(150.0, 6.5, 3.5, 0.5)],
        },
        cores=2,
    )
    outcome = proxy.outcome(measured)
    figures = {f.figure: f for f in outcome.figures}
    assert {name: (f.value, f.ratio) for name, f in figures.items()} == {
        "proxy.turns_per_s": (200.0, None),
        "proxy.stream_turns_per_s": (100.0, 0.5),
        "proxy.vs_echo": (200.0, 0.25),
        "proxy.vs_litellm": (200.0, 4.0),
        "proxy.added_p50_ms": (50.0, None),
        "proxy.added_p99_ms": (99.0, None),
        "proxy.commit_p50_ms": (2.0, None),
        "proxy.turn128_vs_turn5": (8.0, 4.0),
        "proxy.big_bodies_failed": (2, None),
        "proxy.workers": (245.0, pytest.approx(1.65)),
        "proxy.workers_bound": (400.0, pytest.approx(1.8)),
        "proxy.workers_cpu": (4.7, pytest.approx(1.05)),
        "proxy.workers_shared_cpu": (4.6, pytest.approx(1.15)),
        "proxy.sent_on_cpu": (6.25, pytest.approx(1.4)),
        "proxy.cpu_ms_per_turn": (2.0, None),
        "proxy.recorded_wrong": (1, None),
    }
    assert figures["proxy.workers"].against == (
        "one worker: 150 turns/s; agents and engine took 0.12 of 2 cores"
    )
    assert "1.00 GiB at its peak, 2.00 GiB on disk; first: why" in str(
        figures["proxy.big_bodies_failed"].against
    )
    spreads = {s.what: s for s in outcome.spreads}
    assert (spreads["proxy"].low, spreads["proxy"].high) == (100.0, 300.0)
    assert spreads["added at turn 128"].middle == 8.0
    assert spreads["stream, CPU a turn: proxy"].middle == 4.0


def test_a_wrong_record_is_counted(stage: Path, tmp_path: Path) -> None:
    """A changed id, a logprob, a span that covers too little, and a turn that is missing."""
    script = by_mark(stage / "replies.json")
    values = orjson.loads((stage / "replies.json").read_bytes())
    prompt = np.array([1, values["sign"], values["digits"][1], values["digits"][2], 5], np.int32)
    right = script(prompt.tolist(), {})
    ids, logprobs = np.array(right.ids, np.int32), np.array(right.logprobs, np.float32)
    span = VersionSpan("actor", 1, 0, len(ids))
    turn = replace(make_turns(1)[0], prompt_ids=prompt, completion_ids=ids, logprobs=logprobs)
    turn = replace(turn, version_spans=(span,))
    other, less = ids.copy(), logprobs.copy()
    other[3] += 1
    less[3] = np.nextafter(less[3], np.float32(0))
    turns = [
        turn,
        replace(turn, completion_ids=other),
        replace(turn, logprobs=less),
        replace(turn, version_spans=(replace(span, end=len(ids) - 1),)),
    ]
    with store.open(tmp_path / "store", create=True).writer("w") as writer:
        writer.append([Event(record, "bench") for record in turns]).result(10)
    assert check(tmp_path / "store", stage / "replies.json", 5) == Recorded(4, 4)


def test_a_small_run_measures_a_real_proxy(tmp_path: Path) -> None:
    """All of it against a real proxy: every side answers rightly, and all that was recorded is right."""
    plan = proxy.Plan(
        *(Limit(1, 30.0), 2, 4, 4, 4, 4, 3),
        **{"pairs": 1, "long_turns": 7, "looked_at": (2, 6), "big": 4, "big_bytes": 100_000, "commits": 5},
        litellm=False,
        workers_trajectories=4,
    )
    rounds: list[None] = []
    measured = proxy.measure(tmp_path, plan, lambda: rounds.append(None))
    assert len(rounds) == plan.steps == 3
    assert set(measured.laps) == {"proxy", "stream", "echo"}
    assert measured.recorded == Recorded(2 * 2 * 12 + 2 * 3 + 7 + 2 * 5 * 12, 0)
    assert measured.big is not None
    assert (measured.big.count, measured.big.failed) == (4, 0)
    assert measured.big.disk > 4 * 100_000
    names = [f.figure for f in proxy.outcome(measured).figures]
    assert "proxy.turn6_vs_turn2" in names
    assert [f.value for f in proxy.outcome(measured).figures if f.figure == "proxy.recorded_wrong"] == [0]
