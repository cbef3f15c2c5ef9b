"""The same agent as a class, and what its answers are worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollbook.agents import Attempt, Task, ToolRollout

OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}


class Sums(ToolRollout):
    """Answers with a calculator."""

    most_turns = 3

    def messages(self, task: Task) -> list[dict[str, Any]]:
        """The question."""
        return [{"role": "user", "content": task.values["question"]}]

    def schemas(self, task: Task) -> list[dict[str, Any]]:
        """The calculator."""
        integer = {"type": "integer"}
        properties = {"a": integer, "op": {"type": "string", "enum": list(OPERATIONS)}, "b": integer}
        parameters = {"type": "object", "properties": properties, "required": ["a", "op", "b"]}
        return [{"type": "function", "function": {"name": "calc", "parameters": parameters}}]

    def tools(self, task: Task) -> Mapping[str, Callable[..., Any]]:
        """What runs it."""
        return {"calc": lambda a, op, b: OPERATIONS[op](int(a), int(b))}

    def score(self, task: Task, answer: str) -> float:
        """1 for the right number, less a little for each character."""
        return (str(task.values["answer"]) in answer) - len(answer) / 1000


def correct(task: Task, attempt: Attempt) -> float:
    """1 where what the program printed holds the right number."""
    return float(str(task.values["answer"]) in _printed(attempt))


def brief(task: Task, attempt: Attempt) -> float:
    """Less for each character of it."""
    return -len(_printed(attempt)) / 1000


def _printed(attempt: Attempt) -> str:
    return (attempt.folder / "stdout.log").read_text().strip()
