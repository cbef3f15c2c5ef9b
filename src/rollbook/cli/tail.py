"""`rollbook tail`: a line per turn or per event, or JSON, of a store here or behind a proxy."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollbook.cli.options import STORE_VARIABLE
from rollbook.cli.terminal import Console, json_for_terminal

if TYPE_CHECKING:
    from rollbook.client.tail import HttpTail
    from rollbook.store.events import Event
    from rollbook.store.log.store import Store
    from rollbook.store.log.tail import Tail

POLL_EVENTS = 256


Here = Annotated[
    Path | None,
    typer.Option(help=f"Folder of the store, if it is on this machine; without --url: {STORE_VARIABLE}."),
]
Start = Annotated[
    str, typer.Option("--from", help="What to leave out: head, step:N, lane=count,..., or empty.")
]
Kinds = Annotated[
    str, typer.Option(help="Only events of these kinds, such as turn.completed,turn.failed; a line each.")
]
ByEvent = Annotated[bool, typer.Option("--events", help="A line per event instead of one per turn.")]
Key = Annotated[str | None, typer.Option(envvar="ROLLBOOK_API_KEY", help="For --url: the proxy's API key.")]


def tail(
    store: Here = None,
    url: Annotated[str | None, typer.Option(help="Or the address of a `rollbook serve`.")] = None,
    start: Start = "empty",
    kinds: Kinds = "",
    run: Annotated[str | None, typer.Option(help="Only this run.")] = None,
    follow: Annotated[bool, typer.Option(help="Go on as the log grows.")] = True,
    events: ByEvent = False,
    key: Key = None,
    json: Annotated[bool, typer.Option("--json", help="JSON for machines: an event per line.")] = False,
) -> None:
    """Watch agents: a line per turn as it becomes durable, and per outcome, reward and new version.

    A turn's line: time (UTC), trajectory, its number there, which turn it
    extends or why it is a root, prompt + completion tokens, policy version,
    finish reason, latency, mean logprob, and how the reply begins.
    """
    from rollbook.cli.show.lines import EventLines, TurnLines
    from rollbook.store.errors import ConfigError
    from rollbook.store.log.tail import Filter
    from rollbook.store.open import open_store
    from rollbook.transcript.traffic import KINDS

    if store is None and url is None and (named := os.environ.get(STORE_VARIABLE)):
        store = Path(named)
    if (store is None) == (url is None):
        raise ConfigError("rollbook tail: give --store DIR or --url URL, and not both")
    wanted = _kinds(kinds)
    show: Any = _print_json if json else EventLines()
    if not (json or events or wanted):
        show, wanted = TurnLines(), KINDS
    try:
        if url is not None:
            from rollbook.client.tail import HttpTail

            with HttpTail(url, start, wanted or {"*"}, run, key=key) as remote:
                _pump(remote, show, follow)
        else:
            assert store is not None
            log = open_store(store)
            if run is not None:
                _look_for(log, run, follow)
            with log.tail(log.cut(start), Filter(wanted, run=run)) as local:
                _pump(local, show, follow)
    except KeyboardInterrupt:
        return


def _kinds(kinds: str) -> frozenset[str] | None:
    """The kinds of events that are wanted; None: those that a turn's line is made of.

    Raises:
        ConfigError: a kind is unknown.
    """
    from rollbook.store.errors import ConfigError
    from rollbook.store.events import RECORDS

    wanted = frozenset(kind.strip() for kind in kinds.split(",")) if kinds else None
    if unknown := sorted((wanted or set()) - set(RECORDS)):
        raise ConfigError(f"--kinds {unknown[0]!r}: use some of {', '.join(sorted(RECORDS))}")
    return wanted


def _look_for(log: Store, run: str, follow: bool) -> None:
    """Report that the run does not exist; with `follow` the command waits for it."""
    from rollbook.cli.runs import check_run
    from rollbook.store.errors import CutError

    try:
        check_run(log, run)
    except CutError as error:
        if not follow:
            raise
        Console(stderr=True).print(f"{error}; waiting for it", soft_wrap=True)


def _pump(tail: Tail | HttpTail, show: Any, follow: bool) -> None:
    while True:
        for event in tail.poll(POLL_EVENTS):
            show(event)
        sys.stdout.flush()
        if tail.at_head:
            if not follow:
                return
            tail.wait(5.0)


def _print_json(event: Event) -> None:
    from rollbook.store.events.event_json import json_bytes

    sys.stdout.write(json_for_terminal(json_bytes(event)) + "\n")
