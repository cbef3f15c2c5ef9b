"""Agents that speak through OpenAI's and Anthropic's own clients, and tell all that they were given.

Each takes the address of a server. Run twice against servers that answer alike it gives the same twice.
"""

from __future__ import annotations

from typing import Any

import openai

CALC = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}
CALC_BLOCK = {"name": "calc", "input_schema": {"type": "object"}}


def _openai(url: str, name: str | None) -> openai.OpenAI:
    prefix = "" if name is None else f"/t/{name}"
    return openai.OpenAI(base_url=f"{url}{prefix}/v1", api_key="none", max_retries=0)


def chat(url: str, name: str | None = "chat", first: str = "call two") -> list[Any]:
    """Calls and their results, a stream, the same request twice more, two choices, and a failure."""
    replies: list[Any] = []
    with _openai(url, name) as client:
        ask = client.chat.completions.create
        messages: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": first}]
        reply = ask(model="m", messages=messages, tools=[CALC], temperature=0.5, user="somebody")
        replies.append(reply.model_dump())
        messages.append(reply.choices[0].message)
        for call in reply.choices[0].message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "95"})
        chunks = list(
            ask(
                model="m",
                messages=messages,
                tools=[CALC],
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        ends = [c.choices[0].finish_reason for c in chunks if c.choices][-1]
        replies.append([text, ends, chunks[0].id, chunks[0].created, chunks[-1].usage])
        replies += [ask(model="m", messages=messages, tools=[CALC]).model_dump() for _ in range(2)]
        replies.append(ask(model="m", messages=[{"role": "user", "content": "hi"}], n=2).model_dump())
        try:
            ask(model="m", messages=[{"role": "user", "content": "boom"}])
        except openai.APIStatusError as error:
            replies.append([error.status_code, error.body])
    return replies


def responses(url: str, name: str | None = "responses") -> list[Any]:
    """Three responses, two of which name the one before; the last is streamed."""
    with _openai(url, name) as client:
        first = client.responses.create(model="m", input="call", instructions="be brief", tools=[])
        outputs: list[Any] = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "7"}
            for item in first.output
            if item.type == "function_call"
        ]
        outputs.append({"role": "user", "content": "and?"})
        second = client.responses.create(model="m", previous_response_id=first.id, input=outputs)
        with client.responses.stream(model="m", previous_response_id=second.id, input="more") as stream:
            events = list(stream)
            last = stream.get_final_response()
    items = sorted({event.item_id for event in events if hasattr(event, "item_id")})
    whole = [response.model_dump() for response in (first, second, last)]
    return [*whole, events[0].type, events[-1].type, items]


def messages(url: str, name: str | None = "messages") -> list[Any]:
    """A call of a tool and its result, streamed."""
    import anthropic  # it takes seconds, in every process that collects tests

    prefix = "" if name is None else f"/t/{name}"
    with anthropic.Anthropic(base_url=url + prefix, api_key="none", max_retries=0) as client:
        history: list[Any] = [{"role": "user", "content": "call"}]
        ask: Any = {"model": "m", "max_tokens": 50, "tools": [CALC_BLOCK]}
        first = client.messages.create(messages=history, **ask)
        blocks = [block.model_dump(exclude_none=True) for block in first.content]
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "7"}
            for block in first.content
            if block.type == "tool_use"
        ]
        history += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
        with client.messages.stream(messages=history, **ask) as stream:
            last = stream.get_final_message()
    return [first.model_dump(), last.model_dump()]


def completions(url: str, name: str | None = "completions") -> list[Any]:
    """A raw prompt, whole and streamed."""
    with _openai(url, name) as client:
        whole = client.completions.create(model="m", prompt="Once", max_tokens=8)
        chunks = list(client.completions.create(model="m", prompt="Twice", max_tokens=8, stream=True))
    text = "".join(c.choices[0].text for c in chunks)
    return [whole.model_dump(), text, chunks[0].id, chunks[-1].choices[0].finish_reason]
