"""What the scripted model samples: a conversation of three turns with odd calls, in pieces of odd size.

Turn 1 thinks, says something and makes one call whose arguments are spelled as no library would; turn 2
makes two calls at once, `10.0` and all; turn 3 answers with what the calls gave. It goes by how many
assistant messages it is shown, and by which tools: mini-swe-agent's is a shell, and smolagents ends with a
call.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

ONE_CALL = '<tool_call>\n{"name": "add", "arguments": {"b":  3, "a": 2}}\n</tool_call>'
TWO_CALLS = (
    '<tool_call>\n{"name": "add", "arguments": {"a":5,"b":10.0}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"b":2 ,"a":1}}\n</tool_call>'
)
SHELL = (
    '<tool_call>\n{"name": "bash", "arguments": {"command":  "echo $((2+3))"}}\n</tool_call>',
    '<tool_call>\n{"name": "bash", "arguments": {"command":"echo $((5+10))"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "bash", "arguments": {"command": "echo $((1+2))" }}\n</tool_call>',
)
SUBMIT = '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo \'%s\'"}'


def said(messages: Sequence[Any], tools: Sequence[Any] | None) -> str:
    """The completion's text, without its end-of-turn token."""
    names = {tool["function"]["name"] for tool in tools or ()}
    turn = sum(message["role"] == "assistant" for message in messages)
    calls = SHELL if "bash" in names else (ONE_CALL, TWO_CALLS)
    if turn == 0:
        return f"<think>\n2 and 3 come first. ✓\n</think>\n\nCalling add.\n\n{calls[0]}"
    if turn == 1:
        return f"<think>\nNow the other two.\n</think>\n\n{calls[1]}"
    sums = results(messages)
    answer = f"The sums are {' and '.join(sums)}. é✓"
    if "bash" in names:
        answer = f'<tool_call>\n{{"name": "bash", "arguments": {SUBMIT % answer}}}\n</tool_call>'
    if "final_answer" in names:
        arguments = f'{{"answer": "{answer}"}}'
        answer = f'<tool_call>\n{{"name": "final_answer", "arguments": {arguments}}}\n</tool_call>'
    return f"<think>\nDone.\n</think>\n\n{answer}"


def results(messages: Sequence[Any]) -> list[str]:
    """Numbers that the tools gave since the assistant last spoke."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    texts = [_text(message["content"]) for message in messages[last + 1 :]]
    return [number for text in texts for number in re.findall(r"(?<![\d.])\d+(?![\d.])", _output(text))]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _output(text: str) -> str:
    """What a shell printed, where the text is a shell's: the rest says how it ended."""
    return str(json.loads(text)["output"]) if '"returncode"' in text else text


def pieces(text: str) -> list[str]:
    """The text as it is sampled: cut where no tokenizer would, but for control tokens and markers."""
    rng = random.Random(text)
    parts = []
    for part in re.split(r"(</?\w+>)", text):
        if re.fullmatch(r"</?\w+>", part):
            parts.append(part)
            continue
        while part:
            size = rng.randint(1, 5)
            parts.append(part[:size])
            part = part[size:]
    return parts


async def answer(messages: Sequence[Any], tools: Sequence[Any] | None) -> AsyncIterator[str]:
    """The completion, piece by piece; slowly, if the first message of the user asks for that."""
    first = next(_text(message["content"]) for message in messages if message["role"] == "user")
    for piece in pieces(said(messages, tools)):
        await asyncio.sleep(0.05 if "slowly" in first else 0)
        yield piece
