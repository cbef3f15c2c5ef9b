"""docs/replay-environment.md: its tables are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from rollbook.replay.step.tolerances import NARROW, TOLERANCES, Tolerance, tolerance_of
from rollbook.train.environment import PREFIXES, fingerprint
from rollbook.train.source_files import ROOMS

NAMED = re.compile(r"`([^`]+)`")
PARTS = {"largest": "of_largest", "own": "rtol", "rate": "of_rate"}


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    """The page."""
    return (root / "docs" / "replay-environment.md").read_text()


def _rows(page: str, header: str) -> list[list[str]]:
    """The cells of the table whose first line begins so."""
    table = page[page.index(f"\n| {header} |") + 1 :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_every_key_of_a_fingerprint_is_told(page: str) -> None:
    """But for the number of its form; with the rooms of its sources, and how variables begin."""
    rows = _rows(page, "key")
    documented = {name for key, _, _ in rows for name in NAMED.findall(key)}
    assert documented == (set(fingerprint(torch.device("cpu"))) - {"form"}) | {"parts", "gpu"}
    about = {key: set(NAMED.findall(text)) for key, text, _ in rows}
    assert about["`sources`"] == {*ROOMS, "megatron-core"}
    assert about["`variables`"] == set(PREFIXES)


def _stated(cell: str) -> dict[str, float]:
    """Fields of a tolerance, of a cell such as `largest x 1e-5 + 1e-6`."""
    tolerance = dict.fromkeys((*PARTS.values(), "atol"), 0.0)
    for term in cell.split(" + "):
        name, _, factor = term.rpartition(" x ")
        tolerance[PARTS[name] if name else "atol"] = float(factor)
    return tolerance


def test_every_tolerance_is_told(page: str) -> None:
    """Of each stage that is not exact, in both types; what was measured is below it."""
    documented: dict[str, tuple[str, str]] = {}
    for stages, wide, narrow, *measured in _rows(page, "stages"):
        documented |= dict.fromkeys(NAMED.findall(stages), (wide, narrow))
        for cell, seen in zip((wide, narrow), measured, strict=True):
            if seen != "-":
                name, _, factor = seen.rpartition(" x ")
                assert 0 < float(factor) < _stated(cell)[PARTS[name]], stages
    assert set(documented) == {stage for stage, tolerance in TOLERANCES.items() if not tolerance.exact}
    for stage, cells in documented.items():
        for cell, table in zip(cells, (TOLERANCES, NARROW), strict=True):
            assert _stated(cell) == pytest.approx(_fields(table[stage])), stage


def _fields(tolerance: Tolerance) -> dict[str, float]:
    return {name: getattr(tolerance, name) for name in (*PARTS.values(), "atol")}


def test_what_is_said_beside_the_table(page: str) -> None:
    """How far all weights may be off together, and advantages that are made of a model's numbers."""
    text = " ".join(page.split())
    typical = [table["weights"].typical for table in (TOLERANCES, NARROW)]
    assert f"may be {typical[0]:g} of what one may be off ({typical[1]:g} in bfloat16)" in text
    derived = [tolerance_of("advantages", ["values"], dtype).of_largest for dtype in ("float32", "bfloat16")]
    assert f"may be off by largest x {derived[0]:g} ({derived[1]:g} in bfloat16)" in text
