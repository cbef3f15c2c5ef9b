"""`rollbook rollout`: its options. What it does is imported when it runs: see `cli.online.rolling`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.options import AsJson

Config = Annotated[Path, typer.Argument(help="TOML file: tasks, agent, clocks, scores.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Overrule a key, such as concurrency=8 or clocks.total_s=600."),
]
Key = Annotated[
    str | None,
    typer.Option(envvar="ROLLBOOK_KEY", help="An operator's key, if the proxy asks for keys."),
]
Follow = Annotated[
    bool,
    typer.Option("--follow", help="Go over the tasks again and again, until an online training ends."),
]
OnRay = Annotated[
    bool, typer.Option("--ray", help="Have an actor of a Ray cluster run them: that of RAY_ADDRESS.")
]
Resources = Annotated[
    list[str] | None,
    typer.Option(help="With --ray: what the actor takes, such as cpu_node=0.01; once for each."),
]
ScoreAgain = Annotated[
    bool,
    typer.Option(
        "--score-again",
        help="Run nothing: score again what ended and left its folder; what changed is superseded.",
    ),
]


def rollout(
    config: Config,
    overrides: Set = None,
    key: Key = None,
    follow: Follow = False,
    ray: OnRay = False,
    resources: Resources = None,
    score_again: ScoreAgain = False,
    json: AsJson = False,
) -> None:
    """Run agents on tasks: started, watched and scored, each a trajectory of the proxy's log.

    An agent is a program that speaks OpenAI's or Anthropic's API, unchanged, or
    a class in Python. Trajectories whose infrastructure failed are void, and
    tried again. Interrupted, the same command goes on where it was.

    rollbook serve serve.toml --store runs
    rollbook rollout rollouts.toml --set samples=8
    rollbook rollout rollouts.toml --follow
    rollbook rollout rollouts.toml --ray --resources cpu_node=0.01
    rollbook sql "select status, count(*) from launches group by 1" --store runs

    Exit codes: 0 all places have their trajectory, 1 some were given up (or, of
    --score-again, some scorers failed), 2 they could not begin or go on, 75 the
    proxy was lost: the same command goes on.
    """
    from rollbook.cli.online.rolling import resources_of, run_rollouts, run_scoring

    if resources and not ray:
        raise typer.BadParameter("goes with --ray", param_hint="--resources")
    if score_again:
        raise typer.Exit(run_scoring(config, overrides or [], key, json=json))
    cluster = resources_of(resources or []) if ray else None
    raise typer.Exit(run_rollouts(config, overrides or [], key, follow, cluster, json=json))
