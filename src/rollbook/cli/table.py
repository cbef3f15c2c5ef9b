"""Prints rows as a table: numbers right-aligned, long values cut, one value per line if too wide."""

from __future__ import annotations

from typing import Any

import orjson
from rich.table import Table
from rich.text import Text

from rollbook.cli.show.terminal_text import visible
from rollbook.cli.terminal import Console

CELL_WIDTH = 60


def print_table(names: list[str], rows: list[tuple[Any, ...]]) -> None:
    """Print rows, and on standard error how many there are."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    numeric = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(names))]
    for name, number in zip(names, numeric, strict=True):
        table.add_column(name, justify="right" if number and rows else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    console = Console()
    widths = [max([len(n), *(len(_cell(row[i])) for row in rows)]) for i, n in enumerate(names)]
    if sum(widths) + 2 * len(widths) <= console.width:
        console.print(table)
    else:
        _print_expanded(console, names, rows)
    Console(stderr=True).tell((f"{len(rows)} rows", "dim"))


def _print_expanded(console: Console, names: list[str], rows: list[tuple[Any, ...]]) -> None:
    """Print one value per line, for rows wider than the terminal."""
    width = max(len(name) for name in names)
    for number, row in enumerate(rows, 1):
        console.tell((f"-- row {number} --", "dim"))
        for name, value in zip(names, row, strict=True):
            line = Text(f"{name:<{width}}  ", style="bold").append(_cell(value), style="not bold")
            console.print(line, overflow="fold", soft_wrap=True)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    whole = orjson.dumps(value, default=str).decode() if isinstance(value, (list, dict)) else str(value)
    text = visible(whole[: CELL_WIDTH + 1], lines=True)
    return text if len(text) <= CELL_WIDTH else text[: CELL_WIDTH - 1] + "…"
