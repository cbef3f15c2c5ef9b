"""What a reply says, and what every model family's parser promises.

A writer is the way back: the text that a model samples for a reply's parts, so that it can be trained on what
somebody else said. What it writes is believed only if the parser reads the same parts from it (`written`).

A parser is a pure function of the sampled text. It never raises: a call that cannot be read goes out as
content, flagged, since the sampled tokens are on record elsewhere. Streaming is the same function with
`final=False`: of any prefix of a text it returns only what the whole text's parse begins with.

Reasoning stands in front of the answer: `<think>...</think>` or `[THINK]...[/THINK]`. Only a block at the
very start counts, white space aside; a later `<think>` is text. White space around the reasoning is trimmed,
and so are line feeds between it and the answer, as templates add them. An empty block gives an empty
reasoning, not None: it was sampled.
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
class ReplyContext:
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

    def write(self, parts: Parsed, context: ReplyContext) -> str | None:
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


@dataclass(frozen=True, slots=True)
class Block:
    """How a family opens and closes its reasoning, and the white space that it samples inside and behind."""

    open: str
    close: str
    inside: str = "\n"
    behind: str = "\n\n"


THINK = Block("<think>", "</think>")
BRACKET_THINK = Block("[THINK]", "[/THINK]", "", "")


@dataclass(frozen=True, slots=True)
class Split:
    """A text cut at the end of its reasoning."""

    reasoning: str | None
    answer: int | None
    """Where the answer begins; None: the text is not that far, or ended inside its reasoning."""


def split_reasoning(text: str, blocks: Sequence[Block], *, in_reasoning: bool, final: bool) -> Split:
    """Cut a text at the end of its reasoning."""
    start = skip_space(text, 0)
    opened = next((b for b in blocks if text.startswith(b.open, start)), None)
    if opened is None and not final and any(b.open.startswith(text[start:]) for b in blocks):
        return Split(None, None)
    if opened is None and not in_reasoning:
        return Split(None, 0)
    # A prompt that opened the block does not say which of the family's; nor need the model heed it.
    closes = [b.close for b in (blocks if opened is None else [opened])]
    start += 0 if opened is None else len(opened.open)
    ends = [(at, close) for close in closes if (at := text.find(close, start)) >= 0]
    if ends:
        end, close = min(ends)
        answer = end + len(close)
        while text.startswith("\n", answer):
            answer += 1
        return Split(text[start:end].strip(SPACE), answer)
    end = len(text) if final else certain(text, closes, start)
    return Split(text[start:end].strip(SPACE), None)


def opened_by(prompt: str, blocks: Sequence[Block]) -> Block | None:
    """The block that a prompt ends inside of."""
    return next((block for block in blocks if prompt.rstrip(SPACE).endswith(block.open)), None)


def written_reasoning(reasoning: str, blocks: Sequence[Block], context: ReplyContext) -> str | None:
    """The text of a reasoning in front of the answer; None: the model does not reason there.

    A prompt that opens a block has it closed, whatever is in it, and shows by its end whether line feeds are
    the block's own. One that ends with a closed block asks for none, and a template that knows none of the
    blocks is of a model that never opens one.
    """
    prompt = context.prompt.rstrip(SPACE)
    opened = opened_by(context.prompt, blocks)
    if opened is not None:
        airy = len(prompt) < len(context.prompt)
        return (
            f"{reasoning}{opened.inside}{opened.close}{opened.behind}" if airy else reasoning + opened.close
        )
    if not reasoning:
        return ""
    known = next((b for b in blocks if b.open in context.template), None)
    if known is None or any(prompt.endswith(b.close) for b in blocks):
        return None
    return f"{known.open}{known.inside}{reasoning}{known.inside}{known.close}{known.behind}"
