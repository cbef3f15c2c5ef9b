"""The agent of the rollouts' benchmark that is a class, and the script that replies to all of its
agents."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from rollbook.bench.load_generator import Conversation
from rollbook.bench.proxy_outcome import PROXY
from rollbook.bench.scripted.dialogues import Material
from rollbook.rollouts.agents.agentic import LLM, AgenticRollout
from rollbook.rollouts.tasks import Task

MATERIAL = "ROLLBOOK_BENCH_MATERIAL"
"""Variable with the path of what is talked about."""
_MARK = re.compile(r"#(\d\d)\Z")


@functools.cache
def _material() -> Material:
    return Material.read(Path(os.environ[MATERIAL]))


class Converses(AgenticRollout):
    """Talks, and checks every reply, as the load generator does."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def run(self, task: Task, llm: LLM) -> float:
        """As `AgenticRollout`."""
        conversation = Conversation(_material(), task.values["seed"], self._turns, PROXY)
        for turn in range(self._turns):
            fields = conversation.fields(turn)
            await llm.chat(fields.pop("messages"), **fields)
            conversation.take(turn, llm.replies[-1]["choices"][0])
        return 1.0


async def answer(messages: Sequence[Any], tools: Sequence[Any] | None) -> AsyncIterator[str]:
    """The reply that the last message's mark names."""
    mark = _MARK.search(messages[-1]["content"])
    assert mark is not None
    yield _material().replies[int(mark[1])].text()
