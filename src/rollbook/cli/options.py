"""Options that several commands share.

Help is printed as it is written: the library that draws it would read `[serve]` as the name of a
colour.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from rollbook.store.workers import Workers

STORE_VARIABLE = "ROLLBOOK_STORE"
StoreOption = Annotated[Path, typer.Option("--store", envvar=STORE_VARIABLE, help="Folder of the store.")]
AsOf = Annotated[str, typer.Option("--as-of", help="Cut: head, step:N, or lane=count,lane=count.")]
Run = Annotated[str | None, typer.Option("--run", help="Run, where the store holds several.")]
RunOfStep = Annotated[
    str | None, typer.Option("--run", help="Run of --as-of step:N, where several have that step.")
]
Policy = Annotated[str, typer.Option(help="Which line of weights.")]
Named = Annotated[str, typer.Argument(help="The client's name of it, our id, or the id's end.")]
FirstStep = Annotated[int | None, typer.Option("--from", help="First step; default: the run's first.")]
LastStep = Annotated[int | None, typer.Option("--to", help="Last step; default: the run's last.")]
Source = Annotated[Literal["cut", "tail"], typer.Option(help="cut: the log as it is; tail: as it grows.")]
"""Where a training takes its samples from."""
TrustParts = Annotated[
    bool, typer.Option("--trust-parts", help="Import and run parts of one's own that manifests name.")
]
RowFormat = Annotated[
    str,
    typer.Option(
        "--format",
        help="Shape of rows: auto, messages, sharegpt, alpaca, prompt-completion, preference or dialogue.",
    ),
]
RowKeys = Annotated[
    list[str] | None,
    typer.Option("--key", help="Which key of the rows is meant, NAME=KEY: --key completion=solution."),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out rows that cannot be used.")]
LeaveOut = Annotated[
    str,
    typer.Option(
        "--leave-out", help="Parts of replies to leave out where the template has no form: reasoning,calls."
    ),
]
TemplateKwargs = Annotated[
    str,
    typer.Option(
        "--chat-template-kwargs",
        help="JSON object that the chat template is given, such as '{\"enable_thinking\": false}'.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON for machines.")]
Ray = Annotated[
    int,
    typer.Option(
        "--ray",
        min=0,
        help="Have so many workers of Ray's cluster do it (RAY_ADDRESS, or one started here); 0: here.",
    ),
]
RayStore = Annotated[
    Path | None,
    typer.Option(
        "--ray-store", help="Folder of the store on the nodes of --ray; default: the path that it has here."
    ),
]


def ray_workers(count: int, there: Path | None) -> Workers:
    """The workers that `--ray` asks for.

    Raises:
        BadParameter: `--ray-store` without them.
    """
    from rollbook.store.workers import Workers

    if there is not None and not count:
        raise typer.BadParameter("says where workers find the store: add --ray N", param_hint="--ray-store")
    return Workers(count, there)


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


class LiteralGroup(TyperGroup):
    """The command that all others stand below: it makes the help of all of them literal, once."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        make_literal(self)
