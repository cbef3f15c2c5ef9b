"""Groups of commands: of which options alone mean one, and whose commands are imported when they are called.

Help is printed as it is written: the library that draws it would read `[serve]` as the name of a
colour.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

_MARKUP = re.compile(r"\\*\[[a-z#/@][^\[]*?\]")
"""What the library would read as markup, with the backslashes before it, of which two would say one."""


def literal(text: str) -> str:
    """The text, escaped so that the library that draws help prints it as it is."""
    return _MARKUP.sub(lambda match: match[0].replace("\\", "\\\\").replace("[", "\\["), text)


def make_literal(command: Any) -> None:
    """Make every text of a command's help literal, and of the commands below it."""
    command.help = literal(command.help or "")
    command.epilog = literal(command.epilog or "")
    for parameter in command.params:
        parameter.help = literal(getattr(parameter, "help", None) or "")
    for below in getattr(command, "commands", {}).values():
        make_literal(below)


def group_with(default: str, *, words: bool = False) -> type[TyperGroup]:
    """A group of commands that means one of them where options alone are given, or nothing.

    Args:
        words: also where the first word is no command: it is that one's argument.
    """

    class WithDefault(TyperGroup):
        """Such a group."""

        def named(self, args: list[str]) -> list[str]:
            """The arguments, with the command's name before them."""
            if not args:
                return args if self.no_args_is_help else [default]
            options = args[0].startswith("-") and args[0] != "--help"
            unknown = words and not args[0].startswith("-") and args[0] not in self.commands
            return [default, *args] if options or unknown else args

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            """As any group of commands, of the arguments with the command's name."""
            parsed: list[str] = super().parse_args(ctx, self.named(args))
            return parsed

    return WithDefault


class Announced(NamedTuple):
    """A command that is imported when it is called.

    Attributes:
        place: `module:name` of its function or group, below `rollbook.cli`.
        help: what the help of the group above says of it: the first paragraph of its own.
    """

    place: str
    help: str


def group_of(announced: Mapping[str, Announced]) -> type[TyperGroup]:
    """A group of these commands, in this order. Help imports none of them, a call only the one it names."""

    class OfAnnounced(TyperGroup):
        """Such a group."""

        def __init__(self, **values: Any) -> None:
            super().__init__(**values)
            make_literal(self)
            commands: Any = _Commands(announced)
            self.commands = commands

        def list_commands(self, ctx: Any) -> list[str]:
            """The names."""
            return list(announced)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            """What help needs of a command; None if there is none of the name."""
            found = announced.get(cmd_name)
            return None if found is None else TyperCommand(cmd_name, help=literal(found.help))

        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
            """As any group of commands, but what is called is the command itself."""
            name, _, rest = super().resolve_command(ctx, args)
            return name, None if name is None else self.commands[name], rest

        def get_help_option(self, ctx: Any) -> Any:
            """--help; typer would import pydantic to read of it that it is not given."""
            option = super().get_help_option(ctx)
            if option is not None:
                option.default = False
            return option

    return OfAnnounced


class _Commands(Mapping[str, Any]):
    """Name -> command, imported as it is taken."""

    def __init__(self, announced: Mapping[str, Announced]) -> None:
        self._announced = announced
        self._taken: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._taken:
            self._taken[name] = _imported(name, self._announced[name].place)
        return self._taken[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._announced)

    def __len__(self) -> int:
        return len(self._announced)


def _imported(name: str, place: str) -> Any:
    """The command of this name; its help is literal."""
    module, _, attribute = place.partition(":")
    found = getattr(importlib.import_module(f"rollbook.cli.{module}"), attribute)
    above = typer.Typer()
    if isinstance(found, typer.Typer):
        above.add_typer(found, name=name)
    else:
        above.command(name)(found)
    command = get_group(above).commands[name]
    if not isinstance(getattr(command, "commands", None), _Commands):  # else it has made itself literal
        make_literal(command)
    return command
