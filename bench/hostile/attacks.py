"""All attacks, in the order in which they are carried out; new modules with attacks are listed here."""

from __future__ import annotations

from rollbook.bench.hostile import bodies, faults, identity, streams, wire
from rollbook.bench.hostile.attack import ATTACKS, Attack

MODULES = (bodies, wire, identity, streams, faults)


def attacks_on(kind: str) -> list[Attack]:
    """The attacks on a kind of proxy; those on its underlying resources come last."""
    places = {module.__name__: place for place, module in enumerate(MODULES)}
    ours = [candidate for candidate in ATTACKS.values() if kind in candidate.proxies]
    return sorted(ours, key=lambda candidate: places[candidate.volley.__module__])


def named(name: str) -> Attack:
    """An attack by its name."""
    return ATTACKS[name]
