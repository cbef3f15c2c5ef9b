"""`rollbook replay serve`: which trajectories a cassette holds, and what is printed of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from rollbook.cli.errors import querying
from rollbook.cli.options import AsJson, AsOf, Run, StoreOption
from rollbook.cli.terminal import Console, print_json

if TYPE_CHECKING:
    from rollbook.cassettes.cassette import Cassette, Hit, Miss
    from rollbook.store.log.store import Store


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
        Literal["error", "engine"],
        typer.Option(help="What was not recorded: an error that shows the difference, or an engine."),
    ] = "error",
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
    if not trajectory and query is None:
        raise typer.BadParameter("name one, or give a --query", param_hint="--trajectory")
    if (on_miss == "engine") != bool(engine):
        raise typer.BadParameter("goes with --on-miss engine, which needs it", param_hint="--engine")
    cassette = read_cassette(store, trajectory or [], query, run, as_of, ignore or [])
    run_cassette(cassette, host, port, engine or [], engine_key, timing, model, json)


COLUMN = "trajectory_id"
MOST_SHOWN = 10
"""Requests that are named at the end, of those that nothing asked for."""


def read_cassette(
    path: Path,
    trajectories: Sequence[str],
    query: str | None,
    run: str | None = None,
    as_of: str = "head",
    ignored: Sequence[str] = (),
) -> Cassette:
    """The cassette of trajectories of a store at a cut.

    Args:
        trajectories: of each the client's name, the id, or the id's end.
        query: SQL that gives the ids of more.
        ignored: request fields by which requests are not compared.

    Raises:
        NotFoundError: no such trajectory, or several.
        QueryError: the SQL is wrong, or gives no ids.
        CutError: no such run, or cut.
        ReplayError: there is no request to answer from.
    """
    from rollbook.cassettes.cassette import Cassette
    from rollbook.cassettes.tape import read_tapes
    from rollbook.cli.runs import of_run
    from rollbook.store.open import open_store
    from rollbook.transcript.finding import find_trajectory

    log = open_store(path)
    with of_run(log, run):
        cut = log.cut(as_of, run)
        ids = [find_trajectory(log, cut, name, run).trajectory_id for name in trajectories]
        ids += [] if query is None else _queried(log, as_of, run, query)
    return Cassette(read_tapes(log, cut, list(dict.fromkeys(ids))), ignored)


def _queried(log: Store, as_of: str, run: str | None, query: str) -> list[str]:
    """The ids that a query gives: its column `trajectory_id`, or its only one."""
    from rollbook.store.errors import QueryError
    from rollbook.store.sql.query import connect_at

    with connect_at(log, as_of, run) as connection, querying(connection):
        result = connection.execute(query)
        names = [column[0] for column in result.description or ()]
        rows = result.fetchall()
    if COLUMN not in names and len(names) != 1:
        raise QueryError(
            f"--query gives the columns {', '.join(names)}: select {COLUMN} alone, or under that name"
        )
    place = names.index(COLUMN) if COLUMN in names else 0
    if not rows:
        raise QueryError("--query gives no trajectory: try it with rollbook sql")
    return [str(row[place]) for row in rows]


def run_cassette(
    cassette: Cassette,
    host: str,
    port: int,
    engines: Sequence[str],
    engine_key: str | None,
    timing: bool,
    model: Path | None,
    as_json: bool,
) -> None:
    """Serve a cassette until interrupted; print its address, and what was not recorded.

    Raises:
        ConfigError: an engine's address is none, or the own one cannot be listened on.
        ModelError: the model directory holds no tokenizer.
    """
    from rollbook.cassettes.app import CassetteOptions, EngineBehind, serve_cassette, state_of
    from rollbook.edge.web_pages import LOOPBACK_NAMES, is_loopback
    from rollbook.engines.address import EngineAddress
    from rollbook.engines.hub import model_folder
    from rollbook.ingest.tokens.chat_template import load_chat_tokenizer
    from rollbook.ingest.upstream.paths import Upstream

    upstreams = [Upstream(EngineAddress.of(url), engine_key) for url in engines]
    options = CassetteOptions(
        engine=EngineBehind(upstreams) if upstreams else None,
        timing=timing,
        tokenizer=None if model is None else load_chat_tokenizer(model_folder(model, weights=False)),
        on_request=_told_as_json if as_json else _print_miss,
    )

    def announce(url: str) -> None:
        if as_json:
            print_json({"event": "listening", "url": url} | state_of(cassette), indent=False)
            return
        console = Console(stderr=True)
        summary = f"answering from {len(cassette.tapes)} trajectories, {len(cassette.requests)} requests"
        console.print(summary)
        console.tell("point an agent here: base_url = ", (f"{url}/t/ANY-ID/v1", "bold"))
        if not is_loopback(host) and host not in LOOPBACK_NAMES:
            console.tell(("listening beyond this host: everybody may read the recording", "yellow"))

    try:
        serve_cassette(cassette, host, port, options, announce)
    finally:
        if as_json:
            print_json({"event": "stopped"} | state_of(cassette), indent=False)
        else:
            _print_end(cassette)


def _print_miss(outcome: Hit | Miss) -> None:
    """Print what was not recorded, with the difference to the nearest that was."""
    from rollbook.cassettes.cassette import Hit

    if isinstance(outcome, Hit):
        return
    console = Console(stderr=True)
    request = outcome.asked
    console.tell(("not recorded: ", "bold red"), f"{request.endpoint}, {len(request.messages)} messages")
    if outcome.near is None:
        return
    for line in outcome.near.text.splitlines():
        style = {"+": "green", "-": "red"}.get(line.strip()[:1], "") if line.startswith("  ") else ""
        console.print(Text(f"  {line}", style), soft_wrap=True)


def _told_as_json(outcome: Hit | Miss) -> None:
    from rollbook.cassettes.cassette import Hit

    if isinstance(outcome, Hit):
        request = outcome.request
        value = {
            "event": "answered",
            "trajectory": request.name,
            "trajectory_id": request.tape,
            "turn": request.number,
            "answer": outcome.answer,
            "answers": outcome.answers,
            "repeated": outcome.repeated,
        }
    else:
        near = outcome.near
        value = {"event": "not recorded", "endpoint": outcome.asked.endpoint}
        value["nearest"] = None if near is None else near.as_json()
    print_json(value, indent=False)


def _print_end(cassette: Cassette) -> None:
    console = Console(stderr=True)
    unused = cassette.unused
    used = len(cassette.requests) - len(unused)
    summary = f"{used} of {len(cassette.requests)} recorded requests were asked for"
    missed = f", and {len(cassette.misses)} that were not recorded" if cassette.misses else ""
    console.print(summary + missed)
    for request in unused[:MOST_SHOWN]:
        console.tell(f"  not asked for: turn {request.number} of {request.name}")
    if len(unused) > MOST_SHOWN:
        console.print(f"  and {len(unused) - MOST_SHOWN} more")
