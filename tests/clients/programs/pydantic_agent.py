"""pydantic-ai. Words: chat, responses or anthropic; stream."""

import asyncio
import sys
from typing import Any

from conversation import MODEL, QUESTION, SYSTEM, called, report
from conversation import add as plus
from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse, TextPart, ThinkingPart, ToolCallPart

PREFIXES = {"chat": "openai-chat", "responses": "openai-responses", "anthropic": "anthropic"}


def add(a: float, b: float) -> str:
    """Add two numbers."""
    return plus(a, b)


def thought(part: ThinkingPart) -> str:
    """Reasoning: of Responses a summary, if there is one, and what the model thought besides."""
    return part.content or "".join((part.provider_details or {}).get("raw_content", []))


def shown(response: ModelResponse) -> dict[str, Any]:
    """What is shown of a response."""
    parts = response.parts
    calls = [p for p in parts if isinstance(p, ToolCallPart)]
    return {
        "content": "".join(p.content for p in parts if isinstance(p, TextPart)),
        "reasoning": "".join(thought(p) for p in parts if isinstance(p, ThinkingPart)),
        "calls": [called(p.tool_name, p.args, p.tool_call_id) for p in calls],
        "usage": [response.usage.input_tokens, response.usage.output_tokens],
    }


async def main(words: list[str]) -> None:
    """Run the agent."""
    prefix = next(PREFIXES[word] for word in words if word in PREFIXES)
    agent = Agent(f"{prefix}:{MODEL}", instructions=SYSTEM, tools=[add])

    async def watch(_: Any, events: Any) -> None:
        async for _ in events:
            pass

    result = await agent.run(QUESTION, event_stream_handler=watch if "stream" in words else None)
    responses = [m for m in result.all_messages() if isinstance(m, ModelResponse)]
    report(result.output, [shown(response) for response in responses])


asyncio.run(main(sys.argv[1:]))
