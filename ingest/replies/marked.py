"""The families whose calls begin at a marker: reasoning, content, then calls.

What streams is the text in front of the first marker, without trailing white space, which is trimmed if
a call follows. If what follows turns out to be no call, the text goes on as content from there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollbook.ingest.replies.family import (
    MALFORMED_CALL,
    MENDED_CALL,
    SPACE,
    TEXT_AFTER_CALLS,
    THINK,
    UNCLOSED_REASONING,
    Block,
    Call,
    Parsed,
    ReplyContext,
    blank,
    certain,
    opened_by,
    skip_space,
    split_reasoning,
    written_reasoning,
)
from rollbook.store.events import Json


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call that was read, where it ends, and whether it lacked a tag."""

    call: Call
    end: int
    mended: bool = False


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """The calls of a reply and what there is to say of them."""

    calls: tuple[Call, ...]
    flags: tuple[str, ...] = ()


Reader = Callable[[str, int, Sequence[Json]], ParsedCalls | None]
"""Reads the calls of a text from its first marker on; None: they are malformed; no calls: it is content."""

Writer = Callable[[str, Sequence[Call], str], str | None]
"""Writes (content, calls) in the form that a template's source shows; None: no such reply has that form."""


@dataclass(frozen=True, slots=True)
class MarkedFamily:
    """A family that its markers, its reader and its writer define."""

    name: str
    starts: tuple[str, ...] = ()
    """Any of these, anywhere, begins the calls."""
    read: Reader | None = None
    head: str = ""
    """A text that begins so may be a call from there on."""
    others: tuple[str, ...] = ()
    """Control tokens that matter only behind a start."""
    blocks: tuple[Block, ...] = (THINK,)
    written: Writer | None = None
    ends: tuple[str, str] | None = None
    """What ends a reply without calls, and one with calls."""

    @property
    def markers(self) -> frozenset[str]:
        """All that the parser must see."""
        around = (mark for block in self.blocks for mark in (block.open, block.close))
        return frozenset([*self.starts, *self.others, *around])

    def parse(self, text: str, tools: Sequence[Json] | None, *, in_reasoning: bool, final: bool) -> Parsed:
        """See `Family.parse`."""
        split = split_reasoning(text, self.blocks, in_reasoning=in_reasoning, final=final)
        if split.answer is None:
            return Parsed(split.reasoning, "", (), (UNCLOSED_REASONING,) if final else ())
        body = text[split.answer :]
        if not tools or self.read is None:
            return Parsed(split.reasoning, body)
        start = self.find(body)
        if not final:
            end = certain(body, self.starts) if start is None else start
            return Parsed(split.reasoning, body[:end].rstrip(SPACE))
        if start is None:
            return Parsed(split.reasoning, body)
        parsed = self.read(body, start, tools)
        if parsed is None:
            return Parsed(split.reasoning, body, (), (MALFORMED_CALL,))
        content = body[:start].rstrip(SPACE) if parsed.calls else body
        return Parsed(split.reasoning, content, parsed.calls, parsed.flags)

    def write(self, parts: Parsed, context: ReplyContext) -> str | None:
        """See `Family.write`."""
        if self.written is None and not parts.calls and not opened_by(context.prompt, self.blocks):
            return None  # what else a template puts around a reply of text is unknown here
        thought = written_reasoning(parts.reasoning or "", self.blocks, context)
        answer: str | None = parts.content
        if parts.calls:
            answer = self.written(parts.content, parts.calls, context.template) if self.written else None
        return None if thought is None or answer is None else thought + answer

    def end(self, parts: Parsed) -> str | None:
        """See `Family.end`."""
        return self.ends[bool(parts.calls)] if self.ends else None

    def find(self, body: str) -> int | None:
        """Where the first call begins."""
        first = skip_space(body, 0)
        if self.head and body.startswith(self.head, first):
            return first
        return min((at for s in self.starts if (at := body.find(s)) >= 0), default=None)


def behind(content: str, gap: str, calls: str) -> str:
    """The calls, behind the content if there is any."""
    return f"{content}{gap}{calls}" if content else calls


def read_each(
    body: str, start: int, opening: re.Pattern[str], read: Callable[[re.Match[str]], ParsedCall | None]
) -> ParsedCalls | None:
    """One call behind each match of `opening`; one that cannot be read spoils them all.

    The next opening is looked for behind a call, so that markers inside its arguments are text.
    """
    calls: list[Call] = []
    gaps, mended, position = False, False, start
    while match := opening.search(body, position):
        gaps = gaps or not blank(body[position : match.start()])
        parsed = read(match)
        if parsed is None:
            return None
        calls.append(parsed.call)
        mended = mended or parsed.mended
        position = parsed.end
    if not calls:
        return None
    gaps = gaps or not blank(body[position:])
    flags = [flag for flag, raised in ((MENDED_CALL, mended), (TEXT_AFTER_CALLS, gaps)) if raised]
    return ParsedCalls(tuple(calls), tuple(flags))
