"""`python -m bench NAME`, in a checkout: Rollbook against the machine's own limit, or against peers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollbook.bench import BENCHES, run_bench
from rollbook.cli.errors import run
from rollbook.cli.options import AsJson

app = typer.Typer(add_completion=False)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help=f"{', '.join(BENCHES)}.")],
    json: AsJson = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Where to write; default: a temporary folder here. What learning, materialize, replay, "
            "scale and view make stays there."
        ),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            help="hostile: times 100 kills; learning: times 15 batches; loop: times 200 kills; replay, "
            "scale, view: times 1M turns; rollouts: times 1,000 hostile agents; sql: times 100,000 turns."
        ),
    ] = None,
) -> None:
    """Measure Rollbook against the machine's own limit, in one interleaved run."""
    run_bench(name, folder, json, scale)


if __name__ == "__main__":
    run(app)
