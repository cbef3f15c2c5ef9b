"""The sums, and what answers to them are worth."""

from __future__ import annotations

import json
from pathlib import Path

import verifiers.v1 as vf

TASKS = Path(__file__).resolve().parents[1] / "tasks.jsonl"


class SumsData(vf.TaskData):
    """A sum."""

    answer: int


class SumsTask(vf.Task[SumsData]):
    """A question with a number as its answer."""

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """1 where the last reply holds the right number."""
        return float(str(self.data.answer) in (trace.last_reply or ""))

    @vf.reward(weight=0.001)
    async def brief(self, trace: vf.Trace) -> float:
        """Less for each character of it."""
        return -float(len(trace.last_reply or ""))


class SumsTaskset(vf.Taskset[SumsTask, vf.TasksetConfig]):
    """All sums."""

    def load(self) -> list[SumsTask]:
        """One for each line."""
        rows = map(json.loads, TASKS.read_text().splitlines())
        return [
            SumsTask(SumsData(prompt=row["question"], answer=row["answer"]), self.config.task) for row in rows
        ]
