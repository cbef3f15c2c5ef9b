"""What a scorer is given of a rollout, beside its task. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollbook.store.events import Json


@dataclass(frozen=True, slots=True)
class Attempt:
    """What scorers are given beside the task.

    Attributes:
        trajectory: its name.
        folder: what the agent left there.
        conversations: what was said, each from its beginning to a last reply: objects with `messages` and
            `tools`.
        trajectory_id: of the log.
    """

    trajectory: str
    folder: Path
    conversations: Sequence[Json] = ()
    trajectory_id: str = ""

    @property
    def messages(self) -> list[Json]:
        """The last conversation's, the agent's last reply included; none where nothing was said."""
        return list(self.conversations[-1]["messages"]) if self.conversations else []

    @property
    def answer(self) -> str:
        """The text of the agent's last reply."""
        content = self.messages[-1].get("content") if self.messages else None
        return content if isinstance(content, str) else ""
