"""`rollbook tail`: a line per turn or per event, or JSON, of a store here or behind a proxy."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from rich.text import Text

from rollbook.cli.runs import check_run
from rollbook.cli.show.terminal_text import clock, one_line, short_id, visible
from rollbook.cli.terminal import Console, json_for_terminal
from rollbook.cli.turn_lines import KINDS, TurnLines
from rollbook.store.errors import ConfigError, CutError
from rollbook.store.events import (
    RECORDS,
    Event,
    RewardAssigned,
    TrajectoryOpened,
    TurnCompleted,
    TurnFailed,
    TurnRequested,
)
from rollbook.store.events.event_json import json_bytes
from rollbook.store.fold.versions import unversioned
from rollbook.store.log.store import Store
from rollbook.store.log.tail import Filter
from rollbook.store.open import open_store

POLL_EVENTS = 256
WORDS = 60
"""Characters of a text that a line shows."""


class AnyTail(Protocol):
    """What a local tail and one over HTTP have in common."""

    def poll(self, limit: int | None = None) -> list[Event]:
        """New events."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for new events, at most so many seconds; returns whether there are any."""

    def cut(self) -> dict[str, int]:
        """The cut of all events that were handed out."""

    @property
    def at_head(self) -> bool:
        """Whether the last poll reached the head."""


def run_tail(
    store: Path | None,
    url: str | None,
    start: str,
    kinds: str,
    run: str | None,
    follow: bool,
    by_event: bool,
    as_json: bool,
    key: str | None = None,
) -> None:
    """Print turns, or events, from a cut on; with `follow`, until interrupted.

    Args:
        kinds: of events; a line per event then, since a turn's line is made of several kinds.

    Raises:
        ConfigError: not exactly one of store and url is given, or a kind is unknown.
        RollbookError: the tail cannot be read.
    """
    if (store is None) == (url is None):
        raise ConfigError("rollbook tail: give --store DIR or --url URL, and not both")
    wanted = frozenset(kind.strip() for kind in kinds.split(",")) if kinds else None
    if unknown := sorted((wanted or set()) - set(RECORDS)):
        raise ConfigError(f"--kinds {unknown[0]!r}: use some of {', '.join(sorted(RECORDS))}")
    show: Any = _print_json if as_json else _Lines()
    if not (as_json or by_event or wanted):
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


def _look_for(log: Store, run: str, follow: bool) -> None:
    """Report that the run does not exist; with `follow` the command waits for it."""
    try:
        check_run(log, run)
    except CutError as error:
        if not follow:
            raise
        Console(stderr=True).print(f"{error}; waiting for it", soft_wrap=True)


def _pump(tail: AnyTail, show: Any, follow: bool) -> None:
    while True:
        for event in tail.poll(POLL_EVENTS):
            show(event)
        sys.stdout.flush()
        if tail.at_head:
            if not follow:
                return
            tail.wait(5.0)


def _print_json(event: Event) -> None:
    sys.stdout.write(json_for_terminal(json_bytes(event)) + "\n")


class _Lines:
    """Prints events for people, with colours if the output is a terminal."""

    def __init__(self) -> None:
        self._console = Console(soft_wrap=True)

    def __call__(self, event: Event) -> None:
        time, place, kind, trajectory, summary = map(visible, line_of(event))
        colour = {"turn": "cyan", "trajectory": "green", "reward": "yellow", "step": "magenta"}
        text = Text.assemble(
            (f"{time} ", "dim"),
            f"{place:<14} ",
            (f"{kind:<22} ", "red" if kind.endswith(".failed") else colour.get(kind.split(".")[0], "")),
            (f"{trajectory:<8} ", "dim"),
            summary,
        )
        self._console.print(text)


def line_of(event: Event) -> tuple[str, str, str, str, str]:
    """An event's line: time (UTC), lane=seq, kind, the trajectory's last eight characters, a summary."""
    trajectory = short_id(str(getattr(event.record, "trajectory_id", "")))
    return clock(event.time_us), f"{event.lane}={event.seq}", event.kind, trajectory, _summary(event.record)


def _summary(record: Any) -> str:
    match record:
        case TrajectoryOpened():
            parts = [record.name, f"task {record.task}" if record.task else "", record.split]
            return " ".join(part for part in parts if part)
        case TurnRequested():
            link = (
                f"after {record.parent_turn_id[-8:]}" if record.parent_turn_id else record.root_reason or ""
            )
            last = record.messages[-1] if record.messages else {}
            return f"{link}: {one_line(last.get('role'), WORDS)}: {one_line(last.get('content'), WORDS)}"
        case TurnCompleted():
            version = "" if record.policy_version is None else f" by {record.policy} v{record.policy_version}"
            if record.logprobs is not None and (unknown := unversioned(record)):
                version += f", {unknown} of no version"
            tokens = f"{record.prompt_length}+{len(record.completion_ids)} tokens"
            return (
                f"{tokens}{version}, {record.finish_reason}: {one_line(record.reply.get('content'), WORDS)}"
            )
        case TurnFailed():
            return one_line(record.error, WORDS)
        case RewardAssigned():
            of = f" for turn {record.turn_id[-8:]}" if record.turn_id else ""
            return f"{record.reward:g} from {record.source}{of}"
    shown = {f.name: getattr(record, f.name) for f in fields(record) if f.name != "trajectory_id"}
    small = {k: v for k, v in shown.items() if isinstance(v, (str, int, float)) and v != ""}
    return one_line(" ".join(f"{name}={value}" for name, value in small.items()), WORDS)
