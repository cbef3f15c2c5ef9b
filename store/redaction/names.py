"""Which names are names of secrets, and which parts of a body are conversation. Pure.

`x-api-key` and `refreshToken` are names of secrets, `max_tokens` and `token_ids` are not.

Conversation is what the model sees, and what constrains its reply; it is left unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

PLACEHOLDER = re.compile(r"\[secret:[0-9a-f]{12}\]")
"""The placeholder of a secret; inside a name it does not count as a word."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ALONE = (
    "authorization",
    "authentication",
    "auth",
    "apikey",
    "password",
    "passwd",
    "passphrase",
    "pwd",
    "secret",
    "cookie",
    "credential",
    "jwt",
)
"""Words that alone mark a secret; `clientsecret` and `dbpassword` end with one."""
_ENDINGS = tuple(word for word in _ALONE if len(word) > 4)
_KEYS_OF = frozenset(
    {"api", "access", "secret", "private", "encryption", "signing", "subscription", "account", "auth"}
    | {"shared", "master", "service", "client", "license", "ssh", "webhook", "engine"}
)
"""Before `key`: a key of these opens something. One of a cache or of a column does not."""
_TOKENS_OF = frozenset(
    {"access", "refresh", "auth", "api", "bearer", "session", "oauth", "csrf", "xsrf", "security", "id"}
    | {"authorization", "personal", "github", "gitlab", "hf", "bot", "service", "user", "client"}
)
"""Before `tokens`: of these they are secrets. All others are those of a model."""
_OF_A_MODEL = frozenset(
    {"eos", "bos", "pad", "unk", "sep", "cls", "mask", "stop", "end", "start", "begin", "special"}
    | {"image", "audio", "video", "think", "thinking", "reasoning", "prompt", "completion", "input", "output"}
    | {"sampled", "generated", "predicted", "max", "min", "total", "num", "per", "next", "first", "last"}
    | {"last", "page", "continuation", "of", "to", "new", "draft", "added", "control", "top", "cached"}
)
"""Before `token`: a token of these is one of a model, or of a page."""
_ABOUT = frozenset(
    {"url", "uri", "endpoint", "type", "types", "name", "names", "count", "counts", "limit", "budget"}
    | {"policy", "length", "size", "expires", "expiry", "ttl", "usage", "details", "version", "enabled"}
    | {"required", "mode", "method", "methods", "scheme", "status", "error", "path", "domain", "at", "in"}
    | {"ids", "index", "format", "provider", "algorithm", "rotation"}
)
"""Behind the word: then it is said of the secret, and is not one."""
_VALUE = frozenset({"value", "secret", "string", "header", "text", "data", "raw", "b64", "base64", "plain"})
"""Behind `token` or `key`: still the secret itself."""


@lru_cache(maxsize=8192)
def is_secret_name(name: str) -> bool:
    """Whether the value of a field, header, parameter or variable of this name is a secret."""
    words = [word.lower() for word in _WORD.findall(PLACEHOLDER.sub("", name[:256]))]
    if not words or words[-1] in _ABOUT:
        return False
    return any(_opens(words, at) for at in range(len(words)))


def _opens(words: list[str], at: int) -> bool:
    """Whether the word at this place, with its neighbours, names a secret."""
    word, before = words[at], words[at - 1] if at else ""
    single = word.removesuffix("s")
    if single in _ALONE or single.endswith(_ENDINGS):
        return True
    if at < len(words) - 1 and words[at + 1] not in _VALUE and not words[at + 1].isdigit():
        # `key_id`, `token_budget`: of something else. AWS calls half of a secret an id.
        return (word, words[at + 1]) == ("key", "id") and before == "access"
    if single.endswith("key"):
        return (before if single == "key" else single.removesuffix("key")) in _KEYS_OF
    if word.endswith("tokens"):
        return (before if word == "tokens" else word.removesuffix("tokens")) in _TOKENS_OF
    if word.endswith("token"):
        return (before if word == "token" else word.removesuffix("token")) not in _OF_A_MODEL
    return word == "bearer"


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


def replace_outside(body: Json, change: Callable[[str, Any], Any]) -> Json:
    """The body with `change` applied to each part that is no conversation; the same object if
    nothing changes.

    Args:
        change: called with (name of a field, its value); returns a new value, or the same.
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
