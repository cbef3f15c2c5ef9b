"""`rollbook run`: its options. What it does is imported when it runs: see `cli.online.running`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Only(StrEnum):
    """Parts of a run."""

    engines = "engines"
    proxy = "proxy"
    trainer = "trainer"
    rollouts = "rollouts"


def run_online(
    config: Annotated[Path, typer.Argument(help="TOML file with [serve], [train], [rollout], [engines].")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Overrule a key, such as train.optimizer.lr=1e-5 or serve.port=9000."),
    ] = None,
    only: Annotated[
        list[Only] | None,
        typer.Option(help="Start this part alone, or these: the others run elsewhere."),
    ] = None,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="Have a Ray cluster place the trainer's ranks, and run the rollouts."),
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="End what an earlier start of this run left running.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print the commands that would be started, and start nothing.")
    ] = False,
) -> None:
    """Train online with one command: engines, proxy, trainer and rollouts.

    Each part is a process of its own, with a log of its own. What dies is
    started again, and goes on from the log. When the training has ended, or
    on SIGINT, SIGTERM and SIGHUP (a closed terminal), all are stopped: the
    rollouts, and the trainer after its step with a checkpoint, then the proxy,
    then the engines. The same command goes on.

    rollbook run online.toml
    rollbook run online.toml --set train.steps=500
    rollbook run online.toml --only engines        (on another machine)
    rollbook run online.toml --ray                 (on a node of a Ray cluster)

    Exit codes: 0 the training has ended, 2 a part cannot be started or died
    too often, 130 and 143 stopped by SIGINT and SIGTERM (or SIGHUP).
    """
    from rollbook.cli.online.running import run_whole

    raise typer.Exit(
        run_whole(
            config,
            overrides or [],
            [part.value for part in only or ()],
            ray=ray,
            take_over=take_over,
            show=show,
        )
    )
