"""Recorded text cannot drive a terminal, and long text is cut where it says so."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.transcript.text import clock, duration, one_line, shortened, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é✓🙂", "plain é✓🙂"),
        ("\x1b[31mred\x1b]0;title\x07", "\\x1b[31mred\\x1b]0;title\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("a\rb\x00", "a\\rb\\x00"),
        ("abc\u202edef\u2028", "abc\\u202edef\\u2028"),
        ("\ud83d", "\\ud83d"),
        ("a\tb", "a    b"),
        ("\u3000wide\xa0space", "\u3000wide\xa0space"),
        ("a\nb", "a\\nb"),
    ],
)
def test_control_characters_are_shown_as_escapes(text: str, shown: str) -> None:
    """Control characters, overrides of direction and halves of characters; other text stays."""
    assert visible(text) == shown


@given(st.text(alphabet=st.characters(), max_size=80))
def test_no_control_character_reaches_the_terminal(text: str) -> None:
    """Whatever the text, no control, format or surrogate character is left, but line feeds if asked."""
    for lines in (False, True):
        kinds = {unicodedata.category(c) for c in visible(text, lines=lines) if not (lines and c == "\n")}
        assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert "\n" not in one_line(text, 20)
    assert len(one_line(text, 20)) <= 20


def test_long_text_keeps_its_ends() -> None:
    """Beginning, end, and how many characters are between; `full` keeps all, short text is not touched."""
    text = "begin " + "x" * 1000 + " end"
    short = shortened(text)
    assert short == "begin " + "x" * 354 + "\n... 530 characters more ...\n" + "x" * 116 + " end"
    assert shortened(text, full=True) == text
    lines = "\n".join(f"line {i}" for i in range(20))
    assert (
        shortened(lines)
        == "line 0\nline 1\nline 2\nline 3\nline 4\nline 5\n... 101 characters more ...\nline 19"
    )
    assert shortened("a\nb") == "a\nb"
    assert [shortened("x" * count).count("more") for count in (600, 601)] == [0, 1]


def test_values_on_one_line() -> None:
    """Spaces are collapsed, other values are JSON, nothing is nothing."""
    assert one_line("a\n  b", 10) == "a b"
    assert one_line({"a": [1, None]}, 20) == '{"a":[1,null]}'
    assert one_line("abcdefgh", 7) == "abcd..."
    assert one_line(None, 5) == ""


def test_times_have_a_fitting_unit() -> None:
    """Milliseconds, seconds and minutes; a date that is none is shown as the number it is."""
    assert [duration(x) for x in (0.4, 999, 1234, 119_000, 120_000, -5)] == [
        *("0 ms", "999 ms", "1.2 s", "119.0 s", "2.0 min", "-5 ms")
    ]
    assert clock(1_700_000_000_123_456) == "11-14 22:13:20.123"
    assert clock(10**18) == str(10**18)
