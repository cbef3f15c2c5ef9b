"""docs/glossary.md: a word for each view and each kind of event, explained once."""

from __future__ import annotations

import re
from pathlib import Path

from rollbook.store.events import RECORDS
from rollbook.store.sql.views import VIEWS

PAGE = Path(__file__).parents[2] / "docs" / "glossary.md"
ROWS = [line.split("|")[1:4] for line in PAGE.read_text().splitlines() if re.match(r"\| (?!word)\S", line)]
WORDS = {word.strip(" `") for row in ROWS for word in row[0].split(",")}


def test_every_view_has_its_word() -> None:
    """What a row of it is, under the name that queries use."""
    named = {word for row in ROWS for word in re.findall(r"`(\w+)`", row[0])}
    assert named == {view.name for view in VIEWS}


def test_every_kind_of_event_is_of_a_word() -> None:
    """The noun before its dot is explained."""
    nouns = {kind.split(".")[0] for kind in RECORDS} - {"eval", "stop"}
    assert nouns - WORDS == set()


def test_a_word_stands_once_and_says_something() -> None:
    """Each row has a word, a meaning in one sentence, and perhaps other projects' words."""
    words = [row[0].strip() for row in ROWS]
    assert len(words) == len(set(words)) > 60
    for word, meaning, _ in ROWS:
        assert len(meaning.split()) >= 4, word
        assert not meaning.rstrip().endswith("."), word
