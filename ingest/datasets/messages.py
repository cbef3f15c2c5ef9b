"""What a key of a row holds, as a list of chat messages: messages themselves, ShareGPT's, or a text. Pure.

- A list of messages, each with `role` and `content` or with ShareGPT's `from` and `value`; one message alone;
  a list of texts, the user's and the assistant's in turn; or any of these as JSON text.
- A text that spells a dialogue, as those of hh-rlhf ("\n\nHuman: ... \n\nAssistant: ...") or of Guanaco
  ("### Human: ... ### Assistant: ..."), is that dialogue.
- Any other text is one message, of the role that its key implies. A text that holds the marks of somebody's
  chat template is refused: within a message they would be read as what a person wrote. So is an answer that
  ends with an end of turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from rollbook.store.events import Json
from rollbook.store.interchange.chats import ROLES, shown

OTHER_ROLES: Mapping[str, str] = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot", "ai", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response"), "tool"),
}
"""Words by which data sets call a role -> the role."""
SPEAKERS, SAYINGS = ("role", "from"), ("content", "value", "text")
DIALOGUES = (
    (re.compile(r"\s*Human:.*?\n\nAssistant:", re.DOTALL), re.compile(r"(?:^\s*|\n\n)(Human|Assistant):")),
    (re.compile(r"\s*### ?Human:.*?### ?Assistant:", re.DOTALL), re.compile(r"### ?(Human|Assistant):")),
)
"""How a dialogue begins, and what its turns begin with."""
IMAGES = frozenset(("image", "image_url", "input_image"))
RENDERED = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<\|start\|>|\[INST\]|<\|(?:user|assistant)\|>"
    r"|<｜(?:User|Assistant)｜>|<\|turn>|(?:### ?(?:Response|Assistant)|ASSISTANT|<\|assistant\|>):?\s*\Z"
)
"""Marks by which chat templates begin a message, or an answer that is to come."""
ENDED = re.compile(
    r"(?:</s>|<\|(?:endoftext|end_of_text|eot_id|im_end|end|eom_id|return)\|>|<end_of_turn>|<eos>"
    r"|<｜end▁of▁sentence｜>)\s*\Z"
)
"""Tokens by which templates end a turn, at the end of an answer."""
_PYTHON = re.compile(r"\s*\[\s*\{\s*'")


class RowError(ValueError):
    """What is wrong with a row, and what to do; the caller says which row it is."""


def messages_of(key: str, value: Any, role: str | None) -> list[Json]:
    """The messages that a key of a row holds.

    Args:
        role: whose message a text is; None: a text has to spell a dialogue.

    Raises:
        RowError: it holds none; naming the key.
    """
    if isinstance(value, str):
        return _of_text(key, value, role)
    if isinstance(value, dict):
        return [_message(key, value)]
    if isinstance(value, list) and value:
        if all(isinstance(entry, str) for entry in value):
            return [{"role": ("user", "assistant")[i % 2], "content": entry} for i, entry in enumerate(value)]
        return [_message(f"{key}[{index}]", entry) for index, entry in enumerate(value)]
    raise RowError(f"{key} is {shown(value)}: write a text, or a list of messages")


def is_dialogue(value: Any) -> bool:
    """Whether a value is a text that spells a dialogue."""
    return isinstance(value, str) and any(begins.match(value) for begins, _ in DIALOGUES)


def read_json(key: str, value: Any) -> Any:
    """The value that a key holds as JSON text, or as itself.

    Raises:
        RowError: it is a text that is no JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise RowError(f"{key} is {shown(value)}: no JSON ({error})") from error


def tools_of(row: Json) -> list[Json] | None:
    """The tools of a row in chat form, whichever API they were sent to; `functions` are their older form.

    Tools that run at a provider are left out, as no model is told of them.

    Raises:
        RowError: they are no list of objects.
    """
    key = "tools" if row.get("tools") else "functions"
    if not row.get(key):
        return None
    tools = read_json(key, row[key])
    if isinstance(tools, list):
        tools = [read_json(f"{key}[{index}]", tool) for index, tool in enumerate(tools)]
    if not (isinstance(tools, list | None) and all(isinstance(tool, dict) for tool in tools or ())):
        raise RowError(f"{key} is {shown(row[key])}: write a list of objects")
    return [_tool(tool) for tool in tools or () if not _is_elsewhere(tool)] or None


def _is_elsewhere(tool: Json) -> bool:
    """Whether a tool runs at a provider."""
    kind = tool.get("type") or "function"
    return kind != "function" and not (kind == "custom" and "input_schema" in tool)


def _tool(tool: Json) -> Any:
    """A tool of chat completions as it is; one of Anthropic's, of Responses' or a bare function wrapped."""
    if "input_schema" in tool:
        described = {"description": tool["description"]} if tool.get("description") is not None else {}
        tool = {"name": tool.get("name"), **described, "parameters": tool["input_schema"] or {}}
    elif "type" in tool and "function" not in tool and isinstance(tool.get("name"), str):
        named = ("name", "description", "parameters", "strict")
        tool = {key: tool[key] for key in named if tool.get(key) is not None}
    return _wrapped(tool)


def _wrapped(function: Any) -> Any:
    """A tool, or a call, in OpenAI's form: the function that it names stands within it."""
    bare = isinstance(function, dict) and "function" not in function and isinstance(function.get("name"), str)
    return {"type": "function", "function": function} if bare else function


def _of_text(key: str, text: str, role: str | None) -> list[Json]:
    if text.lstrip()[:1] in ("[", "{"):
        messages = _json_messages(key, text)
        if messages is not None:
            return messages
        if _PYTHON.match(text):
            raise RowError(f"{key} is {shown(text)}: Python's notation; write JSON, or save Parquet or JSONL")
    for begins_with, turns in DIALOGUES:
        if begins_with.match(text):
            return _dialogue(turns, text)
    mark = RENDERED.search(text)
    if mark is not None:
        raise RowError(
            f"{key} holds {mark[0]}, the mark of a chat template: write what was said, as messages"
        )
    _refuse_ended(key, role, text)
    if role is None:
        raise RowError(
            f"{key} is {shown(text)}: no list of messages, and no dialogue of Human: and Assistant:"
        )
    return [{"role": role, "content": text}]


def _json_messages(key: str, text: str) -> list[Json] | None:
    """The messages of a JSON text; None where it is a text that says something else."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(isinstance(entry, dict) and _speaks(entry) for entry in listed):
        return None
    return [_message(f"{key}[{index}]", entry) for index, entry in enumerate(listed)]


def _speaks(value: Json) -> bool:
    """Whether an object is a message beyond doubt: an answer in JSON may have such keys too."""
    word = next((value[key] for key in SPEAKERS if isinstance(value.get(key), str)), "")
    return (word in ROLES or word in OTHER_ROLES) and not value.keys().isdisjoint((*SAYINGS, "tool_calls"))


def _dialogue(turns: re.Pattern[str], text: str) -> list[Json]:
    """The messages of a dialogue; an answer that is still to be given, at its end, is left out."""
    _, *parts = turns.split(text)
    messages = [
        {"role": "user" if speaker == "Human" else "assistant", "content": words.strip()}
        for speaker, words in zip(parts[::2], parts[1::2], strict=True)
    ]
    return messages[:-1] if messages[-1] == {"role": "assistant", "content": ""} else messages


def _message(where: str, value: Any) -> Json:
    """A message in OpenAI's form; the same object where it has it."""
    if not isinstance(value, dict):
        raise RowError(f"{where} is {shown(value)}: write an object with role and content")
    speaker = next((key for key in SPEAKERS if isinstance(value.get(key), str)), None)
    if speaker is None:
        raise RowError(f"{where} is {shown(value)}: write an object with role and content")
    word = value[speaker]
    role = word if word in ROLES else OTHER_ROLES.get(word.lower(), word.lower())
    if role not in ROLES:
        known = ", ".join((*ROLES, *OTHER_ROLES))
        raise RowError(f"{where}.{speaker} is {shown(word)}: write one of {known}")
    if "train_detail" in value:
        raise RowError(f"{where}.train_detail is not read: mark whole messages by weight, 0 or 1")
    saying = next((key for key in SAYINGS if key in value), "content")
    content, calls = value.get(saying), value.get("tool_calls")
    _refuse_images(f"{where}.{saying}", content)
    _refuse_ended(f"{where}.{saying}", role, content)
    if word == "function_call":
        content, calls = "", _calls(f"{where}.{saying}", content)
    elif calls:
        calls = read_json(f"{where}.tool_calls", calls)
        calls = [_wrapped(call) for call in calls] if isinstance(calls, list) else calls
    if (speaker, role, saying, calls) == ("role", word, "content", value.get("tool_calls")):
        return value
    rest = {key: entry for key, entry in value.items() if key not in (speaker, saying, "tool_calls")}
    return {"role": role, "content": content} | ({"tool_calls": calls} if calls else {}) | rest


def _refuse_ended(where: str, role: str | None, content: Any) -> None:
    """Refuse an answer with an end of turn of its own: the model's follows it anyway."""
    if role != "assistant" or not isinstance(content, str):
        return
    end = ENDED.search(content)
    if end is not None and not (end[0].startswith("</s>") and "<s>" in content):
        raise RowError(
            f"{where} ends with {end[0].strip()}, the end of a turn in a chat template: leave it out"
        )


def _refuse_images(where: str, content: Any) -> None:
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and part.get("type") in IMAGES:
            raise RowError(f"{where}[{index}] is an image: rows of text alone can be imported")


def _calls(where: str, value: Any) -> list[Json]:
    """The calls of a ShareGPT message `function_call`: an object of name and arguments, or a list of such."""
    calls = read_json(where, value)
    listed = calls if isinstance(calls, list) else [calls]
    for call in listed:
        if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
            raise RowError(f"{where} is {shown(value)}: write an object with name and arguments, as JSON")
    return [_wrapped({"name": call["name"], "arguments": call.get("arguments", {})}) for call in listed]
