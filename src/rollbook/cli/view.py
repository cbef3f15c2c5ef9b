"""`rollbook view`: the log in a browser."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.options import StoreOption
from rollbook.cli.terminal import say


def view(
    store: StoreOption,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8080,
    model: Annotated[
        Path | None, typer.Option(help="Model directory, whose tokenizer gives tokens their text.")
    ] = None,
) -> None:
    """Look at a log in a browser: runs, steps, samples token by token, trajectories, as they become durable.

    Every page has an address that can be shared; with .json behind it, it is JSON.

    rollbook view --store runs
    """
    from rollbook.store.open import open_store
    from rollbook.viewer.serve import serve_viewer

    def announce(url: str) -> None:
        say(f"{store} is at {url}/view/runs")
        sys.stdout.flush()  # a program may wait for it

    serve_viewer(open_store(store), host, port, model, announce)
