"""openai-agents. Words: stream; chat (its default is Responses); previous, which names the response that
came before."""

import asyncio
import sys
from typing import Any

from agents import Agent, Runner, function_tool, set_default_openai_api
from conversation import MODEL, QUESTION, SYSTEM, called, report
from conversation import add as plus


@function_tool
def add(a: float, b: float) -> str:
    """Add two numbers."""
    return plus(a, b)


def shown(response: Any) -> dict[str, Any]:
    """What is shown of a response."""
    items = response.output
    messages = [item for item in items if item.type == "message"]
    thoughts = [item for item in items if item.type == "reasoning"]
    return {
        "content": "".join(part.text for item in messages for part in item.content),
        "reasoning": "".join(p.text for item in thoughts for p in item.content or item.summary),
        "calls": [called(i.name, i.arguments, i.call_id) for i in items if i.type == "function_call"],
        "usage": [response.usage.input_tokens, response.usage.output_tokens],
    }


async def main(words: list[str]) -> None:
    """Run the agent."""
    if "chat" in words:
        set_default_openai_api("chat_completions")
    agent = Agent(name="adder", instructions=SYSTEM, model=MODEL, tools=[add])
    named = {"auto_previous_response_id": True} if "previous" in words else {}
    if "stream" in words:
        result = Runner.run_streamed(agent, QUESTION, **named)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, QUESTION, **named)
    report(result.final_output, [shown(response) for response in result.raw_responses])


asyncio.run(main(sys.argv[1:]))
