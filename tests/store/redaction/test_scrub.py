"""No secret survives outside a conversation, in whatever shape it stands; nothing else is changed."""

from __future__ import annotations

import base64
import json
import time
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.store.events import (
    EngineControlled,
    RunOpened,
    StepFailed,
    SyncFailed,
    TurnDelivered,
    TurnFailed,
)
from rollbook.store.redaction import PLACEHOLDER, Scrubber, credentials, scrub_record, secrets_in, shown

SCRUB = Scrubber(b"k" * 32)
SECRET = "hunter2-pl4nted"
GONE = SCRUB.digest(SECRET)
KEY = "sk-" + "a1B2c3D4e5" * 4


def test_digests_join_equal_secrets_and_tell_nothing_without_the_key() -> None:
    """The same by the same key, wherever and in whatever form; another by another key."""
    assert PLACEHOLDER.fullmatch(GONE)
    assert SCRUB.digest(GONE) == GONE
    assert Scrubber(b"other").digest(SECRET) != GONE
    everywhere = [
        SCRUB.field("api_key", SECRET),
        SCRUB.field("authorization", f"Bearer {SECRET}").removeprefix("Bearer "),
        SCRUB.text(f"https://h/?token={SECRET}").removeprefix("https://h/?token="),
        SCRUB.text(f"password: {SECRET}").removeprefix("password: "),
        SCRUB.knowing([SECRET]).text(f"bad {SECRET}!").removeprefix("bad ").removesuffix("!"),
    ]
    assert everywhere == [GONE] * 5


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("https://§@h:1/p?q=1", "https://¤@h:1/p?q=1"),
        ("postgresql+psycopg://§@db/x", "postgresql+psycopg://¤@db/x"),
        ("see http://§@h and ftp://§@h", "see http://¤@h and ftp://¤@h"),
        ("https://b/k?X-Amz-Credential=§&X-Amz-Date=1&X-Amz-Signature=§", "https://b/k?X-Amz-Credential=¤&X-Amz-Date=1&X-Amz-Signature=¤"),
        ("https://b/k?sv=1&se=§&sig=§&sp=r", "https://b/k?sv=1&se=¤&sig=¤&sp=r"),
        ("https://h/?key=§#access_token=§&x=1", "https://h/?key=¤#access_token=¤&x=1"),
        ("https%3A%2F%2Fh%3Fapi_key%3D§%26x%3D1", "https%3A%2F%2Fh%3Fapi_key%3D¤%26x%3D1"),
        ("Authorization: Bearer §", "Authorization: Bearer ¤"),
        ("{'authorization': 'Bearer §', 'accept': '*/*'}", "{'authorization': 'Bearer ¤', 'accept': '*/*'}"),
        ("(b'x-api-key', b'§'), (b'host', b'h')", "(b'x-api-key', b'¤'), (b'host', b'h')"),
        ('{"api_key": "§", "model": "m"}', '{"api_key": "¤", "model": "m"}'),
        ('{\\"api_key\\": \\"§\\"}', '{\\"api_key\\": \\"¤\\"}'),
        ("OPENAI_API_KEY=§ rollbook serve", "OPENAI_API_KEY=¤ rollbook serve"),
        ("the API key: § is wrong", "the API key: ¤ is wrong"),
        ("set-cookie: §; Path=/", None),
        ("Cookie: a=§; b=§", None),
        ("curl -H 'X-Api-Key: §' https://h", "curl -H 'X-Api-Key: ¤' https://h"),
        ("token=abcdef123456", None),
        ("bearer abc123def456", None),
    ],
)  # fmt: skip
def test_secrets_in_text(text: str, clean: str | None) -> None:
    """By how they stand in it, and the text around them stays."""
    scrubbed = SCRUB.text(text.replace("§", SECRET))
    assert SECRET not in scrubbed
    assert PLACEHOLDER.search(scrubbed)
    assert SCRUB.text(scrubbed) == scrubbed
    if clean is not None:
        assert scrubbed == clean.replace("¤", GONE)


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens: 5, prompt_tokens=7",
        "unexpected token: end of file",
        "bearer authentication is off",
        "see https://h/path?model=m&n=1",
        "the key of the dictionary = value",
        "password",
        "an author: Jane",
        "finished with code=1",
        "x@y.z and a://b",
        "[secret:0123456789ab]",
    ],
)
def test_other_text_stays(text: str) -> None:
    """Words about secrets are none."""
    assert SCRUB.text(text) == text


SHAPES = st.sampled_from(
    [
        lambda s: {"api_key": s},
        lambda s: {"Authorization": f"Bearer {s}"},
        lambda s: {"authorization": {"type": "bearer", "value": s}},
        lambda s: {"headers": {"x-anything": s}},
        lambda s: {"extra_headers": [["cookie", s], ["accept", s]]},
        lambda s: [["Set-Cookie", s]],
        lambda s: [{"name": "X-Api-Key", "value": s}],
        lambda s: {"key": "db_password", "value": {"deep": [s]}},
        lambda s: {"env": {"GITHUB_TOKEN": s}},
        lambda s: {"tokens": [{"access_token": s}]},
        lambda s: {"secrets": {"a": s, "b": [s, None]}},
        lambda s: {"server_url": f"https://u:{s}@h/x?sig={s}"},
        lambda s: {"note": f'{{"password": "{s}"}}'},
        lambda s: {"note": json.dumps(json.dumps({"client_secret": s}))},
        lambda s: {"schema": {"properties": {"token": s}}},
        lambda s: {f"https://{s}@h": 1},
        lambda s: f"client_secret={s}",
    ]
)
HARMLESS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("abc :x1\n", max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "max_tokens", "key", "n", "model"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.lists(SHAPES, min_size=1, max_size=4), HARMLESS, st.integers(0, 3))
@settings(max_examples=300)
def test_no_planted_secret_survives(shapes: list[Any], around: Any, depth: int) -> None:
    """In any shape, at any depth, beside anything; twice is as once, JSON stays JSON, the rest stays."""
    planted: Any = [shape(SECRET) for shape in shapes]
    for _ in range(depth):
        planted = {"inside": [planted, 1]}
    clean = SCRUB.value({"planted": planted, "around": around})
    assert "hunter2" not in json.dumps(clean)
    assert GONE in json.dumps(clean) or "u:" in json.dumps(planted)
    assert clean["around"] is around
    assert SCRUB.value(clean) is clean
    assert json.loads(json.dumps(clean)) == clean
    assert any("hunter2" in secret for secret in secrets_in({"planted": planted}))


@given(HARMLESS)
@settings(max_examples=200)
def test_what_holds_no_secret_is_the_same_object(value: Any) -> None:
    """Nothing is copied, and nothing is changed."""
    assert SCRUB.value(value) is value


def test_numbers_and_schemas() -> None:
    """A number under a secret's name is one; a count, a flag and a schema are not."""
    value = {
        "password": 1234,
        "pin": 1234,
        "api_keys": 2,
        "secret": True,
        "cookie": None,
        "authorization": "",
        "token": 17,
        "properties": {"password": {"type": "string", "minLength": 8}, "secret": SECRET},
    }
    clean = SCRUB.value(value)
    assert clean == value | {
        "password": SCRUB.digest("1234"),
        "properties": {"password": {"type": "string", "minLength": 8}, "secret": GONE},
    }


@pytest.mark.parametrize("secret", ["pa ss/w+rd&é\"'\\1", "s3cr3t", "abcd"])
def test_a_known_secret_in_every_spelling(secret: str) -> None:
    """As it is, and as addresses, JSON, HTML and base64 write it; what stands there already is no secret."""
    known = SCRUB.knowing([secret, "abc", "secret"])
    coded = base64.b64encode(secret.encode()).decode()
    spelled = [secret, quote(secret, safe=""), quote_plus(secret), json.dumps(secret)[1:-1], coded]
    for text in (*spelled, quote(secret, safe="").lower() if "%" in quote(secret) else secret):
        scrubbed = known.text(f"said <{text}> abc")
        assert scrubbed.endswith("> abc")
        assert PLACEHOLDER.fullmatch(scrubbed[6:-5])
        assert known.text(scrubbed) == scrubbed
    if len(secret) < 8:
        assert known.text(f"x{secret}x") == f"x{secret}x"


def test_what_a_header_holds() -> None:
    """All of it, the credential, and of a login the password."""
    assert credentials("Bearer abc") == {"Bearer abc", "abc"}
    login = base64.b64encode(b"user:pass:word").decode()
    assert credentials(f"Basic {login}") == {f"Basic {login}", login, "user:pass:word", "pass:word"}
    assert credentials("Basic ???") == {"Basic ???", "???"}
    assert credentials(" ") == set()


def test_records_that_repeat_errors_and_settings() -> None:
    """Their text is cleaned; a record without secrets, and any other, is the same object."""
    clean = (SCRUB.text, SCRUB.value)
    assert scrub_record(TurnFailed("t", "u", f"password={SECRET}"), *clean) == TurnFailed(
        "t", "u", f"password={GONE}"
    )
    assert scrub_record(StepFailed(1, 1, "p", f"{KEY}!"), *clean).error == SCRUB.digest(KEY) + "!"  # type: ignore[attr-defined]
    failed = SyncFailed("p", 1, "s", "http://h", f"http://{SECRET}@h")
    assert scrub_record(failed, *clean).error == f"http://{GONE}@h"  # type: ignore[attr-defined]
    opened = RunOpened("serve", {"engine_ask": {"api_key": SECRET}, "n": 1})
    assert scrub_record(opened, *clean) == RunOpened("serve", {"engine_ask": {"api_key": GONE}, "n": 1})
    controlled = EngineControlled("e", "load", {"path": f"http://{SECRET}@h"}, f"password={SECRET}")
    assert scrub_record(controlled, *clean) == EngineControlled(
        "e", "load", {"path": f"http://{GONE}@h"}, f"password={GONE}"
    )
    assert scrub_record(EngineControlled("e", "pause", {"mode": "abort"}), *clean).error is None  # type: ignore[attr-defined]
    for record in (TurnFailed("t", "u", "no"), RunOpened("serve", {"n": 1}), TurnDelivered("t", "u", "sent")):
        assert scrub_record(record, *clean) is record


def test_messages_for_people_are_cleaned_too() -> None:
    """By a key of the process: nobody joins those."""
    assert PLACEHOLDER.fullmatch(shown(KEY))
    assert shown(KEY) == shown(KEY) != SCRUB.text(KEY)
    assert shown("all is well") == "all is well"


@pytest.mark.parametrize(
    "unit",
    ["a1b2", "token", "key=", 'secret="', 'key=\\\\"', "http://", "?a=", "?key=", "bearer ", "cookie: a; "],
)
def test_the_time_grows_with_the_length_alone(unit: str) -> None:
    """Whatever a client sends: four times as much takes not much more than four times as long."""

    def took(size: int) -> float:
        begun = time.thread_time()
        SCRUB.text(unit * (size // len(unit)))
        return time.thread_time() - begun

    assert min(took(120_000) for _ in range(3)) < 40 * max(took(30_000), 0.005)


def test_what_is_nested_deeper_than_can_be_stored_is_left() -> None:
    """It is refused later, by a message that says so, and breaks nothing here."""
    deep: Any = SECRET
    for _ in range(5000):
        deep = [deep]
    assert SCRUB.value({"api_key": deep}) == {"api_key": deep}


TEXTS = st.lists(
    st.sampled_from(
        [
            "password=",
            "PaSsWoRd",
            "&sig=",
            "://",
            "%3D",
            "b\u0131earer",
            "\u017fecret",
            "x",
            " ",
            "=",
            "&",
            "e=",
            "\ud800",
        ]
    )
    | st.characters(),
    max_size=12,
).map("".join)


@given(TEXTS, st.integers(0, 9000))
def test_long_texts_are_searched_as_short_ones(text: str, place: int) -> None:
    """What is found in a short text is found in a long one, wherever it stands in it."""
    long = "." * place + text + "." * 9000
    assert "." * place + SCRUB.text(text + "." * 9000) == SCRUB.text(long)
    planted = f"{text} password={SECRET} "
    assert SECRET not in SCRUB.text("." * place + planted + "." * 9000)
