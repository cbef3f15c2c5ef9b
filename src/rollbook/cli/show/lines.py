"""Prints traffic: a line per turn, or per event."""

from __future__ import annotations

from rich.text import Text

from rollbook.cli.terminal import Console, say
from rollbook.store.events import Event
from rollbook.transcript.text import visible
from rollbook.transcript.traffic import Traffic, line_of, plain_text


class EventLines:
    """Prints events for people, with colours if the output is a terminal."""

    def __init__(self) -> None:
        self._console = Console(soft_wrap=True)

    def __call__(self, event: Event) -> None:
        time, place, kind, trajectory, summary = map(visible, line_of(event))
        colour = {"turn": "cyan", "trajectory": "green", "reward": "yellow", "step": "magenta"}
        text = Text.assemble(
            (f"{time} ", "dim"),
            f"{place:<14} ",
            (f"{kind:<22} ", "red" if kind.endswith(".failed") else colour.get(kind.split(".")[0], "")),
            (f"{trajectory:<8} ", "dim"),
            summary,
        )
        self._console.print(text)


class TurnLines:
    """Prints traffic; with colours on a terminal, else without Rich, which would take most of the time."""

    def __init__(self) -> None:
        self._console = Console(soft_wrap=True)
        self._coloured = self._console.is_terminal
        self._traffic = Traffic(self._console.width if self._coloured else None)

    def __call__(self, event: Event) -> None:
        for line in self._traffic.lines(event):
            if self._coloured:
                self._console.print(Text.assemble(*line))
            else:
                say(plain_text(line))
