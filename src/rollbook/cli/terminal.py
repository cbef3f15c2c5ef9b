"""Prints text to a terminal. Control characters in recorded text are escaped, so they have no effect.

Every command prints through here. `Console` writes an escape for each character that a terminal would act on,
at the last moment, when all that is to be styled has its style; and takes no text for markup. JSON keeps its
exact values: such a character is written there as JSON's own escape.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

import orjson
from rich.console import Console as _RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from rollbook.cli.show.terminal_text import visible
from rollbook.store.redaction import shown

_NOT_ASCII_CONTROLS = re.compile(
    "[\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001345f\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0001-\U000e007f]"
)
"""Of what JSON need not escape, what a terminal or a reader's eye would be led by: C1, marks of direction."""


class Console(_RichConsole):
    """Rich's console, which prints escapes and Rich's markup in a text as plain characters."""

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False) -> None:
        super().__init__(stderr=stderr, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of styled text, with control characters escaped."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(visible(segment.text, lines=True), segment.style)

    def on_broken_pipe(self) -> None:
        """Let BrokenPipeError end the command, as if it printed without Rich."""
        raise BrokenPipeError(errno.EPIPE, "nobody reads the output")

    def tell(self, *parts: str | tuple[str, str]) -> None:
        """Print a line of texts, each with the style beside it, if it has one; it is not broken."""
        self.print(Text.assemble(*parts), soft_wrap=True)


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line, or several, of plain text."""
    out = file or sys.stdout
    # Standard error may lead to a full disk too: no request fails because of that.
    with contextlib.suppress(*([OSError] if out is sys.stderr else [])):
        print(visible(text, lines=True), file=out, flush=out is sys.stderr)


def json_for_terminal(data: bytes) -> str:
    """JSON of the same value, in which every character that a terminal would act on is escaped."""
    text = data.decode()
    if text.isascii() and "\x7f" not in text:
        return text
    return _NOT_ASCII_CONTROLS.sub(_json_escape, text)


def _json_escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def print_json(value: Any, *, indent: bool = True) -> None:
    """Print a value as JSON; what has no JSON form is printed as its text."""
    option = orjson.OPT_INDENT_2 if indent else 0
    print(json_for_terminal(orjson.dumps(value, default=str, option=option)), flush=True)


class LogFormatter(logging.Formatter):
    """Log records for people: escaped, without secrets, an exception by its name and text alone."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            text = f"{text.rstrip()}: {type(error).__name__}: {error}"
        return visible(shown(text.strip()), lines=True)
