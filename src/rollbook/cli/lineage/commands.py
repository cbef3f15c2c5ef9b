"""The commands of `rollbook lineage`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.options import AsJson, AsOf, Run, StoreOption

lineage_app = typer.Typer(
    no_args_is_help=True,
    help="Where a token, sample, step, policy version or trajectory comes from, and all that it led to. "
    "See docs/lineage.md.",
)
Full = Annotated[bool, typer.Option("--full", help="Shorten no list.")]
PolicyName = Annotated[str, typer.Option("--policy", help="Which line of weights.")]


@lineage_app.command("token")
def lineage_token(
    token: Annotated[
        str, typer.Argument(help="TURN:INDEX or TRAJECTORY:INDEX; sampled tokens count from 0.")
    ],
    store: StoreOption,
    run: Run = None,
    as_of: AsOf = "head",
    model: Annotated[
        Path | None, typer.Option(help="Model directory, whose tokenizer.json has the token's text.")
    ] = None,
    full: Full = False,
    json: AsJson = False,
) -> None:
    """One sampled token: the event that holds it, the version and engines that made it, and its training.

    TURN is a turn's id or the id's end, and INDEX the token's place in its
    completion. TRAJECTORY is as `rollbook show` takes it, and INDEX counts the
    sampled tokens of all its turns, in turn order.

    rollbook lineage token task-7:12 --store runs
    rollbook lineage token 5f3b9a1c:0 --store runs --model ./my-model --json
    """
    from rollbook.cli.lineage.asking import ask_token

    ask_token(token, store, run, as_of, model, full, json)


@lineage_app.command("sample")
def lineage_sample(
    leaf: Annotated[str, typer.Argument(help="The sample's last turn: its id, or the id's end.")],
    store: StoreOption,
    run: Run = None,
    as_of: AsOf = "head",
    full: Full = False,
    json: AsJson = False,
) -> None:
    """One sample: the turns of its path, the steps that consumed or dropped it, and what those made.

    rollbook lineage sample 5f3b9a1c --store runs
    """
    from rollbook.cli.lineage.asking import ask_sample

    ask_sample(leaf, store, run, as_of, full, json)


@lineage_app.command("step")
def lineage_step(
    step: Annotated[int, typer.Argument(help="Number of the optimizer step.")],
    store: StoreOption,
    run: Run = None,
    policy: PolicyName = "actor",
    as_of: AsOf = "head",
    full: Full = False,
    json: AsJson = False,
) -> None:
    """One optimizer step: its samples, the versions and engines that sampled them, and what it led to.

    Back: trajectories, requests, versions, engines. Forward: the version it
    made, the engines that got it, what was sampled by it, and the steps that
    consumed that.

    rollbook lineage step 12 --store runs --full
    """
    from rollbook.cli.lineage.asking import ask_step

    ask_step(step, store, run, policy, as_of, full, json)


@lineage_app.command("policy")
def lineage_policy(
    version: Annotated[int, typer.Argument(help="Number of the policy version.")],
    store: StoreOption,
    run: Run = None,
    policy: PolicyName = "actor",
    as_of: AsOf = "head",
    full: Full = False,
    json: AsJson = False,
) -> None:
    """One policy version: the steps that led to it, and the engines, tokens and steps that it led to.

    rollbook lineage policy 12 --store runs
    """
    from rollbook.cli.lineage.asking import ask_policy

    ask_policy(version, store, run, policy, as_of, full, json)


@lineage_app.command("trajectory")
def lineage_trajectory(
    trajectory: Annotated[str, typer.Argument(help="The client's name of it, our id, or the id's end.")],
    store: StoreOption,
    run: Run = None,
    as_of: AsOf = "head",
    full: Full = False,
    json: AsJson = False,
) -> None:
    """One trajectory: the versions and engines that sampled it, its rewards, its training and its outcome.

    rollbook lineage trajectory task-7 --store runs
    rollbook lineage trajectory task-7 --store runs --as-of step:12 --json
    """
    from rollbook.cli.lineage.asking import ask_trajectory

    ask_trajectory(trajectory, store, run, as_of, full, json)
