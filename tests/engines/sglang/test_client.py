"""SGLang's native protocol over real HTTP: what the log says is what the server saw and answered."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.clients import streamed
from tests.fakes.clients.streamed import KINDS, PATHS, asked
from tests.fakes.proxies.in_process import InProcess
from tests.fakes.proxies.served import Served
from tests.fakes.stories.weights import STARTED_WITH, ToldWeights

from rollbook import store
from rollbook.bench.scripted.job import Answer, Failure, Options, in_turn, logprobs_of
from rollbook.bench.scripted.sglang import ScriptedSGLang
from rollbook.engines.engine import Prompt, Sampling
from rollbook.engines.sglang.client import SglangEngine, join_parts
from rollbook.engines.sglang.protocol import part, sampling_params
from rollbook.engines.weights.name import MARK_LENGTH, NamedWeights, read_name, version_in, weight_name
from rollbook.ingest.recording.runner import ATTEMPTS
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.store.errors import EngineError
from rollbook.store.events import VersionSpan, token_ids
from rollbook.store.fold.trajectory import fold
from rollbook.testing.asgi import serving
from rollbook.train.select.samples import all_samples

CHAT = PATHS["chat"]
NAMES = itertools.count()
Make = Callable[..., tuple[Any, ScriptedSGLang]]


@pytest.fixture(scope="module")
def ids_of(chat: Any) -> Callable[[str], list[int]]:
    """A text's ids and the end-of-turn token."""
    return lambda text: [*chat().encode(text).tolist(), chat().stop_ids[0]]


@pytest.fixture
def proxied(in_process: Any, chat: Any) -> Iterator[Make]:
    """Makes a scripted server and a proxy in front of it."""
    with ExitStack() as stack:

        def make(*answers: Any, **options: Any) -> tuple[Any, ScriptedSGLang]:
            app = ScriptedSGLang(in_turn(answers), Options(log=100, **options))
            return in_process(SglangEngine(stack.enter_context(serving(app)), ToldWeights()), chat()), app

        yield make


def _turns(proxy: Any, name: str = "t") -> list[Any]:
    return list(proxy.trajectories()[name].turns.values())


def _check(trajectory: Any, turn: Any, seen: Any) -> None:
    """The turn in the log against the server's own memory of the request."""
    done = turn.completed
    assert trajectory.prompt_ids(turn).tolist() == seen["input_ids"]
    assert done.completion_ids.tolist() == seen["output_ids"]
    assert done.logprobs.tolist() == np.float32(seen["logprobs"]).tolist()
    assert [{"version": str(s.version), "start": s.start, "end": s.end} for s in done.version_spans] == [
        s | {"version": "0" if s["version"] == "default" else s["version"]} for s in seen["weight_versions"]
    ]
    assert seen["rid"] == turn.turn_id


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"incremental": True}, {"interval": 3}, {"incremental": True, "interval": 4}]
)
def test_the_log_holds_what_the_server_said(
    proxied: Make, ids_of: Callable[[str], list[int]], options: Any, stream: bool
) -> None:
    """Ids, logprobs and versions, however they are streamed, over three turns of every endpoint."""
    text = "Hé🎉, one two three"
    proxy, app = proxied(ids_of(text), weight_version="7", **options)
    for kind in KINDS:
        body = asked(kind, stream=stream)
        reply = proxy.ask(f"/t/{kind}{PATHS[kind]}", body)
        whole = streamed.together(kind, reply.data) if stream else reply.json
        assert streamed.text_in(kind, whole) == text
    for kind, seen in zip(KINDS, app.seen, strict=True):
        trajectory = proxy.trajectories()[kind]
        (turn,) = trajectory.turns.values()
        _check(trajectory, turn, seen)
        assert turn.completed.finish_reason == "stop"
        assert turn.completed.policy_version == 7
        assert seen["stream"] == stream
        timings = turn.completed.timings
        assert ("first_token_us" in timings) is stream
        assert timings.get("first_token_us", 0) <= timings["engine_us"]
        assert turn.delivered == "sent"
    health = proxy.ask("/healthz", method="GET").json
    assert (health["engine"], health["policy_version"]) == ("sglang", 7)


def test_a_conversation_keeps_its_ids(proxied: Make, ids_of: Callable[[str], list[int]]) -> None:
    """The second prompt is the first one's ids, what was sampled, and new ones; no text in between."""
    odd = [5, 6, *ids_of("odd ids")]
    proxy, app = proxied(odd, ids_of("bye"))
    first = proxy.ask(f"/t/t{CHAT}", asked("chat"))
    message = first.json["choices"][0]["message"]
    more = [*asked("chat")["messages"], message, {"role": "user", "content": "go on"}]
    proxy.ask(f"/t/t{CHAT}", {"messages": more})
    before, after = app.seen
    assert after["input_ids"][: len(before["input_ids"]) + len(odd)] == [*before["input_ids"], *odd]
    trajectory = proxy.trajectories()["t"]
    for turn, seen in zip(trajectory.turns.values(), app.seen, strict=True):
        _check(trajectory, turn, seen)
    (sample,) = all_samples([trajectory])
    assert sample.tokens[sample.loss_mask].tolist() == [*odd, *ids_of("bye")]
    assert sample.versions[sample.loss_mask].tolist() == [0] * (len(odd) + len(ids_of("bye")))


def test_what_the_server_is_asked(proxied: Make, ids_of: Callable[[str], list[int]]) -> None:
    """SGLang's names, also of what is as by default, ids untouched by stop strings."""
    proxy, app = proxied(ids_of("a"))
    fields = {
        **{
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 4,
            "seed": 2**40 + 3,
            "max_tokens": 30,
            "min_tokens": 1,
        },
        **{
            "stop": ["END", "x"],
            "logit_bias": {"5": -1.0},
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
        },
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"b": 1, "a": 2}}},
    }
    proxy.ask(f"/t/t{CHAT}", asked("chat", **fields))
    (seen,) = app.seen
    params = seen["sampling_params"]
    assert params == {
        **{"max_new_tokens": 30, "min_new_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 4},
        **{"sampling_seed": 3, "stop": ["END", "x"], "logit_bias": {"5": -1.0}, "repetition_penalty": 1.2},
        **{"presence_penalty": 0.5, "no_stop_trim": True, "skip_special_tokens": False},
        **{"spaces_between_special_tokens": False, "json_schema": '{"b":1,"a":2}'},
        **{"min_p": 0.0, "frequency_penalty": 0.0},
    }
    assert (seen["return_logprob"], seen["stream"]) == (True, True)
    assert "image_data" not in seen
    (turn,) = _turns(proxy)
    assert turn.requested.honoured == {"seed": False}  # it heeds one only where all of it is deterministic
    assert turn.completed.logprob_semantics["altered"] == [
        *("constraint", "logit_bias", "min_new_tokens", "presence_penalty", "repetition_penalty")
    ]
    assert turn.completed.logprob_semantics["temperature"] == 0.5
    assert sampling_params(Sampling(9, 1.0, 1)) == {
        **{"max_new_tokens": 9, "temperature": 1.0, "sampling_seed": 1, "no_stop_trim": True},
        **{"skip_special_tokens": False, "spaces_between_special_tokens": False},
        **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_new_tokens": 0},
        **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
    }


def test_images_are_passed_on(
    in_process: Callable[..., InProcess],
    chat: Callable[[str], ChatTokenizer],
    ids_of: Callable[[str], list[int]],
) -> None:
    """As data URLs, beside the ids."""
    url = "data:image/png;base64,AAAA"
    part = {"type": "image_url", "image_url": {"url": url}}
    app = ScriptedSGLang(in_turn([ids_of("a square")]), Options(log=9, images=True))
    with serving(app) as address:
        proxy = in_process(SglangEngine(address, ToldWeights(), takes_images=True), chat("sees"))
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]}
        assert proxy.ask(f"/t/t{CHAT}", body).status == 200
    assert app.seen[0]["image_data"] == [url]


def test_the_server_stops_at_stop_strings(
    proxied: Make, ids_of: Callable[[str], list[int]], text_model: Callable[[str], Path]
) -> None:
    """The server stops at them; the ids keep the token that completed one, and the reply ends before it."""
    proxy, app = proxied(ids_of("one STOP two"), tokenizer=text_model("chatml") / "tokenizer.json")
    for stream in (False, True):
        reply = proxy.ask(f"/t/{stream}{CHAT}", asked("chat", stop="STOP", stream=stream))
        whole = streamed.chat(reply.data) if stream else reply.json
        assert streamed.text_in("chat", whole) == "one "
        assert whole["choices"][0]["finish_reason"] == "stop"
    for name, seen in zip(("False", "True"), app.seen, strict=True):
        trajectory = proxy.trajectories()[name]
        (turn,) = trajectory.turns.values()
        _check(trajectory, turn, seen)
        assert seen["finish_reason"] == {"type": "stop", "matched": "STOP"}
        assert "stop_string" in turn.completed.flags


def test_a_reply_of_full_length(proxied: Make, ids_of: Callable[[str], list[int]]) -> None:
    """Cut off at max_tokens: length, and no end-of-turn token."""
    proxy, app = proxied(ids_of("one two three four"))
    reply = proxy.ask(f"/t/t{CHAT}", asked("chat", max_tokens=3))
    assert reply.json["choices"][0]["finish_reason"] == "length"
    (turn,) = _turns(proxy)
    assert len(turn.completed.completion_ids) == 3
    _check(proxy.trajectories()["t"], turn, app.seen[0])


# Versions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_weights_that_change_in_the_middle(
    proxied: Make, ids_of: Callable[[str], list[int]], stream: bool
) -> None:
    """Each token has the version that made it, and the turn the last one."""
    ids = ids_of("one two three four five")
    answer = Answer(ids, versions=((3, "6"), (5, "8")))
    proxy, app = proxied(answer, weight_version="5")
    reply = proxy.ask(f"/t/t{CHAT}", asked("chat", stream=stream))
    assert reply.status == 200
    (turn,) = _turns(proxy)
    done = turn.completed
    spans = [(s.policy, s.version, s.start, s.end) for s in done.version_spans]
    assert spans == [("actor", 5, 0, 3), ("actor", 6, 3, 5), ("actor", 8, 5, len(ids))]
    assert done.policy_version == 8
    _check(proxy.trajectories()["t"], turn, app.seen[0])
    (sample,) = all_samples([proxy.trajectories()["t"]])
    assert sample.versions[sample.loss_mask].tolist() == [5] * 3 + [6] * 2 + [8] * (len(ids) - 5)
    assert proxy.engine.policy_version() == 8
    if not stream:
        assert reply.headers["x-rollbook-policy-version"] == "8"


NAMED = {"0": 0, "12": 12, "9" * 18: 10**18 - 1, "ours/actor/7/mark": 7} | dict.fromkeys(
    ["v1", "step-3", "", "default", "１２", "-1", "9" * 19, "1.0", "ours/actor/7", "ours/actor/7/", "a/b/c/7"]
)


def test_names_say_whose_weights_they_are() -> None:
    """Run, policy and version, and a mark that no second name has."""
    first, other = (weight_name("ours", "actor", 7) for _ in range(2))
    assert first != other
    parsed = read_name(first)
    assert parsed == NamedWeights("ours", "actor", 7, first[-MARK_LENGTH:])
    assert [version_in(name) for name in NAMED] == list(NAMED.values())


def test_only_bound_names_of_weights_give_versions(proxied: Make, ids_of: Callable[[str], list[int]]) -> None:
    """A name that is bound to a version is that version's; any other says nothing, and no span has it."""
    proxy, app = proxied(ids_of("a"))
    for number, (name, version) in enumerate((NAMED | {STARTED_WITH: 0}).items()):
        app.weight_version = name
        assert proxy.ask(f"/t/{number}{CHAT}", asked("chat")).status == 200
        (turn,) = _turns(proxy, str(number))
        assert turn.completed.policy_version == version
        size = len(turn.completed.completion_ids)
        wanted = () if version is None else (VersionSpan("actor", version, 0, size),)
        assert turn.completed.version_spans == wanted
        assert proxy.engine.policy_version() == version


# What goes wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["error", "drop", "refuse"])
def test_a_server_that_fails_at_once(proxied: Make, ids_of: Callable[[str], list[int]], failure: Any) -> None:
    """500 or 400: 502 in the API's form, and a failed turn that says why. A broken connection: once more."""
    proxy, _ = proxied(Answer(ids_of("one two"), failure=Failure(0, failure)))
    for kind, stream in itertools.product(KINDS, (False, True)):
        name = f"{kind}-{stream}"
        reply = proxy.ask(f"/t/{name}{PATHS[kind]}", asked(kind, stream=stream))
        assert reply.status == 502, name
        assert reply.json["error"]["code"] == "engine_failed"
        turns = _turns(proxy, name)
        assert len(turns) == (ATTEMPTS if failure == "drop" else 1)
        assert all(turn.completed is None for turn in turns)
        why = "EngineLostError" if failure == "drop" else "the script says so"
        assert all(why in turn.failed.error for turn in turns)


@pytest.mark.parametrize("failure", ["error", "drop"])
def test_a_server_that_fails_on_the_way(
    proxied: Make, ids_of: Callable[[str], list[int]], failure: Any
) -> None:
    """The client has some text and is told of an error; the turn has failed; nothing of it is trained."""
    proxy, _ = proxied(Answer(ids_of("one two three"), token_s=0.02, failure=Failure(4, failure)))
    for kind in KINDS:
        reply = proxy.ask(f"/t/{kind}{PATHS[kind]}", asked(kind, stream=True))
        assert reply.status == 200
        text = streamed.text_of(kind, reply.data)
        assert text
        assert "one two three".startswith(text)
        assert not any(end in reply.data for end in streamed.TERMINATORS[kind])
        _, error = streamed.events(reply.data)[-1]
        assert (error if kind == "responses" else error["error"])["code"] == "engine_failed"
        (turn,) = _turns(proxy, kind)
        assert (turn.completed, turn.delivered) == (None, None)
        assert turn.failed is not None
        assert all_samples([proxy.trajectories()[kind]]) == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_that_ends_before_an_answer(
    proxied: Make, ids_of: Callable[[str], list[int]], stream: bool
) -> None:
    """The request is asked once more, by another id, on a connection of its own; nobody is put out for it."""
    proxy, app = proxied(Answer(ids_of("x"), failure=Failure(0, "drop")), ids_of("fine"))
    reply = proxy.ask(f"/t/t{CHAT}", asked("chat", stream=stream))
    assert reply.status == 200
    (turn,) = _turns(proxy)
    assert (turn.failed, turn.completed.reply["content"]) == (None, "fine")
    first, again = [seen["rid"] for seen in app.seen]
    assert (first, again) == (turn.turn_id, f"again-{turn.turn_id}")
    assert not again.startswith(first), "else the end of the first would end the second"


def test_after_a_failure_all_goes_on(proxied: Make, ids_of: Callable[[str], list[int]]) -> None:
    """A server that comes back is asked again, on new connections: only the log notices."""
    drop = Answer(ids_of("x"), failure=Failure(0, "drop"))
    proxy, _ = proxied(drop, drop, ids_of("fine"))
    assert proxy.ask(f"/t/t{CHAT}", asked("chat")).json["choices"][0]["message"]["content"] == "fine"
    lost, answered = _turns(proxy)
    assert (lost.completed, answered.failed) == (None, None)
    assert answered.requested.wire["instead_of"] == lost.turn_id


class Raw:
    """A server that answers every POST with given bytes, in given pieces, and hears what was sent."""

    def __init__(self) -> None:
        self.reply = b""
        self.sizes: list[int] = [1 << 20]
        self.heads: list[bytes] = []
        self.bodies: list[Any] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head)
            length = [h for h in head.lower().split(b"\r\n") if h.startswith(b"content-length")]
            body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
            if b"_info" in head:
                info = orjson.dumps({"weight_version": "4", "version": "0.5.23"})
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(info) + info)
            else:
                self.bodies.append(orjson.loads(body))
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
                )
                rest, sizes = self.reply, itertools.cycle(self.sizes)
                while rest:
                    size = next(sizes)
                    writer.write(rest[:size])
                    await writer.drain()
                    await asyncio.sleep(0)
                    rest = rest[size:]
            await writer.drain()
        writer.close()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """A loop for the raw server and the engine that asks it."""
    with asyncio.Runner() as loop:
        yield loop


@pytest.fixture(scope="module")
def raw(runner: asyncio.Runner) -> Iterator[tuple[Raw, SglangEngine]]:
    """A raw server and an engine connected to it."""
    answers = Raw()
    server = runner.run(asyncio.start_server(answers, "127.0.0.1", 0))
    port = server.sockets[0].getsockname()[1]
    engine = SglangEngine(f"http://127.0.0.1:{port}/", ToldWeights(), key="engine-key")

    async def activated(*_: Any) -> None:
        return

    runner.run(engine.start(activated))
    yield answers, engine
    runner.run(engine.close())
    server.close()


def _chunk(ids: list[int], shown: int, end: bool, incremental: bool, text: str = "é🎉") -> Any:
    first = shown if incremental else 0
    triples = [(-0.5 - i / 8, i, text) for i in ids[first:]]
    meta = {"completion_tokens": len(ids), "output_token_logprobs": triples, "finish_reason": None}
    if end:
        meta |= {
            "finish_reason": {"type": "stop"},
            "weight_versions": [{"version": "4", "start": 0, "end": len(ids)}],
        }
    return {"output_ids": ids[first:], "text": text, "meta_info": meta}


PROMPT = Prompt(token_ids([1, 2, 3]), [], None, "rid")
SAMPLING = Sampling(99, 1.0, 7)


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    counts=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    incremental=st.booleans(),
    feed=st.sampled_from(["\n", "\r\n"]),
    noise=st.lists(st.sampled_from([": ping", "event: message", "id: 7", "retry: 5", ""]), max_size=4),
    done=st.booleans(),
)
@settings(max_examples=60)
def test_packets_may_be_cut_anywhere(
    runner: Any,
    raw: Any,
    sizes: Any,
    counts: Any,
    incremental: bool,
    feed: str,
    noise: Any,
    done: bool,
) -> None:
    """In events, lines and characters, with comments, other fields, CRLF or LF: the same ids are heard."""
    answers, engine = raw
    ids: list[int] = []
    text = "".join(f"{line}{feed}" for line in noise)
    for place, count in enumerate([*counts, 1]):
        shown = len(ids)
        ids += range(10 * place, 10 * place + count)
        chunk = _chunk(ids, shown, place == len(counts), incremental)
        text += f"data: {orjson.dumps(chunk).decode()}{feed}{feed}"
        text += "".join(f"{line}{feed}" for line in noise)
    text += f"data: [DONE]{feed}{feed}" if done else ""
    answers.reply, answers.sizes = text.encode(), sizes
    heard: list[Any] = []
    generation = runner.run(
        engine.generate(PROMPT, SAMPLING, lambda i, p: heard.append((list(i), list(p or ()))))
    )
    assert generation.completion_ids.tolist() == ids
    assert [i for some, _ in heard for i in some] == ids
    assert [p for _, some in heard for p in some] == [-0.5 - i / 8 for i in ids]
    assert generation.logprobs.tolist() == [-0.5 - i / 8 for i in ids]
    assert generation.version_spans == (VersionSpan("actor", 4, 0, len(ids)),)
    assert answers.bodies[-1]["rid"] == "rid"


def test_the_engines_key_is_sent(raw: tuple[Raw, SglangEngine]) -> None:
    """As a bearer token, with every request."""
    answers, _ = raw
    assert answers.heads
    assert all(b"authorization: bearer engine-key" in head.lower() for head in answers.heads)


def _whole(**changes: Any) -> Any:
    answer = _chunk([5, 6], 0, True, False)
    answer["meta_info"] |= {k: v for k, v in changes.items() if k not in answer}
    return answer | {k: v for k, v in changes.items() if k in answer}


NOT_ANSWERS: dict[str, Any] = {
    "no JSON": b"oops",
    "a list": [1],
    "a number": 5,
    "nothing": None,
    "no meta": {"output_ids": [5]},
    "meta no object": {"output_ids": [5], "meta_info": 7},
    "no ids": {"meta_info": _whole()["meta_info"]},
    "ids no list": _whole(output_ids=5),
    "other ids": _whole(output_ids=[5, 7]),
    "no logprobs": _whole(output_token_logprobs=None),
    "odd logprobs": _whole(output_token_logprobs=[5, 6]),
    "odd versions": _whole(weight_versions=[{"start": 0, "end": 2}]),
    "versions no list": _whole(weight_versions=7),
    "places no numbers": _whole(weight_versions=[{"version": "4", "start": "a", "end": "b"}]),
    "count no number": _whole(completion_tokens="many"),
    "no reason": _whole(finish_reason={}),
    "no tokens": _whole(output_ids=[], output_token_logprobs=[], completion_tokens=0),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("what", NOT_ANSWERS)
def test_an_answer_that_is_none_is_the_engines_fault(
    runner: asyncio.Runner, raw: tuple[Raw, SglangEngine], what: str, stream: bool
) -> None:
    """Whatever comes instead: an EngineError, which clients see as a 502, and never half a turn."""
    answers, engine = raw
    content = NOT_ANSWERS[what]
    data = content if isinstance(content, bytes) else orjson.dumps(content)
    answers.reply, answers.sizes = (b"data: " + data + b"\n\n" if stream else data), [1 << 20]
    asked_ = (
        engine.generate(PROMPT, SAMPLING, lambda i, p: None) if stream else engine.generate(PROMPT, SAMPLING)
    )
    if what == "count no number" and not stream:
        assert runner.run(asked_).completion_ids.tolist() == [5, 6]  # nobody reads it there
        return
    with pytest.raises(EngineError):
        runner.run(asked_)


def test_a_logprob_that_is_null(runner: Any, raw: Any) -> None:
    """JSON has no infinity: what the server could not write is unknown, whole and streamed alike."""
    answers, engine = raw
    answer = _whole(output_token_logprobs=[[None, 5, None], [-1.0, 6, None]])
    heard: list[Any] = []
    for stream in (False, True):
        data = orjson.dumps(answer)
        answers.reply, answers.sizes = (b"data: " + data + b"\n\n" if stream else data), [1 << 20]
        extra = (lambda i, p: heard.append(p),) if stream else ()
        generation = runner.run(engine.generate(PROMPT, SAMPLING, *extra))
        assert np.isnan(generation.logprobs).tolist() == [True, False]
    [[first, second]] = heard
    assert np.isnan(first)
    assert second == -1.0


def test_a_stream_without_an_end_is_a_failure(runner: asyncio.Runner, raw: tuple[Raw, SglangEngine]) -> None:
    """Closed in good order, and yet not finished."""
    answers, engine = raw
    answers.reply = b"data: " + orjson.dumps(_chunk([5], 0, False, False)) + b"\n\n"
    with pytest.raises(EngineError, match="ended before its last chunk"):
        runner.run(engine.generate(PROMPT, SAMPLING, lambda i, p: None))


def test_a_server_that_is_not_there(runner: asyncio.Runner) -> None:
    """Nothing answers, or something that is no SGLang: told at the start, with the option to correct."""

    async def activated(*_: Any) -> None:
        return

    why = r"at http://127\.0\.0\.1:9 \(Cannot connect to host [^=]*\): start one, or correct --engine-url"
    with pytest.raises(EngineError, match=why):
        runner.run(SglangEngine("http://127.0.0.1:9", ToldWeights()).start(activated))

    async def other(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    with serving(other) as url, pytest.raises(EngineError, match="is it an SGLang server"):
        runner.run(SglangEngine(url, ToldWeights()).start(activated))


def test_the_answer_of_an_older_server() -> None:
    """Without spans, the one version it names is of all tokens."""
    answer = _whole(weight_version="3")
    del answer["meta_info"]["weight_versions"]
    generation = join_parts(PROMPT, SAMPLING, [part(answer, PROMPT, "critic", None, version_in)], {})
    assert generation.version_spans == (VersionSpan("critic", 3, 0, 2),)


# Aborts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("incremental", [False, True])
def test_who_leaves_ends_the_servers_request(
    proxied: Make, ids_of: Callable[[str], list[int]], stream: bool, incremental: bool
) -> None:
    """/abort_request with its id; its last chunk, which alone has the versions, is awaited and recorded."""
    ids = ids_of("word " * 60)
    proxy, app = proxied(Answer(ids, first_s=0.02, token_s=0.05), weight_version="9", incremental=incremental)

    async def scenario() -> None:
        reply = proxy.exchange(f"/t/t{CHAT}", asked("chat", stream=stream))
        await reply.until(lambda: app.running and next(iter(app.running.values())).made >= 3)
        reply.leave()
        await reply.end()
        await proxy.turn_runner.drained()

    proxy.run(scenario())
    (seen,) = app.seen
    assert seen["finish_reason"]["type"] == "abort"
    (turn,) = _turns(proxy)
    assert 3 <= len(turn.completed.completion_ids) < len(ids)
    _check(proxy.trajectories()["t"], turn, seen)
    assert (turn.completed.finish_reason, turn.delivered) == ("abort", None)
    assert turn.completed.policy_version == 9
    assert sum(int(s.loss_mask.sum()) for s in all_samples([proxy.trajectories()["t"]])) == 0


class Late(ScriptedSGLang):
    """A server to which requests take a while."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/generate":
            await asyncio.sleep(0.1)
        await super().__call__(scope, receive, send)


def test_an_abort_that_comes_before_the_request(
    in_process: Any,
    chat: Any,
    ids_of: Callable[[str], list[int]],
) -> None:
    """The server knows no such request yet and forgets the abort: it is told again until it ends."""
    ids = ids_of("word " * 60)
    app = Late(in_turn([Answer(ids, first_s=0.05, token_s=0.05)]), Options(log=9))
    with serving(app) as url:
        proxy = in_process(SglangEngine(url, ToldWeights()), chat())

        async def scenario() -> None:
            reply = proxy.exchange(f"/t/t{CHAT}", asked("chat"))
            await reply.until(lambda: proxy.engine._asked)
            reply.leave()
            await reply.end()
            await proxy.turn_runner.drained()

        proxy.run(scenario())
    (seen,) = app.seen
    assert seen["finish_reason"]["type"] == "abort"
    (turn,) = _turns(proxy)
    assert len(turn.completed.completion_ids) < len(ids)
    _check(proxy.trajectories()["t"], turn, seen)


def test_an_abort_of_nothing_is_nothing(
    runner: asyncio.Runner, proxied: Make, ids_of: Callable[[str], list[int]]
) -> None:
    """A request that has ended, or that never was; a server that is away."""
    proxy, _ = proxied(ids_of("a"))
    proxy.run(proxy.engine.abort("never"))
    assert proxy.ask(f"/t/t{CHAT}", asked("chat")).status == 200
    proxy.run(proxy.engine.abort(_turns(proxy)[0].turn_id))
    assert proxy.ask(f"/t/t{CHAT}", asked("chat")).status == 200


def test_rollbook_serve_answers_from_a_server(
    serve: Callable[..., Served], text_model: Callable[[str], Path], ids_of: Callable[[str], list[int]]
) -> None:
    """A process of its own between a client and the server: an answer, and a client that hangs up."""
    ids = ids_of("one two three four five six seven eight")
    app = ScriptedSGLang(
        in_turn([ids, Answer(ids, first_s=0.05, token_s=0.1)]), Options(log=9, weight_version="2")
    )
    with serving(app) as url:
        words = ("--model", str(text_model("chatml")), "--engine", "sglang", "--engine-url", url)
        served = serve(*words)
        with httpx.Client(base_url=served.url, timeout=30) as http:
            (engine,) = http.get("/healthz").json()["engines"]
            assert (engine["policy_version"], engine["state"]) == (None, "usable")
            assert "names no tensor, so nothing can be compared" in engine["unverified"]
            body = asked("chat", stream=True, logprobs=True)
            whole = streamed.chat(http.post(f"/t/t{CHAT}", json=body).content)
            assert [e["token_id"] for e in whole["choices"][0]["logprobs"]["content"]] == ids
            logprobs = [e["logprob"] for e in whole["choices"][0]["logprobs"]["content"]]
            assert logprobs == pytest.approx(logprobs_of(ids))
            with http.stream("POST", f"/t/t{CHAT}", json=body) as reply:
                parts = reply.iter_bytes()
                while "one two" not in streamed.text_of("chat", next(parts)) + "one two":
                    pass
            deadline = time.monotonic() + 30
            while len(app.seen) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert http.post("/v1/trajectories/t/finish", json={"reward": 1}).json()["turns"] == 2
        served.stop()
    (trajectory,) = fold(store.open(served.path).events()).values()
    first, second = trajectory.turns.values()
    for turn, seen in zip((first, second), app.seen, strict=True):
        assert turn.completed.version_spans == ()  # whatever it calls its weights: nobody has compared them
        _check(trajectory, turn, seen | {"weight_versions": []})
    assert "is never trained" in served.log.read_text()
    assert (first.delivered, second.delivered) == ("sent", None)
    assert second.completed.finish_reason == "abort"
    assert 0 < len(second.completed.completion_ids) < len(ids)
    assert "Traceback" not in served.log.read_text()
    assert "leaked" not in served.log.read_text()  # DuckDB's module counts what is left of it at the end
