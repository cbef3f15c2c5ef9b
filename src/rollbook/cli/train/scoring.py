"""What `rollbook score` does, and prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from rollbook.cli.progress import progress
from rollbook.cli.runs import check_run
from rollbook.cli.terminal import print_json, say
from rollbook.engines.hub import model_folder
from rollbook.store.errors import ConfigError
from rollbook.store.events import SPLITS
from rollbook.store.open import open_store
from rollbook.train.reward_scores import RewardClassifier, Scoring, calibrated, score_run


def scoring_of(run: str, source: str, splits: list[str], penalty: float) -> Scoring:
    """What the options ask for; without splits, all of them.

    Raises:
        BadParameter: there is no such split.
    """
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
    as_json: bool,
) -> None:
    """Score, and print a summary.

    Raises:
        ConfigError: the options do not fit the model or the store.
        ModelError: the model is no reward model.
        CutError: the store has no such run.
    """
    log, model = open_store(path), model_folder(model)
    check_run(log, scoring.run, log.head())
    if with_temperature:
        scoring = replace(scoring, temperature=calibrated(log, model))
    classifier = RewardClassifier(model, device)
    if scoring.penalty and not classifier.gives_deviations:
        raise ConfigError(
            f"--penalty {scoring.penalty:g}: {model} gives scores without a standard deviation; train one "
            'with head = "mean_deviation", or leave the option out'
        )
    done = score_run(log, classifier, scoring, lane=lane, idle_timeout_s=idle_timeout_s, progress=progress)
    left = {why: count for why, count in done.left_out.items() if count}
    if as_json:
        print_json({"scored": done.scored, "already_there": done.already, "left_out": left})
        return
    there = f"; {done.already} had one already" if done.already else ""
    of = f"trajectories of run {scoring.run}, as rewards of source {scoring.source}"
    say(f"scored {done.scored} {of}{there}")
    if left:
        say("left out: " + ", ".join(f"{why} {count}" for why, count in sorted(left.items())))
