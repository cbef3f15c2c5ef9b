"""`rollbook plot`: its options. What it does is imported when it runs: see `cli.train.plotting`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.options import AsJson, AsOf, StoreOption


class Axis(StrEnum):
    """What the curves run over."""

    step = "step"
    version = "version"


def plot(
    store: StoreOption,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write; its ending says what: .png, .svg or .pdf.")
    ] = Path("training.png"),
    runs: Annotated[
        list[str] | None, typer.Option("--run", help="Runs to compare; default: all that have steps.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Which line of weights.")] = "actor",
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metric", help="Columns of the view metrics, a panel each; default: the dashboard."),
    ] = None,
    by: Annotated[Axis, typer.Option(help="Over steps, or over policy versions.")] = Axis.step,
    first: Annotated[int, typer.Option("--from", min=0, help="First step or version that is drawn.")] = 0,
    tensorboard: Annotated[
        Path | None,
        typer.Option(
            help="Write TensorBoard's files into this folder instead, RUN/POLICY each: all metrics."
        ),
    ] = None,
    as_of: AsOf = "head",
    json: AsJson = False,
) -> None:
    """Draw the course of trainings from the log, several runs side by side: reward, held-out reward, loss,
    KL, entropy, lengths, staleness, speed.

    A panel for each metric of which there are values. Steps that were
    abandoned are left out.

    rollbook plot --store runs -o math.svg
    rollbook plot --store runs --run math-1 --run math-2 --metric reward --metric entropy --by version
    rollbook plot --store runs --tensorboard curves
    """
    from rollbook.cli.train.plotting import Wanted, run_plot

    if tensorboard is not None:
        from rollbook.cli.train.plotting import write_curves

        write_curves(store, tensorboard, runs or [], policy, as_of, json)
        return
    wanted = Wanted(runs or [], policy, metrics or [], by.value, first)
    run_plot(store, output, wanted, as_of, json)
