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
        said: as recorded; due: as it follows. Both have the same keys.
        open: what of it is taken as recorded.
    """

    said: Json
    due: Json
    open: str = ""


def judged(stage: str, claim: Claim | str) -> StageReplay:
    """The verdict on a stage of claims.

    Args:
        claim: or why there is none that could be proven.
    """
    if isinstance(claim, str):
        return StageReplay(stage, Verdict.not_proven, why=claim)
    digests = digest_json(claim.said), digest_json(claim.due)
    for key, said in claim.said.items():
        if said != claim.due.get(key):
            place = _place(key, said, claim.due.get(key))
            return StageReplay(stage, Verdict.differs, *digests, why=place.said(), place=place)
    return StageReplay(stage, Verdict.equal, *digests, why=claim.open)


def _place(key: str, said: object, due: object) -> Place:
    """Where in a claim a value differs: of lists the first element."""
    if isinstance(said, list) and isinstance(due, list):
        for at, pair in enumerate(zip(said, due, strict=False)):
            if pair[0] != pair[1]:
                return Place(key=f"{key}[{at}]", recorded=_shown(pair[0]), replayed=_shown(pair[1]))
        at = min(len(said), len(due))
        longer = said if len(said) > at else due
        ends = ("nothing", _shown(longer[at])) if longer is due else (_shown(longer[at]), "nothing")
        return Place(key=f"{key}[{at}]", recorded=ends[0], replayed=ends[1])
    if isinstance(said, dict) and isinstance(due, dict):
        for name in sorted(said.keys() | due.keys()):
            if said.get(name) != due.get(name):
                return _place(f"{key}.{name}", said.get(name), due.get(name))
    return Place(key=key, recorded=_shown(said), replayed=_shown(due))


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
