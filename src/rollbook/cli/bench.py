"""`rollbook bench` and `rollbook demo`: see what it does, and how fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.options import AsJson


def bench(
    name: Annotated[str, typer.Argument(help="append: durable appends; bits: a step's numbers.")],
    json: AsJson = False,
    folder: Annotated[
        Path | None, typer.Option(help="Where to write; default: a temporary folder here.")
    ] = None,
) -> None:
    """Measure this machine: how fast its disk takes events, or how far its processor's numbers lie apart.

    All other benchmarks are run in a checkout of Rollbook: python -m bench NAME.
    """
    from rollbook.bench import SHIPPED, run_bench
    from rollbook.store.errors import ConfigError

    if name not in SHIPPED:
        here = f"benchmark {name!r}: {' and '.join(SHIPPED)} are installed"
        raise ConfigError(f"{here}, and all others are run in a checkout of Rollbook: python -m bench {name}")
    run_bench(name, folder, json)


def demo(
    store: Annotated[Path, typer.Option(help="Folder to make; it must not exist yet.")] = Path("demo-store"),
    seed: Annotated[int, typer.Option(help="Decides the model, the tasks and every draw.")] = 0,
    replace: Annotated[bool, typer.Option(help="Remove an earlier demo's folder first.")] = False,
) -> None:
    """See all of it in a few minutes: record, query, train offline and online, replay."""
    from rollbook.demo.run import run_demo

    raise typer.Exit(run_demo(store, seed, replace))
