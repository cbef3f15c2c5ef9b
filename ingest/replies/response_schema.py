"""Replies read by transformers, for models that ship a `response_template` in tokenizer_config.json.

Such a template says in JSON where reasoning, content and calls begin and end (Gemma 4 and others ship
one, since transformers 5.13; its predecessor `response_schema` is read no more). The other families are
code of our own: the proxy runs without transformers; hardly a model ships a template yet; and that parser
builds arguments anew, drops what stood in front of calls if text follows them, takes a call of tags that
was cut off for a whole one, and streams a region before it knows that it can be read.

For the last reason nothing streams here: only a whole text is read. Its content comes trimmed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollbook.ingest.replies.arguments import is_object
from rollbook.ingest.replies.family import MALFORMED_CALL, Call, Parsed, ReplyContext
from rollbook.store.errors import ModelError
from rollbook.store.events import Json

_REASONING = ("reasoning_content", "reasoning", "thinking")
_CALLS = "tool_calls"
# Control tokens as models spell them, `<|channel>`, `[TOOL_CALLS]`, inside strings and patterns.
_TOKEN = re.compile(r"<[^<>\s()]++>|\[/?[A-Z_]++\]")


@dataclass(frozen=True, slots=True, eq=False)
class ResponseTemplate:
    """A model's own response template."""

    template: Json
    read: Callable[..., Any]
    """transformers' `parse_response`."""
    name: str = "response_template"

    @property
    def markers(self) -> frozenset[str]:
        """What looks like a control token in the template's strings and patterns."""
        texts = (text.replace("\\", "") for text in _strings(self.template["fields"]))
        return frozenset(token for text in texts for token in _TOKEN.findall(text))

    def parse(self, text: str, tools: Sequence[Json] | None, *, in_reasoning: bool, final: bool) -> Parsed:
        """See `Family.parse`."""
        if not final:
            return Parsed(None, "")
        fields = self.template["fields"]
        prefix = self._opening() if in_reasoning else ""
        parsed = self._read(text, prefix, fields, tools) if tools else None
        if parsed is not None:
            return parsed
        flags = (MALFORMED_CALL,) if tools else ()
        without = {name: field for name, field in fields.items() if name != _CALLS}
        parsed = self._read(text, prefix, without, None)
        return (
            Parsed(None, text, (), flags)
            if parsed is None
            else Parsed(parsed.reasoning, parsed.content, (), flags)
        )

    def write(self, parts: Parsed, context: ReplyContext) -> str | None:
        """None: a response template reads only; the chat template writes."""
        return None

    def end(self, parts: Parsed) -> str | None:
        """None: the chat template says it."""
        return None

    def _read(self, text: str, prefix: str, fields: Json, tools: Sequence[Json] | None) -> Parsed | None:
        try:
            return _parsed(self.read(text, self.template | {"fields": fields}, prefix=prefix, tools=tools))
        except Exception:  # whatever a model's own patterns make of its text, the reply goes out
            return None

    def _opening(self) -> str:
        """What a prompt ends with that opens the reasoning."""
        fields = self.template["fields"]
        field: Json = next((fields[name] for name in _REASONING if name in fields), {})
        literal = field.get("open")
        if literal is None:
            return "<think>\n" if "<think>" in field.get("open_pattern", "") else ""
        return str(literal[0] if isinstance(literal, list) else literal)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def _parsed(message: Json) -> Parsed | None:
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    content = message.get("content") or ""
    calls = [_call(call["function"]) for call in message.get(_CALLS) or ()]
    if not isinstance(content, str) or not isinstance(reasoning, str | None):
        return None
    read = tuple(call for call in calls if call is not None)
    return Parsed(reasoning, content, read) if len(read) == len(calls) else None


def _call(function: Json) -> Call | None:
    name, arguments = function["name"], json.dumps(function["arguments"], ensure_ascii=False)
    return Call(name, arguments) if isinstance(name, str) and is_object(arguments) else None


def schema_family(schema: Json) -> ResponseTemplate | None:
    """The family that a model's response template describes; None: transformers is not installed.

    Raises:
        ModelError: transformers does not take the template.
    """
    try:
        from transformers.utils.chat_parsing import parse_response
        from transformers.utils.chat_parsing.response_templates import load_response_template
    except ImportError:
        return None
    try:
        load_response_template(schema)
    except Exception as error:  # it checks little before it indexes
        raise ModelError(f"response_template in tokenizer_config.json: {error}; remove it") from error
    return ResponseTemplate(schema, parse_response)
