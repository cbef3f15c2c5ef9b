"""Fixtures of the cassettes' tests: stores that real proxies recorded, and servers of what they hold."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from tests.fakes.agents import program as agent_program
from tests.fakes.models.text import TEMPLATES, write_text_model
from tests.fakes.proxies.settings import proxy_parts
from tests.fakes.upstreams.server import Answer, HttpUpstream, chat_reply, sse, streamed, whole

from rollbook import store as rb
from rollbook.cassettes.app import CassetteOptions, build_cassette_app
from rollbook.cassettes.cassette import Cassette
from rollbook.cassettes.tape import read_tapes
from rollbook.engines.address import EngineAddress
from rollbook.engines.scripted import ScriptedEngine
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.replies.choose import FAMILIES
from rollbook.ingest.replies.written import ReplyWriter
from rollbook.ingest.serve.proxy import build_app
from rollbook.ingest.tokens.bridge import Bridges
from rollbook.ingest.tokens.chat_template import load_chat_tokenizer
from rollbook.ingest.upstream.proxy import Upstream, build_upstream_app
from rollbook.store import Store
from rollbook.testing.asgi import serving


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory without weights."""
    return write_text_model(tmp_path_factory.mktemp("model"), TEMPLATES["chatml"])


@contextlib.contextmanager
def _running(app: Any) -> Iterator[str]:
    """The address of an application that is served by a thread, with its lifespan."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(20)


@dataclass(frozen=True, slots=True)
class Recording:
    """A store, and what each agent was told when it was recorded."""

    store: Store
    told: dict[str, list[Any]]

    def ids(self, *names: str) -> list[str]:
        """The ids of trajectories by name; of all without names."""
        by_name = {t.opened.name: key for key, t in self.store.trajectories().items()}
        return [by_name[name] for name in names or by_name]

    def cassette(self, *names: str, ignored: Any = ()) -> Cassette:
        """The cassette of trajectories by name; of all without names."""
        return Cassette(read_tapes(self.store, self.store.head(), self.ids(*names)), ignored)


def _answers() -> Callable[[Any, Any], Any]:
    """A script that says what its last message asks for, and how often it was asked."""
    counts: dict[str, int] = {}

    def answer(messages: Any, tools: Any) -> Any:
        text = messages[-1].get("content") or ""
        if text == "boom":
            raise RuntimeError("boom")
        if text.startswith("call"):
            function = {"name": "calc", "arguments": {"a": 1, "b": "é"}}
            call = {"id": "x", "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call] * (2 if "two" in text else 1)}
        counts[text] = counts.get(text, 0) + 1
        return f"{text} for the {counts[text]}. time"

    return answer


@pytest.fixture(scope="session")
def by_engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Agents recorded by the proxy, over a scripted engine."""
    log = rb.open(tmp_path_factory.mktemp("by-engine") / "store", create=True)
    tokenizer = load_chat_tokenizer(model)
    recorder = Recorder(log, "serve", "default")
    bridges = Bridges.tested(tokenizer, None)
    runner = TurnRunner(
        recorder,
        ScriptedEngine(ReplyWriter(tokenizer, FAMILIES["hermes"]), _answers()),
        bridges,
        FAMILIES["hermes"],
    )
    with _running(build_app(runner, *proxy_parts())) as url:
        replies = {name: getattr(agent_program, name)(url) for name in ("chat", "responses", "messages")}
    return Recording(log, replies)


def _upstreams_answers() -> list[Answer]:
    """What an upstream says to the agents `chat`, `responses`, `messages`, `completions`, in this order."""
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "calc", "arguments": '{"a": 1}'}}
        for i in range(2)
    ]
    called = {"index": 0, "finish_reason": "tool_calls", "logprobs": None, "matched_stop": 7}
    called |= {"message": {"role": "assistant", "content": None, "tool_calls": calls}}
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
    head = {"id": "chatcmpl-up2", "object": "chat.completion.chunk", "created": 1700000001, "model": "big"}
    chunks = [
        head | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "It is "}}]},
        head | {"choices": [{"index": 0, "delta": {"content": "95"}, "finish_reason": "stop"}]},
        head | {"choices": [], "usage": usage},
    ]
    several = chat_reply("one", id="chatcmpl-up5")
    several["choices"].append(
        several["choices"][0] | {"index": 1, "message": {"role": "assistant", "content": "2"}}
    )
    failed = {"error": {"message": "slow down", "type": "rate_limit_error", "code": "busy", "param": None}}
    return [
        whole(chat_reply(choices=[called], system_fingerprint="fp_1")),
        streamed(sse(*chunks)),
        whole(chat_reply("again", id="chatcmpl-up3")),
        whole(chat_reply("and again", id="chatcmpl-up4")),
        whole(several),
        whole(failed, "429 Too Many Requests"),
        *_response_answers(),
        *_message_answers(),
        whole(
            {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "big", "usage": usage}
            | {"choices": [{"index": 0, "text": " upon", "finish_reason": "length", "logprobs": None}]}
        ),
        streamed(
            sse(
                {"id": "cmpl-2", "object": "text_completion", "created": 6, "model": "big"}
                | {"choices": [{"index": 0, "text": " two", "finish_reason": "stop"}]}
            )
        ),
    ]


def _response(response_id: str, output: list[Any], **more: Any) -> Any:
    return {
        "id": response_id,
        "object": "response",
        "created_at": 1700000002,
        "status": "completed",
        "model": "big",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 5,
            "input_tokens_details": {"cached_tokens": 3},
            "output_tokens": 4,
            "output_tokens_details": {"reasoning_tokens": 2},
            "total_tokens": 9,
        },
    } | more


def _said(item_id: str, text: str) -> Any:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": item_id, "type": "message", "role": "assistant", "status": "completed", "content": [part]}


def _response_answers() -> list[Answer]:
    reasoning = {"id": "rs_up", "type": "reasoning", "summary": [], "encrypted_content": "sealed"}
    call = {"id": "fc_up", "type": "function_call", "call_id": "call_r", "name": "calc", "arguments": "{}"}
    call["status"] = "completed"
    last = _response("resp_up3", [_said("msg_up3", "more it is")])
    begun = last | {"output": [], "status": "in_progress", "usage": None}
    item = last["output"][0]
    place = {"output_index": 0, "item_id": "msg_up3", "content_index": 0}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    events = [
        {"type": "response.created", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": item | {"content": []}},
        {"type": "response.content_part.added", "part": part} | place,
        {"type": "response.output_text.delta", "delta": "more it is", "logprobs": []} | place,
        {"type": "response.output_text.done", "text": "more it is", "logprobs": []} | place,
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": last},
    ]
    events = [event | {"sequence_number": number} for number, event in enumerate(events)]
    return [
        whole(_response("resp_up1", [reasoning, call], instructions="be brief")),
        whole(_response("resp_up2", [_said("msg_up2", "seven")])),
        streamed(sse(*events, named=True)),
    ]


def _message_answers() -> list[Answer]:
    head = {"id": "msg_01up", "type": "message", "role": "assistant", "model": "big", "stop_sequence": None}
    thought = {"type": "thinking", "thinking": "a tool", "signature": "signed-1"}
    used = {"type": "tool_use", "id": "toolu_1", "name": "calc", "input": {"a": 1}}
    usage = {"input_tokens": 8, "output_tokens": 3, "cache_read_input_tokens": 4}
    first = head | {"content": [thought, used], "stop_reason": "tool_use", "usage": usage}
    begun = head | {
        "id": "msg_02up",
        "content": [],
        "stop_reason": None,
        "usage": usage | {"output_tokens": 1},
    }
    events = [
        {"type": "message_start", "message": begun},
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": thought | {"thinking": "", "signature": ""},
        },
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "seven"}},
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "signature_delta", "signature": "signed-2"},
        },
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "It is 7."}},
        {"type": "content_block_stop", "index": 1},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": 12},
        },
        {"type": "message_stop"},
    ]
    return [whole(first), streamed(sse(*events, named=True))]


@pytest.fixture(scope="session")
def by_upstream(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Agents recorded in front of an upstream, whose replies have ids, usage and items of their own."""
    log = rb.open(tmp_path_factory.mktemp("by-upstream") / "store", create=True)
    upstream = HttpUpstream(_upstreams_answers())
    upstream.start()
    app = build_upstream_app(
        Recorder(log, "serve", "default"), Upstream(EngineAddress.of(upstream.url)), *proxy_parts()
    )
    names = ("chat", "responses", "messages", "completions")
    with _running(app) as url:
        replies = {name: getattr(agent_program, name)(url) for name in names}
    upstream.close()
    return Recording(log, replies)


@pytest.fixture
def play() -> Iterator[Callable[..., str]]:
    """Serves cassettes until the test ends; gives the address."""
    with contextlib.ExitStack() as served:

        def start(cassette: Cassette, **options: Any) -> str:
            app = build_cassette_app(cassette, CassetteOptions(**options))
            return served.enter_context(serving(app))

        yield start
