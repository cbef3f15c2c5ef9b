"""A verifiers environment: one task, and a harness that runs the loop over openai's chat completions."""

from adder.harness import AdderHarness
from adder.taskset import AdderTaskset

__all__ = ["AdderHarness", "AdderTaskset"]
