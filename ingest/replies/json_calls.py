"""Families whose calls are JSON: Hermes, Llama 3, Mistral.

Hermes, Qwen2.5, Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Llama 3: the whole reply is a call, `{"name": ..., "parameters": {...}}`, or several with `;` between.

`<|python_tag|>` may stand in front. Without it a call has no mark of its own, so a text that begins with
a brace is held back until it is whole, and prose behind the object makes all of it content.

Mistral, both forms: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and since tokenizer v11
`[TOOL_CALLS]NAME[ARGS]{...}` for each call, some with `[CALL_ID]ID` in between. Magistral reasons in
`[THINK]`, its first release in `<think>`. A sampled call id is not used: ids are minted by the proxy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollbook.ingest.replies.arguments import arguments_at, call_at, call_text
from rollbook.ingest.replies.family import BRACKET_THINK, TEXT_AFTER_CALLS, THINK, Call, blank, skip_space
from rollbook.ingest.replies.marked import MarkedFamily, ParsedCall, ParsedCalls, behind, read_each
from rollbook.store.events import Json

_HERMES_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_HERMES_OPENING = re.compile(_HERMES_OPEN)


def _read_hermes(body: str, start: int, tools: Sequence[Json]) -> ParsedCalls | None:
    return read_each(body, start, _HERMES_OPENING, _read_call)


def _read_call(match: re.Match[str]) -> ParsedCall | None:
    body = match.string
    parsed = call_at(body, skip_space(body, match.end()))
    if parsed is None:
        return None
    call, end = parsed
    end = skip_space(body, end)
    return ParsedCall(call, end + len(_CLOSE)) if body.startswith(_CLOSE, end) else None


def _write_hermes(content: str, calls: Sequence[Call], template: str) -> str:
    return behind(content, "\n", "\n".join(f"{_HERMES_OPEN}\n{call_text(call)}\n{_CLOSE}" for call in calls))


HERMES = MarkedFamily("hermes", (_HERMES_OPEN,), _read_hermes, others=(_CLOSE,), written=_write_hermes)


_TAG = "<|python_tag|>"
# A JSON answer that was never meant as a call is no malformed one.
_CALL_LIKE = re.compile(r'<\|python_tag\|>|\{[ \t\r\n]*+"(?:name|type|function|parameters|arguments)"')


def _read_llama(body: str, start: int, tools: Sequence[Json]) -> ParsedCalls | None:
    calls: list[Call] = []
    position = start
    while position < len(body):
        if body.startswith(_TAG, position):
            position = skip_space(body, position + len(_TAG))
        parsed = call_at(body, position, ("parameters", "arguments"))
        if parsed is None:
            return None if calls or _CALL_LIKE.match(body, start) else ParsedCalls(())
        calls.append(parsed[0])
        position = skip_space(body, parsed[1])
        if body.startswith(";", position):
            position = skip_space(body, position + 1)
    return ParsedCalls(tuple(calls))


def _write_llama(content: str, calls: Sequence[Call], template: str) -> str | None:
    """One call is the whole reply: so the model's own template has it, which refuses several."""
    return None if content or len(calls) > 1 else call_text(calls[0], "parameters")


LLAMA_JSON = MarkedFamily("llama_json", (_TAG,), _read_llama, head="{", written=_write_llama)


_MISTRAL_OPEN, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MISTRAL_OPENING = re.compile(r"\[TOOL_CALLS\][ \t\r\n]*+")
_HEADER = re.compile(
    r"([^ \t\r\n\[\]{}]++)[ \t\r\n]*+(?:\[CALL_ID\][^\[\]{}]*+)?(?:\[ARGS\][ \t\r\n]*+)?(?=\{)"
)


def _read_mistral(body: str, start: int, tools: Sequence[Json]) -> ParsedCalls | None:
    first = skip_space(body, start + len(_MISTRAL_OPEN))
    if body.startswith("[", first) and not body.startswith(_ARGS, first):
        return _array(body, first)
    return read_each(body, start, _MISTRAL_OPENING, _named)


def _named(match: re.Match[str]) -> ParsedCall | None:
    header = _HEADER.match(match.string, match.end())
    parsed = arguments_at(match.string, header.end()) if header else None
    if header is None or parsed is None:
        return None
    return ParsedCall(Call(header[1], parsed[0]), parsed[1])


def _array(body: str, opening: int) -> ParsedCalls | None:
    calls: list[Call] = []
    position = opening
    while body.startswith("," if calls else "[", position):
        parsed = call_at(body, skip_space(body, position + 1))
        if parsed is None:
            return None
        calls.append(parsed[0])
        position = skip_space(body, parsed[1])
    if not body.startswith("]", position):
        return None
    return ParsedCalls(tuple(calls), () if blank(body[position + 1 :]) else (TEXT_AFTER_CALLS,))


def _write_mistral(content: str, calls: Sequence[Call], template: str) -> str:
    if _ARGS in template:
        return content + "".join(f"{_MISTRAL_OPEN}{call.name}{_ARGS}{call.arguments}" for call in calls)
    return f"{content}{_MISTRAL_OPEN}[{', '.join(map(call_text, calls))}]"


MISTRAL = MarkedFamily(
    "mistral",
    (_MISTRAL_OPEN,),
    _read_mistral,
    others=(_CALL_ID, _ARGS),
    blocks=(BRACKET_THINK, THINK),
    written=_write_mistral,
)
