"""Help is said as it was written: the library that draws it would take `[serve]` for the name of a colour."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperGroup

_MARKUP = re.compile(r"\\*\[[a-z#/@][^\[]*?\]")
"""What the library would read as markup, with the backslashes before it, of which two would say one."""


def literal(text: str) -> str:
    """The text in the form in which the library draws it as it is."""
    return _MARKUP.sub(lambda found: found[0].replace("\\", "\\\\").replace("[", "\\["), text)


def make_literal(command: Any) -> None:
    """Make every text of a command's help literal, and of the commands below it."""
    command.help = literal(command.help or "")
    command.epilog = literal(command.epilog or "")
    for parameter in command.params:
        parameter.help = literal(getattr(parameter, "help", None) or "")
    for below in getattr(command, "commands", {}).values():
        make_literal(below)


class LiteralGroup(TyperGroup):
    """The command that all others stand below: it makes the help of all of them literal, once."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        make_literal(self)
