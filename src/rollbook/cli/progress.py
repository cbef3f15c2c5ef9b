"""A progress bar on standard error for long work; nothing if it is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from rollbook.cli.terminal import Console


@contextmanager
def progress(what: str, total: int, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Context with a function that advances the bar; the bar is removed at its end."""
    with _bar(what, total, shown) as (bar, task):
        yield lambda count: bar.advance(task, count)


@contextmanager
def counted(what: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Context with a function that is told how much is done, of how much; the bar is removed at its end."""
    with _bar(what, None, shown) as (bar, task):
        yield lambda count, total: bar.update(task, completed=count, total=total)


@contextmanager
def _bar(what: str, total: int | None, shown: bool) -> Iterator[tuple[Progress, TaskID]]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    silent = not (shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=silent) as bar:
        yield bar, bar.add_task(what, total=total)
