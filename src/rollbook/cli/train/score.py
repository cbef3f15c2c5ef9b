"""`rollbook score`: rewards by a model, and what was scored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rollbook.cli.options import AsJson, Ray, StoreOption, ray_workers
from rollbook.cli.terminal import print_json, say

if TYPE_CHECKING:
    from rollbook.train.reward_scores import Scored, Scoring


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
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto: a GPU if there is one.")
    ] = "auto",
    ray: Ray = 0,
    json: AsJson = False,
) -> None:
    """Reward finished trajectories by a model: each that has no reward of the source gets one, as an event.

    A training whose recipe names the source then goes by them, at a cut, or
    on the tail with --follow. Interrupted, the same command goes on.

    rollbook score runs/checkpoints/math/reward/v00000100 --store runs --run math --source judge
    rollbook train grpo.toml --store runs --set recipe.reward_source=judge
    """
    scoring = scoring_of(run, source, splits or [], penalty)
    run_score(model, store, scoring, lane, calibrated, follow, device, ray, json)


def scoring_of(run: str, source: str, splits: list[str], penalty: float) -> Scoring:
    """What the options ask for; without splits, all of them.

    Raises:
        BadParameter: there is no such split.
    """
    from rollbook.store.events import SPLITS
    from rollbook.train.reward_scores import Scoring

    if unknown := sorted(set(splits) - set(SPLITS)):
        raise typer.BadParameter(f"{unknown[0]!r}: use {', '.join(sorted(SPLITS))}", param_hint="--split")
    return Scoring(run, source, tuple(splits or sorted(SPLITS)), penalty)


def run_score(
    model: Path,
    path: Path,
    scoring: Scoring,
    lane: str,
    with_temperature: bool,
    idle_timeout_s: float | None,
    device: str,
    ray: int,
    as_json: bool,
) -> None:
    """Score, and print a summary.

    Raises:
        ConfigError: the options do not fit the model or the store.
        ModelError: the model is no reward model.
        CutError: the store has no such run.
    """
    from rollbook.cli.progress import progress
    from rollbook.cli.runs import check_run
    from rollbook.engines.hub import model_folder
    from rollbook.store.errors import ConfigError
    from rollbook.store.open import open_store
    from rollbook.train.reward_scores import RewardModel, calibrated, score_run

    log, model = open_store(path), model_folder(model)
    check_run(log, scoring.run, log.head())
    if with_temperature:
        scoring = replace(scoring, temperature=calibrated(log, model))
    reward_model = RewardModel.of(model)
    if scoring.penalty and not reward_model.gives_deviations:
        raise ConfigError(
            f"--penalty {scoring.penalty:g}: {model} gives scores without a standard deviation; train one "
            'with head = "mean_deviation", or leave the option out'
        )
    done = score_run(
        log,
        reward_model,
        scoring,
        lane=lane,
        idle_timeout_s=idle_timeout_s,
        progress=progress,
        device=device,
        workers=ray_workers(ray, None),
    )
    _show(done, scoring, as_json=as_json)


def _show(done: Scored, scoring: Scoring, *, as_json: bool) -> None:
    left = {why: count for why, count in done.left_out.items() if count}
    if as_json:
        print_json({"scored": done.scored, "already_there": done.already, "left_out": left})
        return
    there = f"; {done.already} had one already" if done.already else ""
    what = f"trajectories of run {scoring.run}, as rewards of source {scoring.source}"
    say(f"scored {done.scored} {what}{there}")
    if left:
        say("left out: " + ", ".join(f"{why} {count}" for why, count in sorted(left.items())))
