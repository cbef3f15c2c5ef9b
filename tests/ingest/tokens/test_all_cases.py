"""The adversarial cases that Rollbook is built against: for each there is a test here, which names it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

CASES = {f"{number:02}" for number in range(1, 46)} | {"07b"}


def _named() -> dict[str, list[str]]:
    """Case -> the tests whose docstrings begin with it."""
    tests: dict[str, list[str]] = {}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                numbers = re.match(r"(\d\d\w?(, \d\d\w?)*): ", ast.get_docstring(node) or "")
                for number in numbers[1].split(", ") if numbers else ():
                    tests.setdefault(number, []).append(f"{path.name}: {node.name}")
    return tests


def test_every_case_has_its_test() -> None:
    """01 to 45, none left out and none unknown."""
    assert set(_named()) == CASES
