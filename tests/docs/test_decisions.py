"""docs/decisions: each page has its four parts and a line in the index, and quotes what was measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "decisions"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
PARTS = ["Context", "Decision", "What it costs", "What would change it"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_has_its_four_parts(path: Path) -> None:
    """In their order, and is read in a few minutes."""
    text = path.read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == PARTS
    assert 30 <= text.count("\n") <= 60


def test_the_index_has_every_page() -> None:
    """Once."""
    linked = re.findall(r"\]\(([^)/]+\.md)\)", (FOLDER / "README.md").read_text())
    assert sorted(linked) == [path.name for path in PAGES]


def test_figures_are_those_of_the_pages() -> None:
    """A benchmark's figure that is named was measured; a number with a fraction, or thousands, is quoted."""
    measured = (FOLDER.parent / "benchmarks.md").read_text().split("\n## What was measured\n")[1]
    names = set(re.findall(r"`([a-z]+\.[a-z_0-9]+)`", measured))
    benches = {name.split(".")[0] for name in names}
    quoted = " ".join(path.read_text() for path in FOLDER.parent.glob("*.md"))
    for path in PAGES:
        text = path.read_text()
        named = {
            name for name in re.findall(r"`([a-z]+\.[a-z_0-9]+)`", text) if name.split(".")[0] in benches
        }
        assert named <= names, path.name
        numbers = set(re.findall(r"(?<![\w.])(?:\d+,\d{3}|\d+\.\d+)(?![.,]?\d)", text))
        assert {
            number for number in numbers if not re.search(rf"(?<![\d.,]){number}(?!\d)", quoted)
        } == set(), path.name
