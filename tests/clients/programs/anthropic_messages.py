"""A loop over anthropic's messages. Word: stream."""

import sys
from typing import Any

from anthropic import Anthropic
from conversation import DESCRIPTION, MODEL, PARAMETERS, QUESTION, SYSTEM, add, called, report

TOOL = {"name": "add", "description": DESCRIPTION, "input_schema": PARAMETERS}


def asked(client: Anthropic, messages: list[Any], *, stream: bool) -> Any:
    """One message."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 512, "system": SYSTEM, "tools": [TOOL]}
    if not stream:
        return client.messages.create(messages=messages, **body)
    with client.messages.stream(messages=messages, **body) as events:
        return events.get_final_message()


def shown(message: Any) -> dict[str, Any]:
    """What is shown of it."""
    blocks = message.content
    return {
        "content": "".join(b.text for b in blocks if b.type == "text"),
        "reasoning": "".join(b.thinking for b in blocks if b.type == "thinking"),
        "calls": [called(b.name, b.input, b.id) for b in blocks if b.type == "tool_use"],
        "finish": message.stop_reason,
        "usage": [message.usage.input_tokens, message.usage.output_tokens],
    }


def main(words: list[str]) -> None:
    """Ask until there are no more calls."""
    client = Anthropic()
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    turns: list[dict[str, Any]] = []
    while True:
        message = asked(client, messages, stream="stream" in words)
        turns.append(shown(message))
        if message.stop_reason != "tool_use":
            return report(turns[-1]["content"], turns)
        messages.append({"role": "assistant", "content": message.content})
        uses = [block for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": b.id, "content": add(**b.input)} for b in uses]
        messages.append({"role": "user", "content": results})


main(sys.argv[1:])
