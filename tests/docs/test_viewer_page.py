"""docs/viewer.md names the pages that there are, and the colours of tokens."""

from __future__ import annotations

import re
from pathlib import Path

from rollbook.viewer.app import PAGES, PREFIX
from rollbook.viewer.samples import VECTORS

IN_PAGES = {
    "signs",
    "ledger",
    "curves",
    "colours",
    "tokens",
    "lineage",
    "turns",
    "open",
    "remarks",
    "launches",
}
"""Parts of pages, which are asked for by these."""
WORDS = {"run": "RUN", "policy": "POLICY", "step": "STEP", "trajectory_id": "ID", "turn_id": "TURN"}


def test_the_page_names_the_pages(root: Path) -> None:
    """Each that stands by itself, as it is spelled in an address."""
    page = (root / "docs" / "viewer.md").read_text()
    named = set(re.findall(rf"^\| `({PREFIX}[^`]+)`", page, re.MULTILINE))
    there = set()
    for path in (PREFIX + page.path for page in PAGES):
        parts = path.split("/")
        if IN_PAGES & set(parts) or path.endswith(("/steps/{policy}", "}/samples")):
            continue
        there.add(re.sub(r"\{(\w+)\}", lambda match: WORDS[match[1]], path))
    named = {path.partition("?")[0] for path in named}
    assert named == there
    assert VECTORS in page
