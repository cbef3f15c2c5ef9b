"""Prints text to a terminal. Control characters in recorded text are escaped, so they have no effect.

Every command prints through here. `Console` writes an escape for each character that a terminal would act on,
at the last moment, when all that is to be styled has its style; and takes no text for markup. JSON keeps its
exact values: such a character is written there as JSON's own escape.

Rows are printed as a table: numbers right-aligned, long values cut, one value per line if too wide.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console as _RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rollbook.transcript.text import visible

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
    import orjson

    option = orjson.OPT_INDENT_2 if indent else 0
    print(json_for_terminal(orjson.dumps(value, default=str, option=option)), flush=True)


def json_items(values: list[Any]) -> str:
    """Values as `print_json` has them among the items of a list; empty where there are none."""
    import orjson

    whole = json_for_terminal(orjson.dumps(values, default=str, option=orjson.OPT_INDENT_2))
    return whole[2:-2] if values else ""


def print_items(parts: Iterable[str]) -> None:
    """Print a list, of which these are items: as `print_json` would, and as they come."""
    before = "[\n"
    for part in filter(None, parts):
        print(before, part, sep="", end="")
        before = ",\n"
    print("[]" if before == "[\n" else "\n]", flush=True)


class LogFormatter(logging.Formatter):
    """Log records for people: escaped, without secrets, an exception by its name and text alone."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        from rollbook.store.redaction import shown

        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            text = f"{text.rstrip()}: {type(error).__name__}: {error}"
        return visible(shown(text.strip()), lines=True)


MIB = 1 << 20
CELL_WIDTH = 60


def print_table(names: list[str], rows: list[tuple[Any, ...]]) -> None:
    """Print rows, and on standard error how many there are."""
    draw_table(Console(), names, rows)
    Console(stderr=True).tell((f"{len(rows)} rows", "dim"))


def table_of(*names: str, **column: Any) -> Table:
    """A table without lines.

    Args:
        names: of its columns; `>` stands before those of numbers, which are right-aligned.
        column: what else holds of every column.
    """
    table = Table(box=None, pad_edge=False)
    for name in names:
        justify: Any = "right" if name.startswith(">") else "left"
        table.add_column(name.removeprefix(">"), justify=justify, **column)
    return table


def draw_table(
    console: Console, names: list[str], rows: list[tuple[Any, ...]], cell: int = CELL_WIDTH
) -> None:
    """Print rows; those that the terminal is too narrow for with one value per line.

    Args:
        cell: a value's longest text, in characters; longer ones are cut.
    """
    table = table_of()
    numeric = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(names))]
    for name, number in zip(names, numeric, strict=True):
        table.add_column(name, justify="right" if number and rows else "left", overflow="fold")
    texts = [tuple(_cell(value, cell) for value in row) for row in rows]
    for row in texts:
        table.add_row(*map(Text, row))
    widths = [max([len(n), *(len(row[i]) for row in texts)]) for i, n in enumerate(names)]
    if sum(widths) + 2 * len(widths) <= console.width:
        console.print(table)
    else:
        _print_expanded(console, names, texts)


def _print_expanded(console: Console, names: list[str], rows: list[tuple[str, ...]]) -> None:
    """Print one value per line, for rows wider than the terminal."""
    width = max(len(name) for name in names)
    for number, row in enumerate(rows, 1):
        console.tell((f"-- row {number} --", "dim"))
        for name, value in zip(names, row, strict=True):
            line = Text(f"{name:<{width}}  ", style="bold").append(value, style="not bold")
            console.print(line, overflow="fold", soft_wrap=True)


def _cell(value: Any, most: int) -> str:
    import orjson

    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    whole = orjson.dumps(value, default=str).decode() if isinstance(value, (list, dict)) else str(value)
    text = visible(whole[: most + 1], lines=True)
    return text if len(text) <= most else text[: most - 1] + "…"
