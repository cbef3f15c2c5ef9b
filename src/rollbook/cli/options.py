"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

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
