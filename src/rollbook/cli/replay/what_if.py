"""`rollbook replay what-if`: its options. What it does is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.options import AsJson, Policy, Run, StoreOption, TrustParts

Recipe = Annotated[Path | None, typer.Option("--recipe", help="A recipe file, or a CONFIG for its recipe.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="A key of algorithm, recipe or optimizer: algorithm.clip_high=0.3."),
]
Rescore = Annotated[
    str | None,
    typer.Option("--rescore", help="Reward function, module:function; it is imported and called."),
]
To = Annotated[int | None, typer.Option("--to", help="Go on to this step, with weights of its own.")]
OneRank = Annotated[
    bool, typer.Option("--one-rank", help="In one process, whatever layout the step was taken in.")
]
Write = Annotated[
    bool, typer.Option("--write", help="Record the function's rewards, beside those that are there.")
]
Source = Annotated[str | None, typer.Option(help="Source of the new rewards; absent: the function's name.")]
Replace = Annotated[
    bool, typer.Option("--replace", help="With --write: supersede other rewards of that source.")
]
Out = Annotated[Path | None, typer.Option("-o", "--out", help="New folder for the last weights, as a model.")]


def what_if(
    step: Annotated[int, typer.Argument(help="Number of the optimizer step.")],
    store: StoreOption,
    to: To = None,
    recipe: Recipe = None,
    set_: Set = None,
    rescore: Rescore = None,
    write: Write = False,
    source: Source = None,
    replace: Replace = False,
    out: Out = None,
    run: Run = None,
    policy: Policy = "actor",
    trust_parts: TrustParts = False,
    one_rank: OneRank = False,
    json: AsJson = False,
) -> None:
    """Take a recorded step by another recipe, algorithm, optimizer or reward, beside what was recorded.

    Both sides start from the same state. The recorded one is a replay; the
    other chooses anew among the samples that the step took or let go. Shown are
    samples in and out by rule, rewards and advantages, metrics, and how alike
    the two gradients are. With --to the other side goes on with its own
    weights: an offline run from recorded traffic. Nothing is written without
    --write or -o.

    Exit codes: 0 done, 1 the recorded side is not as recorded, 2 it cannot be done.

    rollbook replay what-if 12 --store runs --set algorithm.clip_high=0.3
    rollbook replay what-if 12 --to 40 --store runs --recipe fresh.toml -o other-model
    rollbook replay what-if 12 --store runs --rescore my_rewards:score --write
    """
    from rollbook.cli.replay.what_if_report import WhatIfOptions, run_what_if

    if rescore is None and (write or source or replace):
        raise typer.BadParameter(
            "goes with --rescore module:function", param_hint="--write, --source, --replace"
        )
    if replace and not write:
        raise typer.BadParameter("goes with --write", param_hint="--replace")
    last = step if to is None else to
    options = WhatIfOptions(
        *(step, last, run, policy, recipe, tuple(set_ or ()), rescore),
        *(write, source, replace, out, trust_parts, one_rank),
    )
    raise typer.Exit(run_what_if(store, options, json))
