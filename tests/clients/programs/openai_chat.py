"""A loop over openai's chat completions. Words: stream; plain, which echoes role, content and calls alone."""

import json
import sys
from typing import Any

from conversation import ASKED, MODEL, SYSTEM, TOOL, add, called, report
from openai import OpenAI

client = OpenAI()


def asked(messages: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the reply as a message, what is shown of it)"""
    reply = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    choice, usage = reply.choices[0], reply.usage
    message = choice.message.model_dump(exclude_none=True)
    return message, {"finish": choice.finish_reason, "usage": [usage.prompt_tokens, usage.completion_tokens]}


def streamed(messages: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same, from chunks."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    shown: dict[str, Any] = {}
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[TOOL], stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        if chunk.usage:
            shown["usage"] = [chunk.usage.prompt_tokens, chunk.usage.completion_tokens]
        for choice in chunk.choices:
            shown["finish"] = choice.finish_reason
            message["content"] += choice.delta.content or ""
            message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.index == len(calls):
                    function = {"name": call.function.name, "arguments": ""}
                    calls.append({"id": call.id, "type": "function", "function": function})
                calls[call.index]["function"]["arguments"] += call.function.arguments or ""
    if calls:
        message["tool_calls"] = calls
    return message, shown


def main(words: list[str]) -> None:
    """Ask until there are no more calls."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASKED}]
    turns: list[dict[str, Any]] = []
    while True:
        message, shown = (streamed if "stream" in words else asked)(messages)
        calls = message.get("tool_calls", [])
        shown |= {"content": message.get("content") or "", "reasoning": message["reasoning_content"]}
        shown["calls"] = [called(c["function"]["name"], c["function"]["arguments"], c["id"]) for c in calls]
        turns.append(shown)
        if not calls:
            return report(message["content"], turns)
        if "plain" in words:
            message = {k: message[k] for k in ("role", "content", "tool_calls") if k in message}
        messages.append(message)
        for call in calls:
            result = add(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


main(sys.argv[1:])
