"""A loop over openai's Responses. Words: stream; previous, which names the response before instead of
repeating what it said."""

import json
import sys
from typing import Any

from conversation import DESCRIPTION, MODEL, PARAMETERS, QUESTION, SYSTEM, add, called, report
from openai import OpenAI

TOOL = {"type": "function", "name": "add", "description": DESCRIPTION, "parameters": PARAMETERS}


def asked(client: OpenAI, *, stream: bool, **body: Any) -> Any:
    """One response."""
    body |= {"model": MODEL, "instructions": SYSTEM, "tools": [TOOL]}
    if not stream:
        return client.responses.create(**body)
    with client.responses.stream(**body) as events:
        return events.get_final_response()


def shown(response: Any) -> dict[str, Any]:
    """What is shown of it."""
    items = response.output
    return {
        "content": response.output_text,
        "reasoning": "".join(p.text for i in items if i.type == "reasoning" for p in i.content),
        "calls": [called(i.name, i.arguments, i.call_id) for i in items if i.type == "function_call"],
        "usage": [response.usage.input_tokens, response.usage.output_tokens],
    }


def main(words: list[str]) -> None:
    """Ask until there are no more calls."""
    client = OpenAI()
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    named: dict[str, Any] = {}
    turns: list[dict[str, Any]] = []
    while True:
        response = asked(client, stream="stream" in words, input=items, **named)
        turns.append(shown(response))
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return report(response.output_text, turns)
        if "previous" in words:
            items, named = [], {"previous_response_id": response.id}
        else:
            items += [item.model_dump(exclude_none=True) for item in response.output]
        for call in calls:
            result = add(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


main(sys.argv[1:])
