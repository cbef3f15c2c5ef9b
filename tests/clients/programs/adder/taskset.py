"""The task, and what its rollout is worth."""

from __future__ import annotations

import verifiers.v1 as vf
from conversation import ANSWER, QUESTION


class AdderData(vf.TaskData):
    """One row."""


class AdderTask(vf.Task[AdderData]):
    """One question with one right answer."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        """1 where the last reply is the answer."""
        return float(trace.last_reply == ANSWER)


class AdderTaskset(vf.Taskset[AdderTask, vf.TasksetConfig]):
    """The one task."""

    def load(self) -> list[AdderTask]:
        """The task."""
        return [AdderTask(AdderData(prompt=QUESTION), self.config.task)]
