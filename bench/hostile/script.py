"""The engine's replies in the hostile benchmark: a function of the last question, so that every
side knows them.

A question with `SLOWLY` in it is answered in pieces, with time between them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

SLOWLY = "SLOWLY"
PIECES, PIECE_S = 40, 0.05


def reply_to(question: str) -> str:
    """The reply to a question."""
    return f"heard {hashlib.sha256(question.encode('utf-8', 'replace')).hexdigest()[:24]}"


def question_of(messages: Sequence[Any]) -> str:
    """The text of the last message, whatever its form."""
    content = messages[-1].get("content") if messages else ""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content)


async def pieces_of(text: str) -> AsyncIterator[str]:
    """The text, several times over, a piece at a time."""
    for number in range(PIECES):
        yield f"{text} {number} "
        await asyncio.sleep(PIECE_S)


def answer(messages: Sequence[Any], tools: Sequence[Any] | None) -> Any:
    """The script that `rollbook serve --engine scripted` is given."""
    question = question_of(messages)
    return pieces_of(reply_to(question)) if SLOWLY in question else reply_to(question)
