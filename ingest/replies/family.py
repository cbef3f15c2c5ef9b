"""What a reply says, and what every model family's parser promises.

A writer is the way back: the text that a model samples for a reply's parts, so that it can be trained on what
somebody else said. What it writes is believed only if the parser reads the same parts from it (`written`).

A parser is a pure function of the sampled text. It never raises: a call that cannot be read goes out as
content, flagged, since the sampled tokens are on record elsewhere. Streaming is the same function with
`final=False`: of any prefix of a text it returns only what the whole text's parse begins with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollbook.store.events import Json

# The white space that parsers trim and skip. Unicode's other spaces are text (U+3000 indents Chinese).
SPACE = " \t\r\n"

MALFORMED_CALL = "malformed_tool_call"
"""What began as a call is none; the whole text, but for reasoning, is the content."""
MENDED_CALL = "mended_tool_call"
"""A call was read although a tag that bears no meaning was missing."""
TEXT_AFTER_CALLS = "text_after_calls"
"""Text behind the first call was dropped from the content."""
UNCLOSED_REASONING = "unclosed_reasoning"
"""The text ended before its reasoning did."""
MALFORMED_MESSAGE = "malformed_message"
"""Harmony only: a header that no message followed was dropped."""


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call."""

    name: str
    arguments: str
    """Text of a JSON object: verbatim where the family samples JSON, else built."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A reply in parts. If there are calls, the content is what was said in front of them."""

    reasoning: str | None
    """None: the reply has no reasoning part. Empty: it has one that says nothing."""
    content: str
    calls: tuple[Call, ...] = ()
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """What a reply is written behind: the rendered prompt, and the source of its chat template."""

    prompt: str
    template: str


class Family(Protocol):
    """Model families differ in how their templates spell reasoning and calls."""

    @property
    def name(self) -> str:
        """The name it is chosen by."""
        ...

    @property
    def markers(self) -> frozenset[str]:
        """Control tokens that the parser must see in the text; all others are dropped before decoding."""
        ...

    def parse(self, text: str, tools: Sequence[Json] | None, *, in_reasoning: bool, final: bool) -> Parsed:
        """What a completion says.

        Args:
            text: the completion without its end-of-turn token, the family's markers kept in.
            tools: those of the request; with none, calls are not looked for and the text is the content.
            in_reasoning: the prompt ended inside an open reasoning block.
            final: the text is whole; else only what can no longer change is returned, and no calls.
        """
        ...

    def write(self, parts: Parsed, asked: Asked) -> str | None:
        """The text that a model samples for these parts, without its end-of-turn token.

        None: no model of the family says them in one reply, or behind this prompt.
        """
        ...

    def end(self, parts: Parsed) -> str | None:
        """The token that ends such a reply; None: the one that the chat template puts there."""
        ...


def blank(text: str) -> bool:
    """Nothing but white space."""
    return not text.strip(SPACE)


def skip_space(text: str, position: int) -> int:
    """The first position from here on that holds no white space."""
    while position < len(text) and text[position] in SPACE:
        position += 1
    return position


def certain(text: str, markers: Sequence[str], start: int = 0) -> int:
    """Where a text's end may be the beginning of a marker, at or behind `start`; its length if nowhere."""
    longest = max((len(m) for m in markers), default=1)
    for position in range(max(start, len(text) - longest + 1), len(text)):
        tail = text[position:]
        if any(m.startswith(tail) for m in markers):
            return position
    return len(text)
