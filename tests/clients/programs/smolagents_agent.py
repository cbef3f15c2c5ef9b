"""smolagents' ToolCallingAgent. Word: stream."""

import os
import sys
from typing import Any

from conversation import MODEL, QUESTION, called, report
from conversation import add as plus
from smolagents import ActionStep, OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: float, b: float) -> str:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return plus(a, b)


def shown(message: Any) -> dict[str, Any]:
    """What is shown of a reply."""
    calls = message.tool_calls or []
    return {
        "content": message.content or "",
        "calls": [called(c.function.name, c.function.arguments, c.id) for c in calls],
        "usage": [message.token_usage.input_tokens, message.token_usage.output_tokens],
    }


def main(words: list[str]) -> None:
    """Run the agent."""
    model = OpenAIServerModel(MODEL, api_base=os.environ["OPENAI_BASE_URL"], api_key="none")
    agent = ToolCallingAgent([add], model, stream_outputs="stream" in words, verbosity_level=0)
    answer = agent.run(QUESTION)
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
    report(answer, [shown(step.model_output_message) for step in steps])


main(sys.argv[1:])
