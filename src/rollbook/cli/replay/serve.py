"""`rollbook replay serve`: its options."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.options import AsJson, AsOf, Run, StoreOption


class OnMiss(StrEnum):
    """What a request gets that was not recorded."""

    error = "error"
    engine = "engine"


Engines = Annotated[
    list[str] | None,
    typer.Option(help="For --on-miss engine: address of an OpenAI-compatible server; several take turns."),
]
EngineKey = Annotated[str | None, typer.Option(envvar="ROLLBOOK_ENGINE_KEY", help="The engine's API key.")]


def replay_serve(
    store: StoreOption,
    trajectory: Annotated[
        list[str] | None,
        typer.Option(help="The client's name of one, our id, or the id's end; may be repeated."),
    ] = None,
    query: Annotated[str | None, typer.Option(help="SQL over the views that gives trajectory ids.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    on_miss: Annotated[
        OnMiss, typer.Option(help="What was not recorded: an error that shows the difference, or an engine.")
    ] = OnMiss.error,
    engine: Engines = None,
    engine_key: EngineKey = None,
    timing: Annotated[
        bool, typer.Option("--timing", help="Take as long as the recorded replies took; else none at all.")
    ] = False,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="A request field that need not be the same, such as model; may be repeated."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Model directory, whose tokenizer gives logprobs their text.")
    ] = None,
    as_of: AsOf = "head",
    run: Run = None,
    json: AsJson = False,
) -> None:
    """Answer an agent from recorded trajectories, without an engine. See docs/cassettes.md.

    A request that is the same as a recorded one gets its reply, through OpenAI's
    and Anthropic's APIs, streamed or not. Any other is a 404, here and in the
    reply, with the difference to the nearest recorded one.

    rollbook replay serve --trajectory task-7 --store runs
    rollbook replay serve --query "select trajectory_id from trajectories where reward = 1" --store runs
    """
    from rollbook.cli.replay.cassette import read_cassette, run_cassette

    if not trajectory and query is None:
        raise typer.BadParameter("name one, or give a --query", param_hint="--trajectory")
    if (on_miss is OnMiss.engine) != bool(engine):
        raise typer.BadParameter("goes with --on-miss engine, which needs it", param_hint="--engine")
    cassette = read_cassette(store, trajectory or [], query, run, as_of, ignore or [])
    run_cassette(cassette, host, port, engine or [], engine_key, timing, model, json)
