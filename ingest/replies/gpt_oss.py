"""gpt-oss: harmony, a reply of several messages, each with a channel and perhaps a recipient.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
    <|constrain|>json<|message|>{...}<|call|>

(one line). The prompt ends behind `<|start|>assistant`, so the first header lacks that. Analysis is the
reasoning; final, and commentary without a recipient (a preamble), are content; a message to a function is a
call, on whatever channel and wherever in the header its recipient stands. Several messages of a kind are
joined by a line feed. From the first call on nothing but calls is read.

A reply ends with its call, so a model samples one at a time.

The openai-harmony package reads this too, but it needs a vocabulary that it downloads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollbook.ingest.replies.arguments import is_object, object_end
from rollbook.ingest.replies.family import (
    MALFORMED_CALL,
    MALFORMED_MESSAGE,
    SPACE,
    TEXT_AFTER_CALLS,
    UNCLOSED_REASONING,
    Call,
    Parsed,
    ReplyContext,
    blank,
    certain,
    skip_space,
)
from rollbook.store.events import Json

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_MARKERS = (_START, _CHANNEL, _MESSAGE, "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
# In a message's text, what ends it; the others there are text.
_END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|(?:start|channel)\|>)")
_HEADER_END = re.compile(r"<\|(?:message|end|call|return)\|>|(?=<\|start\|>)")
_ANALYSIS = f"{_CHANNEL}analysis{_MESSAGE}"
_RECIPIENT = re.compile(r"(?:^|[ \t\r\n>])to=([^ \t\r\n<]++)")
_NOBODY = frozenset({"assistant", "user", "all"})
_DROPPED = _START  # no header holds it


@dataclass(frozen=True, slots=True)
class _Message:
    """A message, where it begins and ends, and whether it was ended."""

    header: str
    body: str
    begin: int
    end: int
    closed: bool

    @property
    def channel(self) -> str:
        """Its channel; the last if the header names several, as broken ones do."""
        named = self.header.rpartition(_CHANNEL)[2] if _CHANNEL in self.header else ""
        word = re.search(r"[a-z]+", named)
        return word[0] if word else "final"

    @property
    def recipient(self) -> str | None:
        """The function it calls."""
        return _recipient(self.header)


def _search(pattern: re.Pattern[str], text: str, start: int) -> re.Match[str] | None:
    """As `pattern.search`, a hundred times faster: what it looks for begins as markers do, and few others."""
    at = text.find("<|", start)
    while at >= 0:
        if match := pattern.match(text, at):
            return match
        at = text.find("<|", at + 1)
    return None


def _recipient(header: str) -> str | None:
    match = _RECIPIENT.search(header)
    return match[1].removeprefix("functions.") if match and match[1] not in _NOBODY else None


def _messages(text: str, final: bool) -> Iterator[_Message]:
    """The messages of a text; the last may be open. A header that nothing follows is no message."""
    position = 0
    while position < len(text):
        begin = position
        named = begin + len(_START) if text.startswith(_START, begin) else begin
        end = _search(_HEADER_END, text, named)
        header = text[named : end.start() if end else len(text)]
        if end is not None and end.group() == _MESSAGE:
            message = _message(text, begin, header, end.end(), final)
            yield message
            position = message.end
            continue
        if (end is not None or final) and not blank(header):
            bare = named == begin and _CHANNEL not in header
            # Text without a header is content: so answers a model that does not keep to the form.
            body = header if bare else ""
            yield _Message(
                "" if bare else _DROPPED, body, begin, end.end() if end else len(text), end is not None
            )
        position = end.end() if end else len(text)


def _message(text: str, begin: int, header: str, start: int, final: bool) -> _Message:
    """The message whose text starts at `start`."""
    search = start
    brace = skip_space(text, start)
    if text.startswith("{", brace) and _recipient(header) is not None:
        # Markers inside the arguments are text. An object without an end is no call, nor is what follows.
        search = object_end(text, brace) or len(text)
    close = _search(_END, text, search)
    stop = close.start() if close else len(text) if final else certain(text, _MARKERS, start)
    return _Message(header, text[start:stop], begin, close.end() if close else len(text), close is not None)


@dataclass(frozen=True, slots=True)
class GptOss:
    """The harmony parser."""

    name: str = "gpt_oss"
    markers: frozenset[str] = frozenset(_MARKERS)

    def parse(self, text: str, tools: Sequence[Json] | None, *, in_reasoning: bool, final: bool) -> Parsed:
        """See `Family.parse`."""
        text = _ANALYSIS + text if in_reasoning else text
        messages = list(_messages(text, final))
        first = next((i for i, m in enumerate(messages) if m.recipient is not None), len(messages))
        leading, rest = messages[:first], messages[first:]
        thoughts = [m.body.strip(SPACE) for m in leading if m.channel == "analysis"]
        reasoning = "\n".join(filter(None, thoughts)) if thoughts else None
        content = "\n".join(m.body for m in leading if m.body and m.channel != "analysis")
        if not final:
            return Parsed(reasoning, content.rstrip(SPACE) if tools else content)
        flags = _flags(leading)
        if not rest:
            return Parsed(reasoning, content, (), flags)
        calls = _calls(rest) if tools else None
        if calls is None:
            raw = content + text[rest[0].begin :]
            return Parsed(reasoning, raw, (), (*flags, MALFORMED_CALL) if tools else flags)
        after = any(m.recipient is None and not blank(m.body) for m in rest)
        flags = (*flags, TEXT_AFTER_CALLS) if after else flags
        return Parsed(reasoning, content.rstrip(SPACE), calls, flags)

    def write(self, parts: Parsed, context: ReplyContext) -> str | None:
        """See `Family.write`."""
        if len(parts.calls) > 1:
            return None
        messages = [f"{_ANALYSIS}{parts.reasoning}"] if parts.reasoning else []
        if not parts.calls:
            messages.append(f"{_CHANNEL}final{_MESSAGE}{parts.content}")
        elif parts.content:
            messages.append(f"{_CHANNEL}commentary{_MESSAGE}{parts.content}")
        for call in parts.calls:
            header = f"{_CHANNEL}commentary to=functions.{call.name} <|constrain|>json"
            messages.append(f"{header}{_MESSAGE}{call.arguments}")
        text = f"<|end|>{_START}assistant".join(messages)
        if not context.prompt.endswith(_ANALYSIS):
            return text
        return text.removeprefix(_ANALYSIS) if parts.reasoning else f"<|end|>{_START}assistant{text}"

    def end(self, parts: Parsed) -> str | None:
        """See `Family.end`."""
        return "<|call|>" if parts.calls else "<|return|>"


def _flags(messages: Sequence[_Message]) -> tuple[str, ...]:
    flags = [MALFORMED_MESSAGE] if any(m.header == _DROPPED for m in messages) else []
    if messages and messages[-1].channel == "analysis" and not messages[-1].closed:
        flags.append(UNCLOSED_REASONING)
    return tuple(flags)


def _calls(messages: Sequence[_Message]) -> tuple[Call, ...] | None:
    calls = [Call(m.recipient, m.body.strip(SPACE)) for m in messages if m.recipient is not None]
    return tuple(calls) if all(is_object(c.arguments) for c in calls) else None


GPT_OSS = GptOss()
