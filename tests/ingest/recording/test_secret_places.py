"""Forty secrets in places outside a conversation: none is on disk. Inside: none where it was asked for."""

from __future__ import annotations

import base64
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from prometheus_client import CollectorRegistry
from tests.fakes.clients.streamed import PATHS, asked
from tests.fakes.proxies.in_process import InProcess
from tests.fakes.stories.records import turn_completed, turn_requested

from rollbook import store
from rollbook.cli.terminal import LogFormatter
from rollbook.ingest.recording.redact import Redactor, changes_conversation
from rollbook.ingest.routes.key_watch import KeyWatch
from rollbook.store import Event
from rollbook.store.errors import EngineError
from rollbook.store.events import token_ids
from rollbook.store.events.event_json import json_bytes
from rollbook.store.redaction import PLACEHOLDER

CHAT = PATHS["chat"]


def planted(number: int) -> str:
    """A secret without a known format: only its place tells it."""
    return f"pl4nted-{number:02d}-s3cret"


def key(number: int) -> str:
    """A secret of a known format."""
    return f"sk-proj-{number:02d}" + "aB3d" * 8


S = [planted(n) for n in range(40)]
OUTSIDE: list[tuple[str, str, dict[str, Any], dict[str, str]]] = [
    ("top", CHAT, {"api_key": S[0], "Authorization": f"Bearer {S[1]}", "access_token": S[2]}, {}),
    ("headers", CHAT, {"extra_headers": {"X-Any": S[3]}, "default_headers": [["cookie", S[4]]]}, {}),
    ("body", CHAT, {"extra_body": {"deep": [{"client_secret": S[5], "password": 12345678}]}}, {}),
    ("metadata", CHAT, {"metadata": {"db_password": S[6], "note": f"https://u:{S[7]}@h/?token={S[8]}"}}, {}),
    ("text", CHAT, {"user": f"password={S[9]}", "metadata": {"json": f'{{"secret": "{S[10]}"}}'}}, {}),
    ("pairs", CHAT, {"metadata": {"env": [{"name": "API_KEY", "value": S[11]}]}}, {}),
    ("format", CHAT, {"metadata": {"x": key(1), key(2): 1}, "user": f"me {key(3)}", "model": key(4)}, {}),
    (
        "mcp", PATHS["responses"],
        {"tools": [
            {"type": "mcp", "server_label": "a", "server_url": f"https://u:{S[12]}@h/sse?api_key={S[13]}&sig={S[14]}",
             "headers": {"X-Team": S[15], "Authorization": f"Bearer {S[16]}"}, "authorization": S[17]},
        ]}, {},
    ),
    (
        "servers", PATHS["messages"],
        {"mcp_servers": [{"type": "url", "url": f"https://h/?token={S[18]}", "authorization_token": S[19]}]},
        {},
    ),
    ("cookies", PATHS["completions"], {"cookies": {"sid": S[20]}, "session": {"refreshToken": S[21]}}, {}),
    ("labels", CHAT, {}, {"x-rollbook-labels": orjson.dumps({"token": S[22], "u": f"ftp://{S[23]}@h"}).decode()}),
    ("words", CHAT, {}, {"x-rollbook-group": f"api_key={S[24]}", "x-rollbook-task": f"https://{S[25]}@git/x"}),
    ("", CHAT, {}, {"x-session-id": key(6)}),
    ("http", CHAT, {}, {"authorization": f"Bearer {S[26]}", "cookie": f"a={S[27]}", "x-api-key": S[28]}),
    (f"path/label/password/{S[29]}", CHAT, {}, {}),
]  # fmt: skip


def everything(folder: Path) -> bytes:
    """Every byte of a store's files, and every event read from it."""
    files = [p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()]
    return b"\0".join([*files, *(json_bytes(event) for event in store.open(folder).events())])


def test_what_is_outside_a_conversation_is_never_recorded(played: Callable[..., InProcess]) -> None:
    """In bodies, tools' connections, headers, labels, openings, rewards, the proxy's settings: by default."""
    proxy = played()
    for name, path, body, headers in OUTSIDE:
        kind = next(kind for kind, route in PATHS.items() if route == path)
        reply = proxy.ask(
            f"{'/t/' if name else ''}{name}{path}?key={S[30]}", asked(kind, "hello") | body, headers=headers
        )
        assert reply.status == 200, (name, reply.data)
    opening = {"id": "o", "task": f"secret: {S[31]}", "labels": {"headers": {"a": S[32]}}}
    assert proxy.ask("/v1/trajectories", opening).status == 201
    label = {"name": "api_key", "value": {"any": S[33]}, "source": f"https://{S[34]}@h"}
    assert proxy.ask("/v1/trajectories/o/labels", label).status == 201
    assert proxy.ask("/v1/trajectories/o/rewards", {"reward": 1, "source": key(5)}).status == 201
    trajectories = proxy.trajectories()
    assert trajectories["mcp"].opened.name == "mcp"
    data = everything(proxy.store.path)
    assert [secret for secret in S if secret.encode() in data] == []
    assert b"12345678" not in data
    assert not any(key(n).encode() in data for n in range(1, 7))
    assert len(PLACEHOLDER.findall(data.decode(errors="replace"))) > 40
    [turn] = trajectories["top"].turns.values()
    request = turn.requested.request
    assert PLACEHOLDER.fullmatch(request["Authorization"].removeprefix("Bearer "))


def test_inside_a_conversation_nothing_is_changed_unless_asked(played: Callable[..., InProcess]) -> None:
    """Messages, tools' schemas, stop strings, template arguments: the model is sent what the client said."""
    proxy = played()
    function = {"name": "login", "description": f"password={S[0]}", "parameters": {
        "type": "object", "properties": {"api_key": {"type": "string", "default": S[1]}}}}  # fmt: skip
    body = {
        "messages": [{"role": "user", "content": f"my api_key={S[2]} and {key(1)} at https://u:{S[3]}@h"}],
        "tools": [{"type": "function", "function": function}],
        "stop": [f"token={S[4]}"],
        "response_format": {"type": "text"},
        "chat_template_kwargs": {"secret": S[5]},
    }
    assert proxy.ask(f"/t/in{CHAT}", body).status == 200
    [turn] = proxy.trajectories()["in"].turns.values()
    assert turn.requested.messages == body["messages"]
    assert turn.requested.request == {k: v for k, v in body.items() if k != "messages"}
    [prompt] = proxy.engine.prompts
    text = proxy.engine.tokenizer.decode(prompt.ids, special=True)
    assert key(1) in text
    assert S[0] in text


def test_known_formats_are_taken_out_of_conversations_where_asked(played: Callable[..., InProcess]) -> None:
    """Before the model and the log see them, in every place of every API; what has no format stays."""
    proxy = played(redact=("known", r"visa \d{4}"))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": f'{{"k": "{key(2)}"}}'}}
    text = {"type": "text", "text": key(7)}
    pem = f"-----BEGIN RSA PRIVATE KEY-----\n{'aB3+' * 20}\n-----END RSA PRIVATE KEY-----"
    bodies = {
        "chat": {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": f"use {key(1)}"}]},
                {"role": "user", "content": "visa 4111"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": f"AWS=AKIAIOSFODNN7EXAMPLE {S[1]}"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "description": key(3)}}],
        },
        "responses": {"instructions": key(4), "input": [{"role": "user", "content": key(5)}]},
        "messages": {"system": key(6), "messages": [{"role": "user", "content": [text]}]},
        "completions": {"prompt": f"{key(8)} {pem}"},
    }  # fmt: skip
    for kind, body in bodies.items():
        reply = proxy.ask(f"/t/{kind}{PATHS[kind]}", asked(kind) | body)
        assert reply.status == 200, reply.data
    proxy.settled()
    data = everything(proxy.store.path)
    rendered = " ".join(proxy.engine.tokenizer.decode(p.ids, special=True) for p in proxy.engine.prompts)
    for secret in (*(key(n) for n in range(1, 9)), "AKIAIOSFODNN7EXAMPLE", "visa 4111", "aB3+aB3+"):
        assert secret.encode() not in data
        assert secret not in rendered
    assert S[1] in rendered
    assert len(PLACEHOLDER.findall(rendered)) >= 9


def test_a_digest_is_the_same_after_a_restart_and_another_elsewhere(
    played: Callable[..., InProcess], tmp_path: Path
) -> None:
    """By the store's own secret."""
    first, other = (played() for _ in range(2))
    digests = []
    for proxy in (first, first, other):
        name = f"t{len(digests)}"
        proxy.ask(f"/t/{name}{CHAT}", asked("chat", "x", api_key=S[0]))
        [turn] = proxy.trajectories()[name].turns.values()
        digests.append(turn.requested.request["api_key"])
    assert digests[0] == digests[1] != digests[2]
    assert first.recorder.redactor.fields({"api_key": S[0]}) == {"api_key": digests[0]}


def test_the_digest_of_a_body_gives_no_weak_secret_away(played: Callable[..., InProcess]) -> None:
    """It is that of the body as it is kept: who knows the rest of a body cannot try passwords against it."""
    from rollbook.ingest.recording.turn_records import Arrival

    proxy = played()
    body = asked("chat", "x", password="1234")
    for _ in range(2):
        assert proxy.ask(f"/t/weak{CHAT}", body, headers={"x-stainless-retry-count": "1"}).status == 200
    [turn] = proxy.trajectories()["weak"].turns.values()  # the second was known for the first one's retry
    assert turn.requested.wire["digest"] != Arrival.of(CHAT, orjson.dumps(body), 0).digest


@pytest.mark.parametrize(("kind", "status"), [(EngineError, 502), (RuntimeError, 500)])
def test_errors_of_ours_go_through_the_same_place(played: Any, kind: type[Exception], status: int) -> None:
    """An engine's error that repeats a secret: not in the log, not in the reply."""

    def answer(*_: Any) -> str:
        raise kind(f"401 Authorization: Bearer {S[0]} at https://u:{S[1]}@h?sig={S[2]} {key(1)}")

    proxy = played(answer)
    reply = proxy.ask(f"/t/bad{CHAT}", asked("chat"))
    assert reply.status == status
    [turn] = proxy.trajectories()["bad"].turns.values()
    assert "401 Authorization: Bearer [secret:" in turn.failed.error
    data = everything(proxy.store.path) + reply.data
    for secret in (*S[:3], key(1)):
        assert secret.encode() not in data


def test_a_line_of_the_log_holds_none_either(capsys: pytest.CaptureFixture[str]) -> None:
    """What nobody foresaw is logged with its traceback; the server's log lines are cleaned."""
    try:
        raise RuntimeError(f"password={S[0]}")
    except RuntimeError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "at https://u:%s@h", (S[1],), sys.exc_info())
    line = LogFormatter().format(record)
    assert line.startswith("at https://[secret:")
    assert "RuntimeError" in line
    assert S[0] not in line
    assert S[1] not in line


# Keys that are seen -------------------------------------------------------------------------------


def _seen(proxy: Any) -> dict[str, float]:
    page = proxy.ask("/metrics", method="GET").data.decode().splitlines()
    lines = [line for line in page if line.startswith("rollbook_keys_seen_total{")]
    return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in lines}


def test_keys_in_conversations_are_counted_and_warned_of_once(
    played: Callable[..., InProcess], caplog: pytest.LogCaptureFixture
) -> None:
    """Only what is new counts, in requests and in replies, and nothing is said of the key itself."""
    proxy = played(lambda *_: "AKIAIOSFODNN7EXAMPLE")
    messages = [{"role": "user", "content": f"{key(1)} and {key(2)}"}]
    path = f"/t/seen{CHAT}"
    message = proxy.ask(path, {"messages": messages}).json["choices"][0]["message"]
    assert _seen(proxy) == {"openai": 2, "aws": 1}
    proxy.ask(path, {"messages": [*messages, message, {"role": "user", "content": "and?"}]})
    assert _seen(proxy) == {"openai": 2, "aws": 2}
    warned = "\n".join(caplog.messages)
    assert (warned.count("format openai"), warned.count("format aws")) == (1, 1)
    assert key(1) not in warned


def test_a_megabyte_is_looked_through_in_milliseconds(capsys: pytest.CaptureFixture[str]) -> None:
    """So that the proxy's loop may do it; a larger one takes a thread."""
    watch = KeyWatch(CollectorRegistry())
    text = ("the agent asks for a token, and the desk says: risk-free. " * 18_000)[: 2**20]
    none = token_ids([])
    record = turn_completed(
        "t", "u", policy=None, prompt_ids=none, completion_ids=none, reply={"content": text}
    )
    best = 1.0
    for _ in range(5):
        begun = time.perf_counter()
        watch.take([Event(record, "r")])
        best = min(best, time.perf_counter() - begun)
    assert best < 0.5  # 2 ms on an idle core


def test_images_and_connections_are_not_looked_through(capsys: pytest.CaptureFixture[str]) -> None:
    """A key is looked for in texts of the conversation."""
    watch = KeyWatch(CollectorRegistry())
    content = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{key(1)}"}}]
    request = {
        "tools": [{"type": "function", "function": {"description": key(2)}}],
        "metadata": {"x": key(3)},
    }
    for base in (None, "earlier"):
        record = turn_requested(
            "t",
            "u",
            request_id="q",
            root_reason="first_turn",
            base_turn_id=base,
            messages=[{"role": "user", "content": content}],
            request=request,
            context_key="k",
        )
        watch.take([Event(record, "r")])
    assert watch.seen.labels("openai")._value.get() == 1  # the tool's description, once


def test_what_changes_a_conversation() -> None:
    """A tool's connection does not; its definition does."""
    sent = {"messages": [], "tools": [{"type": "mcp", "headers": {"a": S[0]}}], "api_key": S[1]}
    clean = Redactor().body(sent)
    assert clean != sent
    assert not changes_conversation(sent, clean)
    sent = {"tools": [{"type": "function", "function": {"description": key(1)}}]}
    assert not changes_conversation(sent, Redactor().body(sent))
    assert changes_conversation(sent, Redactor(["known"]).body(sent))


@pytest.mark.parametrize("pattern", ["(?i)HUNTER2", r"(h)unte(r)\d", "hunter2|known"])
def test_patterns_keep_their_flags_and_groups(pattern: str) -> None:
    """Each is an expression of its own."""
    redactor = Redactor([pattern, "known", "(x)(y)"])
    once = redactor.text("a hunter2 b")
    assert PLACEHOLDER.fullmatch(once[2:-2])
    assert redactor.text(once) == once


def test_basic_logins_are_found_in_every_spelling() -> None:
    """Of what a request came with, the parts too."""
    from rollbook.ingest.upstream.routes import given_cookies, sent_credentials

    login = base64.b64encode(b"user:correct horse").decode()
    headers = [
        (b"Authorization", f"Basic {login}".encode()),
        (b"Cookie", b"a=first-one; b=second"),
        (b"x", b"y"),
    ]
    credentials = sent_credentials(headers, "key=k-value&x=1&access_token=t-value", ["own-key"])
    assert credentials >= {login, "user:correct horse", "correct horse", "first-one", "second"}
    assert credentials >= {"k-value", "t-value", "own-key"}
    assert "y" not in credentials
    cookies = [(b"Set-Cookie", b"sid=abc%3D; Path=/"), (b"set-cookie", b"empty="), (b"x", b"y")]
    assert given_cookies(cookies) == {"abc%3D"}
