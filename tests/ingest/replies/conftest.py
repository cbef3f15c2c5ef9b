"""Fixtures of the reply tests: every family, and the real chat templates of the corpus."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "s": {"type": "string"},
                    "n": {"type": "integer"},
                    "x": {"type": "number"},
                    "b": {"type": "boolean"},
                    "o": {"type": "object"},
                    "l": {"type": "array"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "g"}},
]


class Corpus(dict[str, str]):
    """Templates by name; a failed test does not print all of them."""

    def __repr__(self) -> str:
        return f"Corpus of {len(self)}"


@pytest.fixture(scope="session")
def tools() -> list[dict[str, Any]]:
    """A tool with one parameter of each type, and one without a schema."""
    return TOOLS


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    """Sources of the real chat templates, by file name without its suffix."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("pip install --no-deps -r tests/corpus.txt brings the chat templates")
    folder = Path(spec.origin).parent / "chat_templates"
    return Corpus((path.stem, path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.jinja")))
