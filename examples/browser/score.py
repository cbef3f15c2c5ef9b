"""What an answer is worth."""

from __future__ import annotations

from rollbook.agents import Attempt, Task


def right(task: Task, attempt: Attempt) -> float:
    """1 where the answer, the last line that it printed, is the code."""
    return float((attempt.folder / "stdout.log").read_text().split()[-1:] == [task.values["answer"]])
