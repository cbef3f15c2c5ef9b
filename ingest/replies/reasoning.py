"""Reasoning blocks in front of the answer: `<think>...</think>` and `[THINK]...[/THINK]`.

Only a block at the very start counts, white space aside; a later `<think>` is text. White space around
the reasoning is trimmed, and so are line feeds between it and the answer, as templates add them. An
empty block gives an empty reasoning, not None: it was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollbook.ingest.replies.family import SPACE, Asked, certain, skip_space


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


def written_reasoning(reasoning: str, blocks: Sequence[Block], asked: Asked) -> str | None:
    """The text of a reasoning in front of the answer; None: the model does not reason there.

    A prompt that opens a block has it closed, whatever is in it, and shows by its end whether line feeds are
    the block's own. One that ends with a closed block asks for none, and a template that knows none of the
    blocks is of a model that never opens one.
    """
    prompt = asked.prompt.rstrip(SPACE)
    opened = opened_by(asked.prompt, blocks)
    if opened is not None:
        airy = len(prompt) < len(asked.prompt)
        return (
            f"{reasoning}{opened.inside}{opened.close}{opened.behind}" if airy else reasoning + opened.close
        )
    if not reasoning:
        return ""
    known = next((b for b in blocks if b.open in asked.template), None)
    if known is None or any(prompt.endswith(b.close) for b in blocks):
        return None
    return f"{known.open}{known.inside}{reasoning}{known.inside}{known.close}{known.behind}"
