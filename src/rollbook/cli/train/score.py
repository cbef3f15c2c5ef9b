"""`rollbook score`: its options. What it does is imported when it runs: see `cli.train.scoring`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.options import AsJson, StoreOption


class Device(StrEnum):
    """Where it computes."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def score(
    model: Annotated[
        Path,
        typer.Argument(
            help="Reward model: a checkpoint of algorithm reward_model, or transformers' sequence classifier."
        ),
    ],
    store: StoreOption,
    run: Annotated[str, typer.Option(help="Run whose finished trajectories are scored.")],
    source: Annotated[str, typer.Option(help="Source of the rewards: a recipe's reward_source.")],
    splits: Annotated[
        list[str] | None, typer.Option("--split", help="Only these splits: train, eval, teacher.")
    ] = None,
    calibrated: Annotated[
        bool, typer.Option("--calibrated", help="Divide by the temperature of the checkpoint's evaluation.")
    ] = False,
    penalty: Annotated[
        float, typer.Option(min=0, help="Take off so many standard deviations (head mean_deviation).")
    ] = 0.0,
    follow: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Go on as trajectories finish, until none has for so many seconds.",
            show_default=False,
        ),
    ] = None,
    lane: Annotated[str, typer.Option(help="Lane to write; one process each.")] = "score",
    device: Annotated[Device, typer.Option(help="auto: a GPU if there is one.")] = Device.auto,
    json: AsJson = False,
) -> None:
    """Reward finished trajectories by a model: each that has no reward of the source gets one, as an event.

    A training whose recipe names the source then goes by them, at a cut, or
    on the tail with --follow. Interrupted, the same command goes on.

    rollbook score runs/checkpoints/math/reward/v00000100 --store runs --run math --source judge
    rollbook train grpo.toml --store runs --set recipe.reward_source=judge
    """
    from rollbook.cli.train.scoring import run_score, scoring_of

    scoring = scoring_of(run, source, splits or [], penalty)
    run_score(model, store, scoring, lane, calibrated, follow, device.value, json)
