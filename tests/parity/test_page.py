"""docs/algorithms.md says what is measured here."""

from __future__ import annotations

from pathlib import Path

import pytest
from parity.page import written
from parity.rows.differences import DIFFERENCES
from parity.rows.table import rows_in


def test_the_page_has_these_tables(pytestconfig: pytest.Config) -> None:
    """`--write-page` writes them there."""
    page = Path(__file__).parents[2] / "docs" / "algorithms.md"
    text = page.read_text()
    wanted = written(text, rows_in([]), DIFFERENCES)
    if pytestconfig.getoption("--write-page"):
        page.write_text(wanted)
    assert page.read_text() == wanted, "run `make test-parity PARITY=--write-page`"
