"""All attacks, in the order in which they are carried out; a new module of them is added here."""

from __future__ import annotations

from rollbook.bench.hostile import bodies, faults, identity, streams, wire
from rollbook.bench.hostile.attack import ATTACKS, Attack

MODULES = (bodies, wire, identity, streams, faults)


def attacks_on(kind: str) -> list[Attack]:
    """The attacks on a kind of proxy; those upon what is under it come last."""
    places = {module.__name__: place for place, module in enumerate(MODULES)}
    ours = [one for one in ATTACKS.values() if kind in one.proxies]
    return sorted(ours, key=lambda one: places[one.volley.__module__])


def named(name: str) -> Attack:
    """An attack by its name."""
    return ATTACKS[name]
