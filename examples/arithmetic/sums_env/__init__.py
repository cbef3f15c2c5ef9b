"""The same sums as an environment of verifiers, in which the same program is the agent."""

from sums_env.harness import SumsHarness
from sums_env.taskset import SumsTaskset

__all__ = ["SumsHarness", "SumsTaskset"]
