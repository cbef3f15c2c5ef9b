"""What a replay comes to, in words: what was compared, and what was not. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rollbook.replay.verdict import Outcome, StepReplay, Verdict
from rollbook.store.events import Json

FEWEST = 3
"""Stages in a row that are named by the first and the last of them."""


def summary(replay: StepReplay) -> str:
    """A line about a replay in which nothing differs."""
    said = str(replay.outcome)
    match replay.outcome:
        case Outcome.nothing:
            return "nothing of it can be proven here"
        case Outcome.bits:
            if "weights" not in replay.stages:  # a part was asked for
                said += f" in {_listed(replay, replay.named(Verdict.equal))}"
            rest = _listed(replay, replay.unrecorded)
            return f"{said}, but for {rest}, which was not recorded" if rest else said
        case Outcome.within:
            said = "equal within tolerances"
        case _:
            said = "equal in part"
    parts = [
        ("bit for bit in", _listed(replay, replay.named(Verdict.equal))),
        ("within tolerances in", ", ".join(_within(replay))),
        ("not compared:", _listed(replay, replay.named(Verdict.not_proven))),
        ("not recorded:", _listed(replay, replay.unrecorded)),
    ]
    return f"{said}: " + "; ".join(f"{what} {which}" for what, which in parts if which)


def compared(replay: StepReplay) -> Json:
    """The same for machines: the outcome, and the stages by what is said of them."""
    return {
        "outcome": str(replay.outcome),
        "compared": {str(v): replay.named(v) for v in (Verdict.equal, Verdict.within, Verdict.differs)},
        "not_compared": {str(v): replay.named(v) for v in (Verdict.not_proven, Verdict.not_recorded)},
    }


def _within(replay: StepReplay) -> list[str]:
    """The stages that are within tolerances, each with its own."""
    return [f"{name} ({replay.stages[name].tolerance})" for name in replay.named(Verdict.within)]


def _listed(replay: StepReplay, names: Collection[str]) -> str:
    """Stages by name; several in a row by the first and the last."""
    rows: list[list[str]] = [[]]
    for name in replay.stages:
        if name in names:
            rows[-1].append(name)
        elif rows[-1]:
            rows.append([])
    return ", ".join(_row(row) for row in rows if row)


def _row(row: Sequence[str]) -> str:
    return f"{row[0]} to {row[-1]}" if len(row) >= FEWEST else ", ".join(row)
