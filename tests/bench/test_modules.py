"""Modules that benchmarks name in a text, to be started as processes, are there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

NAMED = re.compile(r'(?<!\[)"(rollbook(?:\.\w+)+)(?::(\w+))?"')
"""What stands in brackets is the key of a mapping."""


def _named(root: Path) -> set[tuple[str, str]]:
    return {name for file in (root / "bench").rglob("*.py") for name in NAMED.findall(file.read_text())}


def test_named_modules_exist(root: Path) -> None:
    """Each `"rollbook.x.y"` is a module, and each `"rollbook.x.y:z"` an attribute of one."""
    named = _named(root)
    assert ("rollbook.bench.scripted.openai", "") in named
    for module, attribute in sorted(named):
        assert importlib.util.find_spec(module), module
        if attribute:
            assert hasattr(importlib.import_module(module), attribute), f"{module}:{attribute}"


@pytest.mark.parametrize("part", ["echo", "load_generator"])
def test_parts_of_the_proxys_benchmark_exist(part: str) -> None:
    """Those that it names by their last part alone."""
    assert importlib.util.find_spec(f"rollbook.bench.{part}")
