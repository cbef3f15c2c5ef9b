"""Claims of a step's manifest that follow from the log and from the training's settings, computed anew."""

from __future__ import annotations

from dataclasses import dataclass

from rollbook.replay.verdict import Place, StageReplay, Verdict
from rollbook.store.digest import digest_json
from rollbook.store.events import Json


@dataclass(frozen=True, slots=True)
class Claim:
    """What a manifest says under some keys, and what that must be.

    Attributes:
        recorded: the values as recorded; due: as they must be. Both have the same keys.
        open: what of it is taken as recorded.
    """

    recorded: Json
    due: Json
    open: str = ""


def judge_claim(stage: str, claim: Claim | str) -> StageReplay:
    """The verdict on a stage of claims.

    Args:
        claim: or the reason why there is none that could be proven.
    """
    if isinstance(claim, str):
        return StageReplay(stage, Verdict.not_proven, why=claim)
    digests = digest_json(claim.recorded), digest_json(claim.due)
    for key, recorded in claim.recorded.items():
        if recorded != claim.due.get(key):
            place = _place(key, recorded, claim.due.get(key))
            return StageReplay(stage, Verdict.differs, *digests, why=place.in_words(), place=place)
    return StageReplay(stage, Verdict.equal, *digests, why=claim.open)


def _place(key: str, recorded: object, due: object) -> Place:
    """Where a value of a claim differs; in a list, the first element that does."""
    if isinstance(recorded, list) and isinstance(due, list):
        for at, pair in enumerate(zip(recorded, due, strict=False)):
            if pair[0] != pair[1]:
                return Place(key=f"{key}[{at}]", recorded=_shown(pair[0]), replayed=_shown(pair[1]))
        at = min(len(recorded), len(due))
        longer = recorded if len(recorded) > at else due
        ends = ("nothing", _shown(longer[at])) if longer is due else (_shown(longer[at]), "nothing")
        return Place(key=f"{key}[{at}]", recorded=ends[0], replayed=ends[1])
    if isinstance(recorded, dict) and isinstance(due, dict):
        for name in sorted(recorded.keys() | due.keys()):
            if recorded.get(name) != due.get(name):
                return _place(f"{key}.{name}", recorded.get(name), due.get(name))
    return Place(key=key, recorded=_shown(recorded), replayed=_shown(due))


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
