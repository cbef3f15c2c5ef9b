"""`rollbook bench` and `rollbook demo`: see what it does, and how fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.options import AsJson


def bench(
    name: Annotated[
        str,
        typer.Argument(
            help="append, bits, hostile, learning, loop, materialize, proxy, recover, replay, rollouts, "
            "scale, seal, sql, sync, tail or train."
        ),
    ],
    json: AsJson = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Where to write; default: a temporary folder here. What learning, materialize, replay "
            "and scale make stays there."
        ),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            help="hostile: times 100 kills; learning: times 15 batches; loop: times 200 kills; replay, "
            "scale: times 1M turns; rollouts: times 1,000 hostile agents; sql: times 100,000 turns."
        ),
    ] = None,
) -> None:
    """Measure Rollbook against the machine's own limit, in one interleaved run."""
    from rollbook.bench import run_bench

    run_bench(name, folder, json, scale)


def demo(
    store: Annotated[Path, typer.Option(help="Folder to make; it must not exist yet.")] = Path("demo-store"),
    seed: Annotated[int, typer.Option(help="Decides the model, the tasks and every draw.")] = 0,
    replace: Annotated[bool, typer.Option(help="Remove an earlier demo's folder first.")] = False,
) -> None:
    """See all of it in a few minutes: record, query, train offline and online, replay."""
    from rollbook.demo.run import run_demo

    raise typer.Exit(run_demo(store, seed, replace))
