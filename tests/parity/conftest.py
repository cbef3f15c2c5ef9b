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
    """`--write-page` writes the tables of docs/algorithms.md; `--measured` prints greatest differences."""
    parser.addoption("--write-page", action="store_true", help="write the tables of docs/algorithms.md")
    parser.addoption("--measured", action="store_true", help="print the greatest differences of all rows")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The greatest differences, in the order of the table."""
    if not config.getoption("--measured"):
        return
    found = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "measured" and getattr(report, "when", "") == "call"
    ]
    for _, line in sorted(found):
        terminalreporter.write_line(line)
