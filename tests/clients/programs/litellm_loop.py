"""A loop over litellm. Words: openai or hosted_vllm; stream."""

import json
import sys
from typing import Any

import litellm
from conversation import MODEL, QUESTION, SYSTEM, TOOL, add, called, report


def main(words: list[str]) -> None:
    """Ask until there are no more calls."""
    provider = next(word for word in words if word in ("openai", "hosted_vllm"))
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    turns: list[dict[str, Any]] = []
    while True:
        body: dict[str, Any] = {"model": f"{provider}/{MODEL}", "messages": messages, "tools": [TOOL]}
        if "stream" in words:
            chunks = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **body))
            reply = litellm.stream_chunk_builder(chunks, messages=messages)
            # The chunk that brings the usage comes last, and the builder goes by its finish, which is none.
            finish = next(c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason)
        else:
            reply = litellm.completion(**body)
            finish = reply.choices[0].finish_reason
        message, usage = reply.choices[0].message, reply.usage
        calls = message.tool_calls or []
        turns.append(
            {
                "content": message.content or "",
                "reasoning": message.reasoning_content,
                "calls": [called(c.function.name, c.function.arguments, c.id) for c in calls],
                "finish": finish,
                "usage": [usage.prompt_tokens, usage.completion_tokens],
            }
        )
        if not calls:
            return report(message.content, turns)
        messages.append(message.model_dump())
        for call in calls:
            result = add(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


main(sys.argv[1:])
