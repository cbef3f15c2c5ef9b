"""What agents and scorers written in Python derive from, and are given: the names that stay.

`docs/rollout-functions.md` shows each. Everything else of `rollbook.rollouts` may move in any release.
"""

from rollbook.rollouts.agents.agentic import LLM, AgenticRollout, EnvRollout, ToolRollout, register
from rollbook.rollouts.outcome import Attempt, Outcome
from rollbook.rollouts.tasks import Task

__all__ = ["LLM", "AgenticRollout", "Attempt", "EnvRollout", "Outcome", "Task", "ToolRollout", "register"]
