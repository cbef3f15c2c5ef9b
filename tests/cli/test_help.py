"""What the help of every command says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from rich.text import Text
from typer.main import get_command
from typer.testing import CliRunner

from rollbook.cli.app import COMMANDS, app
from rollbook.cli.groups import Announced, literal
from rollbook.cli.replay import group as replay


def _commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from _commands(below, (*words, name))


def _texts(command: Any) -> Iterator[str]:
    """What is written of a command and its options, as its author wrote it."""
    yield from ((command.help or "").split("\n\n"))
    yield command.epilog or ""
    with command.make_context("rollbook", [], resilient_parsing=True) as context:
        shown = (
            parameter for parameter in command.get_params(context) if not getattr(parameter, "hidden", 0)
        )
        yield from (getattr(parameter, "help", None) or "" for parameter in shown)


def _flat(text: str) -> str:
    return " ".join(text.replace("\\[", "[").split())


@pytest.mark.parametrize("words", list(_commands(get_command(app))), ids=" ".join)
def test_help_loses_no_text(words: tuple[str, ...]) -> None:
    """Not even a text in brackets, which the library that draws the help takes for a colour."""
    command: Any = get_command(app)
    for word in words:
        command = command.commands[word]
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "4000"})
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert [text for text in map(_flat, _texts(command)) if text not in shown] == []


@pytest.mark.parametrize(("above", "announced"), [((), COMMANDS), (("replay",), replay.COMMANDS)])
def test_a_group_says_of_its_commands_what_they_say(
    above: tuple[str, ...], announced: Mapping[str, Announced]
) -> None:
    """It imports none of them, so that it has their first paragraphs itself."""
    group: Any = get_command(app)
    for word in above:
        group = group.commands[word]
    said = {name: _flat(command.help.partition("\n\n")[0]) for name, command in group.commands.items()}
    assert said == {name: command.help for name, command in announced.items()}


@pytest.mark.parametrize("text", ["[serve]", "[X]", "a\\[b]", "[/bold]", "[...]", "list[str]", "[[a] b]"])
def test_a_literal_text_is_drawn_as_it_is(text: str) -> None:
    """Whatever stands in brackets, or before them."""
    assert Text.from_markup(literal(text)).plain == text
