"""Messages in every spelling that clients use become parts, and no message is refused."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.transcript.messages import Message, Part, beginning, call_names, part_words, read_message

PIXEL = b"\x89PNG not really"
SHA = hashlib.sha256(PIXEL).hexdigest()
DATA = base64.b64encode(PIXEL).decode()
IMAGE = Part("image", "", "image/png", SHA, len(PIXEL))

CASES: list[tuple[Any, tuple[Part, ...]]] = [
    ({"role": "user", "content": "hi"}, (Part("text", "hi"),)),
    (
        {"role": "user", "content": [{"type": "text", "text": "hi"}, "yo"]},
        (Part("text", "hi"), Part("text", "yo")),
    ),
    (
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}}],
        },
        (IMAGE,),
    ),
    (
        {"role": "user", "content": [{"type": "input_image", "image_url": f"data:image/png;base64,{DATA}"}]},
        (IMAGE,),
    ),
    (
        {"role": "user", "content": [{"type": "image", "source": {"media_type": "image/png", "data": DATA}}]},
        (IMAGE,),
    ),
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a/b.png"}}]},
        (Part("image", "https://a/b.png"),),
    ),
    ({"role": "user", "content": [{"type": "audio", "id": 3}]}, (Part("other", '{"id":3}', "audio"),)),
    (
        {"role": "assistant", "content": "ok", "reasoning_content": "hm"},
        (Part("reasoning", "hm"), Part("text", "ok")),
    ),
    (
        {"role": "assistant", "content": "<think>hm</think>\nok"},
        (Part("reasoning", "<think>hm</think>"), Part("text", "ok")),
    ),
    ({"role": "assistant", "content": "<think>cut sho"}, (Part("reasoning", "<think>cut sho"),)),
    ({"role": "user", "content": "<think>hm</think>"}, (Part("text", "<think>hm</think>"),)),
    (
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm"},
                {"type": "tool_use", "name": "f", "input": {"a": 1}},
            ],
        },
        (Part("reasoning", "hm"), Part("call", '{"a":1}', "f")),
    ),
    (
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}],
        },
        (Part("call", "{", "f"),),
    ),
    ({"role": "user", "content": [{"type": "tool_result", "content": "42"}]}, (Part("text", "42"),)),
    ({"type": "function_call", "name": "f", "arguments": "{}"}, (Part("call", "{}", "f"),)),
    ({"erased": True}, (Part("erased"),)),
    ({"role": "user", "content": {"erased": True}}, (Part("erased"),)),
    (7, (Part("other", "7"),)),
]


@pytest.mark.parametrize(("message", "parts"), CASES)
def test_each_spelling_of_a_message_has_its_parts(message: Any, parts: tuple[Part, ...]) -> None:
    """Each spelling has its parts, in order."""
    assert read_message(message, {}).parts == parts


def test_a_tools_result_is_named_after_its_call() -> None:
    """The id of a call leads to the function, in chat form and in Anthropic's."""
    called = {
        "tool_calls": [{"id": "c1", "function": {"name": "f"}}],
        "content": [{"type": "tool_use", "id": "c2", "name": "g"}],
    }
    names = dict(call_names(called))
    assert names == {"c1": "f", "c2": "g"}
    result = read_message({"role": "tool", "tool_call_id": "c1", "content": "1"}, names)
    assert result == Message("tool", (Part("text", "1"),), "f")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (Part("call", '{"path": "a.py", "n": [1]}', "read"), 'read(path="a.py", n=[1])'),
        (Part("call", "not json", "read"), "read(not json)"),
        (Part("call", "[1]", "read"), "read([1])"),
        (IMAGE, f"[image sha256 {SHA[:12]}... image/png, 15 bytes]"),
        (Part("image", "https://a/b.png"), "[image https://a/b.png]"),
        (Part("other", "{}", "audio"), "[audio] {}"),
        (Part("erased"), "[erased]"),
    ],
)
def test_calls_and_images_are_written_for_people(part: Part, words: str) -> None:
    """Calls as a person writes them, images by their digest."""
    assert part_words(part) == words


def test_a_reply_is_shortened_to_its_beginning() -> None:
    """A reply's line has its text and calls, or its reasoning where it has neither."""
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    assert (
        beginning({"role": "assistant", "content": "so\n\x1b", "tool_calls": [call]}, 40) == "so \\x1b f(a=1)"
    )
    assert beginning({"role": "assistant", "content": "ok", "reasoning": "hm"}, 40) == "ok"
    assert beginning({"role": "assistant", "content": None, "reasoning": "hm"}, 40) == "hm"
    assert beginning({"role": "assistant", "content": "x" * 50}, 10) == "xxxxxxx..."
    assert beginning({"role": "assistant", "content": "x"}, 0) == ""


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "text", "tool_calls", "function", "name", "arguments"]
            )
            | st.sampled_from(["image_url", "url", "source", "data", "reasoning", "function_call", "output"]),
            inner
            | st.sampled_from(
                ["assistant", "text", "image", "tool_use", "tool_result", "data:,x", "thinking"]
            ),
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_no_message_is_refused(message: Any) -> None:
    """Any JSON at all has parts and words."""
    list(call_names(message))
    for part in read_message(message, {}).parts:
        assert isinstance(part_words(part, 20), str)
    assert len(beginning(message, 30)) <= 30
