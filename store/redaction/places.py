"""Splits a body into conversation (what the model sees, and what constrains its reply) and the rest. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Json = dict[str, Any]

SHOWN = frozenset(
    {
        *("messages", "input", "prompt", "suffix", "system", "instructions", "prediction", "documents"),
        *("functions", "function_call", "tool_choice", "chat_template", "chat_template_kwargs"),
        *("input_ids", "prompt_token_ids", "stop", "stop_sequences", "logit_bias", "bad_words"),
        *("response_format", "text", "output_config", "output_format", "structured_outputs", "regex", "ebnf"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema"),
        *("choices", "output", "output_text", "content"),
    }
)
"""Fields of the APIs' bodies that are the conversation, or constrain it; the last line's are replies'."""
_DEFINES = frozenset(
    {"type", "function", "custom", "name", "description", "parameters", "input_schema", "output_schema"}
    | {"input_examples", "format", "strict"}
)
"""What of a tool the model is shown. What is beside it, such as an MCP server's headers, is a connection."""


def conversation(body: Json) -> Json:
    """The part of a body that is conversation."""
    shown = {name: value for name, value in body.items() if name in SHOWN}
    if isinstance(body.get("tools"), list):
        shown["tools"] = [_definition(tool) for tool in body["tools"]]
    return shown


def _definition(tool: Any) -> Any:
    return {k: v for k, v in tool.items() if k in _DEFINES} if isinstance(tool, dict) else tool


def outside(body: Json, change: Callable[[str, Any], Any]) -> Json:
    """The body with each part that is no conversation replaced; the same object where nothing changes.

    Args:
        change: gives (name of a field, its value) a new value, or the same.
    """
    changed: Json = {}
    for name, value in body.items():
        if name == "tools" and isinstance(value, list):
            new: Any = _tools(value, change)
        else:
            new = value if name in SHOWN else change(name, value)
        if new is not value:
            changed[name] = new
    return body | changed if changed else body


def _tools(tools: list[Any], change: Callable[[str, Any], Any]) -> list[Any]:
    new = [_tool(tool, change) if isinstance(tool, dict) else tool for tool in tools]
    return tools if all(a is b for a, b in zip(new, tools, strict=True)) else new


def _tool(tool: Json, change: Callable[[str, Any], Any]) -> Json:
    changed = {name: change(name, value) for name, value in tool.items() if name not in _DEFINES}
    changed = {name: value for name, value in changed.items() if value is not tool[name]}
    return tool | changed if changed else tool
