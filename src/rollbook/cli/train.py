"""`rollbook train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rollbook.cli.options import AsOf, Source, StoreOption

AbandonAfter = Annotated[
    int | None,
    typer.Option(min=0, help="Give up the steps after this version, and go on from its checkpoint."),
]
RanksOption = Annotated[
    int | None, typer.Option(min=1, help="Processes; absent: as many as the sizes of parallel need.")
]
Launch = Annotated[
    Literal["here", "ray"],
    typer.Option(help="Where ranks run: on this host, or where Ray places them."),
]
Strategy = Annotated[
    Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"],
    typer.Option(help="With --launch ray: how it spreads ranks over nodes."),
]
PlaceWithin = Annotated[
    float, typer.Option(min=0, help="With --launch ray: seconds to wait for room in the cluster.")
]


def train(
    config: Annotated[Path, typer.Argument(help="TOML file; see configs/.")],
    store: StoreOption,
    source: Annotated[Source, typer.Option(help="cut: the log as it is; tail: as it grows.")] = Source.cut,
    as_of: AsOf = "head",
    lane: Annotated[str, typer.Option(help="Lane to write; one process each.")] = "train",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key: --set optimizer.lr=1e-4.")
    ] = None,
    abandon_after: AbandonAfter = None,
    ranks: RanksOption = None,
    launch: Launch = "here",
    strategy: Strategy = "PACK",
    place_within: PlaceWithin = 60.0,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print what holds, defaults included, and train nothing.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print the memory that each rank will need, and train nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="With --plan: one JSON object.")] = False,
) -> None:
    """Train from the log. Every step is planned and committed as events, so it can be replayed.

    SIGINT and SIGTERM end it after the step in hand, with a checkpoint; the same command goes on. Where it
    cannot, --abandon-after VERSION goes on all the same: what later steps consumed may be used again.
    With --launch ray, Ray places the ranks on the nodes of its cluster; this process is rank 0.
    Under torchrun or Slurm the same command finds its rank in the environment. See docs/ranks.md.
    The keys of CONFIG are in docs/configuration.md.
    """
    from rollbook.train.config.files import load_config

    if json and not plan:
        raise typer.BadParameter("goes with --plan alone", param_hint="--json")
    settings = load_config(config, set_ or [])
    if show_config:
        from rollbook.cli.terminal import say
        from rollbook.train.config.docs import as_toml

        say(as_toml(settings))
        return
    if plan:
        from rollbook.cli.training_plan import print_plan

        print_plan(settings, store, as_of, ranks, as_json=json)
        return
    from rollbook.cli.training import run_train

    placing = (strategy, place_within) if launch == "ray" else None
    run_train(settings, store, source.value, as_of, lane, abandon_after, ranks, placing)
