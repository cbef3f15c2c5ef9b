"""Secrets: what clients send of them reaches neither the disk nor the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.clients.streamed import KINDS, PATHS, asked
from tests.fakes.proxies.in_process import InProcess
from tests.fakes.proxies.served import Served

from rollbook import store
from rollbook.ingest.recording.redact import Redactor
from rollbook.store.errors import ConfigError
from rollbook.store.events.event_json import json_bytes
from rollbook.store.redaction import PLACEHOLDER
from rollbook.store.sealed.seal import seal_closed
from rollbook.store.secret import SECRETS, store_secret
from rollbook.store.settings import SealSettings

PATTERN = r"sk-[A-Za-z0-9]{20,}"
SECRET = "sk-" + "S3cret" * 5
FIELD = "f13ld-s3cret-value"
HEADER = "h34der-s3cret-value"
NAMED = ("api_key", "apikey", "authorization", "x-api-key", "access_token")


@pytest.fixture(scope="module")
def proxy(played: Callable[..., InProcess]) -> InProcess:
    """A proxy that takes keys of one form out."""
    return played(redact=(PATTERN,))


def _everything(kind: str) -> Any:
    """A body with secrets wherever its API has text."""
    more = dict.fromkeys(NAMED, FIELD) | {"Api_Key": FIELD, "user": f"u {SECRET}"}
    more |= {"metadata": {f"key {SECRET}": [{"deep": SECRET}]}, "extra_headers": {"Authorization": FIELD}}
    body = asked(kind, f"my key is {SECRET}, mind", **more)
    if kind == "chat":
        call = {
            "id": SECRET,
            "type": "function",
            "function": {"name": "f", "arguments": f'{{"k": "{SECRET}"}}'},
        }
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": SECRET, "content": [{"type": "text", "text": SECRET}]}
        parts = [{"type": "text", "text": f"a {SECRET}"}, {"type": "text", "text": "b"}]
        body["messages"] += [message, result, {"role": "user", "content": parts}]
        body["tools"] = [{"type": "function", "function": {"name": "f", "description": SECRET}}]
    if kind == "messages":
        body["system"] = [
            {"type": "text", "text": f"secret {SECRET}", "cache_control": {"type": "ephemeral"}}
        ]
    if kind == "responses":
        body["instructions"] = f"secret {SECRET}"
        body["input"] = [{"role": "user", "content": [{"type": "input_text", "text": SECRET}]}]
    return body


def _headers(kind: str) -> dict[str, str]:
    return {
        "authorization": f"Bearer {HEADER}",
        "x-api-key": HEADER,
        "cookie": HEADER,
        "openai-organization": HEADER,
        "x-rollbook-labels": f'{{"label": "{SECRET}", "api_key": "{FIELD}"}}',
        "x-rollbook-group": f"group {SECRET}",
        "x-rollbook-task": SECRET,
        "x-session-id": f"session {SECRET}",
    }


def _contents(folder: Any) -> bytes:
    """All that a store's folder says: every byte of its files, and every event read from it."""
    files = [p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()]
    return b"\0".join([*files, *(json_bytes(event) for event in store.open(folder).events())])


def test_the_search_finds_what_is_there(played: Callable[..., InProcess]) -> None:
    """Without patterns a secret in a message is found, in the log and sealed; credentials are not."""
    proxy = played()
    assert proxy.ask(f"/t/open{PATHS['chat']}", _everything("chat"), headers=_headers("chat")).status == 200
    proxy.settled()
    for _ in range(2):
        hits = [secret.encode() in _contents(proxy.store.path) for secret in (SECRET, FIELD, HEADER)]
        assert hits == [True, False, False]
        _seal(proxy)


def _seal(proxy: Any) -> None:
    proxy.recorder.close()
    with proxy.store.writer("serve"):
        pass
    list(seal_closed(proxy.store.path, "serve", SealSettings(), all_of_it=True))


def test_no_secret_reaches_the_disk_or_the_model(played: Callable[..., InProcess]) -> None:
    """Through every endpoint and route, in every place; the whole store is searched, sealed too."""
    proxy = played(redact=(PATTERN,))
    for kind in KINDS:
        path = f"/t/secret-{kind}/label/path/{SECRET}{PATHS[kind]}"
        reply = proxy.ask(path, _everything(kind), headers=_headers(kind))
        assert reply.status == 200, reply.data
    opening = {"id": "opened", "task": SECRET, "group": SECRET, "labels": {"a": [SECRET]}}
    assert proxy.ask("/v1/trajectories", opening, headers=_headers("")).status == 201
    label = {"name": "found", "value": {"key": SECRET}, "source": f"judge {SECRET}"}
    assert proxy.ask("/v1/trajectories/opened/labels", label).status == 201
    reward = {"reward": 1, "source": f"judge {SECRET}"}
    assert proxy.ask("/v1/trajectories/opened/rewards", reward).status == 201
    trajectories = proxy.trajectories()
    digests = Redactor(key=store_secret(proxy.store.path, SECRETS))
    gone, field = (digests.fields({"api_key": secret})["api_key"] for secret in (SECRET, FIELD))
    for prompt in proxy.engine.prompts:
        text = proxy.engine.tokenizer.decode(prompt.ids, special=True)
        assert SECRET not in text
        assert FIELD not in text
        assert PLACEHOLDER.search(text) or "prompt" in text
    for kind in KINDS:
        (turn,) = trajectories[f"secret-{kind}"].turns.values()
        asked_ = turn.requested.request
        assert asked_["api_key"] == asked_["Api_Key"] == asked_["extra_headers"]["Authorization"] == field
        assert asked_["user"] == f"u {gone}"
        assert asked_["metadata"] == {f"key {gone}": [{"deep": gone}]}
        opened = trajectories[f"secret-{kind}"].opened
        assert (opened.group, opened.task) == (f"group {gone}", gone)
        assert opened.labels == {
            "label": gone,
            "api_key": field,
            "path": gone,
            "session_id": f"session {gone}",
        }
    assert trajectories["opened"].opened.labels == {"a": [gone]}
    for _ in range(2):
        data = _contents(proxy.store.path)
        for secret in (SECRET, FIELD, HEADER):
            assert secret.encode() not in data
        _seal(proxy)
    assert list(proxy.store.path.rglob("*.parquet"))


def test_what_matches_no_pattern_is_kept(proxy: InProcess) -> None:
    """What matches nothing is kept as it came, and an empty secret is none."""
    body = asked("chat", "sk-short is no key", api_key=None, user="sk-")
    assert proxy.ask(f"/t/plain{PATHS['chat']}", body).status == 200
    (turn,) = proxy.trajectories()["plain"].turns.values()
    assert turn.requested.messages == body["messages"]
    assert turn.requested.request == {"api_key": None, "user": "sk-"}


def test_a_redacted_conversation_goes_on(proxy: InProcess) -> None:
    """What is taken out is taken out each time, so the second turn extends the first."""
    messages = [{"role": "user", "content": f"key {SECRET}"}]
    path = f"/t/goes-on{PATHS['chat']}"
    message = proxy.ask(path, {"messages": messages}).json["choices"][0]["message"]
    proxy.ask(path, {"messages": [*messages, message, {"role": "user", "content": "and?"}]})
    parent, child = proxy.trajectories()["goes-on"].turns.values()
    assert child.requested.parent_turn_id == parent.turn_id


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.just(SECRET),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.just(SECRET), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["messages", "api_key", "Authorization", "x", SECRET]), JSON))
@settings(max_examples=200)
def test_no_secret_is_left_wherever_it_was(body: Any) -> None:
    """In keys and values, however deep; the rest is as it was; twice is as once."""
    redactor = Redactor([PATTERN, "never-there"])
    cleaned = redactor.body(body)
    assert SECRET not in repr(cleaned)
    assert redactor.body(cleaned) is cleaned
    plain = Redactor().body(body)
    assert plain.get("messages") is body.get("messages")
    for name in {"api_key", "Authorization"} & body.keys():
        assert SECRET not in repr(plain[name])
    if SECRET not in repr(body) and not {"api_key", "Authorization"} & body.keys():
        assert cleaned is plain is body


@pytest.mark.parametrize("pattern", ["(", "a*", "", "x|"])
def test_a_pattern_that_cannot_be_meant_is_refused(pattern: str) -> None:
    """No regular expression, or one that matches everywhere."""
    with pytest.raises(ConfigError, match=re.escape(f"--redact {pattern!r}")):
        Redactor([pattern])


def test_the_served_command_redacts(
    serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path
) -> None:
    """--redact, in a process of its own, streamed, over TCP; its log and its store hold no secret."""
    words = ("--model", str(text_model("chatml")), "--engine", "scripted", "--script", f"{script}:answer")
    served = serve(*words, "--redact", PATTERN, "--redact", "hunter[0-9]")
    headers = {"authorization": f"Bearer {HEADER}", "x-api-key": HEADER}
    for kind in KINDS[:1] + KINDS[2:]:
        body = asked(kind, f"{SECRET} hunter2", api_key=FIELD, stream=True)
        answer = httpx.post(f"{served.url}/t/{kind}{PATHS[kind]}", json=body, headers=headers, timeout=30)
        assert re.search(rf"{PLACEHOLDER.pattern} {PLACEHOLDER.pattern}", answer.text)
    served.stop()
    data = _contents(served.path) + served.log.read_bytes()
    for secret in (SECRET, FIELD, HEADER, "hunter2"):
        assert secret.encode() not in data
    assert data.count(b"turn.delivered") > 2
