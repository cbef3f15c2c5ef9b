"""The suite that holds our losses, estimators and corrections against the packages of verl, OpenRLHF, AReaL
and TRL.

It has an environment of its own: `make test-parity` sets it up and runs it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--write-page` writes the tables of docs/algorithms.md; `--measured` prints greatest differences;
    `--rows` takes rows of a folder too."""
    parser.addoption("--write-page", action="store_true", help="write the tables of docs/algorithms.md")
    parser.addoption("--rows", action="append", default=[], help="a folder of rows of one's own")
    parser.addoption("--measured", action="store_true", help="print the greatest differences of all rows")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Rows and fixtures of this folder, and of those that `--rows` names."""
    folders = metafunc.config.getoption("--rows")
    if "row" in metafunc.fixturenames:
        from parity.rows.table import rows_in

        rows = rows_in(folders)
        ids = [f"{row.part}={row.peer}-{row.called}".replace(" ", "-") for row in rows]
        metafunc.parametrize(("number", "row"), list(enumerate(rows)), ids=ids)
    if "whose" in metafunc.fixturenames:
        from parity.rows.table import fixtures_in

        fixtures = [*metafunc.module.FIXTURES, *fixtures_in(folders)]
        pairs = [(item, whose) for item in fixtures for whose in item.functions]
        ids = [f"{item.name}-{whose}".replace(" ", "-") for item, whose in pairs]
        metafunc.parametrize(("fixture", "whose"), pairs, ids=ids)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The greatest differences, in the order of the table."""
    if not config.getoption("--measured"):
        return
    lines = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "measured" and getattr(report, "when", "") == "call"
    ]
    for _, line in sorted(lines):
        terminalreporter.write_line(line)
