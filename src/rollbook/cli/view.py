"""`rollbook view`: the log in a browser."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.groups import group_with
from rollbook.cli.options import Policy, Run, StoreOption
from rollbook.cli.terminal import say

view_app = typer.Typer(
    cls=group_with("pages"),
    help="Look at a log in a browser, or write a page of it to a file.\n\n"
    "Options alone are those of pages: rollbook view --store runs.",
)
Model = Annotated[Path | None, typer.Option(help="Model directory, whose tokenizer gives tokens their text.")]


@view_app.command("pages")
def view(
    store: StoreOption,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8080,
    model: Model = None,
    keys: Annotated[
        Path | None,
        typer.Option(help="File of API keys (rollbook keys): a reader's reads, a judge's judges."),
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="ROLLBOOK_API_KEYS", help="An operator's key.")
    ] = None,
    rollouts: Annotated[
        Path | None, typer.Option(help="Folder of rollouts, to show what their agents print.")
    ] = None,
    socket: Annotated[Path | None, typer.Option(hidden=True)] = None,
    parent: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Look at a log in a browser: runs, steps, samples token by token, trajectories, as they become durable.

    Every page has an address that can be shared; with .json behind it, it is JSON. Rewards, labels and
    preferences that are given there are written to the log.

    rollbook view --store runs
    """
    from rollbook.edge.keys import keys_of
    from rollbook.store.open import open_store
    from rollbook.viewer.serve import serve_viewer, serve_viewer_beside
    from rollbook.viewer.snapshots import Snapshots

    if socket is not None:
        serve_viewer_beside(open_store(store), socket, parent, model)
        return

    def announce(url: str) -> None:
        say(f"{store} is at {url}/view/runs")
        sys.stdout.flush()  # a program may wait for it

    known = keys_of(api_key or (), keys, os.environ)
    serve_viewer(Snapshots(open_store(store), model), host, port, known, rollouts, announce)


@view_app.command("export")
def export(
    what: Annotated[
        str, typer.Argument(help="A trajectory: its name, its id, or the id's end; or a step's number.")
    ],
    store: StoreOption,
    out: Annotated[Path, typer.Option("-o", "--out", help="File to make.")],
    run: Run = None,
    policy: Policy = "actor",
    model: Model = None,
    redact: Annotated[
        list[str] | None, typer.Option(help="Regular expression of what else is secret; can be repeated.")
    ] = None,
) -> None:
    """Write a trajectory or a step as one HTML file, to send to somebody: no server, no script, no secrets.

    A trajectory comes with its paths token by token, a step with its samples'
    conversations. Keys and tokens of known forms are taken out of all text.

    rollbook view export task-17 --store runs -o task-17.html
    rollbook view export 12 --store runs --run demo -o step-12.html
    """
    from rollbook.cli.runs import of_run
    from rollbook.store.errors import ConfigError
    from rollbook.store.open import open_store
    from rollbook.transcript.finding import find_trajectory
    from rollbook.viewer.export import Export, only_run
    from rollbook.viewer.snapshots import Snapshots

    if out.exists():
        raise ConfigError(f"{out} is there: name another file with -o")
    log = open_store(store)
    with of_run(log, run), Snapshots(log, model).reading() as snapshot:
        export_ = Export(snapshot, redact or ())
        if what.isdigit():
            html = export_.step(run or only_run(snapshot, policy, int(what)), policy, int(what))
        else:
            html = export_.trajectory(find_trajectory(log, snapshot.cut, what, run).trajectory_id)
    out.write_text(html)
    say(f"{out}: {len(html.encode()):,} bytes")
