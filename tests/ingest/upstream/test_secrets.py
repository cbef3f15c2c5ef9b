"""Keys go where they are meant to go and never to disk; what is redacted is so in the record alone."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from urllib.parse import quote

import pytest
from tests.fakes.upstreams.server import HttpUpstream, chat_reply, sse, streamed, whole
from tests.ingest.upstream.conftest import Passed

from rollbook.edge.keys import Keys, given_keys, trajectory_key
from rollbook.store.redaction import PLACEHOLDER
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
    passed: Passed, upstream: HttpUpstream, headers: dict[str, str]
) -> None:
    """Not with the request, not where a body or a query holds it, and not where an error repeats it."""
    refusal = whole({"error": {"message": f"Incorrect API key provided: {SECRET}"}}, "401 Unauthorized")
    upstream.answers += [whole(chat_reply()), refusal]
    body = {"messages": [USER], "api_key": SECRET, "extra_headers": {"x": SECRET}}
    for name in ("t", "u"):
        reply = passed.post(f"{CHAT}?key={SECRET}", body, name, headers=headers)
        passed.turn(name)
    assert SECRET in reply.text
    assert "provided: [secret:" in passed.turn("u").failed.error
    passed.close()
    assert SECRET.encode() not in passed.bytes_on_disk()
    for request in upstream.asked:
        assert all(request.header(name) == value for name, value in headers.items())
        assert request.json == body


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
    passing: Callable[..., Passed], upstream: HttpUpstream, sent: dict[str, str], arrives: dict[str, str]
) -> None:
    """In the form in which the agent sent one; neither is on disk."""
    passed = passing(key="sk-engine-key")
    upstream.answers.append(whole({"error": "bad key sk-engine-key"}, "403 Forbidden"))
    passed.post(CHAT, {"messages": [USER]}, headers=sent)
    names = ("authorization", "x-api-key")
    assert {n: v for n in names if (v := upstream.asked[0].header(n)) is not None} == arrives
    assert passed.turn().failed.error.startswith('the upstream answers 403: {"error": "bad key [secret:')
    passed.close()
    assert b"sk-engine-key" not in passed.bytes_on_disk()


def test_anthropics_paths_get_a_key_in_anthropics_form(
    passing: Callable[..., Passed], upstream: HttpUpstream
) -> None:
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
    passing: Callable[..., Passed], upstream: HttpUpstream, key: str | None, form: str, secret: str | None
) -> None:
    """It names the trajectory to us and is nobody else's business, however it is sent."""
    passed = passing(key=key, keys=Keys(given_keys([secret] if secret else [], {})))
    made_with = store_secret(passed.path, "trajectory keys") if secret else None
    own = trajectory_key("named", "default", made_with)
    header = "x-api-key" if form == "{}" else "authorization"
    reply = passed.post(CHAT, {"messages": [USER]}, None, headers={header: form.format(own)})
    assert reply.status_code == 200
    [request] = upstream.asked
    assert "trajectory:" not in str(request.headers)
    sent = {"authorization": request.header("authorization"), "x-api-key": request.header("x-api-key")}
    assert sent[header] == (key and (key if header == "x-api-key" else f"Bearer {key}"))
    passed.http.headers["authorization"] = f"Bearer {secret}"
    assert passed.turn("named").completed


def test_the_proxys_own_key_never_leaves(passing: Callable[..., Passed], upstream: HttpUpstream) -> None:
    """Where the proxy checks keys, what it was sent is its own; without one nothing passes."""
    passed = passing(keys=Keys(given_keys(["proxy-secret"], {})))
    assert passed.chat(USER).status_code == 401
    reply = passed.post("/v1/embeddings", {}, headers={"authorization": "Bearer proxy-secret"})
    assert reply.status_code == 200
    passed.post(CHAT, {"messages": [USER]}, headers={"authorization": "Bearer proxy-secret"})
    assert len(upstream.asked) == 2
    assert all("proxy-secret" not in str(request.headers) for request in upstream.asked)


@pytest.mark.parametrize("stream", [False, True])
def test_redaction_is_of_the_record_alone(
    passing: Callable[..., Passed], upstream: HttpUpstream, stream: bool
) -> None:
    """The upstream and the client see every byte; the log has neither text nor tokens of the secret."""
    passed = passing(redact=(r"SECRET-\d+",))
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
    data = b"".join(answer.packets)
    upstream.answers += [answer, whole({"error": "no SECRET-9"}, "400 Bad Request")]
    body = {"messages": [{"role": "user", "content": "mine is SECRET-17"}], "stream": stream}
    assert passed.post(CHAT, body).content == data
    assert upstream.asked[0].json == body
    done = passed.turn().completed
    [sent, replied] = (passed.turn().requested.messages[0]["content"], done.reply["content"])
    assert PLACEHOLDER.fullmatch(sent.removeprefix("mine is "))
    assert PLACEHOLDER.fullmatch(replied)
    assert replied not in sent
    assert done.flags == ["text_only", "redacted"]
    assert "token_ids" not in json.dumps(done.upstream)
    assert "RET-" not in json.dumps(done.upstream)
    assert "SECRET-9" in passed.post(CHAT, body, "u").text
    assert "no [secret:" in passed.turn("u").failed.error
    passed.close()
    assert b"SECRET-" not in passed.bytes_on_disk()


def test_redaction_that_finds_nothing_takes_no_tokens(
    passing: Callable[..., Passed], upstream: HttpUpstream
) -> None:
    """A turn without secrets is as exact as before."""
    passed = passing(redact=(r"SECRET-\d+",))
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "token_ids": [1]}
    upstream.answers.append(whole(chat_reply(choices=[choice], prompt_token_ids=[2])))
    passed.chat(USER, api_key="mine")
    assert passed.turn().completed.flags == []


def test_what_is_outside_the_conversation_is_out_of_the_record(
    passed: Passed, upstream: HttpUpstream
) -> None:
    """Bytes pass unchanged, the record holds none of it, and a turn's tokens are kept all the same."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "token_ids": [1]}
    echo = {
        "metadata": {"password": "s3cret-one"},
        "tools": [{"type": "mcp", "headers": {"a": "s3cret-two"}}],
    }
    upstream.answers.append(whole(chat_reply(choices=[choice], prompt_token_ids=[2], **echo)))
    tool = {
        "type": "mcp",
        "server_url": "https://u:s3cret-three@h/?sig=s3cret-four",
        "authorization": "s3cret-five",
    }
    body = {"messages": [USER], "tools": [tool], "metadata": {"api_token": "s3cret-six"}, "max_tokens": 5}
    passed.post(f"{CHAT}?api_key=s3cret-seven", body)
    turn = passed.turn()
    assert upstream.asked[0].json == body
    assert (turn.completed.flags, turn.completed.completion_ids.tolist()) == ([], [1])
    assert turn.requested.request["max_tokens"] == 5
    passed.close()
    assert b"s3cret-" not in passed.bytes_on_disk()


@pytest.mark.parametrize("stream", [False, True])
def test_cookies_and_credentials_that_an_error_repeats(
    passed: Passed, upstream: HttpUpstream, stream: bool
) -> None:
    """Whatever form they are repeated in, whether the error is a reply or stands in one."""
    login = base64.b64encode(b"agent:p@ss w0rd/42").decode()
    shown = [
        "p@ss w0rd/42",
        quote("p@ss w0rd/42", safe=""),
        login,
        "set-by-you",
        "c00kie-sent",
        "in-the-query",
    ]
    body = {"error": {"message": f"no: {' | '.join(shown)} Set-Cookie: other=v4lue; Path=/"}}
    answer = streamed(sse(body), [9]) if stream else whole(body, "400 Bad Request")
    answer.headers = [*answer.headers, ("set-cookie", "sid=set-by-you; HttpOnly")]
    upstream.answers.append(answer)
    headers = {"authorization": f"Basic {login}", "cookie": "c=c00kie-sent"}
    reply = passed.post(f"{CHAT}?key=in-the-query", {"messages": [USER], "stream": stream}, headers=headers)
    assert "set-by-you" in reply.text
    error = passed.turn().failed.error
    for secret in (*shown, "v4lue"):
        assert secret not in error
    assert error.count("[secret:") >= 5
    passed.close()
    assert b"w0rd" not in passed.bytes_on_disk()


LOGIN = "Basic " + base64.b64encode(b"user:pl4nted!").decode()


def test_a_login_in_the_address_goes_to_the_upstream_and_nowhere_else(
    passing: Callable[..., Passed], upstream: HttpUpstream, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the header that it stands for; the query of the address goes with every request."""
    address = upstream.url.replace("://", "://user:pl4nted%21@") + "/v1/?api-version=7&key=k-pl4nted"
    passed = passing(url=address)
    upstream.answers += [whole(chat_reply()), whole({"error": f"bad {LOGIN} k-pl4nted"}, "401 Unauthorized")]
    for name in ("t", "u"):
        passed.post(f"{CHAT}?x=1", {"messages": [USER]}, name, headers={"x-api-key": "mine"})
    for request in upstream.asked:
        assert (request.header("authorization"), request.header("x-api-key")) == (LOGIN, "mine")
        assert request.target.endswith("/v1/chat/completions?api-version=7&key=k-pl4nted&x=1")
    failed = passed.turn("u").failed.error
    shown = [failed, passed.http.get("/healthz").text, passed.http.get("/metrics").text, *capsys.readouterr()]
    passed.close()
    data = passed.bytes_on_disk() + "".join(shown).encode()
    for secret in (b"pl4nted", LOGIN.encode(), LOGIN.split()[1].encode()):
        assert secret not in data


def test_an_upstream_that_is_away_is_named_without_its_login(passing: Callable[..., Passed]) -> None:
    """In the reply, in the log and on the screen."""
    passed = passing(url="http://user:pl4nted@127.0.0.1:9/?token=t-pl4nted")
    reply = passed.chat(USER)
    assert reply.status_code == 502
    assert "http://127.0.0.1:9 cannot be reached" in reply.text
    text = reply.text + passed.turn().failed.error
    passed.close()
    assert "pl4nted" not in text
    assert b"pl4nted" not in passed.bytes_on_disk()


def test_known_formats_are_taken_out_of_the_record_alone(
    passing: Callable[..., Passed], upstream: HttpUpstream
) -> None:
    """Bytes pass unchanged; of what was taken out of the text no tokens are kept."""
    key = "ghp_" + "aB3d" * 9
    passed = passing(redact=("known",))
    choice = {"index": 0, "message": {"role": "assistant", "content": f"it is {key}"}, "token_ids": [1]}
    upstream.answers.append(whole(chat_reply(choices=[choice], prompt_token_ids=[2])))
    reply = passed.post(CHAT, {"messages": [{"role": "user", "content": f"mine is {key}"}]})
    assert key in reply.text
    assert key in str(upstream.asked[0].json)
    assert passed.turn().completed.flags == ["text_only", "redacted"]
    passed.close()
    assert key.encode() not in passed.bytes_on_disk()
