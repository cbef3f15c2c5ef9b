"""The one command, `rollbook`: its commands, in the order of its help.

A command's module holds its options and what it does, and imports what it needs when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from rollbook import __version__
from rollbook.cli.bench import bench, demo
from rollbook.cli.errors import EPILOG, run
from rollbook.cli.export import export_app
from rollbook.cli.importing import import_
from rollbook.cli.keys import keys_app
from rollbook.cli.lineage.command import lineage_app
from rollbook.cli.online.rollout import rollout
from rollbook.cli.online.run import run_online
from rollbook.cli.options import LiteralGroup
from rollbook.cli.replay.bisect import replay_bisect
from rollbook.cli.replay.bundle import export_app as replay_export_app
from rollbook.cli.replay.bundle import open_bundle
from rollbook.cli.replay.rollout import rollout as replay_rollout
from rollbook.cli.replay.serve import replay_serve
from rollbook.cli.replay.step import replay_step
from rollbook.cli.replay.stretch import replay_run, replay_weights
from rollbook.cli.replay.what_if import what_if
from rollbook.cli.samples import recipe_diff, samples
from rollbook.cli.serve import ServeCommand, serve
from rollbook.cli.service import service_app
from rollbook.cli.show.command import show
from rollbook.cli.show.ledger import ledger
from rollbook.cli.sql import sql
from rollbook.cli.store.store import store_app
from rollbook.cli.tail import tail
from rollbook.cli.train.doctor import doctor, preflight
from rollbook.cli.train.plot import plot
from rollbook.cli.train.score import score
from rollbook.cli.train.train import train
from rollbook.cli.view import view_app

app = typer.Typer(
    cls=LiteralGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The ledger of agent rollouts: record agent traffic, query it with SQL, train on it, "
    "replay any step bit for bit.",
    epilog=EPILOG,
)
replay_app = typer.Typer(no_args_is_help=True, help="Re-run what the log says happened, and compare.")
app.add_typer(replay_app, name="replay")
replay_app.add_typer(replay_export_app, name="export")
recipe_app = typer.Typer(no_args_is_help=True, help="What recipes make of a log.")
app.add_typer(recipe_app, name="recipe")
app.add_typer(store_app, name="store")
app.add_typer(keys_app, name="keys")
app.add_typer(export_app, name="export")
app.add_typer(lineage_app, name="lineage")

app.command(cls=ServeCommand)(serve)
app.add_typer(view_app, name="view")
command: Callable[..., None]
for command in (sql, tail, show, samples, ledger, train, preflight, doctor):
    app.command()(command)
app.command("import")(import_)
app.command("run")(run_online)
for command in (plot, rollout, score):
    app.command()(command)
app.add_typer(service_app, name="service")
for command in (bench, demo):
    app.command()(command)
recipe_app.command("diff")(recipe_diff)
replay_commands: dict[str, Callable[..., None]] = {
    "open": open_bundle,
    "serve": replay_serve,
    "step": replay_step,
    "rollout": replay_rollout,
    "run": replay_run,
    "weights": replay_weights,
    "bisect": replay_bisect,
    "what-if": what_if,
}
for name, command in replay_commands.items():
    replay_app.command(name)(command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"rollbook {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: see `cli_errors` for what is said of errors, and the exit codes."""
    run(app)


if __name__ == "__main__":
    main()
