"""The tables of docs/algorithms.md: parts with the peers that they equal, and where peers differ.

What a part is, and its sources, are written by hand in the page and stay; of a part that has no line yet they
are taken from its docstring. The other columns come of the suite, which fails where one is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from parity import ours
from parity.row import Difference, Row

_HEAD = ("part", "is", "source", "default", "equals")
_WIDTHS = "|" + "---|" * len(_HEAD)


def written(page: str, rows: Iterable[Row], differences: Iterable[Difference]) -> str:
    """The page with both tables as they should be."""
    page = _between(page, "parts", "\n".join(_parts(_by_hand(page), list(rows))))
    return _between(page, "differences", "\n".join(_differences(differences)))


def _between(page: str, name: str, table: str) -> str:
    begin, end = f"<!-- {name}: written by make test-parity -->", f"<!-- {name}: to here -->"
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{table}\n{end}{after}"


def _by_hand(page: str) -> dict[str, tuple[str, str]]:
    """Of each part what it is, and its sources."""
    parts = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == len(_HEAD) and (name := re.fullmatch(r"`(\w+)`", cells[0])):
            parts[name[1]] = cells[1], cells[2]
    return parts


def _parts(by_hand: dict[str, tuple[str, str]], rows: list[Row]) -> Iterable[str]:
    known = ours.parts()
    unknown = {row.part for row in rows} - {part.name for part in known}
    assert not unknown, f"rows name no part of ours: {unknown}"
    yield f"| {' | '.join(_HEAD)} |"
    yield _WIDTHS
    for part in known:
        says, sources = by_hand.get(part.name, (part.says, part.sources))
        cells = f"`{part.name}`", says, sources or "–", part.default, _equals(part.name, rows) or "–"
        yield f"| {' | '.join(cells)} |"


def _equals(part: str, rows: list[Row]) -> str:
    """Each peer with what of it equals the part, without what is in brackets."""
    peers: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.part == part:
            peers.setdefault(row.peer, {})[re.sub(r" \[.*\]", "", row.called)] = None
    return "; ".join(f"{peer} ({', '.join(called)})" for peer, called in peers.items())


def _differences(differences: Iterable[Difference]) -> Iterable[str]:
    yield "| part | these are not equal | since | here |"
    yield "|---|---|---|---|"
    known = {part.name for part in ours.parts()}
    for difference in differences:
        if difference.part in known:
            both = f"{difference.one}; {difference.other}"
            yield f"| `{difference.part}` | {both} | {difference.says} | {difference.here} |"
