"""What every client is asked, the tool it offers, and how it tells what it got.

A program prints one line of JSON: its answer, and of each turn what its library shows of the reply:
content, reasoning, calls (`arguments` a string where the library keeps the text, else the parsed object),
finish, and usage as [prompt tokens, completion tokens].
"""

from __future__ import annotations

import json
import os
from typing import Any

MODEL = "a-model"
SYSTEM = "You add numbers. Be brief."
QUESTION = "Add 2 and 3. Then add 10.0 to the sum, and 1 to 2. é✓"
ASKED = os.environ.get("ROLLBOOK_QUESTION", QUESTION)
"""A test may want another question."""
ANSWER = "The sums are 15 and 3. é✓"

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}
DESCRIPTION = "Add two numbers."
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": DESCRIPTION, "parameters": PARAMETERS},
}


def add(a: float, b: float) -> str:
    """Add two numbers."""
    return f"{a + b:g}"


def called(name: str, arguments: Any, call_id: str | None = None) -> dict[str, Any]:
    """A call, as the library shows it."""
    return {"name": name, "arguments": arguments} | ({} if call_id is None else {"id": call_id})


def report(answer: Any, turns: list[dict[str, Any]]) -> None:
    """Tell the test."""
    print("\n" + json.dumps({"answer": answer, "turns": turns}))
