"""Rows of data sets as chats: each format by example, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rollbook.ingest.datasets.formats import RowError, converted

ASKED = {"role": "user", "content": "2+2?"}
RIGHT, WRONG = ({"role": "assistant", "content": text} for text in ("4", "5"))


def _lines(row: dict[str, Any], copies: int = 0) -> list[tuple[list[Any], int | None, float | None]]:
    chats = converted(row, copies)
    return [(line["messages"], line.get("context"), line.get("reward")) for line in chats.lines]


def test_prompts_and_completions() -> None:
    """As texts and as messages, with a label as reward; the prompt is context."""
    text = {"prompt": "2+2?", "completion": "4"}
    chat = {"prompt": [ASKED], "completion": [RIGHT]}
    assert _lines(text) == _lines(chat) == [([ASKED, RIGHT], 1, None)]
    assert _lines(text | {"label": True}) == [([ASKED, RIGHT], 1, 1.0)]
    assert _lines(text | {"label": False}) == [([ASKED, RIGHT], 1, 0.0)]


def test_preferences() -> None:
    """With a prompt and without, as texts and as messages: the same two chats, in one group."""
    text = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
    explicit = {"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]}
    implicit = {"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]}
    for row in (text, explicit, implicit):
        chats = converted(row)
        assert [line["messages"] for line in chats.lines] == [[ASKED, RIGHT], [ASKED, WRONG]]
        assert {line["context"] for line in chats.lines} == {1}
        assert len({line["group"] for line in chats.lines}) == 1
        assert [name.rpartition("-")[2] for name in chats.names] == ["chosen", "rejected"]
        assert chats.margin is None
    scored = converted(text | {"margin": 2, "score_chosen": 0.9, "score_rejected": -1, "from": "x"})
    assert (scored.margin, [line["reward"] for line in scored.lines]) == (2.0, [0.9, -1.0])
    assert [line["from"] for line in scored.lines] == ["x", "x"]


def test_chats_keep_their_replies() -> None:
    """All of them count; a name of their own stays."""
    [line] = converted({"messages": [ASKED, RIGHT], "id": 7}).lines
    assert (line["messages"], line.get("context"), line["trajectory"]) == ([ASKED, RIGHT], None, "7")


def test_names_follow_from_content() -> None:
    """Equal rows have equal names, but for how many came before."""
    row = {"prompt": "a", "completion": "b"}
    assert converted(row).names == converted(dict(reversed(row.items()))).names
    assert converted(row, 2).names == (f"{converted(row).names[0]}-3",)
    assert converted(row | {"completion": "c"}).names != converted(row).names


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "x"}, "it has text: a text without roles"),
        ({}, "it has no key"),
        ({"prompt": "a", "chosen": "b"}, "chosen or rejected alone"),
        ({"chosen": "a", "rejected": "b"}, "texts without a prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "the same"),
        ({"chosen": [ASKED], "rejected": [ASKED, WRONG]}, "only the beginning of the other"),
        ({"prompt": 3, "completion": "b"}, "prompt is 3: write a text"),
        ({"prompt": [], "completion": "b"}, "prompt is"),
        ({"prompt": "a", "completion": "b", "label": 1}, "label is 1: write true or false"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"}, "margin is 'much'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": float("nan")}, "margin is nan"),
    ],
)
def test_what_is_refused(row: dict[str, Any], reason: str) -> None:
    """With what is wrong, and what to write."""
    with pytest.raises(RowError, match=reason):
        converted(row)
