"""Keys go where they are meant to go and never to disk; what is redacted is so in the record alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_upstream import chat_reply, sse, streamed, whole

from rollbook.ingest.identity import trajectory_key
from rollbook.ingest.keys import Keys
from rollbook.ingest.redact import Redactor
from rollbook.store.secret import store_secret

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Hello"}
SECRET = "sk-agent-0123456789abcdef"


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {SECRET}"},
        {"authorization": SECRET},
        {"x-api-key": SECRET},
        {"api-key": SECRET},
        {"cookie": f"session={SECRET}", "x-goog-api-key": SECRET},
    ],
)
def test_the_agents_key_goes_to_the_upstream_and_not_to_disk(
    passed: Any, upstream: Any, headers: dict[str, str]
) -> None:
    """Not with the request, not where a body or a query holds it, and not where an error repeats it."""
    said = whole({"error": {"message": f"Incorrect API key provided: {SECRET}"}}, "401 Unauthorized")
    upstream.answers += [whole(chat_reply()), said]
    body = {"messages": [USER], "api_key": SECRET, "extra_headers": {"x": SECRET}}
    for name in ("t", "u"):
        reply = passed.post(f"{CHAT}?key={SECRET}", body, name, headers=headers)
        passed.turn(name)
    assert SECRET in reply.text
    if "cookie" not in headers:
        assert "[redacted]" in passed.turn("u").failed.error
        passed.close()
        assert SECRET.encode() not in passed.bytes_on_disk()
    for asked in upstream.asked:
        assert all(asked.header(name) == value for name, value in headers.items())
        assert asked.json == body


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        ({"authorization": "Bearer sk-mine"}, {"authorization": "Bearer sk-engine-key"}),
        ({"x-api-key": "mine"}, {"x-api-key": "sk-engine-key"}),
        ({"authorization": "Bearer a", "x-api-key": "b"}, {"x-api-key": "sk-engine-key"}),
        ({}, {"authorization": "Bearer sk-engine-key"}),
    ],
)
def test_the_engines_key_takes_its_place(
    passing: Any, upstream: Any, sent: dict[str, str], arrives: dict[str, str]
) -> None:
    """In the form in which the agent sent one; neither is on disk."""
    passed = passing(key="sk-engine-key")
    upstream.answers.append(whole({"error": "bad key sk-engine-key"}, "403 Forbidden"))
    passed.post(CHAT, {"messages": [USER]}, headers=sent)
    names = ("authorization", "x-api-key")
    assert {n: v for n in names if (v := upstream.asked[0].header(n)) is not None} == arrives
    assert passed.turn().failed.error.endswith('"bad key [redacted]"}')
    passed.close()
    assert b"sk-engine-key" not in passed.bytes_on_disk()


def test_anthropics_paths_get_a_key_in_anthropics_form(passing: Any, upstream: Any) -> None:
    """Where the agent sent none."""
    passed = passing(key="engine")
    passed.post("/v1/messages", {"max_tokens": 1, "messages": [USER]})
    assert (upstream.asked[0].header("x-api-key"), upstream.asked[0].header("authorization")) == (
        "engine",
        None,
    )


@pytest.mark.parametrize("key", [None, "engine-key"])
@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "{}"])
@pytest.mark.parametrize("secret", [None, "proxy-secret"])
def test_a_trajectorys_key_never_leaves(
    passing: Any, upstream: Any, key: str | None, form: str, secret: str | None
) -> None:
    """It names the trajectory to us and is nobody else's business, however it is sent."""
    passed = passing(key=key, keys=Keys.of_operators(*([secret] if secret else [])))
    made_with = store_secret(passed.path, "trajectory keys") if secret else None
    own = trajectory_key("named", "default", made_with)
    header = "x-api-key" if form == "{}" else "authorization"
    reply = passed.post(CHAT, {"messages": [USER]}, None, headers={header: form.format(own)})
    assert reply.status_code == 200
    [asked] = upstream.asked
    assert "trajectory:" not in str(asked.headers)
    sent = {"authorization": asked.header("authorization"), "x-api-key": asked.header("x-api-key")}
    assert sent[header] == (key and (key if header == "x-api-key" else f"Bearer {key}"))
    passed.http.headers["authorization"] = f"Bearer {secret}"
    assert passed.turn("named").completed


def test_the_proxys_own_key_never_leaves(passing: Any, upstream: Any) -> None:
    """Where the proxy checks keys, what it was sent is its own; without one nothing passes."""
    passed = passing(keys=Keys.of_operators("proxy-secret"))
    assert passed.chat(USER).status_code == 401
    reply = passed.post("/v1/embeddings", {}, headers={"authorization": "Bearer proxy-secret"})
    assert reply.status_code == 200
    passed.post(CHAT, {"messages": [USER]}, headers={"authorization": "Bearer proxy-secret"})
    assert len(upstream.asked) == 2
    assert all("proxy-secret" not in str(asked.headers) for asked in upstream.asked)


@pytest.mark.parametrize("stream", [False, True])
def test_redaction_is_of_the_record_alone(passing: Any, upstream: Any, stream: bool) -> None:
    """The upstream and the client see every byte; the log has neither text nor tokens of the secret."""
    passed = passing(redactor=Redactor([r"SECRET-\d+"]))
    prompt, ids = [7, 8], [11, 12, 13]
    logprobs = {"content": [{"token": t, "logprob": -1.0} for t in ("SEC", "RET-", "42")]}
    if stream:
        pieces = [
            {"delta": {"content": t}, "token_ids": [i]}
            for t, i in zip(("SEC", "RET-", "42"), ids, strict=True)
        ]
        events = [{"id": "c", "prompt_token_ids": prompt, "choices": [{"index": 0} | p]} for p in pieces]
        answer = streamed(sse(*events), [20])
    else:
        message = {"role": "assistant", "content": "SECRET-42"}
        choice = {
            "index": 0,
            "message": message,
            "token_ids": ids,
            "logprobs": logprobs,
            "finish_reason": "stop",
        }
        answer = whole(chat_reply(choices=[choice], prompt_token_ids=prompt))
    said = b"".join(answer.packets)
    upstream.answers += [answer, whole({"error": "no SECRET-9"}, "400 Bad Request")]
    body = {"messages": [{"role": "user", "content": "mine is SECRET-17"}], "stream": stream}
    assert passed.post(CHAT, body).content == said
    assert upstream.asked[0].json == body
    done = passed.turn().completed
    assert passed.turn().requested.messages[0]["content"] == "mine is [redacted]"
    assert done.reply["content"] == "[redacted]"
    assert done.flags == ["text_only", "redacted"]
    assert "token_ids" not in json.dumps(done.upstream)
    assert "RET-" not in json.dumps(done.upstream)
    assert "SECRET-9" in passed.post(CHAT, body, "u").text
    assert "no [redacted]" in passed.turn("u").failed.error
    passed.close()
    assert b"SECRET-" not in passed.bytes_on_disk()


def test_redaction_that_finds_nothing_takes_no_tokens(passing: Any, upstream: Any) -> None:
    """A turn without secrets is as exact as before."""
    passed = passing(redactor=Redactor([r"SECRET-\d+"]))
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "token_ids": [1]}
    upstream.answers.append(whole(chat_reply(choices=[choice], prompt_token_ids=[2])))
    passed.chat(USER, api_key="mine")
    assert passed.turn().completed.flags == []
