"""Lines of traffic: one per answered or failed turn, outcome, reward and policy version; or one per
event.

A turn's line joins two events, and names a trajectory that a third one opened. The memory for that
is bounded: a line about what came too long ago, or before the tail began, tells less, and is
printed all the same.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields, replace
from typing import Any

from cachetools import FIFOCache
from rich.cells import cell_len

from rollbook.store.events import (
    Event,
    PolicyActivated,
    RewardAssigned,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnCompleted,
    TurnFailed,
    TurnRequested,
)
from rollbook.store.fold.versions import unversioned
from rollbook.transcript.messages import beginning
from rollbook.transcript.reading import mean_and_lowest
from rollbook.transcript.text import clock, duration, one_line, short_id, visible

WORDS = 60
"""Characters of a text that a line shows."""


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
            target = f" for turn {record.turn_id[-8:]}" if record.turn_id else ""
            return f"{record.reward:g} from {record.source}{target}"
    shown = {f.name: getattr(record, f.name) for f in fields(record) if f.name != "trajectory_id"}
    small = {k: v for k, v in shown.items() if isinstance(v, (str, int, float)) and v != ""}
    return one_line(" ".join(f"{name}={value}" for name, value in small.items()), WORDS)


KINDS = frozenset(
    record.KIND
    for record in (
        TrajectoryOpened,
        TurnRequested,
        TurnCompleted,
        TurnFailed,
        RewardAssigned,
        TrajectoryFinished,
        PolicyActivated,
    )
)
"""What a `Traffic` reads; it ignores other kinds."""

TRAJECTORIES, RUNNING, NUMBERS = 4096, 4096, 16_384
"""Remembered: names of trajectories, turns without an answer, and numbers of turns that may be extended."""
NAME_WIDTH = 16
"""Characters of a text that a line shows, more where the terminal is wide."""
COLOURS = ("green", "cyan", "blue", "magenta", "bright_green", "bright_cyan", "bright_blue", "bright_magenta")

Words = list[tuple[str, str]]
"""Pieces of a line with their styles."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A trajectory's name and its number of turns so far; None if some of its events were missed."""

    name: str | None
    turns: int | None = 0


@dataclass(frozen=True, slots=True)
class _RunningTurn:
    """A running turn: the parts of its request that its line shows."""

    time_us: int
    number: int | None
    parent: str | None
    root_reason: str | None


class Traffic:
    """Folds events into lines. Does no I/O.

    Args:
        width: of the terminal; None where the lines go elsewhere.
    """

    def __init__(self, width: int | None = None) -> None:
        self._width = width
        self._trajectories: FIFOCache[str, _Known] = FIFOCache(TRAJECTORIES)
        self._running: FIFOCache[str, _RunningTurn] = FIFOCache(RUNNING)
        self._numbers: FIFOCache[str, int] = FIFOCache(NUMBERS)
        self._day = ""

    def lines(self, event: Event) -> list[Words]:
        """The lines for an event: none, or one, preceded by the date (UTC) if that changed."""
        words = self._words(event)
        if words is None:
            return []
        day, _, time = clock(event.time_us, "%Y-%m-%d %H:%M:%S").partition(" ")
        trajectory_id = str(getattr(event.record, "trajectory_id", ""))
        colour = COLOURS[zlib.crc32(trajectory_id.encode()) % len(COLOURS)] if trajectory_id else ""
        name = _fitted(self._name(trajectory_id) if trajectory_id else getattr(event.record, "policy", ""))
        line = [(f"{time[:8]:<8} ", "dim"), (f"{name:<{NAME_WIDTH}} ", colour), *words]
        if isinstance(event.record, TurnCompleted):
            used = cell_len(plain_text(line)) + 2
            room = WORDS if self._width is None else max(WORDS // 2, self._width - used)
            line.append((f" {beginning(event.record.reply, room)}", ""))
        date = [[(f"{day} UTC", "dim")]] if day != self._day else []
        self._day = day
        return [*date, line]

    def _words(self, event: Event) -> Words | None:
        match event.record:
            case TurnRequested() as asked:
                self._ask(asked, event.time_us)
                return None
            case TurnCompleted() as done:
                return self._completed(done, event.time_us)
            case TurnFailed() as failed:
                asked_at = self._running.pop(failed.turn_id, None)
                took = f" after {duration((event.time_us - asked_at.time_us) / 1000)}" if asked_at else ""
                return [*self._place(asked_at), (f"failed{took}: {one_line(failed.error, 2 * WORDS)}", "red")]
            case TrajectoryOpened() as opened:
                before = self._trajectories.get(opened.trajectory_id)
                self._trajectories[opened.trajectory_id] = replace(before or _Known(None), name=opened.name)
                parts = [opened.split, _named("group", opened.group), _named("task", opened.task)]
                return [("opened  ", "bold"), (", ".join(part for part in parts if part), "dim")]
            case TrajectoryFinished() as finished:
                return self._finished(finished)
            case RewardAssigned() as given:
                return self._reward(given)
            case PolicyActivated() as policy:
                return [
                    (f"v{policy.policy_version} serves, on {one_line(policy.engine, WORDS)}", "bold magenta")
                ]
        return None

    def _ask(self, requested: TurnRequested, time_us: int) -> None:
        # Where the tail began later, or lanes are read in another order, the opening was not seen by now.
        known = self._trajectories.get(requested.trajectory_id) or _Known(None, None)
        number = None if known.turns is None else known.turns + 1
        self._trajectories[requested.trajectory_id] = replace(known, turns=number)
        if number is not None:
            self._numbers[requested.turn_id] = number
        self._running[requested.turn_id] = _RunningTurn(
            time_us, number, requested.parent_turn_id, requested.root_reason
        )

    def _completed(self, done: TurnCompleted, time_us: int) -> Words:
        request = self._running.pop(done.turn_id, None)
        versions = sorted({span.version for span in done.version_spans})
        version = f"v{'-'.join(map(str, (versions[0], *versions[1:][-1:])))}" if versions else ""
        counts = f"{done.prompt_length}+{len(done.completion_ids)}"
        tokens = counts if counts != "0+0" else "text only"
        mean, _ = mean_and_lowest(done.logprobs)
        logprob = "" if mean is None else f"{mean:.3f}"
        finish = visible(done.finish_reason)
        took = duration((time_us - request.time_us) / 1000) if request else ""
        return [
            *self._place(request),
            (f"{tokens:>11} ", "cyan"),
            (f"{version:<5} ", "magenta"),
            (f"{finish:<10} ", "green" if finish in ("stop", "tool_calls") else "yellow"),
            (f"{took:>7} ", ""),
            (f"{logprob:>7}", ""),
            (" no version" if done.logprobs is not None and unversioned(done) else "", "yellow"),
        ]

    def _place(self, request: _RunningTurn | None) -> Words:
        """A turn's number, and the turn it extends or why it is a root."""
        if request is None:
            return [(f"{'':>3} {'':<11} ", "")]
        number = "" if request.number is None else str(request.number)
        if request.parent is None:
            return [(f"{number:>3} ", "bold"), (f"{visible(request.root_reason or 'root'):<11} ", "magenta")]
        extends = f"extends {self._numbers.get(request.parent) or short_id(request.parent)}"
        return [(f"{number:>3} ", "bold"), (f"{extends:<11} ", "")]

    def _finished(self, finished: TrajectoryFinished) -> Words:
        known = self._trajectories.get(finished.trajectory_id)
        success = {None: "", True: ", success", False: ", no success"}[finished.success]
        count = known.turns if known else None
        turns = "" if count is None else ", 1 turn" if count == 1 else f", {count} turns"
        good = finished.status == "completed" and finished.success is not False
        outcome = f"{visible(finished.status)}{success}{turns}"
        return [("finished  ", "bold"), (outcome, "green" if good else "yellow")]

    def _reward(self, reward: RewardAssigned) -> Words:
        target = ""
        if reward.turn_id is not None:
            target = f" for turn {self._numbers.get(reward.turn_id) or short_id(reward.turn_id)}"
        instead = ", instead of an earlier one" if reward.supersedes else ""
        source = one_line(reward.source, WORDS)
        return [("reward  ", "bold"), (f"{reward.reward:g} from {source}{target}{instead}", "yellow")]

    def _name(self, trajectory_id: str) -> str:
        known = self._trajectories.get(trajectory_id)
        return known.name if known and known.name is not None else f"..{short_id(trajectory_id)}"


def _named(what: str, value: str | None) -> str:
    return f"{what} {one_line(value, WORDS)}" if value else ""


def _fitted(name: str) -> str:
    """The name; of a long name its beginning and end."""
    text = visible(name)
    return text if len(text) <= NAME_WIDTH else f"{text[: NAME_WIDTH - 10]}..{text[-8:]}"


def plain_text(line: Words) -> str:
    return "".join([text for text, _ in line])
