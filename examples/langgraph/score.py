"""What an answer is worth."""

from __future__ import annotations

import re

from rollbook.agents import Attempt, Task


def right(task: Task, attempt: Attempt) -> float:
    """1 where the answer that it printed holds the right number, and no other."""
    printed = (attempt.folder / "stdout.log").read_text()
    return float(re.findall(r"\d+", printed) == [task.values["answer"]])
