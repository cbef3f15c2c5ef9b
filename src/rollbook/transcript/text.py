"""Recorded text, made safe and short enough to show. Pure.

What agents send and models sample is not to be trusted: an escape sequence in it would drive the terminal it
is printed on, and a right-to-left override would change what a line seems to say. So every character that is
not printable is written as its escape, visibly.
"""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime
from typing import Any

ID_CHARACTERS = 8
"""Of an id; its end, since ids that were made together begin alike."""
SHORT_CHARACTERS, SHORT_LINES = 480, 8
"""What is shown of a long text unless all of it is asked for: so many characters, and lines."""
LONG_CHARACTERS = 600
"""A text is long from here on: of one that is hardly longer than what is shown, nothing is left out."""


def visible(text: str, *, lines: bool = False) -> str:
    """The text with an escape for each character that a terminal would act on; with `lines` it keeps \\n."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c == "\n") else _escape(c) for c in text)


def _escape(character: str) -> str:
    if unicodedata.category(character) == "Zs":  # a wide or unbreakable space is not printable to Python
        return character
    if character == "\t":
        return "    "
    return character.encode("unicode_escape").decode("ascii")


def one_line(value: object, width: int) -> str:
    """The beginning of a text, or of a value as JSON, on one line of at most so many characters."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json_text(value)
    text = visible(" ".join(text[: 4 * width].split()))
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."


def shortened(text: str, *, full: bool = False) -> str:
    """The text, safe to print; of a long text its beginning and end, and how much was left out."""
    lines = text.count("\n") + 1
    if full or (len(text) <= LONG_CHARACTERS and lines <= SHORT_LINES):
        return visible(text, lines=True)
    head = "\n".join(text[: SHORT_CHARACTERS * 3 // 4].split("\n")[: SHORT_LINES - 2])
    tail = text[len(head) :][-SHORT_CHARACTERS // 4 :].split("\n")[-1]
    missing = len(text) - len(head) - len(tail)
    gap = f"\n... {missing:,} characters more ...\n" if missing else ""
    return visible(head.rstrip() + gap + tail.strip(), lines=True)


def json_text(value: Any) -> str:
    """A value as JSON."""
    import orjson

    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def short_id(identity: str) -> str:
    """The end of an id, long enough to distinguish ids."""
    return visible(identity[-ID_CHARACTERS:])


def clock(time_us: int, form: str = "%m-%d %H:%M:%S") -> str:
    """A time (UTC) to the millisecond; the number itself where a clock was too far off for a date."""
    try:
        when = datetime.fromtimestamp(time_us / 1e6, UTC)
    except (ValueError, OverflowError, OSError):
        return str(time_us)
    return f"{when.strftime(form)}.{when.microsecond // 1000:03d}"


def duration(milliseconds: float) -> str:
    """A time span, in a suitable unit."""
    if abs(milliseconds) < 1000:
        return f"{milliseconds:.0f} ms"
    seconds = milliseconds / 1000
    return f"{seconds:.1f} s" if abs(seconds) < 120 else f"{seconds / 60:.1f} min"
